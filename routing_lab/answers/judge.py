"""The judge: completion text against the one expected answer, by the rules of the answer's type.

==========  ============================================================================================================
type        equal when
==========  ============================================================================================================
integer     both are the same whole number, however written (``1,234``, ``7.0``, ``1e3``, ``$18``, ``12 km``, ``50%``)
rational    both are the same rational number; a percentage is a hundredth (``0.5``, ``1/2``, ``50%``)
decimal     both are the same number after writing them with the stated places; no rounding of a longer answer
expression  sympy proves it: expressions by value, equations as equations, sets unordered, tuples ordered (``symbolic``)
choice      the same single letter or digit, in or out of brackets, in either case
text        the same characters after folding case, runs of blanks, and punctuation around the whole
==========  ============================================================================================================

``12 or 13`` is two answers and therefore none. Numbers are not calculated: ``84/2`` does not answer ``42`` as an
integer, nor ``22/7`` a decimal. Whatever cannot be decided within ``limits`` is wrong with the reason ``undecidable``.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
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
from routing_lab.answers.limits import MAX_ANSWER_CHARS, MAX_PLACES, MAX_SHOWN_CHARS
from routing_lab.answers.numbers import read_number
from routing_lab.answers.supervisor import Supervisor
from routing_lab.answers.syntax import Node, parse
from routing_lab.answers.wording import fold_text, read_choice

__all__ = ["Judge", "validate_expected"]

_BY_ANSWER: Final = {"yes": None, "no": Reason.MISMATCH, "undecided": Reason.UNDECIDABLE}


class Judge:
    """Compares answers; a context manager that owns one symbolic worker process.

    The worker starts with the first expression that needs it and is replaced when it dies; every other type is compared
    in this process. Safe to use from any thread (comparisons of expressions wait for each other) and across ``fork``.
    """

    def __init__(self) -> None:
        self._supervisor = Supervisor()

    def judge(
        self,
        text: str,
        *,
        expected: str,
        answer_type: AnswerType,
        finish_reason: FinishReason | None = None,
        places: int | None = None,
        mode: ExtractionMode = "declared",
        thinking_open: bool = False,
    ) -> Judgement:
        """Give the status of one completion; total on any text.

        Args:
            text: The completion without its prompt.
            expected: An answer that ``validate_expected`` accepts for ``answer_type`` and ``places``.
            answer_type: How to compare.
            finish_reason: Why decoding ended, as in ``extract``.
            places: Decimal places, for ``decimal`` only.
            mode: How to find the answer, as in ``extract``.
            thinking_open: The chat template had opened the reasoning.

        Raises:
            ValueError: ``expected`` is no answer of ``answer_type``.
            RuntimeFailureError: The symbolic worker cannot be started at all (sympy is broken or missing).
        """
        found = extract(text, finish_reason=finish_reason, mode=mode, thinking_open=thinking_open)
        if found.answer is None:
            return Judgement(Status.NO_FINAL_ANSWER, None, found.reason)
        reason = self._objection(found.answer, expected, answer_type, places)
        status = Status.CORRECT if reason is None else Status.WRONG_ANSWER
        return Judgement(status, found.answer[:MAX_SHOWN_CHARS], reason)

    def close(self) -> None:
        """End the symbolic worker; safe to call twice."""
        self._supervisor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _objection(self, answer: str, expected: str, answer_type: AnswerType, places: int | None) -> Reason | None:
        """Say why ``answer`` is not ``expected``; ``None`` when it is."""
        wanted = _wanted(expected, answer_type, places)
        if len(answer) > MAX_ANSWER_CHARS:
            return Reason.TOO_LARGE
        given = _given(answer, answer_type)
        if isinstance(given, Reason):
            return given
        if given == wanted:
            return None
        if isinstance(given, Node) and isinstance(wanted, Node):
            return _BY_ANSWER[self._supervisor.compare(wanted, given)]
        return Reason.MISMATCH


def validate_expected(expected: str, answer_type: AnswerType, places: int | None = None) -> None:
    """Check that ``expected`` is an answer that a completion can be compared with.

    Raises:
        ValueError: It is not; the message says what would be.
    """
    _wanted(expected, answer_type, places)


_AS_WORDS: Final = "words are compared by the type text"
_WAYS_OUT: Final[Mapping[AnswerType, str]] = {
    "integer": f"write it in digits, as 4 or -12; {_AS_WORDS}",
    "rational": f"write it in digits, as 3/4; {_AS_WORDS}",
    "decimal": f"write it in digits, as 0.75; {_AS_WORDS}",
    "expression": f"write it in plain notation or LaTeX, in its simplest form; {_AS_WORDS}",
    "choice": "write the letter or digit of one choice, as B",
    "text": "write the text itself",
}


@lru_cache(maxsize=4096)
def _wanted(expected: str, answer_type: AnswerType, places: int | None) -> Fraction | str | Node:
    """Read the expected answer once per probe; the ValueError is what ``validate_expected`` raises."""
    if answer_type not in ANSWER_TYPES:
        raise ValueError(f"unknown answer type {answer_type!r}; known: {', '.join(ANSWER_TYPES)}")
    if not expected.strip() or len(expected) > MAX_ANSWER_CHARS:
        raise ValueError(f"an answer has 1 to {MAX_ANSWER_CHARS} characters")
    _check_places(answer_type, places)
    value = _given(expected, answer_type)
    if isinstance(value, Reason):
        # The value is wrong, not its Python type: a ValueError, as validate_expected promises.
        raise ValueError(  # noqa: TRY004
            f"the answer {expected[:60]!r} is no {answer_type} ({value}); {_WAYS_OUT[answer_type]}",
        )
    if answer_type == "integer" and isinstance(value, Fraction) and value.denominator != 1:
        raise ValueError(f"the answer {expected[:60]!r} is no integer; its type is rational or decimal")
    if places is not None and isinstance(value, Fraction) and (value * 10**places).denominator != 1:
        raise ValueError(f"the answer {expected[:60]!r} has more than the stated {places} places")
    return value


def _check_places(answer_type: AnswerType, places: int | None) -> None:
    if (answer_type == "decimal") != (places is not None):
        raise ValueError("places is demanded for decimal answers, and for no others")
    if places is not None and not 0 <= places <= MAX_PLACES:
        raise ValueError(f"places is {places}; it must be from 0 to {MAX_PLACES}")


def _given(answer: str, answer_type: AnswerType) -> Fraction | str | Node | Reason:
    """Read an answer by the rules of its type."""
    match answer_type:
        case "text":
            return fold_text(answer)
        case "choice":
            return read_choice(answer)
        case "expression":
            return parse(answer)
    return _number(answer, answer_type)


def _number(answer: str, answer_type: AnswerType) -> Fraction | Reason:
    number = read_number(answer)
    if isinstance(number, Reason):
        return number
    if answer_type == "rational":
        return number.value / 100 if number.percent else number.value
    if number.quotient:
        return Reason.UNEVALUATED if answer_type == "decimal" or number.value.denominator == 1 else Reason.MISMATCH
    return number.value
