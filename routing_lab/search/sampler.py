"""Samplers by name, and what a search over schedules needs of any of them: never the same schedule twice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from routing_lab.model import ModelFacts
from routing_lab.schedule import Schedule
from routing_lab.search.settings import SamplerName
from routing_lab.space import SearchSpace

__all__ = ["Dimensions", "FreshSampler", "Point", "make_sampler"]

Point = tuple[int, ...]
"""A schedule of the space: for each dimension the index of its count among the choices."""

# The constant liar keeps parallel workers apart, which costs storage writes; a study has one process.
_SAMPLERS: Final[Mapping[SamplerName, Callable[[int], BaseSampler]]] = {
    "tpe": lambda seed: TPESampler(seed=seed, constant_liar=False),
    "random": lambda seed: RandomSampler(seed=seed),
}


def make_sampler(name: SamplerName, seed: int) -> BaseSampler:
    """The plain Optuna sampler of that name."""
    return _SAMPLERS[name](seed)


class Dimensions:
    """A search space as Optuna sees it: one whole number per dimension, the rank of a count among the choices.

    Counts are ordered, so a sampler should know that 4 lies between 2 and 6; they need not be evenly spaced, which is
    why the rank is sampled and not the count.
    """

    def __init__(self, space: SearchSpace, facts: ModelFacts) -> None:
        self._space, self._facts = space, facts
        self.choices: dict[str, tuple[int, ...]] = {
            name: tuple(sorted(choices)) for name, choices in space.dimensions(facts)
        }
        self.distributions: dict[str, BaseDistribution] = {
            name: IntDistribution(0, len(choices) - 1) for name, choices in self.choices.items()
        }

    @property
    def size(self) -> int:
        """Number of schedules in the space."""
        return self._space.size(self._facts)

    def schedule(self, params: Mapping[str, Any]) -> Schedule:
        """The schedule of a trial's parameters, every routed block listed."""
        counts = {name: self.choices[name][params[name]] for name in self.choices}
        return self._space.schedule(counts, self._facts).completed(self._facts)

    def point(self, params: Mapping[str, Any]) -> Point:
        """A trial's parameters as a hashable value."""
        return tuple(params[name] for name in self.choices)

    def params(self, point: Sequence[int]) -> dict[str, int]:
        """Inverse of ``point``."""
        return dict(zip(self.choices, point, strict=True))

    def point_of(self, schedule: Schedule) -> Point | None:
        """Where a schedule lies in the space; ``None`` when it does not."""
        values = self._space.values(schedule, self._facts)
        if values is None:
            return None
        return tuple(choices.index(values[name]) for name, choices in self.choices.items())


class FreshSampler(BaseSampler):
    """Asks another sampler until it proposes a point that nobody has evaluated, before a trial is spent on it.

    After ``tries`` proposals it draws at random among the points that are left, so that a sampler that has settled on a
    few favourites cannot stall a study.

    Args:
        inner: The sampler that knows where to look.
        dimensions: The space.
        taken: The points not to propose; the study adds to it as it goes.
        seed: Of the random draw.
        tries: Proposals of ``inner`` per trial.
    """

    ENUMERABLE: Final = 20_000
    """Spaces up to this size are listed to draw from what is left; in larger ones chance finds it sooner."""

    def __init__(
        self, inner: BaseSampler, dimensions: Dimensions, taken: set[Point], *, seed: int, tries: int = 10
    ) -> None:
        self._inner, self._dimensions, self._taken, self._tries = inner, dimensions, taken, tries
        self._random = random.Random(seed)  # noqa: S311 - a search needs no secret

    @property
    def exhausted(self) -> bool:
        """Whether every point of the space is taken."""
        return len(self._taken) >= self._dimensions.size

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All dimensions, so that ``sample_relative`` decides on the whole point at once."""
        del study, trial
        return dict(self._dimensions.distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A point that is not taken."""
        for _ in range(self._tries):
            params = self._proposal(study, trial, search_space)
            if self._dimensions.point(params) not in self._taken:
                return params
        return self._dimensions.params(self._any_point_left())

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:  # noqa: ANN401 - Optuna's signature
        """Never needed for a dimension of the space; left to the other sampler."""
        return self._inner.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Passed on."""
        self._inner.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Passed on."""
        self._inner.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        """Passed on."""
        self._inner.reseed_rng()

    def _proposal(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """One point of the other sampler, put together as Optuna does: first what it samples jointly, then the rest."""
        space = self._inner.infer_relative_search_space(study, trial)
        joint = self._inner.sample_relative(study, trial, space)
        params: dict[str, Any] = {}
        for name, distribution in search_space.items():
            if distribution.single():
                params[name] = 0
            elif name in joint:
                params[name] = joint[name]
            else:
                params[name] = self._inner.sample_independent(study, trial, name, distribution)
        return params

    def _any_point_left(self) -> Point:
        if self.exhausted:
            raise RuntimeError("asked for a point of a space in which every point is taken")
        ranges = [range(len(choices)) for choices in self._dimensions.choices.values()]
        if self._dimensions.size <= self.ENUMERABLE:
            return self._random.choice([point for point in itertools.product(*ranges) if point not in self._taken])
        while True:
            # A study that has taken half of a space this large is beyond anyone's patience.
            point = tuple(self._random.choice(choices) for choices in ranges)
            if point not in self._taken:
                return point
