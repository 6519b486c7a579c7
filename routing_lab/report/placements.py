"""A placement sweep as a table and as a figure, and a published table to lay beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from routing_lab.errors import UsageError
from routing_lab.placement.published import PublishedTable
from routing_lab.placement.sweep import SweepRow
from routing_lab.report.figures import canvas
from routing_lab.visible import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Group
    from rich.table import Table

__all__ = ["figure_sweep", "memory_table", "published_table", "sweep_table"]

_HEADINGS: Final[Mapping[str, str]] = {
    "label": "",
    "host_blocks": "blocks with experts\non the host",
    "device_mib": "device\nMiB",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_to": "up to",
}
_EXPERTS: Final[dict[str, Any]] = {"fmt": "o-", "color": "#0072B2", "label": "all layers on the device, experts moved"}
_LAYERS: Final[dict[str, Any]] = {"fmt": "s--", "color": "#D55E00", "label": "whole layers moved"}


def sweep_table(rows: Sequence[SweepRow]) -> Table:
    """How fast each placement decodes, and what it read from disk meanwhile: the most of all rounds."""
    from rich.table import Table
    from rich.text import Text

    table = Table("placement", box=None, pad_edge=False, collapse_padding=True)
    for name in ("tokens/s", "ratio [95 %]", "major\nfaults", "swapped\npages"):
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        label = Text(visible(row.title))
        if row.ratio is None or row.tokens_per_s is None:
            table.add_row(label, "failed")
            continue
        ratio = f"{row.ratio.ratio:.3f} [{row.ratio.low:.3f}, {row.ratio.high:.3f}]"
        counts = (row.most("major_faults"), row.most("swapped_in_pages"))
        table.add_row(label, f"{row.tokens_per_s:,.2f}", ratio, *map(_count, counts))
    return table


def memory_table(rows: Sequence[SweepRow]) -> Table:
    """What each placement that ran takes of both memories, in MiB; of the host's, what for."""
    from rich.table import Table
    from rich.text import Text

    table = Table("MiB", box=None, pad_edge=False, collapse_padding=True)
    for name in ("device", "host", "weights", "caches", "compute", "resident"):
        heading = f"host\n{name}" if name in {"weights", "caches", "compute"} else f"\n{name}"
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.samples:
            host = row.host
            sizes = (row.device_bytes, row.host_bytes, host.weight_bytes, host.cache_bytes, host.compute_bytes)
            table.add_row(Text(visible(row.title)), *map(_mebibytes, (*sizes, row.most("resident_bytes"))))
    return table


def published_table(published: PublishedTable) -> Group:
    """A published table in its own columns: other machines and models, so only the shape can be compared."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    hardware = f" ({published.hardware})" if published.hardware else ""
    table = Table(box=None, pad_edge=False)
    for column in published.columns:
        justify: Literal["left", "right"] = "left" if column == "label" else "right"
        table.add_column(_HEADINGS.get(column, column), justify=justify, no_wrap=column != "label", vertical="bottom")
    columns = [_cells([row.get(column) for row in published.rows]) for column in published.columns]
    for cells in zip(*columns, strict=True):
        table.add_row(*(Text(visible(cell)) for cell in cells))
    # The title beside the table and not in it, where it would be as narrow as the table.
    return Group(Text(visible(f"published: {published.what}{hardware}"), style="italic"), table)


def figure_sweep(rows: Sequence[SweepRow], *, title: str = "placements") -> Figure:
    """Decode rate against memory used on the device, one line for each way of moving weights to the host.

    Bars are the slowest and the fastest round. Where nothing is on a device, against memory of the host. Raises
    ``UsageError`` where no placement ran.
    """
    ran = [row for row in rows if row.samples]
    if not ran:
        raise UsageError("no placement ran, so there is nothing to draw")
    most = max(row.placement.gpu_layers for row in ran)
    side = "device" if any(row.device_bytes for row in ran) else "host"
    with canvas(7.2, 4.2) as figure:
        axes = figure.add_subplot()
        for look, chosen in (
            (_EXPERTS, [row for row in ran if row.placement.gpu_layers == most > 0]),
            (_LAYERS, [row for row in ran if not row.placement.host_experts]),
        ):
            if chosen:
                _draw(axes, chosen, look, side)
        axes.set_xlabel(f"memory used on the {side}, MiB")
        axes.set_ylabel("decoded tokens per second")
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.legend()
    return figure


def _draw(axes: Any, rows: Sequence[SweepRow], look: Mapping[str, Any], side: str) -> None:  # noqa: ANN401 - matplotlib's
    def taken(row: SweepRow) -> float:
        return (row.device_bytes if side == "device" else row.host_bytes) / 2**20

    ordered = sorted(rows, key=taken)
    rates = [[sample.tokens_per_s for sample in row.samples] for row in ordered]
    middles = [row.tokens_per_s or 0.0 for row in ordered]
    below = [middle - min(series) for middle, series in zip(middles, rates, strict=True)]
    above = [max(series) - middle for middle, series in zip(middles, rates, strict=True)]
    axes.errorbar([taken(row) for row in ordered], middles, yerr=[below, above], capsize=2, **look)


def _mebibytes(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 2**20:,.1f}"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _cells(values: Sequence[str | float | None]) -> list[str]:
    """A column as text, its numbers with as many decimals as the one that has most."""
    written = [f"{value:.10g}" for value in values if isinstance(value, (int, float))]
    decimals = max((len(text.partition(".")[2]) for text in written if "e" not in text), default=0)
    return ["" if value is None else value if isinstance(value, str) else f"{value:,.{decimals}f}" for value in values]
