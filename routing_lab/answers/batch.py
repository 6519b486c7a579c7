"""Many cases from JSON lines: the core of ``answers check --batch``.

One line in, one result out, in order. A case is an object with ``text``, ``expected`` and ``type``, optionally
``finish_reason``, ``places``, ``extract`` (``declared`` or ``last_number``), ``thinking_open`` and an ``id`` that is
handed back. A blank line is skipped. A line that is no such case gives a result with ``error`` in place of ``status``
and does not stop the rest; the caller decides what errors mean for its exit code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, get_args

from routing_lab.answers.judge import Judge, validate_expected
from routing_lab.answers.judgement import ANSWER_TYPES, ExtractionMode, FinishReason, Judgement

__all__ = ["BatchResult", "check_batch"]

_REQUIRED: Final = ("text", "expected", "type")
_OPTIONAL: Final = ("finish_reason", "places", "extract", "thinking_open", "id")


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of one line: a judgement, or an error that says what is wrong with the line."""

    line: int
    id: str | int | None
    judgement: Judgement | None
    error: str | None

    def as_json(self) -> dict[str, Any]:
        """Give the values of one output line."""
        values: dict[str, Any] = {"line": self.line}
        if self.id is not None:
            values["id"] = self.id
        if self.judgement is None:
            return {**values, "error": self.error}
        judgement = self.judgement
        return {**values, "status": judgement.status, "extracted": judgement.extracted, "reason": judgement.reason}


def check_batch(lines: Iterable[str], judge: Judge) -> Iterator[BatchResult]:
    """Judge every case; total on any lines.

    Args:
        lines: JSON lines, numbered from 1 in the results.
        judge: Compares; the caller closes it.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _check_line(number, line, judge)


def _check_line(number: int, line: str, judge: Judge) -> BatchResult:
    try:
        case = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BatchResult(number, None, None, f"not JSON: {str(error)[:200]}")
    problems = list(_problems(case))
    label = case.get("id") if isinstance(case, dict) and isinstance(case.get("id"), str | int) else None
    if problems:
        return BatchResult(number, label, None, "; ".join(problems))
    try:
        # A bad expected answer is the file's fault even where the text declares nothing to compare it with.
        validate_expected(case["expected"], case["type"], case.get("places"))
        judgement = judge.judge(
            case["text"],
            expected=case["expected"],
            answer_type=case["type"],
            finish_reason=case.get("finish_reason"),
            places=case.get("places"),
            mode=case.get("extract", "declared"),
            thinking_open=case.get("thinking_open", False),
        )
    except ValueError as error:
        return BatchResult(number, label, None, str(error))
    return BatchResult(number, label, judgement, None)


def _problems(case: object) -> Iterator[str]:
    """Everything that keeps a line from being a case."""
    if not isinstance(case, dict):
        yield "a case is an object"
        return
    unknown = sorted(set(case) - {*_REQUIRED, *_OPTIONAL})
    if unknown:
        yield f"unknown fields: {', '.join(unknown)[:200]}"
    for name in _REQUIRED:
        if not isinstance(case.get(name), str):
            yield f"{name} must be a string"
    if case.get("type") not in (*ANSWER_TYPES, None):
        yield f"type must be one of {', '.join(ANSWER_TYPES)}"
    if case.get("finish_reason") not in (*get_args(FinishReason), None):
        yield f"finish_reason must be one of {', '.join(get_args(FinishReason))}"
    if case.get("extract", "declared") not in get_args(ExtractionMode):
        yield f"extract must be one of {', '.join(get_args(ExtractionMode))}"
    places = case.get("places")
    if places is not None and (not isinstance(places, int) or isinstance(places, bool)):
        yield "places must be a whole number"
    if not isinstance(case.get("thinking_open", False), bool):
        yield "thinking_open must be true or false"
