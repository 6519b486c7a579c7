"""What each dimension loses alone: the schedules that cut only one, and which of them to ask next.

Two kinds of pass. To start a search, the largest cut of every dimension is asked and no other: on the table of the
demo model (``benchmarks/tabular``) the gentler ones cost more than they tell. For a map of what each count loses, a
dimension whose cut failed is asked again, cut less, until one passes the whole gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from routing_lab.errors import UsageError
from routing_lab.search.dimensions import Dimensions, Point
from routing_lab.search.settings import StudySettings

__all__ = ["SingleCuts"]


class SingleCuts:
    """The points of a space at which one dimension is cut and all others have the model's own count.

    Args:
        dimensions: The space.
        gentler: Whether a cut that failed is followed by a gentler one.

    Raises:
        UsageError: The space cannot leave a dimension uncut, or has nothing to cut.
    """

    def __init__(self, dimensions: Dimensions, *, gentler: bool) -> None:
        missing = [
            name
            for (name, counts), own in zip(dimensions.choices.items(), dimensions.own, strict=True)
            if own not in counts
        ]
        if missing:
            raise UsageError(
                f"to cut one dimension alone the others keep the model's own count, which the space does not offer in "
                f"{', '.join(missing)}: add it to its counts, or begin another way (--start)"
            )
        whole = [counts.index(own) for counts, own in zip(dimensions.choices.values(), dimensions.own, strict=True)]
        self.by_dimension: tuple[tuple[Point, ...], ...] = tuple(
            tuple((*whole[:column], rank, *whole[column + 1 :]) for rank in range(own if gentler else min(own, 1)))
            for column, own in enumerate(whole)
        )
        """For each dimension its cuts, the largest first; none where the model's own count is the smallest choice."""

    @classmethod
    def of_start(cls, dimensions: Dimensions, settings: StudySettings) -> SingleCuts | None:
        """The pass that the study begins with; ``None`` for none. Raises as the class does, but not for ``auto``."""
        if settings.start in {"sensitivity", "map"}:
            return cls(dimensions, gentler=settings.start == "map")
        if settings.start == "auto" and settings.verify:
            with suppress(UsageError):
                return cls(dimensions, gentler=False)
        return None

    def ahead(self, passed: Mapping[Point, bool]) -> list[Point]:
        """The cuts to ask, in this order, as far as they are known to be wanted.

        Args:
            passed: The cuts already asked (or given up), and whether they passed the gate.
        """
        ahead = []
        for cuts in self.by_dimension:
            for depth, cut in enumerate(cuts):
                if cut not in passed:
                    ahead.append((depth, cut))
                    break
                if passed[cut]:
                    break
        return [cut for _, cut in sorted(ahead, key=lambda one: one[0])]
