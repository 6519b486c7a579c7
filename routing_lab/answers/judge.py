"""The judge: completion text against the one expected answer, by the rules of the answer's type.

==========  ============================================================================================================
type        equal when
==========  ============================================================================================================
integer     both are the same whole number, however written (``1,234``, ``7.0``, ``1e3``, ``$18``, ``12 km``, ``50%``)
rational    both are the same rational number; a percentage is a hundredth (``0.5``, ``1/2``, ``50%``)
decimal     both are the same number after writing them with the stated places; no rounding of a longer answer
choice      the same single letter or digit, in or out of brackets, in either case
text        the same characters after folding case, runs of blanks, and punctuation around the whole
==========  ============================================================================================================

``12 or 13`` is two answers and therefore none. Nothing is evaluated: ``84/2`` does not answer ``42`` as an integer.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from types import TracebackType
from typing import Final, Self

from routing_lab.answers.extraction import extract
from routing_lab.answers.judgement import (
    ANSWER_TYPES,
    AnswerType,
    ExtractionMode,
    FinishReason,
    Judgement,
    Reason,
    Status,
)
from routing_lab.answers.limits import MAX_ANSWER_CHARS, MAX_SHOWN_CHARS
from routing_lab.answers.numbers import NumberTooLargeError, read_number

__all__ = ["Judge", "validate_expected"]

_TWO_ANSWERS: Final = re.compile(r"\s(?:or|and|oder)\s|\bor\b|;|\\text\{\s?or\s?\}", re.IGNORECASE)
_CHOICE: Final = re.compile(r"(?:\\text\{|\\mathrm\{)?[(\[]?\s?([A-Za-z]|\d)\s?[)\].:]?\}?(?:[.):]\s.*)?", re.DOTALL)
_QUOTIENT: Final = re.compile(r"\d\s{0,3}/\s{0,3}\d|\\[dt]?frac")
_OUTER: Final = " \t.,;:!?\"'“”‘’`*_"


class Judge:
    """Compares answers. A context manager, so that a judge that holds a process can be put in its place."""

    def judge(
        self,
        text: str,
        *,
        expected: str,
        answer_type: AnswerType,
        finish_reason: FinishReason = "stop",
        places: int | None = None,
        mode: ExtractionMode = "declared",
        thinking_open: bool = False,
    ) -> Judgement:
        """The status of one completion; total on any text.

        Raises:
            ValueError: ``expected`` is no answer of ``answer_type`` (``validate_expected`` says so beforehand).
        """
        found = extract(text, finish_reason=finish_reason, mode=mode, thinking_open=thinking_open)
        if found.answer is None:
            return Judgement(Status.NO_FINAL_ANSWER, None, found.reason)
        reason = _objection(found.answer, expected, answer_type, places)
        status = Status.CORRECT if reason is None else Status.WRONG_ANSWER
        return Judgement(status, found.answer[:MAX_SHOWN_CHARS], reason)

    def close(self) -> None:
        """Release what the judge holds; safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def validate_expected(expected: str, answer_type: AnswerType, places: int | None = None) -> None:
    """Check that ``expected`` is an answer that a completion can be compared with.

    Raises:
        ValueError: It is not; the message says what would be.
    """
    if answer_type not in ANSWER_TYPES:
        raise ValueError(f"unknown answer type {answer_type!r}; known: {', '.join(ANSWER_TYPES)}")
    if not expected.strip() or len(expected) > MAX_ANSWER_CHARS:
        raise ValueError(f"an answer has 1 to {MAX_ANSWER_CHARS} characters")
    reason = _objection(expected, expected, answer_type, places)
    if reason is not None:
        raise ValueError(f"it does not equal itself ({reason}); write it in its simplest form")


def _objection(answer: str, expected: str, answer_type: AnswerType, places: int | None) -> Reason | None:
    """Why ``answer`` is not ``expected``; ``None`` when it is."""
    if len(answer) > MAX_ANSWER_CHARS:
        return Reason.TOO_LARGE
    if answer_type == "text":
        return None if _folded(answer) == _folded(expected) else Reason.MISMATCH
    if answer_type == "choice":
        return _choice_objection(answer, expected)
    try:
        return _number_objection(answer, expected, answer_type, places)
    except NumberTooLargeError:
        return Reason.TOO_LARGE


def _folded(text: str) -> str:
    """Case, compatibility forms, runs of blanks and outer punctuation folded; a text of punctuation alone stays."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return folded.strip(_OUTER) or folded


def _choice_objection(answer: str, expected: str) -> Reason | None:
    wanted = _CHOICE.fullmatch(expected.strip())
    given = _CHOICE.fullmatch(answer.strip())
    if wanted is None or given is None:
        return Reason.AMBIGUOUS if _TWO_ANSWERS.search(answer) else Reason.NOT_A_CHOICE
    return None if given[1].upper() == wanted[1].upper() else Reason.MISMATCH


def _number_objection(answer: str, expected: str, answer_type: AnswerType, places: int | None) -> Reason | None:
    wanted, given = _number(expected, answer_type), _number(answer, answer_type)
    if wanted is None:
        raise ValueError(f"the expected answer {expected[:60]!r} is no {answer_type}")
    if given is None:
        return Reason.AMBIGUOUS if _TWO_ANSWERS.search(answer) else Reason.NOT_A_NUMBER
    if answer_type == "integer" and _QUOTIENT.search(answer):
        return Reason.UNEVALUATED
    if answer_type == "decimal":
        return _decimal_objection(given, wanted, places)
    return None if given == wanted else Reason.MISMATCH


def _decimal_objection(given: Fraction, wanted: Fraction, places: int | None) -> Reason | None:
    if places is None:
        raise ValueError("a decimal answer needs its number of places")
    unit = Fraction(10) ** places
    # The expected answer has the stated places by itself; an answer with more of them is another number.
    return None if given == wanted and (wanted * unit).denominator == 1 else Reason.MISMATCH


def _number(text: str, answer_type: AnswerType) -> Fraction | None:
    # A variable in front (x = 5) is a way to declare, not a part of the number.
    value = read_number(re.sub(r"^[A-Za-z]\s{0,3}=\s{0,3}", "", text.strip()))
    if value is None:
        return None
    return value / 100 if answer_type == "rational" and text.rstrip().endswith("%") else value
