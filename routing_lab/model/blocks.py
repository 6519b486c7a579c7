"""Blocks as people write them: ``0-6,22-32``, numbered from 0, both ends included."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["MAX_BLOCKS", "block_runs", "count_runs", "format_blocks", "parse_blocks"]

MAX_BLOCKS: Final = 4096
"""More blocks than any model has (llama.cpp stops at 512): bounds what a slip of the pen can make us build."""

# No leading zeros: 010 is 8 to some readers of YAML and 10 to others.
_RANGE = re.compile(r"(0|[1-9]\d{0,8})(?:\s*-\s*(0|[1-9]\d{0,8}))?", re.ASCII)


def parse_blocks(text: str) -> tuple[int, ...]:
    """The blocks of a list of ranges, sorted: ``"0-2, 7"`` -> ``(0, 1, 2, 7)``; a blank text names none.

    Raises ``ValueError`` for anything else, for a range that runs backwards, and for a block that is named twice.
    """
    blocks: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is no block or range of blocks such as 7 or 0-6")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {first}-{last} runs backwards")
        if last >= MAX_BLOCKS:
            raise ValueError(f"block {last} is beyond the last possible one, {MAX_BLOCKS - 1}")
        again = blocks & set(range(first, last + 1))
        if again:
            raise ValueError(f"names {_named(again)} twice")
        blocks |= set(range(first, last + 1))
    return tuple(sorted(blocks))


def format_blocks(blocks: Iterable[int]) -> str:
    """Inverse of ``parse_blocks``, as short as it gets: ``(0, 1, 2, 7)`` -> ``"0-2,7"``."""
    return ",".join(_range(first, last) for first, last in block_runs(blocks))


def block_runs(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring blocks as (first, last), both included."""
    return [(first, last) for first, last, _ in count_runs(dict.fromkeys(blocks, 0))]


def count_runs(counts: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Runs of neighbouring blocks with the same count as (first, last, count)."""
    runs: list[tuple[int, int, int]] = []
    for block in sorted(counts):
        if runs and runs[-1][1] == block - 1 and runs[-1][2] == counts[block]:
            runs[-1] = (runs[-1][0], block, counts[block])
        else:
            runs.append((block, block, counts[block]))
    return runs


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _named(blocks: Iterable[int]) -> str:
    text = format_blocks(blocks)
    return f"block {text}" if text.isdigit() else f"blocks {text}"
