"""Samplers by name, and what a search over schedules needs of any of them: never the same schedule twice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from routing_lab.errors import UsageError
from routing_lab.search.dimensions import Dimensions, Point
from routing_lab.search.schedule_sampler import ScheduleSampler
from routing_lab.search.settings import SamplerName

__all__ = ["FreshSampler", "make_sampler"]


def make_sampler(name: SamplerName, seed: int, dimensions: Dimensions, taken: set[Point]) -> BaseSampler:
    """The sampler of that name: ours, or one of Optuna's told about failed gates where it can be.

    Raises:
        UsageError: The sampler needs a package that is not installed.
    """
    if name == "schedule":
        return ScheduleSampler(dimensions, taken, seed=seed)
    if name == "gp":
        try:
            return GPSampler(seed=seed)
        except ImportError:
            raise UsageError("the sampler gp needs PyTorch: pip install torch, or take another --sampler") from None
    return _PLAIN[name](seed)


# The constant liar keeps parallel workers apart, which costs storage writes; a study has one process.
_PLAIN: Final[Mapping[SamplerName, Callable[[int], BaseSampler]]] = {
    "tpe": lambda seed: TPESampler(seed=seed, constant_liar=False),
    "nsga2": lambda seed: NSGAIISampler(seed=seed, population_size=16),
    "random": lambda seed: RandomSampler(seed=seed),
}


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
