"""What each block or band loses when it alone is cut: the sensitivity pass of a study as rows, table and figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from routing_lab.errors import UsageError
from routing_lab.report.figures import canvas
from routing_lab.schedule import format_blocks
from routing_lab.space import SearchSpace
from routing_lab.visible import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from routing_lab.search.records import StudyRecord, TrialRecord

__all__ = ["SingleCut", "figure_sensitivity", "sensitivity_fields", "sensitivity_table", "single_cuts"]

_NOT_ASKED: Final = "·"

Place = tuple[tuple[int, ...], int]
"""Of a cell: the blocks that are cut, and the count."""


@dataclass(frozen=True, slots=True)
class SingleCut:
    """One cell of the map: ``blocks`` alone consult ``count`` experts, all others as many as the model has.

    ``kept_share`` is the share of the baseline's words that were said again (``None``: no draft was checked),
    ``failed`` the probes that count against the cut, of ``run`` that were asked; fewer than the ``total`` of the gate
    where the run stopped at its first failures.
    """

    blocks: tuple[int, ...]
    count: int
    trial: int
    kept_share: float | None
    failed: int
    run: int
    total: int
    smallest_margin: float | None


def single_cuts(study: StudyRecord) -> tuple[SingleCut, ...]:
    """The sensitivity pass of a study, by blocks and count; empty where the study began another way."""
    if not study.single_cuts:
        return ()
    space = SearchSpace.from_yaml(study.identity["search space"])
    own = {int(block): count for block, count in study.facts["experts_used"].items() if int(block) not in space.fixed}
    cells = {(one.blocks, one.count): one for trial in study.single_cuts if (one := _cell(study, trial, own))}
    return tuple(cells[key] for key in sorted(cells))


def _cell(study: StudyRecord, trial: TrialRecord, own: Mapping[int, int]) -> SingleCut | None:
    cut = {block: count for block, count in trial.schedule.experts_used if block in own and count != own[block]}
    if len(set(cut.values())) != 1:
        return None  # it was put there by another hand
    return SingleCut(
        blocks=tuple(sorted(cut)),
        count=next(iter(cut.values())),
        trial=trial.number,
        kept_share=None if study.baseline is None else trial.kept_share(study.baseline),
        failed=len(trial.verdict.failures),
        run=trial.verdict.run,
        total=trial.verdict.total,
        smallest_margin=trial.smallest_margin,
    )


def sensitivity_fields(study: StudyRecord) -> list[dict[str, Any]]:
    """The map as JSON: a list of cells."""
    return [
        {
            "blocks": list(cell.blocks),
            "count": cell.count,
            "trial": cell.trial,
            "kept_share": cell.kept_share,
            "failed": cell.failed,
            "run": cell.run,
            "total": cell.total,
            "smallest_margin": cell.smallest_margin,
        }
        for cell in single_cuts(study)
    ]


def _grid(cells: tuple[SingleCut, ...]) -> tuple[list[tuple[int, ...]], list[int], dict[Place, SingleCut]]:
    """Blocks in order, counts from the gentlest cut on, and the cells by both."""
    blocks = list(dict.fromkeys(cell.blocks for cell in cells))
    counts = sorted({cell.count for cell in cells}, reverse=True)
    return blocks, counts, {(cell.blocks, cell.count): cell for cell in cells}


def sensitivity_table(study: StudyRecord) -> RenderableType:
    """The map for a terminal: a row for each block or band, a column for each count."""
    cells = single_cuts(study)
    blocks, counts, by_place = _grid(cells)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("cut alone", no_wrap=True)
    for count in counts:
        table.add_column(f"to {count}", justify="right", no_wrap=True)
    for named in blocks:
        row = [by_place.get((named, count)) for count in counts]
        table.add_row(format_blocks(named), *map(_cell_text, row))
    title = Text(visible(f"What each part loses alone: study {study.name}"), style="bold")
    return Group(title, table, *(Text(note, style="dim") for note in _notes(cells)))


def _cell_text(cell: SingleCut | None) -> Text:
    if cell is None:
        return Text(_NOT_ASKED, style="dim")
    kept = "?" if cell.kept_share is None else _percent(cell.kept_share)
    return Text(f"{kept} ✗{_failures(cell)}", style="red") if cell.failed else Text(f"{kept} ✓", style="blue")


def _failures(cell: SingleCut) -> str:
    """How many probes failed, as far as the run went."""
    return str(cell.failed) if cell.run == cell.total else f"{cell.failed}/{cell.run}"


def _percent(share: float) -> str:
    """Rounded down, so that only all is 100 %."""
    return f"{math.floor(1000 * share) / 10:.1f} %"


def _notes(cells: tuple[SingleCut, ...]) -> list[str]:
    gate = max((cell.total for cell in cells), default=0)
    notes = [f"Share of the baseline's words kept; ✓ all {gate} gate probes passed, ✗ so many failed."]
    if any(cell.run < cell.total for cell in cells):
        notes.append("✗n/m: n of the first m, where the run stopped; --start map asks the whole gate.")
    if any(cell.count != cells[0].count for cell in cells):
        notes.append(f"{_NOT_ASKED} not asked: the map goes from the largest cut up to the first that passes.")
    return notes


def figure_sensitivity(study: StudyRecord) -> Figure:
    """The map as a picture: a column for each block or band, a row for each count.

    Colour says what share of the baseline's words was lost, the number how many probes failed; an empty cell was not
    asked. Raises ``UsageError`` where the study has no sensitivity pass.
    """
    cells = single_cuts(study)
    if not cells:
        raise UsageError(f"study {study.name} has no sensitivity pass to draw: search --start map makes one")
    blocks, counts, by_place = _grid(cells)
    labels = [format_blocks(named) for named in blocks]
    width = min(max(4.5, 2.4 + 0.5 * len(blocks)), 11.0)
    with canvas(width, 1.5 + 0.38 * len(counts)) as figure:
        axes = figure.add_subplot()
        worst = max([1 - (cell.kept_share or 0.0) for cell in cells] + [0.01])
        for column, named in enumerate(blocks):
            for row, count in enumerate(counts):
                _draw_cell(axes, by_place.get((named, count)), column, row, worst)
        axes.set_xlim(-0.5, len(blocks) - 0.5)
        axes.set_ylim(len(counts) - 0.5, -0.5)
        long = max(map(len, labels)) > 2 and len(blocks) > 8  # noqa: PLR2004 - as many fit side by side
        axes.set_xticks(range(len(blocks)), labels, rotation=90 if long else 0)
        axes.set_yticks(range(len(counts)), [str(count) for count in counts])
        axes.set_xlabel("blocks that are cut alone")
        axes.set_ylabel("experts left")
        axes.set_title(_figure_title(cells, full=len(cells) == len(blocks) * len(counts)))
        axes.tick_params(length=0)
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        _add_scale(figure, axes, worst)
    return figure


def _figure_title(cells: tuple[SingleCut, ...], *, full: bool) -> str:
    title = f"each part cut alone: probes failed of {max(cell.total for cell in cells)}"
    if any(cell.run < cell.total for cell in cells):
        title += "\n(n/m: of the first m, where the run stopped)"
    return title if full else f"{title}\n(empty: not asked)"


def _draw_cell(axes: Axes, cell: SingleCut | None, column: int, row: int, worst: float) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    corner = (column - 0.47, row - 0.45)
    if cell is None:
        axes.add_patch(Rectangle(corner, 0.94, 0.9, facecolor="white", edgecolor="#DDDDDD", linewidth=0.7))
        return
    lost = 1 - (cell.kept_share or 0.0)
    axes.add_patch(Rectangle(corner, 0.94, 0.9, facecolor=colormaps["cividis"](lost / worst), linewidth=0))
    ink = "black" if lost > worst / 2 else "white"
    axes.text(column, row, _failures(cell), ha="center", va="center", color=ink, fontsize=8)


def _add_scale(figure: Figure, axes: Axes, worst: float) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    scale = ScalarMappable(Normalize(0, worst), "cividis")
    decimals = 0 if worst >= 0.05 else 1  # noqa: PLR2004 - so that a tick stands where it says
    ticks, words = MaxNLocator(4, steps=[1, 2, 5, 10]), PercentFormatter(1.0, decimals, " %")
    bar = figure.colorbar(scale, ax=axes, pad=0.02, aspect=12, ticks=ticks, format=words)
    bar.set_label("words lost")
    bar.outline.set_visible(False)
