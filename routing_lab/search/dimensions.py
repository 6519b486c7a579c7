"""A search space as Optuna sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution, IntDistribution

from routing_lab.model import ModelFacts
from routing_lab.schedule import Schedule
from routing_lab.space import SearchSpace

__all__ = ["Dimensions", "Point"]

Point = tuple[int, ...]
"""A schedule of the space: for each dimension the index of its count among the choices."""


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

        routed = [[block for block in blocks if block in facts.experts_used] for blocks in space.blocks(facts)]
        self.blocks: tuple[int, ...] = tuple(map(len, routed))
        """How many blocks of the main pass each dimension stands for."""
        self.own: tuple[int, ...] = tuple(max(facts.experts_used[block] for block in blocks) for blocks in routed)
        """The model's own count in each dimension."""

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
