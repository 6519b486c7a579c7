"""``routing-lab export``: from a certificate to what a server is started with."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from routing_lab.cli import options
from routing_lab.cli.output import activity, print_json, say_error
from routing_lab.errors import NothingAcceptedError, RuntimeUnsupportedError, UsageError

if TYPE_CHECKING:
    from routing_lab.export import Export
    from routing_lab.probes import ProbeSet
    from routing_lab.prove import Proof


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
        choices=("shell", "ini", "systemd", "compose", "python"),
        default="shell",
        help="a shell script, a models preset, a systemd user unit, a compose service, or a Python program "
        "(default: %(default)s)",
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
        "--llama-server", type=Path, metavar="PATH", help="the server (default: on PATH, else of make llama-server)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the export; a schedule without a certificate is a usage error unless the user insists.

    With ``--run`` what the server did follows as comments; exit code 4 where it did not run the schedule, 5 where it
    did and the probe got a wrong answer.
    """
    from routing_lab.certificate import Certificate
    from routing_lab.export import export
    from routing_lab.renderings import FORMATS
    from routing_lab.runtime.native import override_library

    if args.certificate is None and args.schedule is None:
        raise UsageError("give a certificate (routing-lab validate writes one), or --schedule with --unvalidated")
    if args.llama_server is not None and not args.prove:
        raise UsageError("--llama-server names what --run starts; give both or neither")
    probes = options.probe_set(args) if args.prove else None
    certificate = None if args.certificate is None else Certificate.load(args.certificate)
    schedule = options.load_schedules([args.schedule])[0] if args.schedule else None
    library = None
    with contextlib.suppress(RuntimeUnsupportedError):
        library = override_library()  # a uniform schedule needs none; export says so where one is needed
    result = export(
        options.read_facts(args),
        certificate=certificate,
        certificate_file=args.certificate,
        schedule=schedule,
        unvalidated=args.unvalidated,
        library=library,
        port=args.port,
    )
    proof = None if probes is None else _prove(args, result, probes)
    if args.json:
        print_json(result.to_dict() | ({} if proof is None else {"proof": proof.to_dict()}))
    else:
        print(FORMATS[args.format](result), end="")
    if proof is None:
        return 0
    if not args.json:
        print("\n# proved with this very command", *(f"# {line}" for line in proof.lines()), sep="\n")
    try:
        proof.require_answer()
    except NothingAcceptedError as error:
        return say_error(error)  # the export itself is printed already
    return 0


def _prove(args: argparse.Namespace, result: Export, probes: ProbeSet) -> Proof:
    from routing_lab.prove import prove

    with activity("starting") as say_doing:
        return prove(
            result.command,
            result.schedule,
            options.read_facts(args),
            probes,
            binary=args.llama_server,
            on_progress=say_doing,
        )
