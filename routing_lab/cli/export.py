"""``routing-lab export``: from a certificate to what a server is started with."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from routing_lab.cli import options
from routing_lab.cli.files import check_outputs, write_output
from routing_lab.cli.output import activity, print_json, progress_console, say, say_error
from routing_lab.errors import NothingAcceptedError, RuntimeUnsupportedError, UsageError
from routing_lab.interrupts import unwinding

if TYPE_CHECKING:
    from routing_lab.export import Export
    from routing_lab.export.gguf_copy import GgufCopy
    from routing_lab.export.proof import Proof
    from routing_lab.model import ModelFacts
    from routing_lab.probes import ProbeSet

SHELL, SCHEDULE, GGUF = "shell", "schedule", "gguf"


def add(commands: options.Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = options.command(
        commands,
        "export",
        run,
        help="print a validated schedule as override string and llama-server command",
        description="Print the override of a certified schedule: as environment for the preload library, as stock\n"
        "--override-kv where the schedule is uniform, and as the whole llama-server command line.",
        example="routing-lab export certificate.yaml > serve.sh",
    )
    parser.add_argument("certificate", nargs="?", type=Path, metavar="CERTIFICATE", help="file written by validate")
    options.add_model(parser)
    parser.add_argument(
        "--schedule", type=Path, metavar="YAML", help="export this schedule; the certificate must cover it"
    )
    parser.add_argument(
        "--unvalidated",
        action="store_true",
        help="export it although no certificate covers it, with a label that says so",
    )
    parser.add_argument(
        "--format",
        choices=(SHELL, "ini", "systemd", "compose", "python", SCHEDULE, GGUF),
        default=SHELL,
        help="a shell script, a models preset, a systemd user unit, a compose service, a Python program, the schedule "
        "as a file (needs no model), or a copy of the model with the counts in it, kept only where llama.cpp honours "
        "them by itself (default: %(default)s)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="file to write with --format gguf, or with --format schedule"
    )
    parser.add_argument(
        "--rpc",
        action="append",
        type=options.endpoint,
        default=[],
        metavar="HOST:PORT",
        help="the server uses the devices of an RPC server",
    )
    parser.add_argument("--port", type=options.port, metavar="N", help="where the server listens (default: 8080)")
    proof = parser.add_argument_group("prove it")
    proof.add_argument(
        "--run",
        action="store_true",
        dest="prove",
        help="start the printed command, read its counts back, ask a probe, measure its speed, and end it",
    )
    options.add_probes(proof)
    proof.add_argument(
        "--llama-server",
        type=Path,
        metavar="PATH",
        help="the server, for the command as well (default: on PATH, else of make llama-server)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the export; a schedule without a certificate is a usage error unless the user insists.

    With ``--run`` what the server did follows as comments; exit code 4 where it did not run the schedule, 5 where it
    did and the probe got a wrong answer. With ``--format gguf`` exit code 4 where llama.cpp does not honour the counts.
    """
    from routing_lab.export.forms import FORMATS

    _check(args)
    if args.format == SCHEDULE:
        return _schedule(args)
    probes = options.probe_set(args) if args.prove else None
    facts = options.read_facts(args)
    result = _export(args, facts)
    if args.format == GGUF:
        return _copy(args, result, facts)
    text = "" if args.json else _printable(FORMATS[args.format](result))
    proof = None if probes is None else _prove(args, result, probes)
    if args.json:
        print_json(result.to_dict() | ({} if proof is None else {"proof": proof.to_dict()}))
    else:
        print(text, end="")
    if proof is None:
        return 0
    if not args.json:
        what = "this very command" if args.format == SHELL else "the command of --format shell; this form was not run"
        print(f"\n# proved with {what}", *(f"# {line}" for line in proof.lines()), sep="\n")
    try:
        proof.require_answer()
    except NothingAcceptedError as error:
        return say_error(error)  # the export itself is printed already
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse options that do not go together.

    Raises:
        UsageError: There is nothing to export, or an option needs or excludes another one.
    """
    if args.certificate is None and args.schedule is None:
        raise UsageError("give a certificate (routing-lab validate writes one), or --schedule with --unvalidated")
    if args.format == GGUF and args.output is None:
        raise UsageError("--format gguf writes a file and needs -o FILE")
    if args.format not in {GGUF, SCHEDULE} and args.output is not None:
        raise UsageError("-o is for --format gguf and --format schedule; every other form is printed")
    if args.format == SCHEDULE and (args.schedule or args.prove or args.rpc or args.port or args.unvalidated):
        raise UsageError("--format schedule writes the schedule of a certificate; give nothing but that and -o")
    if args.format == GGUF and args.prove:
        raise UsageError("--run proves a printed command; --format gguf reads the counts of its copy back anyway")


def _printable(text: str) -> str:
    """``text``, where standard output can write all of it: with another character in a path a command is another one.

    Raises:
        UsageError: It cannot.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError as error:
        wrong = text[error.start : error.end]
        raise UsageError(
            f"the export names a file with {wrong!r} in its path, which {encoding} text cannot hold: rename the file"
        ) from None
    return text


def _schedule(args: argparse.Namespace) -> int:
    """Print or write a certificate's schedule as a file of its own."""
    from routing_lab.certificate import Certificate

    check_outputs(args)
    schedule = options.certified_schedule(Certificate.load(args.certificate))
    text = schedule.to_yaml()
    if args.output is not None:
        write_output(args.output, text.encode())
    if args.json:
        print_json({"schedule": schedule.name, "file": args.output, "yaml": text})
    elif args.output is None:
        print(text, end="")
    else:
        say(f"schedule: {args.output}")
    return 0


def _export(args: argparse.Namespace, facts: ModelFacts) -> Export:
    from routing_lab.certificate import Certificate
    from routing_lab.export import export
    from routing_lab.runtime.native import override_library
    from routing_lab.runtime.server_binary import server_program

    certificate = None if args.certificate is None else Certificate.load(args.certificate)
    schedule = options.load_schedules([args.schedule])[0] if args.schedule else None
    # A copy of the model needs no library, and its command names none.
    library = Path("none") if args.format == GGUF else None
    with contextlib.suppress(RuntimeUnsupportedError):
        library = override_library()  # a uniform schedule needs none; export says so where one is needed
    return export(
        facts,
        certificate=certificate,
        certificate_file=args.certificate,
        schedule=schedule,
        unvalidated=args.unvalidated,
        library=library,
        port=args.port,
        rpc_servers=tuple(args.rpc),
        program=server_program(args.llama_server),
    )


def _copy(args: argparse.Namespace, made: Export, facts: ModelFacts) -> int:
    from routing_lab.export.gguf_copy import check_targets

    check_outputs(args, inputs=facts.files)
    _printable(str(args.output))
    check_targets(args.output, facts)
    copy = _write_copy(args, made, facts)
    if args.json:
        print_json(copy.to_dict())
    else:
        print(copy.made.text(), end="")
    return 0


def _write_copy(args: argparse.Namespace, made: Export, facts: ModelFacts) -> GgufCopy:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from routing_lab.export.gguf_copy import write_copy

    sizes = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}", markup=False), *sizes)
    with unwinding(), Progress(*columns, console=progress_console(), transient=True) as progress:
        task = progress.add_task("", total=facts.size_bytes)
        return write_copy(
            made,
            facts,
            args.output,
            on_progress=lambda doing, count: progress.update(task, description=doing, advance=count),
        )


def _prove(args: argparse.Namespace, result: Export, probes: ProbeSet) -> Proof:
    from routing_lab.export.proof import prove

    with unwinding(), activity("starting") as say_doing:
        return prove(
            result.command,
            result.schedule,
            options.read_facts(args),
            probes,
            binary=args.llama_server,
            on_progress=say_doing,
        )
