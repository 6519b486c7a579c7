"""Every bound of the judge in one place: what is refused before work is spent on it.

The judge reads the output of a model that may be broken on purpose, so each bound is checked *before* the work it
guards. A bound is generous for a real answer (the longest exact answer of GSM8K, MATH-500 or AIME is far below every
one of them) and small enough that the work below it stays in milliseconds.
"""

from __future__ import annotations

from typing import Final

__all__ = ["MAX_ANSWER_CHARS", "MAX_DIGITS", "MAX_EXPONENT", "MAX_SHOWN_CHARS"]

MAX_ANSWER_CHARS: Final = 20_000
"""A longer extracted answer is ``too_large`` for every type; no comparison looks at it."""

MAX_DIGITS: Final = 4_000
"""Digits of a number written out in full. Python converts that many in microseconds, and stays below its own
quadratic-time guard of 4,300 digits (``sys.int_info.default_max_str_digits``)."""

MAX_SHOWN_CHARS: Final = 1_000
"""``Judgement.extracted`` shows at most this much of an answer, so that a trial record stays small."""

MAX_EXPONENT: Final = 1_000
"""Largest power of ten; ``1e999999`` stops here."""
