"""Search spaces: which blocks may consult how many experts, as a value, as a file, and as named dimensions.

::

    space: three-bands
    counts: [4, 5, 6, 8]                     # the counts to choose from
    bands: ["0-6", "7-32", "33-40"]          # blocks that share one count each; or per_block: true
    fixed: {"0-2": 8}                        # optional: blocks that are not searched, and their count

Routed blocks that are neither in a band nor fixed keep the model's own count.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from routing_lab.errors import Problem, UserFileError
from routing_lab.model import FrozenMap, ModelFacts, count_runs
from routing_lab.schedule import Schedule, blocks_without_experts, counts_yaml, format_blocks, parse_blocks, read_counts
from routing_lab.yamlfile import Fields, kind_of, read_text, render_yaml

__all__ = ["SearchSpace"]

PER_BLOCK_UP_TO: Final = 12
"""With at most so many routed blocks, the default space has a dimension for each: a study of an evening covers that."""
BAND_BLOCKS: Final = 4
"""Blocks per band of the default space of a deeper model."""
DEFAULT_SHARES: Final = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 1)
"""Counts of the default space, as shares of the model's own count: below a quarter, hardly a model answers."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Counts to choose from and the blocks that choose together.

    ``bands`` holds the blocks of each dimension, sorted; no bands at all means a dimension per routed block that is not
    fixed. ``counts`` are sorted. Whether blocks and counts exist in a model is a question to ``check``.
    """

    counts: tuple[int, ...]
    bands: tuple[tuple[int, ...], ...] = ()
    fixed: Mapping[int, int] = field(default_factory=lambda: FrozenMap[int, int]({}))
    name: str = "space"

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", tuple(sorted(self.counts)))
        object.__setattr__(self, "bands", tuple(tuple(sorted(band)) for band in self.bands))
        object.__setattr__(self, "fixed", FrozenMap(dict(sorted(self.fixed.items()))))
        if not self.counts or len(set(self.counts)) < len(self.counts) or self.counts[0] < 1:
            raise ValueError(f"counts must be different numbers from 1: {self.counts}")
        named = Counter([*(block for band in self.bands for block in band), *self.fixed])
        twice = [block for block, times in named.items() if times > 1]
        if twice or not all(self.bands):
            raise ValueError(f"every band needs blocks, and a block may be named once ({format_blocks(twice)})")
        if any(count < 1 for count in self.fixed.values()):
            raise ValueError("a fixed block consults at least 1 expert")

    @property
    def per_block(self) -> bool:
        """Whether every routed block that is not fixed is a dimension of its own."""
        return not self.bands

    @classmethod
    def default(cls, facts: ModelFacts) -> SearchSpace:
        """A space to start with: per block in a shallow model, else in bands of about four neighbouring blocks.

        Raises ``UserFileError`` for a dense model, which has nothing to search.
        """
        if not facts.is_moe:
            raise UserFileError(facts.name, [Problem("", "has no routed experts, so there is nothing to search")])
        own = max(facts.experts_used.values())
        counts = tuple({max(1, math.floor(own * share + 0.5)) for share in DEFAULT_SHARES})
        blocks = facts.routed_blocks
        if len(blocks) <= PER_BLOCK_UP_TO:
            return cls(counts, name="default")
        number = math.ceil(len(blocks) / BAND_BLOCKS)
        edges = [index * len(blocks) // number for index in range(number + 1)]
        bands = tuple(blocks[first:last] for first, last in itertools.pairwise(edges))
        return cls(counts, bands, name="default")

    @classmethod
    def load(cls, path: Path) -> SearchSpace:
        """Read a space file. Raises ``UserFileError`` with every problem in it."""
        return cls.from_yaml(read_text(path), str(path))

    @classmethod
    def from_yaml(cls, text: str, file: str = "space") -> SearchSpace:
        """Parse a space; ``file`` names it in messages. Raises ``UserFileError`` with every problem in it."""
        top = Fields.parse(text, file)
        name = top.text("space")
        counts = _read_choices(top)
        bands = _read_bands(top)
        section = top.section("fixed")
        fixed = read_counts(section) if section is not None else {}
        for index, band in enumerate(bands):
            both = [block for block in band if block in fixed]
            if both:
                top.problem(
                    f"bands[{index}]", f"block {format_blocks(both)} is fixed too", "leave it in one of the two"
                )
        top.finish()
        return cls(counts, bands, FrozenMap(fixed), name)

    def to_yaml(self) -> str:
        """The space as a file; reading it back gives an equal space."""
        data: dict[str, object] = {"space": self.name, "counts": list(self.counts)}
        if self.per_block:
            data["per_block"] = True
        else:
            data["bands"] = [format_blocks(band) for band in self.bands]
        if self.fixed:
            data["fixed"] = counts_yaml(self.fixed)
        return render_yaml(data, flow=("counts", "bands", "fixed"))

    def save(self, path: Path) -> None:
        """Write ``to_yaml`` to ``path``."""
        path.write_text(self.to_yaml(), encoding="utf-8")

    def check(self, facts: ModelFacts) -> None:
        """Raise ``UserFileError`` with everything that does not fit the model."""
        problems = [] if facts.is_moe else [Problem("", f"{facts.name} is a dense model: there is nothing to search")]
        if self.counts[-1] > facts.experts > 0:
            problems.append(Problem("counts", f"{self.counts[-1]} is more than the {facts.experts} experts there are"))
        for index, band in enumerate(self.bands):
            problems += _strangers(f"bands[{index}]", band, facts)
        for first, last, count in count_runs(self.fixed):
            where = f"fixed.{format_blocks(range(first, last + 1))}"
            problems += _strangers(where, range(first, last + 1), facts)
            if count > facts.experts > 0:
                problems.append(Problem(where, f"{count} is more than the {facts.experts} experts there are"))
        if facts.is_moe and not problems and not self.blocks(facts):
            problems.append(Problem("fixed", "every block is fixed: there is nothing to search"))
        if problems:
            raise UserFileError(f"space {self.name}", problems)

    def dimensions(self, facts: ModelFacts) -> list[tuple[str, tuple[int, ...]]]:
        """Name and choices of each dimension, in the order of the blocks. Raises as ``check`` does."""
        self.check(facts)
        return [(_dimension(blocks), self.counts) for blocks in self.blocks(facts)]

    def size(self, facts: ModelFacts) -> int:
        """Number of schedules in the space. Raises as ``check`` does."""
        return math.prod(len(choices) for _, choices in self.dimensions(facts))

    def schedule(self, values: Mapping[str, int], facts: ModelFacts) -> Schedule:
        """The schedule at a point: a count for each dimension. Its name is derived from its counts.

        Raises ``ValueError`` where a dimension is missing or unknown or a count is no choice, else as ``check`` does.
        """
        dimensions = dict(self.dimensions(facts))
        if set(values) != set(dimensions) or any(values[name] not in dimensions[name] for name in dimensions):
            raise ValueError(f"{dict(values)} is no point of the space {self.name}")
        counts = dict(self.fixed)
        for blocks in self.blocks(facts):
            counts.update(dict.fromkeys(blocks, values[_dimension(blocks)]))
        key = Schedule.from_counts("point", counts).key(facts)
        return Schedule.from_counts(f"searched-{hashlib.sha256(key.encode()).hexdigest()[:8]}", counts)

    def values(self, schedule: Schedule, facts: ModelFacts) -> dict[str, int] | None:
        """Where a schedule lies in the space, ``None`` when it does not: the inverse of ``schedule``.

        Raises ``UserFileError`` where the schedule or the space does not fit the model.
        """
        self.check(facts)
        counts = schedule.resolve(facts)
        # The first block of a band that runs in the main pass speaks for it; the comparison below hears the others.
        point = {
            _dimension(blocks): next(counts[block] for block in blocks if block in counts)
            for blocks in self.blocks(facts)
        }
        if any(count not in self.counts for count in point.values()):
            return None
        return point if self.schedule(point, facts).resolve(facts) == counts else None

    def blocks(self, facts: ModelFacts) -> tuple[tuple[int, ...], ...]:
        """The blocks of each dimension, in the order of ``dimensions``."""
        return self.bands or tuple((block,) for block in facts.routed_blocks if block not in self.fixed)


def _dimension(blocks: tuple[int, ...]) -> str:
    return f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {format_blocks(blocks)}"


def _read_choices(top: Fields) -> tuple[int, ...]:
    counts = top.integers("counts")
    for index, count in enumerate(counts):
        if count < 1:
            top.problem(f"counts[{index}]", f"is {count}; a block consults at least 1 expert")
        if count in counts[:index]:
            top.problem(f"counts[{index}]", f"{count} is here twice")
    if not counts and top.has("counts"):
        top.problem("counts", "is empty", "list the counts to choose from")
    return counts


def _read_bands(top: Fields) -> tuple[tuple[int, ...], ...]:
    per_block = top.boolean("per_block", default=False)
    raw = top.raw("bands")
    if raw is None and not per_block:
        top.problem("bands", "is missing", 'list bands of blocks such as ["0-6", "7-32"], or say per_block: true')
    if raw is not None and per_block:
        top.problem("bands", "and per_block: true exclude each other")
    if raw is not None and (not isinstance(raw, list) or not raw):
        top.problem("bands", f"is {kind_of(raw) if raw else 'empty'}, not a list of bands")
    bands: list[tuple[int, ...]] = []
    for index, written in enumerate(raw if isinstance(raw, list) else []):
        band = _read_band(top, f"bands[{index}]", written)
        for earlier, other in enumerate(bands):
            if shared := set(band) & set(other):
                top.problem(f"bands[{index}]", f"overlaps with bands[{earlier}] (both name {format_blocks(shared)})")
        bands.append(band)
    return tuple(bands)


def _read_band(top: Fields, where: str, written: object) -> tuple[int, ...]:
    # A single block is a number to YAML.
    if isinstance(written, bool) or not isinstance(written, (int, str)):
        top.problem(where, f"is {kind_of(written)}, not a range of blocks", 'write it as "0-6" or "0-6,22-32"')
        return ()
    try:
        band = parse_blocks(str(written))
    except ValueError as error:
        top.problem(where, str(error))
        return ()
    if not band:
        top.problem(where, "names no block")
    return band


def _strangers(where: str, blocks: tuple[int, ...] | range, facts: ModelFacts) -> list[Problem]:
    if not facts.is_moe:
        return []
    if wrong := blocks_without_experts(blocks, facts):
        return [Problem(where, wrong, f"experts to choose from are in {format_blocks(facts.routed_blocks)}")]
    if not set(blocks) & set(facts.routed_blocks):
        return [Problem(where, "runs only for multi-token prediction, so its count has no effect")]
    return []
