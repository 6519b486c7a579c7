"""``routing-lab schedule``: check schedule files, show one, compare two."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routing_lab.cli import options
from routing_lab.cli.output import console, print_json, say, shown, strip_width

if TYPE_CHECKING:
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
        description="Check schedule files: their format, and whether they fit the model. Files that were written for\n"
        "another model say so; --format-only leaves the model out.",
        example="routing-lab schedule check schedules/demo/*.yaml",
    )
    check.add_argument("schedules", nargs="+", type=Path, metavar="YAML")
    check.add_argument("--format-only", action="store_true", help="do not compare with a model")
    options.add_model(check)
    show = options.command(
        actions,
        "show",
        run_show,
        help="print a schedule as ranges, as override string and as a strip of blocks",
        example="routing-lab schedule show schedules/demo/late-half.yaml",
    )
    show.add_argument("schedule", type=Path, metavar="YAML")
    options.add_model(show)
    compare = options.command(
        actions,
        "diff",
        run_diff,
        help="print the blocks in which two schedules differ",
        example="routing-lab schedule diff schedules/demo/early-half.yaml schedules/demo/late-half.yaml",
    )
    compare.add_argument("before", type=Path, metavar="YAML")
    compare.add_argument("after", type=Path, metavar="YAML")
    options.add_model(compare)


def run_check(args: argparse.Namespace) -> int:
    """Print one line per file; all problems of all files come as one error."""
    schedules = options.load_schedules(args.schedules)
    if not args.format_only:
        facts = options.read_facts(args)
        options.check_fit(schedules, args.schedules, facts)
    if args.json:
        print_json([{"file": path, "schedule": one.name} for path, one in zip(args.schedules, schedules, strict=True)])
        return 0
    for path, schedule in zip(args.schedules, schedules, strict=True):
        say(f"{path}: ok, {schedule.name}")
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Print every form of one schedule."""
    from routing_lab.overrides import experts_setting, override_kv
    from routing_lab.report import schedule_strip

    facts = options.read_facts(args)
    (schedule,) = options.load_schedules([args.schedule])
    options.check_fit([schedule], [args.schedule], facts)
    stock = override_kv(schedule, facts) if schedule.uniform_count(facts) is not None else None
    fields: dict[str, Any] = {
        "schedule": schedule.name,
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
    if schedule.source is not None:
        out.print(shown(f"source: {_source_line(schedule)}"), soft_wrap=True)
    return 0


def run_diff(args: argparse.Namespace) -> int:
    """Print runs of blocks with both counts."""
    from routing_lab.schedule import diff

    facts = options.read_facts(args)
    before, after = options.load_schedules([args.before, args.after])
    options.check_fit([before, after], [args.before, args.after], facts)
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
