"""``routing-lab probes``: what a probe set is worth on a model, and how a data set becomes one."""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING

from routing_lab.answers import ANSWER_TYPES, reason_words
from routing_lab.cli import options
from routing_lab.cli.files import check_outputs, write_output
from routing_lab.cli.output import activity, console, fact_table, print_json, say, say_error, shown
from routing_lab.errors import NothingAcceptedError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from routing_lab.probes.check import BaselineFailure, ProbesReport, SplitReport
    from routing_lab.probes.dataset import Recipe


def add(commands: options.Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command with its actions."""
    parser = options.group(commands, "probes", help="check what a probe set is worth, or make one of a data set")
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
    check.add_argument(
        "--closest", type=options.positive, default=5, metavar="N", help="close calls to list (default: %(default)s)"
    )
    options.add_runtime(check)
    _add_import(actions)


def _add_import(actions: options.Subparsers[argparse.ArgumentParser]) -> None:
    importer = options.command(
        actions,
        "import",
        run_import,
        help="make a probe set of a data set",
        description="Make a probe set of a data set: the name of a ready recipe (gsm8k, math-500, aime-2024,\n"
        "aime-2025, mmlu, mmlu-pro), owner/name on the Hugging Face hub, a folder with a downloaded data set, or a\n"
        "local parquet, JSONL or CSV file.\n"
        "Rows whose answer cannot be checked exactly are listed with the reason.",
        example="routing-lab probes import questions.csv --question q --answer a --type integer -o probes.yaml",
    )
    importer.add_argument("source", metavar="SOURCE", help="recipe, hub name, folder or file")
    importer.add_argument("-o", "--output", type=Path, required=True, metavar="YAML")
    importer.add_argument("--recipe", metavar="NAME", help="read SOURCE by this ready recipe")
    importer.add_argument("--config", metavar="NAME", help="configuration of a data set that has several")
    importer.add_argument("--split", metavar="NAME", help="split of the data set (default: the recipe's, or train)")
    importer.add_argument("--question", metavar="COLUMN")
    importer.add_argument("--answer", metavar="COLUMN")
    importer.add_argument("--type", choices=ANSWER_TYPES, help="type of the answers")
    importer.add_argument("--places", type=options.non_negative, metavar="N", help="decimal places of decimal answers")
    importer.add_argument("--choices", metavar="COLUMN", help="column with the list of choices")
    importer.add_argument("--answer-regex", metavar="RE", help="where the answer stands in its column; last match")
    importer.add_argument(
        "--prompt",
        choices=("chat", "raw"),
        help="chat: through the model's own template; raw: the question as it stands, line breaks at its end too "
        "(default: the recipe's, or chat)",
    )
    wording = importer.add_mutually_exclusive_group()
    wording.add_argument(
        "--template",
        metavar="TEXT",
        help="prompt, with {question} and, for choices, {choices} (default: the recipe's; else question and choices, "
        "and of chat prompts a request to end with 'Answer: ...')",
    )
    wording.add_argument("--bare", action="store_true", help="leave the question as it is, without that request")
    importer.add_argument(
        "--max-tokens",
        type=options.positive,
        metavar="N",
        help="budget of a completion (default: the recipe's, or 1024)",
    )
    importer.add_argument("--limit", type=options.positive, metavar="N", help="probes to make (default: all)")
    importer.add_argument("--seed", type=options.non_negative, default=0, metavar="N", help="default: %(default)s")
    importer.add_argument(
        "--gate-share", type=float, default=0.5, metavar="P", help="share of the gate (default: %(default)s)"
    )
    importer.add_argument("--rejected", type=options.positive, default=10, metavar="N", help="left-out rows to list")


def run_check(args: argparse.Namespace) -> int:
    """Print the report; exit code 5 where the baseline fails a gate probe."""
    from routing_lab.answers import Judge
    from routing_lab.probes.check import check_probes

    probes = options.probe_set(args)
    if args.bound == 0:
        raise UsageError("--bound 0 takes infinitely many probes; give a share above 0")
    with options.open_runtime(args) as runtime, Judge() as judge, activity("asking") as say_doing:
        number = itertools.count(1)
        report = check_probes(
            runtime,
            probes,
            judge,
            wanted_bound=args.bound,
            progress=lambda one: say_doing(f"asked {next(number)} of {len(probes.items)}: {one.probe}"),
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
        got = f"{failure.extracted!r} for {failure.expected!r}" if failure.extracted else _why(failure)
        out.print(shown(f"fails {failure.probe} ({failure.split}): {failure.status.replace('_', ' ')}, {got}"))
    for probe in report.not_run:
        out.print(shown(f"did not run: {probe}"))
    for sentence in closeness(report, closest):
        out.print(shown(sentence))
    for split in report.splits:
        if split.probes:
            out.print(shown(_worth(split, report.wanted_bound)))


def _why(failure: BaselineFailure) -> str:
    return reason_words(failure.reason) if failure.reason else "no answer"


def closeness(report: ProbesReport, closest: int) -> list[str]:
    """The close calls, at most so many; where there is none, how far the closest was from being one."""
    from routing_lab.probes.check import CLOSE_CALL

    known = [one for one in report.passes if one.smallest_margin is not None]
    if not known:
        return []
    close = [one for one in known if one.is_close]
    if not close:
        least = f"{known[0].smallest_margin:.2f} logits ({known[0].probe})"
        return [f"no close call: the two best tokens are never nearer than {least}; close is below {CLOSE_CALL:g}"]
    lines = [f"close call {one.probe} ({one.split}): {_gap(one.smallest_margin or 0.0)}" for one in close[:closest]]
    more = len(close) - len(lines)
    return [*lines, f"and {more} more close calls (--closest lists more)"] if more else lines


def _gap(margin: float) -> str:
    likely = f"{100 * math.exp(-margin):.0f} %"
    return f"somewhere the second-best token is {likely} as likely as the best ({margin:.2f} logits apart)"


def _worth(split: SplitReport, wanted: float) -> str:
    """What a schedule that answers the whole split has shown by it, and what it takes to show what is wanted."""
    share = f"{100 * split.bound_if_all_correct:.3g} %"
    proves = (
        f"{split.split}: a schedule that answers all {split.probes} fails at most {share} of such questions (95 % sure)"
    )
    limit = f"at most {100 * wanted:.3g} %"
    if split.probes_missing:
        return f"{proves}; to show {limit} it takes {split.probes_wanted} probes, {split.probes_missing} more"
    return f"{proves}; enough to show {limit}"


def _splits(report: ProbesReport) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("split")
    for column in ("probes", "baseline right", "longest answer", "tokens in all"):
        table.add_column(column, justify="right")
    for split in report.splits:
        table.add_row(
            split.split,
            str(split.probes),
            str(split.passed),
            f"{split.most_tokens} tokens",
            f"{split.tokens:,}",
        )
    return table


def run_import(args: argparse.Namespace) -> int:
    """Write the probe set and say what was left out."""
    from routing_lab.probes.dataset import import_probes

    check_outputs(args, inputs=[Path(args.source)])
    result = import_probes(args.source, _recipe(args), limit=args.limit, seed=args.seed, gate_share=args.gate_share)
    write_output(args.output, result.probe_set.to_yaml().encode())
    gate = len(result.probe_set.split("gate"))
    if args.json:
        rejections = [{"row": one.row, "where": one.where, "reason": one.reason} for one in result.rejections]
        counts = {"rows": result.rows, "examined": result.examined, "gate": gate}
        counts["holdout"] = len(result.probe_set.items) - gate
        print_json({"file": args.output, "digest": result.probe_set.digest} | counts | {"rejected": rejections})
        return 0
    say(f"{args.output}: {gate} gate and {len(result.probe_set.items) - gate} holdout probes")
    say(f"{result.examined} of {result.rows} rows examined, {len(result.rejections)} left out")
    for reason, times in result.reasons().items():
        say(f"  {times} times: {reason}")
    for rejection in result.rejections[: args.rejected]:
        say(f"  {rejection.where}: {rejection.reason}")
    return 0


def _recipe(args: argparse.Namespace) -> Recipe | None:
    """The recipe that the options describe; ``None`` leaves it to the name of the source.

    Raises:
        UsageError: An unknown recipe, or column options that do not make one.
    """
    from dataclasses import replace

    from routing_lab.probes.dataset import RECIPES, Recipe, bare_template, is_single_file

    if (args.config or args.split) and is_single_file(args.source):
        raise UsageError(f"{args.source} is a single file: --config and --split choose a part of a data set or folder")
    named = args.recipe or (args.source if args.source in RECIPES else None)
    if named is not None and named not in RECIPES:
        raise UsageError(f"unknown recipe {named!r}; ready ones: {', '.join(RECIPES)}")
    given = {
        "config": args.config,
        "split": args.split,
        "question": args.question,
        "answer": args.answer,
        "answer_type": args.type,
        "places": args.places,
        "choices": args.choices,
        "answer_regex": args.answer_regex,
        "template": args.template,
        "prompt": args.prompt,
        "max_tokens": args.max_tokens,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if args.bare:
        given["template"] = bare_template(args.choices or (RECIPES[named].choices if named else None))
    if named is not None:
        return replace(RECIPES[named], **given)
    if not given:
        return None
    if missing := {"question", "answer", "answer_type"} - given.keys():
        names = ", ".join(f"--{name.removeprefix('answer_')}" for name in sorted(missing))
        raise UsageError(f"{args.source} needs {names} too, or --recipe with a ready one: {', '.join(RECIPES)}")
    hub = None if Path(args.source).suffix else args.source
    return Recipe(name=Path(args.source).stem, hub=hub, **given)
