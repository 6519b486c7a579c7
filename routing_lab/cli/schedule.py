"""``routing-lab schedule``: check schedule files, show one, compare two."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routing_lab.cli import options
from routing_lab.cli.output import console, print_json, say, shown, strip_width
from routing_lab.errors import Problem, UsageError, UserFileError

if TYPE_CHECKING:
    from routing_lab.model import ModelFacts
    from routing_lab.schedule import Schedule


def add(commands: options.Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command with its three actions."""
    parser = options.group(commands, "schedule", help="check, show or compare schedule files")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = options.command(
        actions,
        "check",
        run_check,
        help="check files; with a model also that they fit it",
        description="Check schedule files: their format, and whether they fit a model: that of --model, else the one\n"
        "that a file's own section model describes, else the demo model. --format-only leaves the model out.",
        example="routing-lab schedule check schedules/demo/*.yaml",
    )
    check.add_argument("schedules", nargs="+", type=Path, metavar="YAML", help="schedule files, or certificates")
    check.add_argument("--format-only", action="store_true", help="do not compare with a model")
    options.add_model(check)
    show = options.command(
        actions,
        "show",
        run_show,
        help="print a schedule as ranges, as override string and as a strip of blocks",
        description="Print a schedule as ranges, as override string and as a strip of blocks, for the model of\n"
        "--model, else for the one that the file's own section model describes, else for the demo model.",
        example="routing-lab schedule show schedules/demo/late-half.yaml",
    )
    show.add_argument("schedule", type=Path, metavar="YAML", help="schedule file, or a certificate")
    options.add_model(show)
    compare = options.command(
        actions,
        "diff",
        run_diff,
        help="print the blocks in which two schedules differ",
        description="Print the blocks in which two schedules differ, on the model of --model, else on the one that a\n"
        "file's own section model describes, else on the demo model.",
        example="routing-lab schedule diff schedules/demo/early-half.yaml schedules/demo/late-half.yaml",
    )
    compare.add_argument("before", type=Path, metavar="YAML")
    compare.add_argument("after", type=Path, metavar="YAML")
    options.add_model(compare)


def run_check(args: argparse.Namespace) -> int:
    """Print one line per file; all problems of all files come as one error."""
    if args.format_only and args.model is not None:
        raise UsageError("--format-only leaves the model out, and --model names one; give one of the two")
    facts = None if args.format_only else options.read_facts(args)
    schedules = options.load_schedules(args.schedules, facts)
    pairs = list(zip(args.schedules, schedules, strict=True))
    models = [None if facts is None else _model_of(args, facts, [schedule]) for schedule in schedules]
    checks = zip(pairs, models, strict=True)
    options.collect_problems(partial(_fit, args, [one], [path], on) for (path, one), on in checks if on is not None)
    if args.json:
        print_json([{"file": path, "schedule": one.name} for path, one in pairs])
        return 0
    for (path, schedule), on in zip(pairs, models, strict=True):
        say(f"{path}: ok, {schedule.name}{'' if on is None else f', on {on.name}'}")
    return 0


def _model_of(args: argparse.Namespace, read: ModelFacts, schedules: list[Schedule]) -> ModelFacts:
    """The model of ``--model``, which was read; else the one that a schedule says it is for; else the demo model."""
    stated = [one.model for one in schedules if one.model is not None] if args.model is None else []
    if any(not model.misfits(read) for model in stated):
        return read  # the demo model itself, of which more is known than its numbers
    return next((facts for model in stated if (facts := model.facts()) is not None), read)


def _fit(args: argparse.Namespace, schedules: list[Schedule], paths: list[Path], facts: ModelFacts) -> None:
    """Check that the schedules fit; where nobody named a model, say which one it was. Raises ``UserFileError``."""
    try:
        options.check_fit(schedules, paths, facts)
    except UserFileError as error:
        if args.model is not None or all(one.model is not None for one in schedules):
            raise
        remedy = "give --model or --format-only" if hasattr(args, "format_only") else "give --model"
        note = Problem("", f"no --model given, so compared with {facts.name}", remedy)
        raise UserFileError(error.file, [*error.problems, note]) from None


def run_show(args: argparse.Namespace) -> int:
    """Print every form of one schedule."""
    from routing_lab.overrides import experts_setting, override_kv
    from routing_lab.report import schedule_strip

    read = options.read_facts(args)
    (schedule,) = options.load_schedules([args.schedule], read)
    facts = _model_of(args, read, [schedule])
    _fit(args, [schedule], [args.schedule], facts)
    stock = override_kv(schedule, facts) if schedule.uniform_count(facts) is not None else None
    fields: dict[str, Any] = {
        "schedule": schedule.name,
        "model": facts.name,
        "model_from": "header" if facts is read else "schedule file",
        "experts_used": schedule.key(facts),
        "total_experts": schedule.total(facts),
        "baseline_total": sum(facts.experts_used.values()),
        "override": experts_setting(schedule, facts),
        "override_kv": stock,
        "source": schedule.source,
    }
    if args.json:
        print_json(fields)
        return 0
    out = console()
    totals = f"{fields['total_experts']} experts over all blocks (baseline {fields['baseline_total']})"
    out.print(shown(f"{schedule.name}: {totals}"))
    out.print(schedule_strip(schedule, facts, width=strip_width(out)))
    out.print(f"override: {fields['override']}", soft_wrap=True)
    out.print(f"stock override: {stock or 'none, the counts differ between blocks'}")
    if facts is not read:
        out.print(shown(f"model: {facts.name}, from the file's own section; --model reads which of them route"))
    if schedule.source is not None:
        out.print(shown(f"source: {_source_line(schedule)}"), soft_wrap=True)
    return 0


def run_diff(args: argparse.Namespace) -> int:
    """Print runs of blocks with both counts."""
    from routing_lab.schedule import diff

    read = options.read_facts(args)
    before, after = options.load_schedules([args.before, args.after], read)
    facts = _model_of(args, read, [before, after])
    _fit(args, [before, after], [args.before, args.after], facts)
    changes = diff(before, after, facts)
    if args.json:
        print_json({"before": before.name, "after": after.name, "changes": changes})
        return 0
    if not changes:
        say(f"{before.name} and {after.name} consult the same experts in every block")
    for change in changes:
        blocks = str(change.first) if change.first == change.last else f"{change.first}-{change.last}"
        say(f"{blocks}: {change.before} -> {change.after}")
    return 0


def _source_line(schedule: Schedule) -> str:
    source = schedule.source
    assert source is not None, "asked by the caller"  # noqa: S101
    rate = f", {source.decode_tokens_per_s:g} tokens/s" if source.decode_tokens_per_s is not None else ""
    return f"{source.what}{rate}{', ' + source.status.replace('_', ' ') if source.status else ''}"
