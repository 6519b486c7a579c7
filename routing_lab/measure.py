"""Compare decode speeds on a machine that is not quiet: schedules take turns, and only ratios within a round count.

**Rounds.** In every round each schedule decodes once, and the order turns around from round to round (A B, B A, ...;
with more schedules A B C, C B A, ...). So a machine that warms up or slows down steadily favours nobody, and the
schedule that ended a round begins the next without a switch. The first ``warmup_rounds`` are thrown away, always and
unseen: that is where caches fill and the clock frequency settles.

**The ratio.** Each round gives one log ratio. Their centre is the Hodges-Lehmann estimate, the median of all pairwise
means (Walsh averages), and the interval is the one that belongs to Wilcoxon's signed-rank test (Hollander, Wolfe and
Chicken, *Nonparametric Statistical Methods*, 3rd ed., section 3.3). It needs no normal distribution, only one that is
as likely to lean one way as the other, and its coverage is exact for every number of rounds. The price of 95 % is six
rounds; from twelve on, a single round that another process spoiled, however badly, no longer reaches an end of the
interval. Student's t was not taken because timing noise is rare and large: one such round moves a mean and widens t's
interval to nothing useful for any number of rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from routing_lab.errors import RuntimeFailureError
from routing_lab.runtime.base import Runtime
from routing_lab.schedule import Schedule

__all__ = ["MeasureSettings", "SpeedRatio", "fewest_rounds", "measure_many", "measure_rates", "measure_ratio"]


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """How much is decoded: per schedule ``rounds`` times ``tokens`` tokens that count, and the warm-up that does not.

    ``prompt_tokens`` are processed before each stretch and never timed. ``confidence`` is that of the interval.
    """

    tokens: int = 128
    rounds: int = 12
    warmup_rounds: int = 1
    prompt_tokens: int = 16
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.prompt_tokens < 1 or self.warmup_rounds < 0:
            raise ValueError(f"tokens and prompt_tokens must be positive and warmup_rounds not negative: {self}")
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence must be between 0 and 1, got {self.confidence}")
        if self.rounds < (needed := fewest_rounds(self.confidence)):
            raise ValueError(
                f"{self.rounds} rounds cannot give a {self.confidence:.0%} interval; it takes at least {needed}"
            )


@dataclass(frozen=True, slots=True)
class SpeedRatio:
    """Decode rate of a candidate over that of a baseline, from rounds in which both took part.

    ``low <= ratio <= high``; the interval has at least the stated ``confidence``. The rates are tokens per second, one
    per counted round and in the same order on both sides. The medians are for reading; the ratio does not rest on them.
    """

    ratio: float
    low: float
    high: float
    confidence: float
    candidate_rates: tuple[float, ...]
    baseline_rates: tuple[float, ...]

    @classmethod
    def from_rates(cls, candidate: Sequence[float], baseline: Sequence[float], confidence: float = 0.95) -> SpeedRatio:
        """Compare two series of tokens per second, round by round.

        Raises:
            ValueError: The series differ in length, hold a rate that is not finite and positive, or are too short for
                ``confidence``.
        """
        if len(candidate) != len(baseline):
            raise ValueError(f"rounds do not pair up: {len(candidate)} and {len(baseline)}")
        if bad := [rate for rate in (*candidate, *baseline) if not _is_rate(rate)]:
            raise ValueError(f"a decode rate must be finite and positive, got {bad[0]}")
        centre, low, high = _centre([math.log(a / b) for a, b in zip(candidate, baseline, strict=True)], confidence)
        return cls(
            ratio=math.exp(centre),
            low=math.exp(low),
            high=math.exp(high),
            confidence=confidence,
            candidate_rates=tuple(candidate),
            baseline_rates=tuple(baseline),
        )

    @property
    def rounds(self) -> int:
        """Rounds that count."""
        return len(self.candidate_rates)

    @property
    def candidate_tokens_per_s(self) -> float:
        """Median decode rate of the candidate."""
        return statistics.median(self.candidate_rates)

    @property
    def baseline_tokens_per_s(self) -> float:
        """Median decode rate of the baseline."""
        return statistics.median(self.baseline_rates)

    def to_dict(self) -> dict[str, Any]:
        """What JSON and YAML can hold; the rates carry everything else."""
        return {
            "ratio": self.ratio,
            "low": self.low,
            "high": self.high,
            "confidence": self.confidence,
            "rounds": self.rounds,
            "candidate_rates": list(self.candidate_rates),
            "baseline_rates": list(self.baseline_rates),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SpeedRatio:
        """Inverse of ``to_dict``; ratio and interval are computed anew, so that they always belong to the rates."""
        return cls.from_rates(data["candidate_rates"], data["baseline_rates"], data["confidence"])


def measure_ratio(
    runtime: Runtime, candidate: Schedule, baseline: Schedule, settings: MeasureSettings | None = None
) -> SpeedRatio:
    """Decode rate of ``candidate`` over that of ``baseline``, interleaved; see the head of this module.

    Raises:
        RuntimeFailureError: The model's process died, or its clock gave a time that is none.
        AttestationError: The runtime did not switch to a schedule.
    """
    return measure_many(runtime, [candidate], baseline, settings)[0]


def measure_many(
    runtime: Runtime, candidates: Sequence[Schedule], baseline: Schedule, settings: MeasureSettings | None = None
) -> list[SpeedRatio]:
    """The ratio of each candidate, all in the same rounds, so that the baseline is decoded once for all of them.

    Raises:
        RuntimeFailureError: As ``measure_ratio``.
        AttestationError: As ``measure_ratio``.
    """
    settings = settings or MeasureSettings()
    of_baseline, *of_candidates = measure_rates(runtime, [baseline, *candidates], settings)
    return [SpeedRatio.from_rates(rates, of_baseline, settings.confidence) for rates in of_candidates]


def measure_rates(
    runtime: Runtime, schedules: Sequence[Schedule], settings: MeasureSettings
) -> list[tuple[float, ...]]:
    """Decode rates in tokens per second: per schedule one for each round that counts.

    Raises:
        RuntimeFailureError: As ``measure_ratio``.
        AttestationError: As ``measure_ratio``.
    """
    rates: list[list[float]] = [[] for _ in schedules]
    applied: int | None = None
    order = list(range(len(schedules)))
    for _ in range(settings.warmup_rounds + settings.rounds):
        for which in order:
            # Even two equal schedules are switched between: then a comparison of a schedule with itself costs and
            # risks what any other does.
            if which != applied:
                runtime.apply(schedules[which])
                applied = which
            rates[which].append(_decode_rate(runtime, settings))
        order.reverse()
    return [tuple(series[settings.warmup_rounds :]) for series in rates]


def _decode_rate(runtime: Runtime, settings: MeasureSettings) -> float:
    timing = runtime.decode_timing(tokens=settings.tokens, prompt_tokens=settings.prompt_tokens)
    if not (timing.seconds > 0 and _is_rate(timing.tokens_per_s)):
        raise RuntimeFailureError(f"{timing.tokens} tokens in {timing.seconds} seconds is no decode rate")
    return timing.tokens_per_s


def _is_rate(value: float) -> bool:
    return math.isfinite(value) and value > 0


# ---------------------------------------------------------------------------------------------------------------------
# Centre and interval of a few noisy numbers


def fewest_rounds(confidence: float) -> int:
    """Fewest rounds that give an interval of this confidence: the least n with ``2 ** (1 - n) <= 1 - confidence``."""
    return math.ceil(1 - math.log2(1 - confidence))


def _centre(values: Sequence[float], confidence: float) -> tuple[float, float, float]:
    """Hodges-Lehmann estimate of the centre and the ends of its signed-rank interval.

    Raises:
        ValueError: Too few values for ``confidence``.
    """
    cut = _walsh_averages_outside(len(values), confidence)
    walsh = sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])
    return statistics.median(walsh), walsh[cut], walsh[-1 - cut]


def _walsh_averages_outside(n: int, confidence: float) -> int:
    """How many Walsh averages lie beyond each end: k - 1 for the largest k with P(W < k) <= (1 - confidence) / 2.

    W is the signed-rank statistic of ``n`` values. ``2 ** n`` times its distribution counts the subsets of {1 ... n} by
    their sum, so whole numbers decide and nothing is approximated.

    Raises:
        ValueError: Not even k = 1 qualifies.
    """
    subsets = [1] + [0] * (n * (n + 1) // 2)
    for rank in range(1, n + 1):
        for total in range(len(subsets) - 1, rank - 1, -1):
            subsets[total] += subsets[total - rank]
    allowed = (1 - confidence) / 2 * 2**n
    below, k = 0, 0
    while below + subsets[k] <= allowed:
        below += subsets[k]
        k += 1
    if k == 0:
        raise ValueError(f"{n} rounds cannot give a {confidence:.0%} interval")
    return k - 1
