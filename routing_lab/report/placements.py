"""A placement sweep as a table and as a figure, and a published table to lay beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from routing_lab.errors import UsageError
from routing_lab.placement.published import PublishedTable
from routing_lab.placement.sweep import SweepRow
from routing_lab.report.figures import canvas
from routing_lab.visible import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

__all__ = ["figure_sweep", "published_table", "sweep_table"]

_EXPERTS: Final[dict[str, Any]] = {"fmt": "o-", "color": "#0072B2", "label": "all layers on the device, experts moved"}
_LAYERS: Final[dict[str, Any]] = {"fmt": "s--", "color": "#D55E00", "label": "whole layers moved"}


def sweep_table(rows: Sequence[SweepRow]) -> Table:
    """One line per placement. Faults and swap are the largest of all rounds."""
    from rich.table import Table
    from rich.text import Text

    table = Table("placement", box=None, pad_edge=False)
    for name in ("tokens/s", "ratio [95 %]", "device MiB", "host MiB", "resident MiB", "major faults", "swapped in"):
        table.add_column(name, justify="right")
    for row in rows:
        label = Text(visible(row.placement.name or row.placement.describe()))
        if row.ratio is None or row.tokens_per_s is None:
            table.add_row(label, Text(f"failed: {visible((row.error or 'no reason given').splitlines()[0])}"))
            continue
        ratio = f"{row.ratio.ratio:.3f} [{row.ratio.low:.3f}, {row.ratio.high:.3f}]"
        sizes = (row.device_bytes, row.host_bytes, row.most("resident_bytes"))
        counts = (row.most("major_faults"), row.most("swapped_in_pages"))
        table.add_row(label, f"{row.tokens_per_s:,.2f}", ratio, *map(_mebibytes, sizes), *map(_count, counts))
    return table


def published_table(published: PublishedTable) -> Table:
    """A published table in its own columns: other machines and models, so only the shape can be compared."""
    from rich.table import Table
    from rich.text import Text

    hardware = f" ({published.hardware})" if published.hardware else ""
    table = Table(
        title=Text(visible(f"published: {published.what}{hardware}")), title_justify="left", box=None, pad_edge=False
    )
    for column in published.columns:
        table.add_column(column.replace("_", " "), justify="left" if column == "label" else "right")
    for row in published.rows:
        table.add_row(*(Text(visible(_cell(row.get(column)))) for column in published.columns))
    return table


def figure_sweep(rows: Sequence[SweepRow], *, title: str = "placements") -> Figure:
    """Decode rate against memory used on the device, one line for each way of moving weights to the host.

    Bars are the slowest and the fastest round. Raises ``UsageError`` where no placement ran.
    """
    ran = [row for row in rows if row.samples]
    if not ran:
        raise UsageError("no placement ran, so there is nothing to draw")
    most = max(row.placement.gpu_layers for row in ran)
    with canvas(7.2, 4.2) as figure:
        axes = figure.add_subplot()
        for look, chosen in (
            (_EXPERTS, [row for row in ran if row.placement.gpu_layers == most]),
            (_LAYERS, [row for row in ran if not row.placement.host_experts]),
        ):
            if chosen:
                _draw(axes, sorted(chosen, key=lambda row: row.device_bytes), look)
        axes.set_xlabel("memory used on the device, MiB")
        axes.set_ylabel("decoded tokens per second")
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.legend()
    return figure


def _draw(axes: Any, rows: Sequence[SweepRow], look: dict[str, Any]) -> None:  # noqa: ANN401 - matplotlib's
    rates = [[sample.tokens_per_s for sample in row.samples] for row in rows]
    middles = [row.tokens_per_s or 0.0 for row in rows]
    below = [middle - min(series) for middle, series in zip(middles, rates, strict=True)]
    above = [max(series) - middle for middle, series in zip(middles, rates, strict=True)]
    axes.errorbar([row.device_bytes / 2**20 for row in rows], middles, yerr=[below, above], capsize=2, **look)


def _mebibytes(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 2**20:,.1f}"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _cell(value: str | float | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:,.10g}"
