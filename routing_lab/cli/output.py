"""What a command prints: JSON on stdout for programs, rich tables on stdout for people, progress on stderr."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routing_lab.errors import RoutingLabError, RuntimeFailureError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["console", "fact_table", "plain", "prepare_streams", "print_json", "progress_console", "say_error", "size"]


def print_json(value: object) -> None:
    """Print ``value`` as one JSON document; NaN is refused, so that what is printed is JSON everywhere."""
    json.dump(plain(value), sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def plain(value: object) -> Any:  # noqa: ANN401 - JSON's own types
    """``value`` in terms of JSON: dataclasses, mappings, enumerations, paths and tuples as what JSON has for them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def say_error(error: RoutingLabError) -> int:
    """Say on stderr what went wrong and return the exit code; for commands whose results are printed already, too."""
    print(f"routing-lab: error: {error}", file=sys.stderr)
    if isinstance(error, RuntimeFailureError) and error.log_tail:
        print(f"the last words of the model's process:\n{error.log_tail.rstrip()}", file=sys.stderr)
    return error.exit_code


def prepare_streams() -> None:
    """Make stdout and stderr take any text: bars on a terminal without them become question marks, not a traceback."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell (>&-)
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open to the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def console() -> Console:
    """Where tables go. Piped output is not wrapped to a guessed width: a line of a table stays one line."""
    from rich.console import Console

    class Stdout(Console):
        def on_broken_pipe(self) -> None:
            # rich would exit with 1; that the reader has seen enough is no failure, and the caller handles it.
            raise BrokenPipeError

    return Stdout(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, soft_wrap=False)


def progress_console() -> Console:
    """Where progress goes: stderr, so that a pipe sees only results."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def fact_table(rows: Mapping[str, str]) -> Table:
    """Names and values in two columns without lines; long values fold."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def size(size_bytes: int) -> str:
    """Bytes in the largest binary unit that leaves a number of at least 1."""
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:  # noqa: PLR2004 - what the binary units are made of
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
