"""``routing-lab report``: a study's screening results again, as a table, as CSV, as figures."""

from __future__ import annotations

import argparse
import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING

from routing_lab.cli import options
from routing_lab.cli.files import check_outputs, write_output
from routing_lab.cli.output import console, print_json, say
from routing_lab.cli.search import add_study, study_fields, study_storage
from routing_lab.errors import RuntimeUnsupportedError, UsageError

if TYPE_CHECKING:
    from routing_lab.search import StudyRecord


def add(commands: options.Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = options.command(
        commands,
        "report",
        run,
        help="show a study again: table, CSV, frontier figure",
        example="routing-lab report --study demo --figure frontier.png",
    )
    add_study(parser)
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="NAME",
        help="another study of the same model and probes, as a column of its own: what a schedule gains per placement",
    )
    parser.add_argument(
        "--rows", type=options.positive, default=8, metavar="N", help="accepted trials to list (default: %(default)s)"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write one row per trial")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the frontier (.png, .svg or .pdf)")


def run(args: argparse.Namespace) -> int:
    """Print the table and write what was asked for."""
    from routing_lab.report import screening_table, study_frame
    from routing_lab.search import load_study

    figure_format = _figure_format(args.figure)
    _require_libraries(args)
    check_outputs(args, inputs=[study_storage(args)])
    study = load_study(args.storage, args.study)
    if args.beside:
        return _print_joint(args, [study, *(load_study(args.storage, name) for name in args.beside)])
    if args.json:
        print_json(study_fields(study))
    else:
        console().print(screening_table(study, rows=args.rows))
    if args.csv is not None:
        write_output(args.csv, study_frame(study).to_csv(index=False).encode())
    if args.figure is not None:
        write_output(args.figure, _drawn(study, figure_format))
    written = [path for path in (args.csv, args.figure) if path is not None]
    if written and not args.json:
        say(f"written: {', '.join(map(str, written))}")
    return 0


def _print_joint(args: argparse.Namespace, studies: list[StudyRecord]) -> int:
    """Print studies side by side.

    Raises:
        UsageError: They are of different models or probes, or a file was asked for, which is of one study.
    """
    from routing_lab.report import joint_fields, joint_table

    if args.csv is not None or args.figure is not None:
        raise UsageError("--csv and --figure are of one study: results of different placements do not rank")
    if args.json:
        print_json(joint_fields(studies))
    else:
        console().print(joint_table(studies, rows=args.rows))
    return 0


def _figure_format(figure: Path | None) -> str:
    """The format that the name of the figure asks for.

    Raises:
        UsageError: It is none of those that are written.
    """
    from routing_lab.report import FIGURE_FORMATS

    suffix = "" if figure is None else figure.suffix.lower().removeprefix(".")
    if figure is not None and suffix not in FIGURE_FORMATS:
        names = ", ".join(f".{name}" for name in FIGURE_FORMATS)
        raise UsageError(f"--figure {figure}: the end of the name says the format, one of {names}")
    return suffix


def _require_libraries(args: argparse.Namespace) -> None:
    """Find out before anything is printed that a library is missing. Raises ``RuntimeUnsupportedError``."""
    wanted = {"pandas": args.csv or args.figure, "matplotlib": args.figure}
    missing = [name for name, needed in wanted.items() if needed and importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeUnsupportedError(
            f"{' and '.join(missing)} not installed, and frames and figures need it: "
            "pip install 'routing-lab[notebooks]'"
        )


def _drawn(study: StudyRecord, figure_format: str) -> bytes:
    from routing_lab.report import figure_frontier, study_frame

    drawn = io.BytesIO()
    figure_frontier(study_frame(study)).savefig(drawn, format=figure_format, dpi=160, bbox_inches="tight")
    return drawn.getvalue()
