"""The judge: from the text of a completion to ``correct``, ``wrong_answer`` or ``no_final_answer``.

It reads the output of a model that may be broken on purpose, so nothing that it reads is ever executed, every bound is
checked before the work it guards (``limits``), and the only open-ended work, symbolic equivalence, runs in a process
that can be killed (``worker``). Whatever cannot be decided is not correct.

::

    extraction   completion text -> the declared answer, or why there is none
    numbers      integer, rational, decimal: exact numbers from the spellings people and models use
    wording      choice, text
    syntax       expression: text -> a bounded syntax tree (no sympy)
    symbolic     two syntax trees -> equal, different or undecided (sympy; imported by the worker only)
    worker       the killable process; supervisor: its parent's side
    judge        Judge, validate_expected; batch: many cases from JSON lines
"""

from routing_lab.answers.batch import BatchResult, check_batch
from routing_lab.answers.extraction import extract
from routing_lab.answers.judge import Judge, validate_expected
from routing_lab.answers.judgement import (
    ANSWER_TYPES,
    AnswerType,
    Extraction,
    ExtractionMode,
    FinishReason,
    Judgement,
    Reason,
    Status,
    reason_words,
)

__all__ = [
    "ANSWER_TYPES",
    "AnswerType",
    "BatchResult",
    "Extraction",
    "ExtractionMode",
    "FinishReason",
    "Judge",
    "Judgement",
    "Reason",
    "Status",
    "check_batch",
    "extract",
    "reason_words",
    "validate_expected",
]
