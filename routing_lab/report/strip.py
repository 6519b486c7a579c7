"""A schedule as a strip of blocks: one cell per stored block, readable in a terminal without colour."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.text import Text

from routing_lab.errors import UsageError
from routing_lab.model import ModelFacts
from routing_lab.schedule import Schedule

__all__ = ["BlockKind", "StripCell", "schedule_strip", "strip_cells"]


class BlockKind(StrEnum):
    """What a stored block is to a schedule."""

    ROUTED = "routed"
    DENSE = "dense"
    MTP = "mtp"
    """Stored for multi-token prediction; it does not run in the main pass."""
    FIXED = "fixed"
    """Its experts are looked up in a table of the model; no count changes them."""


_SIGNS = {BlockKind.DENSE: "─", BlockKind.MTP: "x", BlockKind.FIXED: "="}
_MEANINGS = {
    BlockKind.DENSE: "dense block",
    BlockKind.MTP: "stored, not run in the main pass",
    BlockKind.FIXED: "experts fixed by the model",
}
_BARS = "▁▂▃▄▅▆▇█"
_MARGIN = 7
"""Columns in front of the cells, for the words ``block`` and ``count``."""
_WIDEST_CELL = 4
_NARROWEST_STRIP = 20
# After "cividis", which keeps its order for every kind of colour vision; the cell's height says the same again.
_SHADES = ("#51648f", "#62697f", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fde737")


@dataclass(frozen=True, slots=True)
class StripCell:
    """One stored block: ``count`` experts are consulted per token where the model alone would consult ``own``.

    Both counts are 0 for a block that has no routed experts in the main pass.
    """

    block: int
    kind: BlockKind
    count: int
    own: int


def strip_cells(schedule: Schedule, facts: ModelFacts) -> tuple[StripCell, ...]:
    """One cell for every stored block of the model, in order; the data behind every strip.

    Raises ``UserFileError`` where the schedule does not fit the model.
    """
    counts = schedule.resolve(facts)
    return tuple(
        StripCell(block, _kind(block, facts), counts.get(block, 0), facts.experts_used.get(block, 0))
        for block in range(facts.blocks)
    )


def _kind(block: int, facts: ModelFacts) -> BlockKind:
    if block in facts.mtp_blocks:
        return BlockKind.MTP
    if block in facts.routed_blocks:
        return BlockKind.ROUTED
    return BlockKind.DENSE if block in facts.dense_blocks else BlockKind.FIXED


def schedule_strip(schedule: Schedule, facts: ModelFacts, *, width: int = 80) -> Text:
    """The schedule as lines of text: block numbers, bars, and each block's count in digits below its bar.

    ``width`` is in terminal columns. A full bar is the largest count in sight (the model's own or the schedule's). A
    model with more blocks than fit in one row continues in a further row. Blocks
    that no schedule reaches show a sign that a last line explains.

    Raises ``UsageError`` for a width under 20 columns and ``UserFileError`` where the schedule does not fit the model.
    """
    if width < _NARROWEST_STRIP:
        raise UsageError(f"a strip needs at least {_NARROWEST_STRIP} columns, got {width}")
    cells = strip_cells(schedule, facts)
    room = width - _MARGIN
    cell_width = max(min(_WIDEST_CELL, room // max(len(cells), 1)), 1)
    full = max((max(cell.count, cell.own) for cell in cells), default=1) or 1
    lines = Text()
    per_row = _blocks_per_row(len(cells), room // cell_width)
    for start in range(0, len(cells), per_row):
        if start:
            lines.append("\n")
        lines.append_text(_row(cells[start : start + per_row], cell_width, full))
    for line in textwrap.wrap(_legend(cells), room):
        lines.append(f"\n{'':{_MARGIN}}{line}", style="dim")
    return lines


def _blocks_per_row(blocks: int, room: int) -> int:
    """All blocks where they fit; otherwise a multiple of ten, so that every row starts at a round block number."""
    if blocks <= room:
        return max(blocks, 1)
    return max(room // 10 * 10, 1)


def _row(cells: Sequence[StripCell], cell_width: int, full: int) -> Text:
    row = Text()
    row.append(f"{'block':<{_MARGIN}}", style="dim").append(_ruler(cells, cell_width).rstrip(), style="dim").append(
        "\n"
    )
    row.append(f"{'':{_MARGIN}}")
    for cell in cells:
        row.append(_bar(cell, full, cell_width), style=_shade(cell, full))
    row.rstrip()
    digits = len(str(max(cell.count for cell in cells)))
    # Counts that would touch their neighbours are written downwards: tens in one line, units in the next.
    downwards = digits if digits > 1 and cell_width <= digits else 1
    for line in range(downwards):
        label = "count" if line == downwards - 1 else ""
        row.append("\n").append(f"{label:<{_MARGIN}}", style="dim")
        row.append("".join(_count(cell, cell_width, line, downwards) for cell in cells).rstrip())
    return row


def _ruler(cells: Sequence[StripCell], cell_width: int) -> str:
    """Block numbers above their cells: each one where there is room, else every tenth."""
    widest = len(str(cells[-1].block))
    step = 1 if cell_width > widest else 10
    ruler = ""
    for position, cell in enumerate(cells):
        if cell.block % step == 0:
            ruler = f"{ruler:<{position * cell_width}}{cell.block}"
    return ruler


def _bar(cell: StripCell, full: int, cell_width: int) -> str:
    if cell.kind is not BlockKind.ROUTED:
        return _SIGNS[cell.kind].ljust(cell_width)
    # Two wide cells would melt into one bar without a gap between them.
    solid = cell_width - 1 if cell_width > 1 else 1
    return (_BARS[_level(cell, full)] * solid).ljust(cell_width)


def _count(cell: StripCell, cell_width: int, line: int, downwards: int) -> str:
    if cell.kind is not BlockKind.ROUTED:
        return " " * cell_width
    text = str(cell.count)
    return (text.rjust(downwards)[line] if downwards > 1 else text).ljust(cell_width)


def _shade(cell: StripCell, full: int) -> str:
    return _SHADES[_level(cell, full)] if cell.kind is BlockKind.ROUTED else "dim"


def _level(cell: StripCell, full: int) -> int:
    return max(round(cell.count / full * len(_BARS)) - 1, 0)


def _legend(cells: Sequence[StripCell]) -> str:
    kinds = {cell.kind for cell in cells}
    return " · ".join(f"{_SIGNS[kind]} {meaning}" for kind, meaning in _MEANINGS.items() if kind in kinds)
