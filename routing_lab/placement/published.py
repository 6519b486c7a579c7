"""Published placement tables: what others measured, as data with its source, to print beside a sweep of one's own.

::

    published: rtx-5080
    source: {what: a post on an RTX 5080, hardware: RTX 5080 with 16 GB}
    rows:
      - {label: Q6, tokens_per_s: 30}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from routing_lab.model import FrozenMap
from routing_lab.yamlfile import Fields

__all__ = ["COLUMNS", "PublishedTable"]

COLUMNS: Final = ("label", "host_blocks", "context", "device_mib", "tokens_per_s", "tokens_per_s_to")
"""What a row may say: a label, how many blocks' experts were on the host, tokens of context, memory used on the device,
and the decode rate (or the range of it, up to ``tokens_per_s_to``)."""


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """One table: its name, what it comes from, the hardware where that is known, and its rows."""

    name: str
    what: str
    hardware: str
    rows: tuple[Mapping[str, str | float], ...]

    @classmethod
    def load(cls, path: Path) -> PublishedTable:
        """Read a table. Raises ``UserFileError`` with every problem in it."""
        top = Fields.load(path)
        name = _line(top, "published")
        source = top.section("source", required=True)
        what = _line(source, "what") if source else ""
        hardware = _line(source, "hardware", default="") if source else ""
        rows = tuple(_row(row) for row in top.sections("rows"))
        if top.raw("rows") == []:
            top.problem("rows", "is empty", "a table needs at least one row")
        top.finish()
        return cls(name, what, hardware, rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns in use, in their fixed order."""
        return tuple(column for column in COLUMNS if any(column in row for row in self.rows))


def _line(fields: Fields, key: str, **default: str) -> str:
    """A text that stands in a table as it is: one line, and nothing in it that acts on a terminal."""
    text = fields.text(key, **default)
    if not text.isprintable():
        fields.problem(key, f"is {text[:60]!r}, which has characters that do not print")
    return text


def _row(fields: Fields) -> Mapping[str, str | float]:
    values: dict[str, str | float | None] = {
        "label": _line(fields, "label"),
        "host_blocks": fields.integer("host_blocks", default=None, minimum=0),
        "context": fields.integer("context", default=None, minimum=1),
        "device_mib": fields.number("device_mib", default=None, minimum=0),
        "tokens_per_s": fields.number("tokens_per_s", minimum=0),
        "tokens_per_s_to": fields.number("tokens_per_s_to", default=None, minimum=0),
    }
    least, most = values["tokens_per_s"], values["tokens_per_s_to"]
    if isinstance(least, float) and isinstance(most, float) and most < least:
        fields.problem("tokens_per_s_to", f"is {most:g}, below tokens_per_s, {least:g}")
    return FrozenMap({name: value for name, value in values.items() if value is not None})
