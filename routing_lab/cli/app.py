"""Assemble the parser, run one command, and turn every expected error into one message and its exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from routing_lab import __version__
from routing_lab.cli.output import prepare_streams, print_json, say_error
from routing_lab.errors import InterruptedStudyError, RoutingLabError, UsageError, UserFileError

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
)

DESCRIPTION = """\
Find out how few experts each layer of a mixture-of-experts model may consult before its answers change.

Without --model every command uses the demo model that ships with the package."""

EXIT_CODES = """\
exit codes: 0 done, 2 usage, 3 a file is bad, 4 runtime missing or unsupported, 5 nothing passed, 130 interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``routing-lab`` with ``argv`` (default: the process's own) and return its exit code."""
    prepare_streams()
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except RoutingLabError as error:
        return _report(error, as_json=args.json)
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python would complain once more while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _report(InterruptedStudyError("interrupted"), as_json=args.json)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="routing-lab",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"routing-lab {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"routing_lab.cli.{name}").add(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose usage errors name the way to the help; subcommands inherit it."""

    def error(self, message: str) -> NoReturn:
        self.exit(UsageError.exit_code, f"{self.prog}: error: {message}\nTry '{self.prog} --help'.\n")


def _report(error: RoutingLabError, *, as_json: bool) -> int:
    if as_json:
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
