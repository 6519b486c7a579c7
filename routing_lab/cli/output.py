"""What a command prints: JSON on stdout for programs, rich tables on stdout for people, progress on stderr."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from routing_lab.errors import RoutingLabError, RuntimeFailureError, UserFileError
from routing_lab.visible import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "activity",
    "console",
    "fact_table",
    "json_text",
    "plain",
    "prepare_streams",
    "print_json",
    "progress_console",
    "say",
    "say_error",
    "settle_streams",
    "shown",
    "size",
    "strip_width",
]

_PIPED_COLUMNS = 160
_NARROWEST_COLUMNS = 72
_MOST_PROBLEMS = 200
_BLANKS_AT_THE_END = re.compile(r"[ \t]+(?=\n)")
_NOT_ASCII = re.compile(r"[^\x20-\x7e\n]")


def print_json(value: object) -> None:
    """Print ``value`` as one JSON document; NaN is refused, so that what is printed is JSON everywhere."""
    print(json_text(value, indent=2))


def json_text(value: object, *, indent: int | None = None) -> str:
    """``value`` as JSON that stdout can carry whatever its encoding, and that does nothing to a terminal.

    Characters without a shape are written as JSON's own escapes, so that a reader gets exactly the same text back.
    """
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("_", "-")
    text = json.dumps(plain(value), indent=indent, ensure_ascii=encoding not in {"utf-8", "utf8"}, allow_nan=False)
    return _NOT_ASCII.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0] if match[0].isprintable() else json.dumps(match[0])[1:-1]


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


def say(text: str) -> None:
    """Print one line of text on stdout, whatever characters the names in it hold."""
    print(visible(text))


def shown(text: str, style: str = "") -> Text:
    """One line of text for a rich console: no markup is read in it, and no character acts on the terminal."""
    from rich.text import Text

    return Text(visible(text), style=style)


def say_error(error: RoutingLabError) -> int:
    """Say on stderr what went wrong and return the exit code; for commands whose results are printed already, too."""
    lines = [f"routing-lab: error: {_first(error)}", *_rest(error)]
    if isinstance(error, RuntimeFailureError) and error.log_tail:
        lines += ["the last words of the model's process:", *error.log_tail.rstrip().splitlines()]
    with suppress(OSError, ValueError):  # nobody can be told that stderr takes nothing; the exit code still speaks
        sys.stderr.write("".join(f"{visible(line)}\n" for line in lines))
        sys.stderr.flush()
    return error.exit_code


def _first(error: RoutingLabError) -> str:
    if isinstance(error, UserFileError):
        problems = error.problems
        return f"{error.file}: {problems[0] if len(problems) == 1 else f'{len(problems)} problems'}"
    return str(error).split("\n", 1)[0]


def _rest(error: RoutingLabError) -> list[str]:
    """Further lines, all indented: no text from a file can look like a message of its own."""
    if isinstance(error, UserFileError):
        more = len(error.problems) - _MOST_PROBLEMS
        listed = [f"  {problem}" for problem in error.problems[:_MOST_PROBLEMS]] if len(error.problems) > 1 else []
        return [*listed, f"  and {more} more (--json lists all)"] if more > 0 else listed
    return [f"  {line.strip()}" for line in str(error).split("\n")[1:]]


# ---------------------------------------------------------------------------------------------------------------------
# The process's streams


def prepare_streams() -> None:
    """Make stdout and stderr take any text: bars on a terminal without them become question marks, not a traceback."""
    _occupy_standard_descriptors()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell (>&-)
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open to the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _occupy_standard_descriptors() -> None:
    """Open what the shell closed: a database that got number 2 would be written over by libllama's log."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # noqa: PLR2004 - stderr
        pass
    os.close(descriptor)


def settle_streams() -> OSError | None:
    """Write out what is buffered, and return why that was not possible.

    Python flushes both streams once more at its exit and complains there; a stream that failed gets a sink instead.
    """
    failure: OSError | None = None
    for stream in (sys.stderr, sys.stdout):
        try:
            stream.flush()
        except OSError as error:
            failure = error
            silence(stream)
        except ValueError:  # closed by the caller
            pass
    return failure


def silence(stream: TextIO) -> None:
    """Let everything that is still written to ``stream`` vanish."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, stream.fileno())
    os.close(sink)


def console() -> Console:
    """Where tables go.

    What is no terminal has a width of its own, or the one of ``COLUMNS``, and lines without blanks at their ends: a
    line of a table stays one line.
    """
    from rich.console import Console

    class Stdout(Console):
        def on_broken_pipe(self) -> None:
            # rich would exit with 1; that the reader has seen enough is no failure, and the caller handles it.
            raise BrokenPipeError

        def render_str(self, text: str, **how: Any) -> Text:  # noqa: ANN401 - rich's own options
            return super().render_str("\n".join(visible(line) for line in text.split("\n")), **how)

    # Below the narrowest width a table would lose its numbers; a terminal that wraps its lines loses nothing.
    terminal = sys.stdout.isatty()
    out = Stdout(
        file=None if terminal else cast("IO[str]", _Trimmed(sys.stdout)),
        width=None if terminal or os.environ.get("COLUMNS", "").isdecimal() else _PIPED_COLUMNS,
        highlight=False,
        markup=False,
        emoji=False,
    )
    out.width = max(out.width, _NARROWEST_COLUMNS)
    return out


def strip_width(out: Console) -> int:
    """Columns for a strip of blocks on this console; a narrower terminal than the narrowest strip wraps it."""
    return min(max(out.width, 20), 100)


class _Around(io.TextIOBase):
    """A stream around another one, which stays open."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


class _Trimmed(_Around):
    """A stream without the blanks that fill a table's lines up; rich writes whole lines."""

    def write(self, text: str) -> int:
        self._stream.write(_BLANKS_AT_THE_END.sub("", text))
        return len(text)


class _Lenient(_Around):
    """A stream for progress: where it cannot be written, the work goes on without."""

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


def progress_console() -> Console:
    """Where progress goes: stderr, so that a pipe sees only results."""
    from rich.console import Console

    return Console(file=cast("IO[str]", _Lenient(sys.stderr)), highlight=False, markup=False, emoji=False)


@contextmanager
def activity(doing: str) -> Iterator[Callable[[str], None]]:
    """One line on a terminal that says what is being done; call what this gives to say something else."""
    out = progress_console()
    with out.status(shown(doing)) as status:

        def say_doing(text: str) -> None:
            line = shown(text)
            line.truncate(max(out.width - 4, 10), overflow="ellipsis")
            status.update(line)

        yield say_doing


def fact_table(rows: Mapping[str, str]) -> Table:
    """Names and values in two columns without lines; long values fold."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, shown(value))
    return table


def size(size_bytes: int) -> str:
    """Bytes in the largest binary unit that leaves a number of at least 1."""
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:  # noqa: PLR2004 - what the binary units are made of
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
