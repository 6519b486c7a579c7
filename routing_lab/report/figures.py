"""The figures: drawn from frames and schedules, without global matplotlib state, readable without colour.

Every figure is a ``matplotlib.figure.Figure``; save it with ``savefig`` or let a notebook show it. Status is told by
the shape of a marker as well as by its colour (Okabe and Ito's palette, made for every kind of colour vision).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from routing_lab.errors import UsageError
from routing_lab.model import ModelFacts
from routing_lab.report.frames import frontier
from routing_lab.report.strip import BlockKind, StripCell, strip_cells
from routing_lab.schedule import Schedule
from routing_lab.visible import visible

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FIGURE_FORMATS", "figure_frontier", "figure_published", "figure_strip"]

FIGURE_FORMATS: Final = ("png", "svg", "pdf")
"""What the command line writes; ``savefig`` knows more."""


@dataclass(frozen=True, slots=True)
class _Look:
    """How one status is drawn and named in a legend."""

    marker: str
    colour: str
    label: str


_LOOKS: Final[Mapping[str, _Look]] = {
    "pass": _Look("o", "#0072B2", "every probe correct"),
    "correct": _Look("o", "#0072B2", "correct"),
    "fail": _Look("X", "#D55E00", "a probe failed"),
    "wrong_answer": _Look("X", "#D55E00", "wrong answer"),
    "no_final_answer": _Look("^", "#E69F00", "no final answer"),
    "runtime_error": _Look("s", "#7F7F7F", "runtime error"),
    "undecided": _Look("D", "#7F7F7F", "undecided"),
}
_STYLE: Final[dict[Any, Any]] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "figure.dpi": 110.0,
}
_MARK: Final[dict[str, Any]] = {"markersize": 7.5, "markeredgecolor": "white", "markeredgewidth": 0.5}
_SPEED_LABEL: Final = "decode speed ÷ baseline decode speed"
_CUT: Final = "\n(of those asked until the run stopped)"
_BASELINE: Final[dict[str, Any]] = {"color": "#555555", "linewidth": 0.9, "linestyle": (0, (4, 3))}


@contextmanager
def canvas(width_in: float, height_in: float) -> Iterator[Figure]:
    """A figure of its own, outside pyplot, so that no caller inherits our style and no figure leaks."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        yield Figure(figsize=(width_in, height_in), layout="constrained")


def figure_frontier(frame: pd.DataFrame, *, title: str = "screening, not validated") -> Figure:
    """Every finished trial of a study: decode speed against the share of gate probes it answered correctly.

    ``frame`` is a ``study_frame``. Horizontal bars are the interval of the speed ratio; the stepped line joins the
    trials that no other beats in both directions (``frontier``). A gate that fails fast stops at its first wrong
    answers, so a point below 1 is a share of the probes that were asked, not of all that the schedule would get right.

    Where every trial that was timed passed (the gate came first, and only what passes it is timed), the share says
    nothing: then the experts consulted take its place, and the fastest is named.

    Raises ``UsageError`` where no trial has both a ratio and a verdict.
    """
    shown = frame.dropna(subset=["speed_ratio", "share_correct"])
    if shown.empty:
        raise UsageError("the study has no finished trial to draw")
    verdicts = list(dict.fromkeys(str(verdict) for verdict in shown["verdict"]))
    upwards = "total_experts" if verdicts == ["pass"] else "share_correct"
    with canvas(7.2, 4.2) as figure:
        axes = figure.add_subplot()
        _draw_baseline(axes)
        line = [] if verdicts == ["pass"] else _draw_frontier(axes, shown)
        for verdict in verdicts:
            _draw_trials(axes, shown[shown["verdict"] == verdict], _LOOKS[verdict], upwards)
        axes.set_xlabel(_SPEED_LABEL)
        axes.set_xlim(*_span(shown))
        if upwards == "share_correct":
            _scale_shares(axes, shown)
        else:
            _scale_experts(axes, shown)
        axes.set_title(f"{_how_many(frame, shown)} ({visible(title)})", parse_math=False)
        _legend(figure, verdicts, *line)
    return figure


def _how_many(frame: pd.DataFrame, shown: pd.DataFrame) -> str:
    """How many trials are drawn, of how many that the search itself evaluated."""
    from routing_lab.search.records import SINGLE_CUT

    of_search = (frame["origin"] != SINGLE_CUT) & (frame["ending"] == "evaluated")
    trials = max(int(of_search.sum()), len(shown))
    if len(shown) == trials:
        return f"{trials} trials"
    why = ", the others failed the gate" if (shown["verdict"] == "pass").all() else ""
    return f"{len(shown)} of {trials} trials were timed{why}"


def _scale_shares(axes: Axes, shown: pd.DataFrame) -> None:
    """From the least share to 1, which no share exceeds; marks at the edge are drawn whole."""
    cut = (shown["asked"] < shown["probes_total"]).any()
    axes.set_ylabel(f"share of gate probes answered correctly{_CUT if cut else ''}")
    axes.set_ylim(shown["share_correct"].min() - 0.05, 1.0)
    for drawn in axes.containers:
        drawn[0].set_clip_on(False)


def _scale_experts(axes: Axes, shown: pd.DataFrame) -> None:
    """Whole numbers of experts, and the name of the fastest trial beside it."""
    from matplotlib.ticker import MaxNLocator

    axes.set_ylabel("experts consulted per token, all blocks")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(y=0.15)
    best = shown.nlargest(1, "speed_ratio").to_dict("records")[0]
    low, high = axes.get_xlim()
    beyond = best["speed_ratio"] > (low + high) / 2
    axes.annotate(
        f"fastest: trial {best['trial']}",
        (best["speed_ratio"], best["total_experts"]),
        xytext=(0, -14),
        textcoords="offset points",
        ha="right" if beyond else "left",
        fontsize=8,
        color="#333333",
    )


def _span(frame: pd.DataFrame) -> tuple[float, float]:
    """Limits of a speed axis: all ratios with their intervals, and the baseline.

    An interval that reaches further than all ratios do runs out of the axis and sets no scale.
    """
    ratios = frame["speed_ratio"]
    low, high = min(ratios.min(), 1.0), max(ratios.max(), 1.0)
    reach = max(high - low, 0.1)
    low = min([low, *(end for end in frame["ratio_low"].dropna() if end >= low - reach)])
    high = max([high, *(end for end in frame["ratio_high"].dropna() if end <= high + reach)])
    margin = max(0.05 * (high - low), 0.01)
    return low - margin, high + margin


def _draw_baseline(axes: Axes) -> None:
    axes.axvline(1.0, **_BASELINE)
    look: dict[str, Any] = {"color": "#555555", "fontsize": 8, "rotation": 90, "ha": "right", "va": "bottom"}
    axes.annotate("baseline", (1.0, 0.02), xycoords=("data", "axes fraction"), **look)


def _draw_frontier(axes: Axes, trials: pd.DataFrame) -> list[Artist]:
    """The stepped line; none where one trial beats all others, for a line of one point cannot be seen."""
    best = frontier(trials)
    if len(best) == 1:
        return []
    # To the left of a trial there is always that trial itself to take: the step comes before the point.
    (line,) = axes.step(
        best["speed_ratio"], best["share_correct"], where="pre", color="#999999", zorder=1, label="nothing beats these"
    )
    return [line]


def _draw_trials(axes: Axes, trials: pd.DataFrame, look: _Look, upwards: str) -> None:
    ends = [trials["speed_ratio"] - trials["ratio_low"], trials["ratio_high"] - trials["speed_ratio"]]
    faint: dict[str, Any] = {"elinewidth": 0.9, "ecolor": f"{look.colour}50"}
    axes.errorbar(
        trials["speed_ratio"], trials[upwards], xerr=ends, fmt=look.marker, color=look.colour, **faint, **_MARK
    )


def figure_strip(schedules: Sequence[Schedule], facts: ModelFacts) -> Figure:
    """One row per schedule, one cell per stored block: its colour and its number say how many experts it consults.

    Cells of dense and of MTP blocks are hatched: no schedule reaches them. Raises ``UsageError`` without schedules and
    ``UserFileError`` where one does not fit the model.
    """
    if not schedules:
        raise UsageError("a strip needs at least one schedule")
    rows = [strip_cells(schedule, facts) for schedule in schedules]
    full = max((max(cell.count, cell.own) for row in rows for cell in row), default=1) or 1
    # Wide enough for the cells of a deep model; of a shallow one, cells should not become bars.
    width = min(max(4.5, 1.8 + 0.5 * facts.blocks), 9.0)
    with canvas(width, 0.7 + 0.38 * len(rows)) as figure:
        axes = figure.add_subplot()
        for position, cells in enumerate(rows):
            for cell in cells:
                _draw_cell(axes, cell, position, full, numbered=facts.blocks <= 64)  # noqa: PLR2004 - 8 inches hold 64
        axes.set_xlim(-0.5, facts.blocks - 0.5)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        _name_rows(axes, [schedule.name for schedule in schedules])
        axes.set_xticks(range(0, facts.blocks, 1 if facts.blocks <= 16 else 8))  # noqa: PLR2004 - room for the numbers
        axes.set_xlabel("block")
        axes.set_title("experts consulted per token")
        axes.tick_params(length=0)
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
    return figure


def _draw_cell(axes: Axes, cell: StripCell, row: int, full: int, *, numbered: bool) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    corner = (cell.block - 0.47, row - 0.42)
    if cell.kind is not BlockKind.ROUTED:
        axes.add_patch(Rectangle(corner, 0.94, 0.84, facecolor="white", edgecolor="#BBBBBB", hatch="////", linewidth=0))
        return
    share = cell.count / full
    axes.add_patch(Rectangle(corner, 0.94, 0.84, facecolor=colormaps["cividis"](0.15 + 0.85 * share), linewidth=0))
    if numbered:
        ink = "black" if share > 0.5 else "white"  # noqa: PLR2004 - the middle of the colour map
        axes.text(cell.block, row, str(cell.count), ha="center", va="center", color=ink, fontsize=8)


def figure_published(published: pd.DataFrame, own: pd.DataFrame) -> Figure:
    """The published figure 1 beside a run of one's own, each relative to its own baseline.

    Both frames have the columns of ``published_frame`` and ``evaluation_frame``. Speed is the ratio to the baseline of
    the same panel: other machines, other models and other rates, so only the *shape* can be compared. Where a frame has
    an interval for the ratio it is drawn.
    """
    panels = (("published (35B-A3B model, 12 GB GPU)", published), ("this run", own))
    height = 1.2 + 0.27 * max(len(published), len(own), 1)
    with canvas(9.6, height) as figure:
        for axes, (title, frame) in zip(figure.subplots(1, 2), panels, strict=True):
            _draw_schedules(axes, frame.sort_values("speed_ratio", kind="stable").reset_index(drop=True))
            axes.set_title(title)
            axes.set_xlabel(_SPEED_LABEL)
        statuses = dict.fromkeys([*published["status"], *own["status"]])
        _legend(figure, [str(status) for status in statuses])
    return figure


def _draw_schedules(axes: Axes, frame: pd.DataFrame) -> None:
    axes.axvline(1.0, **_BASELINE)
    rows = frame.to_dict("records")
    for position, row in enumerate(rows):
        look = _LOOKS[row["status"]]
        # Where there is no interval its ends are NaN, and nothing is drawn.
        axes.plot([row["ratio_low"], row["ratio_high"]], [position] * 2, color=look.colour, linewidth=1.4, alpha=0.6)
        axes.plot([row["speed_ratio"]], [position], look.marker, color=look.colour, **_MARK)
    _name_rows(axes, [row["schedule"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(*_span(frame))
    axes.grid(visible=False, axis="y")


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names beside the rows, as they are: a dollar sign in one begins no formula."""
    axes.set_yticks(range(len(names)), [visible(name) for name in names], parse_math=False)


def _legend(figure: Figure, statuses: Sequence[str], *more: Artist) -> None:
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], marker=look.marker, color=look.colour, linestyle="", label=look.label, **_MARK)
        for look in (_LOOKS[status] for status in statuses)
    ]
    figure.legend(handles=[*marks, *more], loc="outside lower center", ncols=len(marks) + len(more))
