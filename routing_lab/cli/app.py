"""Assemble the parser, run one command, and turn every expected error into one message and its exit code."""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from routing_lab import __version__
from routing_lab.cli.files import refuse_special_files
from routing_lab.cli.options import folded
from routing_lab.cli.output import prepare_streams, print_json, say_error, settle_streams, silence
from routing_lab.errors import InterruptedStudyError, Problem, RoutingLabError, UsageError, UserFileError

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

COMMANDS = (
    "doctor",
    "model",
    "placement",
    "schedule",
    "probes",
    "answers",
    "evaluate",
    "search",
    "validate",
    "report",
    "export",
    "synth",
    "attest",
)

DESCRIPTION = """\
Find out how few experts each layer of a mixture-of-experts model may consult before its answers change.

Without --model every command uses the demo model that ships with the package."""

EXIT_CODES = """\
exit codes: 0 done, 2 usage, 3 a file is bad or cannot be written, 4 runtime missing or unsupported,
5 nothing passed, 130 interrupted, 1 a bug"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``routing-lab`` with ``argv`` (default: the process's own) and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    as_json = "--json" in itertools.takewhile(lambda word: word != "--", words)
    try:
        prepare_streams()
        code = _run(words)
    except RoutingLabError as error:
        code = _report(error, as_json=as_json)
    except KeyboardInterrupt:
        code = _report(InterruptedStudyError("interrupted"), as_json=as_json)
    return _settled(code)


def _run(words: list[str]) -> int:
    """Parse and run one command.

    Raises:
        RoutingLabError: Every expected failure, that of stdout among them.
    """
    try:
        args = _parser().parse_args(words)
        refuse_special_files(args)
        code: int = args.run(args)
        sys.stdout.flush()
    except SystemExit as stop:  # --help and --version end so
        return stop.code if isinstance(stop.code, int) else 0
    except BrokenPipeError:
        silence(sys.stdout)  # the reader (`| head`) has seen enough
        return 0
    except OSError as error:
        # What cannot be opened has a name, and the readers and writers of files know it; what is left is a full stdout.
        if error.filename is not None or error.errno not in _FULL:
            raise
        silence(sys.stdout)
        raise _full(error) from None
    return code


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


def _full(error: OSError) -> UserFileError:
    return UserFileError("standard output", [Problem("", f"cannot be written: {error.strerror}")])


def _settled(code: int) -> int:
    """The exit code, once all that was printed has arrived; that it cannot is an error where all else went well."""
    failure = settle_streams()
    if failure is None or isinstance(failure, BrokenPipeError) or code:
        return code
    return say_error(_full(failure))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="routing-lab",
        description=folded(DESCRIPTION),
        epilog=folded(EXIT_CODES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"routing-lab {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"routing_lab.cli.{name}").add(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose usage errors are raised and name the way to the help; subcommands inherit it."""

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            option = message.removeprefix("argument ").partition(":")[0].split("/")[-1]
            message += f" (a value that begins with a dash is written {option}=-1/2)"
        raise UsageError(f"{message}\nTry '{self.prog} --help'.")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """As argparse's own, which keeps silent where the stream cannot be written."""
        (file or sys.stderr).write(message)


def _report(error: RoutingLabError, *, as_json: bool) -> int:
    if as_json:
        with contextlib.suppress(OSError, ValueError):  # a stdout that takes nothing; stderr says the same
            print_json({"error": _error_fields(error)})
    return say_error(error)


def _error_fields(error: RoutingLabError) -> dict[str, object]:
    fields: dict[str, object] = {"kind": type(error).__name__, "message": str(error), "exit_code": error.exit_code}
    if isinstance(error, UserFileError):
        fields["file"] = error.file
        fields["problems"] = [
            {"where": problem.where, "what": problem.what, "remedy": problem.remedy} for problem in error.problems
        ]
    return fields
