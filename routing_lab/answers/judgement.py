"""The values the judge hands out: a status, the extracted answer, and one reason from a closed list."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, get_args

__all__ = [
    "ANSWER_TYPES",
    "AnswerType",
    "Extraction",
    "ExtractionMode",
    "FinishReason",
    "Judgement",
    "Reason",
    "Status",
]

AnswerType = Literal["integer", "rational", "decimal", "expression", "choice", "text"]
ANSWER_TYPES: Final[tuple[AnswerType, ...]] = get_args(AnswerType)

ExtractionMode = Literal["declared", "last_number"]
"""``declared``: an answer counts only when the text declares it. ``last_number``: the last number in the text counts;
an explicit choice of a probe set, never a fallback."""

FinishReason = Literal["stop", "length"]
"""Why decoding ended: the model ended it (or a stop string did), or the token budget was used up."""


class Status(StrEnum):
    """What became of one probe (the four words of the design)."""

    CORRECT = "correct"
    WRONG_ANSWER = "wrong_answer"
    NO_FINAL_ANSWER = "no_final_answer"
    RUNTIME_ERROR = "runtime_error"
    """Never given by the judge: the runner sets it when there is no completion to judge."""


class Reason(StrEnum):
    """Why an answer is missing (first group, ``no_final_answer``) or not correct (second group, ``wrong_answer``)."""

    NO_DECLARATION = "no_declaration"
    """The text ended without declaring an answer (with ``last_number``: it holds no number)."""
    EMPTY_DECLARATION = "empty_declaration"
    """``Answer:`` or an empty box, and nothing after it."""
    BUDGET = "budget"
    """The token budget ran out in the reasoning, in a box, in the answer's line or before any declaration."""
    UNCLOSED_REASONING = "unclosed_reasoning"
    """The model itself stopped before it closed its reasoning."""
    TRUNCATED_BOX = "truncated_box"
    r"""The last ``\boxed{`` never closes, although the budget was not used up."""

    MISMATCH = "mismatch"
    """A readable answer of the right type, but another one."""
    AMBIGUOUS = "ambiguous"
    """More than one answer was declared: ``12 or 13``, ``(B) or (C)``."""
    NOT_A_NUMBER = "not_a_number"
    """Nothing that the type reads as one number: words, a formula, ``0.333...``, ``5x``."""
    UNEVALUATED = "unevaluated"
    """A quotient where a finished number is demanded: ``84/2`` repeats the question, it does not answer ``42``."""
    NOT_A_CHOICE = "not_a_choice"
    """No single option letter or digit where a choice is demanded."""
    NOT_AN_EXPRESSION = "not_an_expression"
    """Outside the grammar that expressions are read with (``syntax``)."""
    TOO_LARGE = "too_large"
    """Beyond a bound of ``limits``: digits, exponents, nesting, length."""
    UNDECIDABLE = "undecidable"
    """Equality was neither proved nor refuted within the limits of time and memory."""

    @property
    def words(self) -> str:
        """The reason as people are told it."""
        return _WORDS[self]


_WORDS: Final = {
    Reason.NO_DECLARATION: "it declares no answer",
    Reason.EMPTY_DECLARATION: "the answer it declares is empty",
    Reason.BUDGET: "its tokens were used up before an answer",
    Reason.UNCLOSED_REASONING: "it ended inside its reasoning",
    Reason.TRUNCATED_BOX: "the box of its answer is never closed",
    Reason.MISMATCH: "another answer",
    Reason.AMBIGUOUS: "more than one answer",
    Reason.NOT_A_NUMBER: "not one number",
    Reason.UNEVALUATED: "a quotient that is not worked out",
    Reason.NOT_A_CHOICE: "not one of the choices",
    Reason.NOT_AN_EXPRESSION: "not an expression that can be read",
    Reason.TOO_LARGE: "too large to be read",
    Reason.UNDECIDABLE: "whether it is equal could not be decided",
}


def reason_words(reason: str) -> str:
    """A reason of an outcome in words: the judge's by its code; what a runtime said of its failure stays as it is."""
    return Reason(reason).words if reason in set(Reason) else reason


@dataclass(frozen=True, slots=True)
class Extraction:
    """The declared answer of a completion, or the reason why there is none (exactly one of the two is set)."""

    answer: str | None
    reason: Reason | None = None

    def __post_init__(self) -> None:
        if (self.answer is None) == (self.reason is None):
            raise ValueError("an extraction has an answer or a reason, never both and never neither")


@dataclass(frozen=True, slots=True)
class Judgement:
    """The status of one completion.

    ``extracted`` is the declared answer as it was read, without markup, cut to ``limits.MAX_SHOWN_CHARS``; ``None``
    when there is none. ``reason`` is ``None`` exactly for ``correct``.
    """

    status: Status
    extracted: str | None
    reason: Reason | None

    def __post_init__(self) -> None:
        if (self.status is Status.CORRECT) != (self.reason is None):
            raise ValueError(f"a judgement of {self.status} cannot have the reason {self.reason}")
