"""What n answers prove about the next one: exact bounds on a failure rate, and how many probes a wanted bound takes."""

from __future__ import annotations

import math

__all__ = ["CONFIDENCE", "failure_bound", "probes_needed", "rule_of_three"]

CONFIDENCE = 0.95


def failure_bound(failures: int, n: int, confidence: float = CONFIDENCE) -> float:
    """Largest failure rate that ``failures`` in ``n`` probes leave plausible, as a share between 0 and 1.

    The exact one-sided upper limit of Clopper and Pearson (Biometrika 26, 1934): the rate at which so few failures
    would be seen with probability ``1 - confidence`` only. Without failures it is ``1 - (1 - confidence) ** (1 / n)``,
    about ``3 / n`` (``rule_of_three``). Without probes nothing is excluded: 1.0.

    A run that was stopped at a failure is a sample of another kind; for it this limit is still valid, but wider than
    need be (the exact one of inverse sampling is the limit for one failure and one probe fewer).

    Raises:
        ValueError: ``failures`` is not within ``0..n``, or ``confidence`` is not between 0 and 1.
    """
    if not 0 <= failures <= n:
        raise ValueError(f"failures must be within 0..{n}, got {failures}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    if failures == n:
        return 1.0
    if failures == 0:
        return -math.expm1(math.log1p(-confidence) / n)
    return _rate_where_tail_is(failures, n, 1 - confidence)


def rule_of_three(n: int) -> float:
    """Rough failure bound at 95 % after ``n`` probes without a failure: ``3 / n``, a little above the exact one.

    Raises:
        ValueError: ``n`` is not positive.
    """
    if n <= 0:
        raise ValueError(f"n must be positive, got {n}")
    return min(1.0, 3 / n)


def probes_needed(bound: float, failures: int = 0, confidence: float = CONFIDENCE) -> int:
    """Fewest probes with which ``failures`` failures still bound the failure rate by ``bound``.

    Raises:
        ValueError: ``bound`` is not between 0 and 1, ``failures`` is negative, or ``confidence`` is out of range.
    """
    if not 0 < bound < 1:
        raise ValueError(f"bound must be between 0 and 1, got {bound}")
    if failures < 0:
        raise ValueError(f"failures must not be negative, got {failures}")
    too_few, enough = failures, failures + 1
    while failure_bound(failures, enough, confidence) > bound:
        too_few, enough = enough, 2 * enough
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if failure_bound(failures, middle, confidence) > bound:
            too_few = middle
        else:
            enough = middle
    return enough


def _rate_where_tail_is(successes: int, n: int, tail: float) -> float:
    """The rate p with P(X <= successes) = ``tail`` for X ~ Binomial(n, p), to the last few bits, never below it."""
    low, high = successes / n, 1.0
    while low < (middle := (low + high) / 2) < high:
        if _at_most(successes, n, middle) > tail:
            low = middle
        else:
            high = middle
    return high


def _at_most(successes: int, n: int, rate: float) -> float:
    """P(X <= successes) for X ~ Binomial(n, rate) with 0 < rate < 1, summed term by term."""
    log_yes, log_no, log_all = math.log(rate), math.log1p(-rate), math.lgamma(n + 1)
    return math.fsum(
        math.exp(log_all - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * log_yes + (n - k) * log_no)
        for k in range(successes + 1)
    )
