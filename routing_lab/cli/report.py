"""``routing-lab report``: a study's screening results again, as a table, as CSV, as figures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from routing_lab.cli import options
from routing_lab.cli.drawing import check_figure, drawn, require_libraries
from routing_lab.cli.files import check_outputs, write_output
from routing_lab.cli.output import console, print_json, say
from routing_lab.cli.search import add_study, study_fields, study_storage
from routing_lab.errors import UsageError

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
    parser.add_argument(
        "--sensitivity",
        type=Path,
        metavar="FILE",
        help="draw what each block or band loses alone, of a study with --start map or sensitivity",
    )


def run(args: argparse.Namespace) -> int:
    """Print the table and write what was asked for."""
    from routing_lab.report import (
        figure_frontier,
        figure_sensitivity,
        screening_table,
        sensitivity_table,
        study_frame,
    )
    from routing_lab.search import load_study

    check_figure(args.figure)
    check_figure(args.sensitivity, "--sensitivity")
    require_libraries(pandas=args.csv or args.figure, matplotlib=args.figure or args.sensitivity)
    check_outputs(args, inputs=[study_storage(args)])
    study = load_study(args.storage, args.study)
    if args.beside:
        return _print_joint(args, [study, *(load_study(args.storage, name) for name in args.beside)])
    if args.json:
        print_json(study_fields(study))
    else:
        console().print(screening_table(study, rows=args.rows))
        if study.single_cuts:
            console().print()
            console().print(sensitivity_table(study))
    if args.csv is not None:
        write_output(args.csv, study_frame(study).to_csv(index=False).encode())
    if args.figure is not None:
        write_output(args.figure, drawn(figure_frontier(study_frame(study)), args.figure))
    if args.sensitivity is not None:
        write_output(args.sensitivity, drawn(figure_sensitivity(study), args.sensitivity))
    written = [path for path in (args.csv, args.figure, args.sensitivity) if path is not None]
    if written and not args.json:
        say(f"written: {', '.join(map(str, written))}")
    return 0


def _print_joint(args: argparse.Namespace, studies: list[StudyRecord]) -> int:
    """Print studies side by side.

    Raises:
        UsageError: They are of different models or probes, or a file was asked for, which is of one study.
    """
    from routing_lab.report import joint_fields, joint_table

    if any(path is not None for path in (args.csv, args.figure, args.sensitivity)):
        raise UsageError(
            "--csv, --figure and --sensitivity are of one study: results of different placements do not rank"
        )
    if args.json:
        print_json(joint_fields(studies))
    else:
        console().print(joint_table(studies, rows=args.rows))
    return 0
