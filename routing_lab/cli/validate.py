"""``routing-lab validate``: the acceptance run of a study's best candidates."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from routing_lab.cli import options
from routing_lab.cli.files import check_outputs, write_output
from routing_lab.cli.output import activity, console, print_json, say_error, shown, strip_width
from routing_lab.cli.search import add_study, study_storage
from routing_lab.errors import NothingAcceptedError, Problem, UserFileError
from routing_lab.schedule import format_counts

if TYPE_CHECKING:
    from routing_lab.model import ModelFacts
    from routing_lab.schedule import Schedule
    from routing_lab.validate import Validation

ROUNDS = 96


def add(commands: options.Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = options.command(
        commands,
        "validate",
        run,
        help="accept or reject a study's best candidates: fresh measurement, gate and holdout",
        description="Measure the best candidates of a study anew, beside the baseline and the even spread of the\n"
        "same total, and ask them every gate and holdout probe. The best accepted one gets a certificate.",
        example="routing-lab validate --study demo --output demo-certificate.yaml",
    )
    options.add_model(parser)
    options.add_probes(parser)
    add_study(parser)
    parser.add_argument(
        "--schedule",
        action="append",
        type=Path,
        metavar="YAML",
        help="validate this schedule instead of a study's candidates (repeatable)",
    )
    parser.add_argument(
        "--top", type=options.positive, default=3, metavar="N", help="candidates (default: %(default)s)"
    )
    rule = parser.add_argument_group("what is demanded on the holdout")
    rule.add_argument(
        "--margin",
        type=options.share,
        default=0.02,
        metavar="M",
        help="accuracy that may be lost against the baseline (default: %(default)s)",
    )
    rule.add_argument("--strict", action="store_true", help="no probe may be lost that the baseline gets right")
    parser.add_argument(
        "--output", type=Path, default=Path("certificate.yaml"), metavar="FILE", help="default: %(default)s"
    )
    options.add_measure(parser, rounds=ROUNDS)
    options.add_runtime(parser)


def run(args: argparse.Namespace) -> int:
    """Run the acceptance; exit code 5 when no candidate survives."""
    from routing_lab.gate import AcceptanceRule
    from routing_lab.validate import ValidateSettings, validate

    settings = ValidateSettings(
        measure=options.measure_settings(args), acceptance_rule=AcceptanceRule(margin=args.margin, strict=args.strict)
    )
    probes = options.probe_set(args)
    options.require_splits(probes, "gate", "holdout")
    check_outputs(args, inputs=[] if args.schedule else [study_storage(args)])
    if args.schedule:
        schedules = options.load_schedules(args.schedule)
        options.check_fit(schedules, args.schedule, options.read_facts(args))
    else:
        schedules = _candidates(args)
    with options.open_runtime(args) as runtime, activity("loading the model") as say_doing:
        result = validate(
            runtime,
            probes,
            schedules,
            settings,
            on_progress=lambda now: say_doing(f"{now.doing}  ({now.done} of {now.total} probes asked)"),
        )
        facts = runtime.facts
    unsaved = _save(result, args.output)
    if args.json:
        print_json(_fields(result, args.output, unsaved))
    else:
        _print(result, facts, args.output, unsaved)
    if unsaved is not None:
        return say_error(unsaved)
    try:
        result.require_certificate()
    except NothingAcceptedError as error:
        # To people the reasons are printed already, below the table.
        return say_error(
            error if args.json else NothingAcceptedError("no schedule was accepted; the reasons stand below the table")
        )
    return 0


def _save(result: Validation, output: Path) -> UserFileError | None:
    """Write the certificate where there is one; what cannot be written is returned, for hours of work are in it."""
    if result.certificate is not None:
        try:
            write_output(output, result.certificate.to_yaml().encode())
        except UserFileError as error:
            problems = [Problem(one.where, one.what, "the certificate is printed instead") for one in error.problems]
            return UserFileError(error.file, problems)
    return None


def _print(result: Validation, facts: ModelFacts, output: Path, unsaved: UserFileError | None) -> None:
    from routing_lab.report import schedule_strip, validated_table

    out = console()
    certificate = result.certificate
    out.print(validated_table(result.results, certificate))
    if certificate is None:
        return
    out.print()
    out.print(shown(f"accepted: {certificate.schedule.name}: {certificate.schedule.experts_used}"))
    out.print(schedule_strip(certificate.schedule.schedule, facts, width=strip_width(out)))
    if unsaved is None:
        out.print(shown(f"certificate: {output}"))
    else:
        print(f"\n{certificate.to_yaml()}", end="")


def _fields(result: Validation, output: Path, unsaved: UserFileError | None) -> dict[str, object]:
    certificate = result.certificate
    return {
        "stage": "validated",
        "accepted": certificate is not None,
        "certificate": output if certificate and unsaved is None else None,
        **({"certificate_yaml": certificate.to_yaml()} if certificate and unsaved else {}),
        "warnings": result.warnings(),
        "results": [
            {
                "schedule": one.schedule.name,
                "experts_used": format_counts(dict(one.schedule.experts_used)),
                "speed": one.speed.to_dict(),
                "gate": one.gate,
                "holdout": one.holdout,
                "even_spread": one.even_spread,
                "even_spread_reasons": one.even_spread_reasons,
                "acceptance": one.acceptance,
            }
            for one in result.results
        ],
    }


def _candidates(args: argparse.Namespace) -> list[Schedule]:
    """The fastest accepted schedules of the study.

    Raises:
        NothingAcceptedError: The study accepted none.
    """
    from routing_lab.search import candidates, load_study

    study = load_study(args.storage, args.study)
    found = candidates(study, args.top)
    if not found:
        raise NothingAcceptedError(
            f"study {study.name} in {args.storage} has no accepted schedule yet: "
            f"routing-lab search --study {study.name} --storage {args.storage}"
        )
    return [trial.schedule for trial in found]
