"""``routing-lab answers``: the judge on its own, for one text or for many."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from routing_lab.answers import ANSWER_TYPES, ExtractionMode, FinishReason, Judge, check_batch, validate_expected
from routing_lab.cli import options
from routing_lab.cli.output import json_text, print_json, say_error
from routing_lab.errors import Problem, UsageError, UserFileError
from routing_lab.visible import visible

MAX_TEXT_BYTES = 64 * 2**20
"""A completion of more than 64 MiB is no completion."""


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
    check.add_argument("--finish-reason", choices=get_args(FinishReason), help="why decoding ended, where it is known")
    check.add_argument("--extract", choices=get_args(ExtractionMode), default="declared", help="default: %(default)s")
    check.add_argument("--text-file", type=Path, default=Path("-"), metavar="FILE", help="default: standard input")
    check.add_argument("--batch", type=Path, metavar="JSONL", help="judge every line of this file")


def run_check(args: argparse.Namespace) -> int:
    """Print one judgement, or one per line of the batch."""
    with Judge() as judge:
        if args.batch is not None:
            return _run_batch(args.batch, judge)
        if args.type is None or args.expected is None:
            raise UsageError("give --type and --expected, or --batch")
        try:
            validate_expected(args.expected, args.type, args.places)
        except ValueError as error:
            raise UsageError(f"--expected {args.expected[:60]!r}: {error}") from error
        judgement = judge.judge(
            _read(args.text_file),
            expected=args.expected,
            answer_type=args.type,
            finish_reason=args.finish_reason,
            places=args.places,
            mode=args.extract,
        )
    if args.json:
        print_json(judgement)
    else:
        reason = judgement.reason and judgement.reason.words
        words = (judgement.status.replace("_", " "), judgement.extracted, reason)
        print("\t".join(visible(word) for word in words if word))
    return 0


def _run_batch(path: Path, judge: Judge) -> int:
    """Print one JSON line per case; lines that are no cases do not stop the rest, and end in exit code 3."""
    problems = []
    for result in check_batch(_read(path).splitlines(), judge):
        print(json_text(result.as_json()))
        if result.error is not None:
            problems.append(Problem(f"line {result.line}", result.error))
    return say_error(UserFileError(str(path), problems)) if problems else 0


def _read(path: Path) -> str:
    """A file, or standard input for ``-``; bytes that are no UTF-8 are kept as what they look like.

    Raises:
        UserFileError: It cannot be read, or is larger than any completion.
    """
    try:
        if str(path) == "-":
            if sys.stdin is None:
                raise UserFileError("standard input", [Problem("", "is closed", "give --text-file or --batch")])
            raw = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
        else:
            with path.open("rb") as file:
                raw = file.read(MAX_TEXT_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UserFileError(str(path), [Problem("", f"cannot be read: {error}")]) from None
    if len(raw) > MAX_TEXT_BYTES:
        raise UserFileError(str(path), [Problem("", f"is larger than {MAX_TEXT_BYTES // 2**20} MiB")])
    return raw.decode("utf-8", errors="replace")
