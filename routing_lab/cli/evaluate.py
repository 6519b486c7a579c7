"""``routing-lab evaluate``: given schedules, measured and gated, as the table of figure 1."""

from __future__ import annotations

import argparse
from pathlib import Path

from routing_lab.cli import options
from routing_lab.cli.output import activity, console, print_json
from routing_lab.errors import UsageError

ROUNDS = 24
PREFILL_TOKENS = 256


def add(commands: options.Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = options.command(
        commands,
        "evaluate",
        run,
        help="measure and gate given schedules beside the baseline",
        example="routing-lab evaluate schedules/demo/*.yaml",
    )
    parser.add_argument("schedules", nargs="+", type=Path, metavar="YAML", help="schedule files")
    options.add_model(parser)
    options.add_probes(parser)
    parser.add_argument(
        "--fail-fast", action="store_true", help="stop asking a schedule's probes at the first one that fails"
    )
    options.add_measure(parser, rounds=ROUNDS, precision=0.01)
    parser.add_argument(
        "--race",
        action="store_true",
        help="measure a schedule no further once it is surely slower than one that passed (for many schedules)",
    )
    options.add_plain(parser)
    parser.add_argument(
        "--prefill",
        type=options.non_negative,
        default=PREFILL_TOKENS,
        metavar="N",
        help="also measure prompts of N tokens; 0: do not (default: %(default)s)",
    )
    options.add_runtime(parser)


def run(args: argparse.Namespace) -> int:
    """Print one row per schedule."""
    from routing_lab.evaluate import EvaluateSettings, evaluate
    from routing_lab.report import evaluation_table

    _require_room(args)
    settings = EvaluateSettings(
        measure=options.measure_settings(args),
        stop_after_failures=1 if args.fail_fast else None,
        verify=not args.plain,
        prefill_tokens=args.prefill,
        race=args.race,
    )
    probes = options.probe_set(args)
    options.require_splits(probes, "gate")
    facts = options.read_facts(args)
    schedules = options.load_schedules(args.schedules, facts)
    # A misfit is said before minutes are spent on loading and measuring.
    options.check_fit(schedules, args.schedules, facts)
    with options.open_runtime(args) as runtime, activity("loading the model") as say_doing:
        result = evaluate(runtime, probes, schedules, settings, on_progress=say_doing)
    if args.json:
        print_json(result.to_dict())
    else:
        console().print(evaluation_table(result))
    return 0


def _require_room(args: argparse.Namespace) -> None:
    """Refuse prompts that the context cannot hold: they are measured last, after minutes. Raises ``UsageError``."""
    context = options.runtime_options(args).context_tokens
    if args.prefill and args.prefill + 1 > context:
        raise UsageError(
            f"--prefill {args.prefill} and a token after it do not fit in a context of {context}: give a smaller "
            "number (0: prompts are not measured) or more context"
        )
