"""``routing-lab export``: from a certificate to what a server is started with."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from routing_lab.cli import options
from routing_lab.cli.output import print_json
from routing_lab.errors import RuntimeUnsupportedError, UsageError


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


def run(args: argparse.Namespace) -> int:
    """Print the export; a schedule without a certificate is a usage error unless the user insists."""
    from routing_lab.certificate import Certificate
    from routing_lab.export import export
    from routing_lab.renderings import FORMATS
    from routing_lab.runtime.native import override_library

    if args.certificate is None and args.schedule is None:
        raise UsageError("give a certificate (routing-lab validate writes one), or --schedule with --unvalidated")
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
    )
    if args.json:
        print_json(result.to_dict())
    else:
        print(FORMATS[args.format](result), end="")
    return 0
