"""``routing-lab probes``: what a probe set is worth on a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from routing_lab.cli import options
from routing_lab.cli.output import console, fact_table, print_json, progress_console, say_error
from routing_lab.errors import NothingAcceptedError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from routing_lab.probes.check import ProbesReport, SplitReport


def add(commands: options.Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command with its action."""
    parser = options.group(commands, "probes", help="check what a probe set is worth on a model")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = options.command(
        actions,
        "check",
        run_check,
        help="run a probe set with the model's own expert counts",
        description="Read a probe set strictly, ask the model every probe with its own expert counts, and say which\n"
        "ones it fails by itself, how close the others are, and what a pass of all of them would prove.",
        example="routing-lab probes check my-probes.yaml --model big.gguf",
    )
    check.add_argument("probes", nargs="?", type=Path, metavar="YAML", help="default: those of the demo model")
    options.add_model(check)
    check.add_argument(
        "--bound",
        type=options.share,
        default=0.05,
        metavar="P",
        help="failure rate that a pass should rule out (default: %(default)s)",
    )
    check.add_argument("--closest", type=options.positive, default=5, metavar="N", help="close calls to list")
    options.add_runtime(check)


def run_check(args: argparse.Namespace) -> int:
    """Print the report; exit code 5 where the baseline fails a gate probe."""
    from routing_lab.answers import Judge
    from routing_lab.probes.check import check_probes

    probes = options.probe_set(args)
    if args.bound == 0:
        raise UsageError("--bound 0 takes infinitely many probes; give a share above 0")
    with options.open_runtime(args) as runtime, Judge() as judge, progress_console().status("asking") as status:
        report = check_probes(
            runtime, probes, judge, wanted_bound=args.bound, progress=lambda outcome: status.update(outcome.probe)
        )
    if args.json:
        print_json(report)
    else:
        _print(report, args.closest)
    if report.sound:
        return 0
    return say_error(NothingAcceptedError("the baseline does not answer every gate probe, so no schedule could pass"))


def _print(report: ProbesReport, closest: int) -> None:
    out = console()
    out.print(fact_table({"probe set": report.name, "digest": report.digest, "model": report.model}))
    out.print()
    out.print(_splits(report))
    out.print()
    for failure in report.failures:
        got = f"{failure.extracted!r} for {failure.expected!r}" if failure.extracted else failure.reason
        out.print(f"fails {failure.probe} ({failure.split}): {failure.status.replace('_', ' ')}, {got}", markup=False)
    for probe in report.not_run:
        out.print(f"did not run: {probe}", markup=False)
    for near in report.passes[:closest]:
        if near.smallest_margin is not None:
            out.print(f"close call {near.probe}: smallest margin {near.smallest_margin:.2f} logits", markup=False)


def _splits(report: ProbesReport) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("split")
    for column in ("probes", "baseline passes", "longest", "tokens", "a pass rules out rates above"):
        table.add_column(column, justify="right")
    table.add_column(f"for {report.wanted_bound:.3g}")
    for split in report.splits:
        table.add_row(
            split.split,
            str(split.probes),
            str(split.passed),
            f"{split.most_tokens} tokens",
            str(split.tokens),
            f"{split.bound_if_all_correct:.3f}",
            _missing(split),
        )
    return table


def _missing(split: SplitReport) -> str:
    return f"{split.probes_missing} more needed" if split.probes_missing else "enough"
