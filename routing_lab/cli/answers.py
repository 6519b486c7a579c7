"""``routing-lab answers``: the judge on its own, for one text or for many."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from routing_lab.answers import ANSWER_TYPES, ExtractionMode, FinishReason, Judge, validate_expected
from routing_lab.cli import options
from routing_lab.cli.output import plain, print_json
from routing_lab.errors import Problem, UsageError, UserFileError

if TYPE_CHECKING:
    from routing_lab.answers import Judgement

MAX_TEXT_BYTES = 64 * 2**20
"""A completion of more than 64 MiB is no completion."""

_CASE_FIELDS = {"text": str, "expected": str, "type": str, "finish_reason": str, "places": int, "extract": str}


def add(commands: options.Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command with its action."""
    parser = options.group(commands, "answers", help="judge a completion text against an expected answer")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = options.command(
        actions,
        "check",
        run_check,
        help="print status, extracted answer and reason",
        description="Judge one completion (from a file, or from standard input), or one per line of a JSONL file\n"
        "with the fields text, expected, type and, where needed, finish_reason, places, extract.",
        example="echo 'so it is 12. Answer: 1,234' | routing-lab answers check --type integer --expected 1234",
    )
    check.add_argument("--type", choices=ANSWER_TYPES)
    check.add_argument("--expected", metavar="ANSWER")
    check.add_argument("--places", type=options.non_negative, metavar="N", help="decimal places of a decimal answer")
    check.add_argument("--finish-reason", choices=get_args(FinishReason), default="stop", help="default: %(default)s")
    check.add_argument("--extract", choices=get_args(ExtractionMode), default="declared", help="default: %(default)s")
    check.add_argument("--text-file", type=Path, default=Path("-"), metavar="FILE", help="default: standard input")
    check.add_argument("--batch", type=Path, metavar="JSONL", help="judge every line of this file")


def run_check(args: argparse.Namespace) -> int:
    """Print one judgement, or one per line of the batch."""
    with Judge() as judge:
        if args.batch is not None:
            for case in _cases(args.batch):
                print(json.dumps(plain(_judged(judge, case)), ensure_ascii=False), flush=False)
            return 0
        if args.type is None or args.expected is None:
            raise UsageError("give --type and --expected, or --batch")
        case = {"text": _read(args.text_file), "expected": args.expected, "type": args.type}
        case |= {"places": args.places, "finish_reason": args.finish_reason, "extract": args.extract}
        try:
            validate_expected(args.expected, args.type, args.places)
        except ValueError as error:
            raise UsageError(f"--expected {args.expected[:60]!r}: {error}") from error
        judgement = _judged(judge, case)
    if args.json:
        print_json(judgement)
    else:
        print(*(word for word in (judgement.status, judgement.extracted, judgement.reason) if word), sep="\t")
    return 0


def _judged(judge: Judge, case: dict[str, Any]) -> Judgement:
    return judge.judge(
        case["text"],
        expected=case["expected"],
        answer_type=case["type"],
        finish_reason=case.get("finish_reason", "stop"),
        places=case.get("places"),
        mode=case.get("extract", "declared"),
    )


def _cases(path: Path) -> Iterator[dict[str, Any]]:
    """The cases of a JSONL file; all of its bad lines are reported at once, before anything is judged.

    Raises:
        UserFileError: With one problem for each bad line.
    """
    cases: list[dict[str, Any]] = []
    problems: list[Problem] = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            cases.append(_case(line))
        except ValueError as error:
            problems.append(Problem(f"line {number}", str(error)))
    if problems:
        raise UserFileError(str(path), problems)
    return iter(cases)


def _case(line: str) -> dict[str, Any]:
    """One line of a batch. Raises ``ValueError`` that says what is wrong with it."""
    try:
        case = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(case, dict):
        raise ValueError("is no JSON object")  # noqa: TRY004 - one kind of error for one kind of problem
    if missing := {"text", "expected", "type"} - case.keys():
        raise ValueError(f"lacks {', '.join(sorted(missing))}")
    for name, value in case.items():
        kind = _CASE_FIELDS.get(name)
        if kind is None:
            raise ValueError(f"has an unknown field {name!r}; known: {', '.join(_CASE_FIELDS)}")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{name} is no {'text' if kind is str else 'whole number'}")  # noqa: TRY004 - as above
    for name, words in (("finish_reason", get_args(FinishReason)), ("extract", get_args(ExtractionMode))):
        if case.get(name, words[0]) not in words:
            raise ValueError(f"{name} is {case[name]!r}; known: {', '.join(words)}")
    validate_expected(case["expected"], case["type"], case.get("places"))
    return case


def _read(path: Path) -> str:
    """A file, or standard input for ``-``; bytes that are no UTF-8 are kept as what they look like.

    Raises:
        UserFileError: It cannot be read, or is larger than any completion.
    """
    try:
        if str(path) == "-":
            raw = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
        else:
            with path.open("rb") as file:
                raw = file.read(MAX_TEXT_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UserFileError(str(path), [Problem("", f"cannot be read: {error}")]) from None
    if len(raw) > MAX_TEXT_BYTES:
        raise UserFileError(str(path), [Problem("", f"is larger than {MAX_TEXT_BYTES // 2**20} MiB")])
    return raw.decode("utf-8", errors="replace")
