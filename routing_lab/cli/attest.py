"""``routing-lab attest``: what schedule a running llama-server has."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from routing_lab.cli import options
from routing_lab.cli.output import console, fact_table, print_json

if TYPE_CHECKING:
    from routing_lab.runtime.report import ServedSchedule
    from routing_lab.schedule import Schedule


def add(commands: options.Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = options.command(
        commands,
        "attest",
        run,
        help="say what schedule a running llama-server has, read back from its graphs",
        description="Read back what the graphs of a running llama-server were built with. The server must run on this\n"
        "machine, as this user, and under the override library (LD_PRELOAD, as export prints it).",
        example="routing-lab attest --url http://127.0.0.1:8080 --schedule night-schedule.yaml",
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8080", metavar="URL", help="where it listens (default: %(default)s)"
    )
    parser.add_argument(
        "--schedule", type=Path, metavar="YAML", help="exit with 4 where the server has another one than this"
    )


def run(args: argparse.Namespace) -> int:
    """Print the counts; exit code 4 where they cannot be read, or are not the wanted ones."""
    from routing_lab.runtime.report import served_schedule
    from routing_lab.schedule import Schedule, format_counts

    wanted = Schedule.load(args.schedule) if args.schedule is not None else None
    served = served_schedule(args.url)
    if wanted is not None:
        _compare(wanted, served)
    fields = {
        "process": served.process,
        "program": served.program,
        "experts_used": format_counts(served.experts_used),
        "prompt_experts_used": format_counts(served.prompt_experts_used),
        "own": format_counts(served.own),
        "generation": served.generation,
        "next_graph": served.next_graph,
        "refused": served.refused,
    }
    if args.json:
        print_json(fields)
    else:
        console().print(fact_table(_rows(fields)))
    return 0


def _compare(wanted: Schedule, served: ServedSchedule) -> None:
    """Blocks that the schedule does not list keep the model's own count.

    Raises:
        AttestationError: A block of the graph that decodes has another count.
    """
    from routing_lab.errors import AttestationError

    for block, count in (dict(served.own) | dict(wanted.experts_used)).items():
        if served.experts_used.get(block) != count:
            raise AttestationError(block, count, served.experts_used.get(block), f"by {wanted.name}")


def _rows(fields: dict[str, object]) -> dict[str, str]:
    rows = {
        "server": f"process {fields['process']} ({fields['program']})",
        "decodes with": f"{fields['experts_used']}, read back",
        "model's own": f"{fields['own']}",
    }
    if fields["prompt_experts_used"] != fields["experts_used"]:
        rows["reads prompts with"] = f"{fields['prompt_experts_used']}"
    if fields["next_graph"] is not None:
        rows["next graph"] = f"{fields['next_graph']}"
    if fields["refused"] is not None:
        rows["last order refused"] = f"{fields['refused']}"
    return rows
