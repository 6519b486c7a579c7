"""Compare decode speeds on a machine that is not quiet: schedules take turns, and only ratios within a round count.

**Rounds.** In every round each schedule decodes once, and the order turns around from round to round (A B, B A, ...;
with more schedules A B C, C B A, ...). So a machine that warms up or slows down steadily favours nobody, and the
schedule that ended a round begins the next without a switch. A switch costs milliseconds, so many short rounds are
better than a few long ones: what the machine does for a second then hits both sides. The first ``warmup_rounds`` are
thrown away, always and unseen: that is where caches fill and the clock frequency settles.

**The ratio.** Each round gives one log ratio. Their centre is the Hodges-Lehmann estimate, the median of all pairwise
means (Walsh averages), and the interval is the one that belongs to Wilcoxon's signed-rank test (Hollander, Wolfe and
Chicken, *Nonparametric Statistical Methods*, 3rd ed., section 3.3). It needs no normal distribution, only one that is
as likely to lean one way as the other, and its coverage is exact for every number of rounds. The price of 95 % is six
rounds; from twelve on, a single round that another process spoiled, however badly, no longer reaches an end of the
interval. Student's t was not taken because timing noise is rare and large: one such round moves a mean and widens t's
interval to nothing useful for any number of rounds.

**When to stop.** ``rounds`` may be doubled again and again, up to ``most_rounds``. After each stretch a candidate is
done when its interval is as narrow as asked (``half_width``), or when it is surely slower than a rival: a ratio that is
given, or the fastest of those it takes turns with (a race: clear losers cost one stretch each). To stop where
an interval looks narrow picks the stretches that happened to agree: with 95 % at each of four looks, 7.5 % of 200
comparisons of a schedule with itself found a difference. So the looks share the error (Bonferroni): each interval has
``1 - (1 - confidence) / looks``, and the one reported covers with ``confidence`` whatever ended the measurement.

**What went wrong on the way.** ``SpeedRatio.warnings`` looks at the baseline, which decodes in every round: a trend of
its rate (Kendall's tau; a machine that throttles), and single rounds far below the others (another process). Both are
shared by the two sides of a ratio and do not spoil it, but they say that the machine was not quiet.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from routing_lab.errors import RuntimeFailureError
from routing_lab.runtime.base import Runtime
from routing_lab.schedule import Schedule

__all__ = [
    "CountRounds",
    "Ended",
    "MeasureSettings",
    "SpeedRatio",
    "fewest_rounds",
    "measure_many",
    "measure_prefill",
    "measure_rates",
    "measure_ratio",
]

CountRounds = Callable[[int, int], None]
"""Called before every round that counts with its number and how many there may be at most."""


class Ended(StrEnum):
    """Why a measurement ended."""

    ROUNDS = "rounds"
    """There were no more."""
    NARROW = "narrow"
    """The interval was as narrow as asked."""
    BEATEN = "beaten"
    """A rival was surely faster."""


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """How much is decoded: per schedule ``rounds`` times ``tokens`` tokens that count, and the warm-up that does not.

    ``prompt_tokens`` are processed before each stretch and never timed: they are the depth at which it begins.
    ``confidence`` is that of the interval. ``most_rounds`` (``None``: no more than ``rounds``) bounds what is added
    while the interval reaches further than ``half_width`` to either side of the ratio, as a share of it (``None``: no
    width is narrow enough).
    """

    tokens: int = 32
    rounds: int = 24
    warmup_rounds: int = 2
    prompt_tokens: int = 16
    confidence: float = 0.95
    most_rounds: int | None = None
    half_width: float | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.prompt_tokens < 1 or self.warmup_rounds < 0:
            raise ValueError(f"tokens and prompt_tokens must be positive and warmup_rounds not negative: {self}")
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence must be between 0 and 1, got {self.confidence}")
        if self.rounds < (needed := fewest_rounds(self.confidence)):
            raise ValueError(
                f"{self.rounds} rounds cannot give a {_percent(self.confidence)} interval; it takes at least {needed}"
            )
        if self.most_rounds is not None and self.most_rounds < self.rounds:
            raise ValueError(f"most_rounds ({self.most_rounds}) must be at least rounds ({self.rounds})")
        if self.half_width is not None and not self.half_width > 0:
            raise ValueError(f"half_width must be positive, got {self.half_width}")

    @property
    def confidence_of_a_look(self) -> float:
        """Confidence of the interval at each look."""
        doublings = math.log2((self.most_rounds or self.rounds) / self.rounds)
        return 1 - (1 - self.confidence) / (1 + math.ceil(doublings))

    @property
    def looks(self) -> tuple[int, ...]:
        """After how many counted rounds it is asked whether to go on, each twice the one before; the last ends it."""
        look = max(self.rounds, fewest_rounds(self.confidence_of_a_look))
        most = max(look, self.most_rounds or self.rounds)
        looks = []
        while look < most:
            looks.append(look)
            look *= 2
        return (*looks, most)


@dataclass(frozen=True, slots=True)
class SpeedRatio:
    """Decode rate of a candidate over that of a baseline, from rounds in which both took part.

    ``low <= ratio <= high``; the interval has at least the stated ``confidence`` (more than the settings ask for where
    a measurement looks several times). The rates are tokens per second, one per counted round and in the same order on
    both sides. The medians are for reading; the ratio does not rest on them.
    ``ended`` says why there were no more rounds.
    """

    ratio: float
    low: float
    high: float
    confidence: float
    candidate_rates: tuple[float, ...]
    baseline_rates: tuple[float, ...]
    ended: Ended = Ended.ROUNDS

    @classmethod
    def from_rates(
        cls,
        candidate: Sequence[float],
        baseline: Sequence[float],
        confidence: float = 0.95,
        ended: Ended = Ended.ROUNDS,
    ) -> SpeedRatio:
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
            ended=ended,
        )

    def warnings(self) -> tuple[str, ...]:
        """What the baseline's rates say about the machine while this was measured; empty where it was quiet."""
        return tuple(filter(None, (_trend(self.baseline_rates), _stalls(self.baseline_rates))))

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
            "ended": self.ended,
            "candidate_rates": list(self.candidate_rates),
            "baseline_rates": list(self.baseline_rates),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SpeedRatio:
        """Inverse of ``to_dict``; ratio and interval are computed anew, so that they always belong to the rates."""
        ended = Ended(data["ended"])
        return cls.from_rates(data["candidate_rates"], data["baseline_rates"], data["confidence"], ended)

    @property
    def half_width(self) -> float:
        """How far the interval reaches to its longer side, as a share of the ratio."""
        return max(self.high / self.ratio - 1, 1 - self.low / self.ratio)


def measure_ratio(
    runtime: Runtime,
    candidate: Schedule,
    baseline: Schedule,
    settings: MeasureSettings | None = None,
    *,
    rival: float | None = None,
    on_round: CountRounds | None = None,
) -> SpeedRatio:
    """Decode rate of ``candidate`` over that of ``baseline``, interleaved; see the head of this module.

    ``rival`` is a ratio to beat: a candidate that is surely below it is not measured any further.

    Raises:
        RuntimeFailureError: The model's process died, or its clock gave a time that is none.
        AttestationError: The runtime did not switch to a schedule.
    """
    return measure_many(runtime, [candidate], baseline, settings, rival=rival, on_round=on_round)[0]


def measure_many(
    runtime: Runtime,
    candidates: Sequence[Schedule],
    baseline: Schedule,
    settings: MeasureSettings | None = None,
    *,
    rival: float | None = None,
    racers: Collection[int] = (),
    on_round: CountRounds | None = None,
) -> list[SpeedRatio]:
    """The ratio of each candidate, in common rounds, so that the baseline is decoded once for all of them.

    Candidates that are done drop out; the others go on with the baseline. ``racers`` are places in ``candidates``: who
    is surely slower than one of them is done.

    Raises:
        RuntimeFailureError: As ``measure_ratio``.
        AttestationError: As ``measure_ratio``.
    """
    settings = settings or MeasureSettings()
    turns = _Turns(runtime, [baseline, *candidates], settings)
    turns.play(settings.warmup_rounds, range(len(candidates) + 1))
    turns.forget()
    turns.count(on_round, settings.looks[-1])
    done: dict[int, SpeedRatio] = {}
    for look in settings.looks:
        left = [which for which in range(len(candidates)) if which not in done]
        turns.play(look - len(turns.rates[0]), [0, *(which + 1 for which in left)])
        own = turns.rates[0]
        now = {
            which: SpeedRatio.from_rates(turns.rates[which + 1], own, settings.confidence_of_a_look) for which in left
        }
        lows = [one.low for which, one in (done | now).items() if which in racers]
        to_reach = max(lows if rival is None else [rival, *lows], default=0.0)
        for which, measured in now.items():
            if (ended := _ended(measured, settings, look, to_reach)) is not None:
                done[which] = replace(measured, ended=ended)
        if len(done) == len(candidates):
            break
    return [done[which] for which in range(len(candidates))]


def _ended(now: SpeedRatio, settings: MeasureSettings, look: int, to_reach: float) -> Ended | None:
    """Why a candidate needs no more rounds; ``None`` where it does."""
    if now.high < to_reach:
        return Ended.BEATEN
    if settings.half_width is not None and now.half_width <= settings.half_width:
        return Ended.NARROW
    return Ended.ROUNDS if look == settings.looks[-1] else None


def measure_prefill(
    runtime: Runtime,
    candidates: Sequence[Schedule],
    baseline: Schedule,
    settings: MeasureSettings,
    prompt_tokens: int,
    *,
    on_round: CountRounds | None = None,
) -> list[SpeedRatio] | None:
    """The ratios of the rates at which prompts of ``prompt_tokens`` are processed; ``None`` where nothing tells them.

    Raises:
        RuntimeFailureError: As ``measure_ratio``.
        AttestationError: As ``measure_ratio``.
    """
    of_prompts = replace(settings, tokens=1, prompt_tokens=prompt_tokens)
    turns = _Turns(runtime, [baseline, *candidates], of_prompts, _prefill_rate)
    everyone = range(len(candidates) + 1)
    turns.play(settings.warmup_rounds, everyone)
    turns.forget()
    turns.count(on_round, settings.rounds)
    turns.play(settings.rounds, everyone)
    if any(math.isnan(rate) for rates in turns.rates for rate in rates):
        return None
    return [SpeedRatio.from_rates(rates, turns.rates[0], settings.confidence) for rates in turns.rates[1:]]


def measure_rates(
    runtime: Runtime, schedules: Sequence[Schedule], settings: MeasureSettings, *, on_round: CountRounds | None = None
) -> list[tuple[float, ...]]:
    """Decode rates in tokens per second: per schedule one for each of the ``rounds`` that count.

    Raises:
        RuntimeFailureError: As ``measure_ratio``.
        AttestationError: As ``measure_ratio``.
    """
    turns = _Turns(runtime, schedules, settings)
    everyone = range(len(schedules))
    turns.play(settings.warmup_rounds, everyone)
    turns.forget()
    turns.count(on_round, settings.rounds)
    turns.play(settings.rounds, everyone)
    return [tuple(rates) for rates in turns.rates]


class _Turns:
    """Schedules that take turns, and the rates of each round."""

    def __init__(
        self,
        runtime: Runtime,
        schedules: Sequence[Schedule],
        settings: MeasureSettings,
        rate: Callable[[Runtime, MeasureSettings], float] | None = None,
    ) -> None:
        self._runtime, self._schedules, self._settings = runtime, schedules, settings
        self._rate = rate or _decode_rate
        self._applied: int | None = None
        self._backwards = False
        self._tell: Callable[[int], None] = lambda _number: None
        self.rates: list[list[float]] = [[] for _ in schedules]

    def forget(self) -> None:
        """Throw away what was measured so far."""
        self.rates = [[] for _ in self._schedules]

    def count(self, on_round: CountRounds | None, most: int) -> None:
        """From now on say the number of every round, of at most so many."""
        if on_round is not None:
            self._tell = lambda number: on_round(number, most)

    def play(self, rounds: int, which: Sequence[int]) -> None:
        """Let these schedules decode for some rounds, every other one in reverse order."""
        for _ in range(rounds):
            self._tell(len(self.rates[0]) + 1)
            for turn in reversed(which) if self._backwards else which:
                # Even two equal schedules are switched between: then a comparison of a schedule with itself costs and
                # risks what any other does.
                if turn != self._applied:
                    self._runtime.apply(self._schedules[turn])
                    self._applied = turn
                self.rates[turn].append(self._rate(self._runtime, self._settings))
            self._backwards = not self._backwards


def _decode_rate(runtime: Runtime, settings: MeasureSettings) -> float:
    timing = runtime.decode_timing(tokens=settings.tokens, prompt_tokens=settings.prompt_tokens)
    if not (timing.seconds > 0 and _is_rate(timing.tokens_per_s)):
        raise RuntimeFailureError(f"{timing.tokens} tokens in {timing.seconds} seconds is no decode rate")
    return timing.tokens_per_s


def _prefill_rate(runtime: Runtime, settings: MeasureSettings) -> float:
    """Rate of the prompt in front of a decode; NaN where the runtime does not tell its time."""
    timing = runtime.decode_timing(tokens=settings.tokens, prompt_tokens=settings.prompt_tokens)
    if timing.prompt_seconds is None:
        return math.nan
    if not timing.prompt_seconds > 0:
        raise RuntimeFailureError(
            f"{settings.prompt_tokens} prompt tokens in {timing.prompt_seconds} seconds is no rate"
        )
    return settings.prompt_tokens / timing.prompt_seconds


def _is_rate(value: float) -> bool:
    return math.isfinite(value) and value > 0


# ---------------------------------------------------------------------------------------------------------------------
# A machine that is not quiet

_TREND_P = 0.01
_TREND_SHARE = 0.03  # a trend that is sure but this small is nobody's trouble
_STALL_SHARE = 0.8


def _trend(rates: Sequence[float]) -> str | None:
    """A steady change of the rate over the rounds: Theil-Sen's slope where Kendall's tau is sure of its sign."""
    from scipy import stats

    rounds = range(len(rates))
    if len(set(rates)) == 1 or stats.kendalltau(rounds, rates).pvalue >= _TREND_P:
        return None
    change = stats.theilslopes(rates, rounds).slope * (len(rates) - 1) / statistics.median(rates)
    if abs(change) < _TREND_SHARE:
        return None
    return (
        f"the baseline became {100 * abs(change):.0f} % {'faster' if change > 0 else 'slower'} over {len(rates)} rounds"
    )


def _stalls(rates: Sequence[float]) -> str | None:
    """Rounds in which something else had the machine: far below the median, where the others are not."""
    usual = statistics.median(rates)
    stalled = [number for number, rate in enumerate(rates, 1) if rate < _STALL_SHARE * usual]
    if not stalled:
        return None
    lowest = min(rates) / usual
    named = ", ".join(map(str, stalled[:5])) + (" ..." if len(stalled) > 5 else "")  # noqa: PLR2004 - enough to see
    slowest = f"down to {100 * lowest:.0f} % of the usual rate"
    return f"{len(stalled)} of {len(rates)} rounds were disturbed (round {named}; {slowest})"


# ---------------------------------------------------------------------------------------------------------------------
# Centre and interval of a few noisy numbers


def _percent(confidence: float) -> str:
    """A confidence for a message, with all of its digits that count."""
    return f"{100 * confidence:.6g} %"


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


@functools.cache
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
        raise ValueError(f"{n} rounds cannot give a {_percent(confidence)} interval")
    return k - 1
