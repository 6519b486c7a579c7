"""``routing-lab report``: a study's screening results again, as a table, as CSV, as figures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from routing_lab.cli import options
from routing_lab.cli.output import console, print_json
from routing_lab.cli.search import add_study, study_fields
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
    from routing_lab.report import screening_table
    from routing_lab.search import load_study

    for output in (args.csv, args.figure):
        if output is not None:
            options.check_output(output)
    study = load_study(args.storage, args.study)
    if args.beside:
        return _print_joint(args, [study, *(load_study(args.storage, name) for name in args.beside)])
    if args.json:
        print_json(study_fields(study))
    else:
        console().print(screening_table(study, rows=args.rows))
    if args.csv is not None or args.figure is not None:
        _write(args, study)
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


def _write(args: argparse.Namespace, study: StudyRecord) -> None:
    """Write the files.

    Raises:
        RuntimeUnsupportedError: pandas or matplotlib is not installed.
    """
    from routing_lab.report import figure_frontier, study_frame

    try:
        frame = study_frame(study)
        if args.csv is not None:
            frame.to_csv(args.csv, index=False)
        if args.figure is not None:
            figure_frontier(frame).savefig(args.figure, dpi=160, bbox_inches="tight")
    except ModuleNotFoundError as error:
        raise RuntimeUnsupportedError(
            f"{error.name} is not installed, and frames and figures need it: pip install 'routing-lab[notebooks]'"
        ) from error
