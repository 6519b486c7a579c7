"""``routing-lab doctor``: is the runtime usable on this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from routing_lab.cli import options
from routing_lab.cli.output import console, fact_table, print_json, size

if TYPE_CHECKING:
    from rich.table import Table

    from routing_lab.runtime.doctor import DoctorReport


def add(commands: options.Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = options.command(
        commands,
        "doctor",
        run,
        help="check that the runtime works here: library, override, attestation, machine",
        example="routing-lab doctor --json",
    )
    options.add_model(parser)
    options.add_runtime(parser)


def run(args: argparse.Namespace) -> int:
    """Examine the machine; exit code 4 where per-block schedules cannot run."""
    from routing_lab.errors import RuntimeUnsupportedError
    from routing_lab.runtime.doctor import examine

    options.check_server(args)
    report = examine(
        options.model_path(args), options.runtime_options(args), runtime=args.runtime, binary=args.llama_server
    )
    if args.json:
        print_json(report)
    else:
        console().print(_table(report, stock=args.stock))
    return 0 if report.override == "attested" else RuntimeUnsupportedError.exit_code


def _table(report: DoctorReport, *, stock: bool) -> Table:
    from routing_lab.schedule import format_counts

    attested = f", read back {format_counts(report.attested)}" if report.attested else ""
    off = stock and report.usable  # nothing is wrong: it was not to be tried
    rows = {
        "machine": f"{report.platform}, {report.cores} cores, {_memory(report)}",
        "devices": ", ".join(f"{device.name} ({device.kind})" for device in report.devices) or "none listed",
        "libllama": f"{report.library or 'not found'}{f' ({report.version})' if report.version else ''}",
        "override library": report.override_library or "not used",
        "override": "switched off by --stock: uniform schedules only" if off else f"{report.override}{attested}",
        "capability": report.capability or "none",
        "tried on": report.model,
    }
    if report.reason and not off:
        rows["reason"] = report.reason
    rows |= {f"warning {number}": warning for number, warning in enumerate(report.warnings, start=1)}
    return fact_table(rows)


def _memory(report: DoctorReport) -> str:
    if report.memory_total_bytes is None or report.memory_available_bytes is None:
        return "memory unknown"
    return f"{size(report.memory_available_bytes)} of {size(report.memory_total_bytes)} memory available"
