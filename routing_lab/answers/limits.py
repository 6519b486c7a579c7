"""Every bound of the judge in one place: what is refused before work is spent on it.

The judge reads the output of a model that may be broken on purpose, so each bound is checked *before* the work it
guards. A bound is generous for a real answer (the longest exact answer of GSM8K, MATH-500 or AIME is far below every
one of them) and small enough that the work below it stays in milliseconds.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "MAX_ANSWER_CHARS",
    "MAX_DIGITS",
    "MAX_EXPONENT",
    "MAX_EXPRESSION_CHARS",
    "MAX_EXPRESSION_DIGITS",
    "MAX_EXPRESSION_TOKENS",
    "MAX_FACTORIAL",
    "MAX_ITEMS",
    "MAX_NESTING",
    "MAX_PLACES",
    "MAX_POWER_BITS",
    "MAX_SHOWN_CHARS",
    "WORKER_CPU_S",
    "WORKER_MEMORY_BYTES",
    "WORKER_START_S",
    "WORKER_WALL_S",
]

MAX_ANSWER_CHARS: Final = 20_000
"""A longer extracted answer is ``too_large`` for every type; no comparison looks at it."""

MAX_DIGITS: Final = 4_000
"""Digits of a number written out in full. Python converts that many in microseconds, and stays below its own
quadratic-time guard of 4,300 digits (``sys.int_info.default_max_str_digits``)."""

MAX_SHOWN_CHARS: Final = 1_000
"""``Judgement.extracted`` shows at most this much of an answer, so that a trial record stays small."""

MAX_EXPONENT: Final = 4_000
"""Largest exponent whose value is known while reading; ``1e999999`` and ``10^10^10`` stop here."""

MAX_PLACES: Final = 30
"""Decimal places that a ``decimal`` answer may state."""

MAX_EXPRESSION_CHARS: Final = 2_000
MAX_EXPRESSION_TOKENS: Final = 600
MAX_EXPRESSION_DIGITS: Final = 200
"""Digits of one literal inside an expression."""

MAX_NESTING: Final = 100
"""Levels of the recursive parser; a bracket takes two or three of them. Keeps it far from Python's own limit."""

MAX_ITEMS: Final = 64
"""Elements of one list, set, tuple or matrix row: sets are compared pair by pair."""

MAX_POWER_BITS: Final = 8_192
"""Size of a rational number that a power of constants may grow to."""

MAX_FACTORIAL: Final = 200

WORKER_CPU_S: Final = 1.0
"""Processor time for one symbolic comparison. CPU time and not wall time is what decides, so that a busy machine does
not turn a right answer into an undecidable one."""

WORKER_WALL_S: Final = 1.8
"""Wall time for one symbolic comparison: the second line, and why every answer comes within two seconds."""

WORKER_START_S: Final = 60.0
"""Importing sympy takes 0.5 to 2 s, on a loaded machine longer. Only the first expression waits for it."""

WORKER_MEMORY_BYTES: Final = 768 * 2**20
"""Address space of the process that compares."""
