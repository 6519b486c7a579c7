from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing_lab.errors import RuntimeFailureError
from routing_lab.measure import (
    MeasureSettings,
    SpeedRatio,
    fewest_rounds,
    measure_many,
    measure_prefill,
    measure_rates,
    measure_ratio,
)
from routing_lab.runtime.base import DecodeTiming

RATES = st.lists(st.floats(1.0, 1000.0), min_size=6, max_size=14)


@dataclass
class Clockwork:
    """A runtime that only decodes: seconds per token as a function of (schedule, number of stretches so far)."""

    seconds_per_token: Any
    applied: list[str] = field(default_factory=list)
    stretches: list[str] = field(default_factory=list)

    def apply(self, schedule: Any) -> None:
        self.applied.append(schedule)

    def decode_timing(self, *, tokens: int, prompt_tokens: int = 16) -> DecodeTiming:
        self.stretches.append(self.applied[-1])
        each = self.seconds_per_token(self.applied[-1], len(self.stretches) - 1)
        return DecodeTiming(tokens, tokens * each, prompt_tokens * each / 10)


def settings(**changes: Any) -> MeasureSettings:
    return MeasureSettings(**{"rounds": 6, "tokens": 10, **changes})


# --- order -----------------------------------------------------------------------------------------------------------


def test_two_schedules_take_turns_in_the_order_abba() -> None:
    runtime = Clockwork(lambda _schedule, _i: 0.01)
    measure_rates(runtime, ["a", "b"], settings(rounds=6, warmup_rounds=0))
    assert "".join(runtime.stretches) == "abbaabbaabba"


def test_several_candidates_share_the_baseline_rounds_and_the_order_turns_around() -> None:
    runtime = Clockwork(lambda _schedule, _i: 0.01)
    measure_rates(runtime, ["a", "b", "c"], settings(rounds=6, warmup_rounds=0))
    assert "".join(runtime.stretches) == "abccbaabccbaabccba"


def test_a_schedule_that_is_already_applied_is_not_applied_again() -> None:
    runtime = Clockwork(lambda _schedule, _i: 0.01)
    measure_rates(runtime, ["a", "b"], settings(rounds=6, warmup_rounds=0))
    assert len(runtime.applied) == 7


def test_a_schedule_measured_against_itself_is_switched_like_any_other() -> None:
    runtime = Clockwork(lambda _schedule, _i: 0.01)
    measure_rates(runtime, ["a", "a"], settings(rounds=6, warmup_rounds=0))
    assert len(runtime.applied) == 7


def test_exactly_the_first_rounds_are_discarded() -> None:
    runtime = Clockwork(lambda _schedule, i: 100.0 if i < 4 else 0.01)
    candidate, baseline = measure_rates(runtime, ["a", "b"], settings(warmup_rounds=2))
    assert len(candidate) == len(baseline) == 6
    assert max(candidate + baseline) == min(candidate + baseline) == pytest.approx(100.0)


# --- the ratio -------------------------------------------------------------------------------------------------------


def test_without_noise_the_ratio_is_exact() -> None:
    runtime = Clockwork(lambda schedule, _i: {"fast": 0.008, "base": 0.010}[schedule])
    ratio = measure_ratio(runtime, "fast", "base", settings())
    assert (ratio.low, ratio.ratio, ratio.high) == pytest.approx((1.25, 1.25, 1.25))
    assert ratio.candidate_tokens_per_s == pytest.approx(125)
    assert ratio.baseline_tokens_per_s == pytest.approx(100)
    assert ratio.rounds == 6


def test_a_machine_that_slows_down_steadily_favours_nobody() -> None:
    runtime = Clockwork(lambda _schedule, i: 0.01 * 1.05**i)
    ratio = measure_ratio(runtime, "a", "b", settings(rounds=8))
    assert ratio.ratio == pytest.approx(1.0)
    assert ratio.low < 1.0 < ratio.high


def test_candidates_measured_together_get_the_ratios_they_get_alone() -> None:
    runtime = Clockwork(lambda schedule, _i: {"a": 0.01, "b": 0.008, "c": 0.005}[schedule])
    together = measure_many(runtime, ["b", "c"], "a", settings())
    assert [ratio.ratio for ratio in together] == pytest.approx([1.25, 2.0])


@pytest.mark.parametrize("rounds", [12, 13, 20, 40])
def test_from_twelve_rounds_on_one_spoiled_round_reaches_no_end_of_the_interval(rounds: int) -> None:
    quiet = [100.0 * (1 + 0.001 * i) for i in range(rounds)]
    spoiled = [0.001, *quiet[1:]]
    for candidate, baseline in [(spoiled, quiet), (quiet, spoiled)]:
        ratio = SpeedRatio.from_rates(candidate, baseline)
        assert 0.99 < ratio.low <= ratio.ratio <= ratio.high < 1.01


@given(RATES, st.randoms())
def test_the_interval_holds_the_estimate_and_swapping_sides_inverts_it(rates: list[float], rng: random.Random) -> None:
    other = [rate * rng.uniform(0.5, 2.0) for rate in rates]
    ratio, inverse = SpeedRatio.from_rates(rates, other), SpeedRatio.from_rates(other, rates)
    assert ratio.low <= ratio.ratio <= ratio.high
    assert ratio.ratio == pytest.approx(1 / inverse.ratio)
    assert (ratio.low, ratio.high) == pytest.approx((1 / inverse.high, 1 / inverse.low))


@given(RATES)
def test_a_ratio_survives_its_dictionary(rates: list[float]) -> None:
    ratio = SpeedRatio.from_rates(rates, list(reversed(rates)))
    assert SpeedRatio.from_dict(ratio.to_dict()) == ratio


def test_the_interval_is_the_one_scipy_inverts_the_signed_rank_test_to() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    rng = random.Random(5)
    logs = [rng.gauss(0.1, 0.05) for _ in range(11)]
    ratio = SpeedRatio.from_rates([math.exp(x) for x in logs], [1.0] * 11)
    for end, inside in [(ratio.low, 1 + 1e-9), (ratio.high, 1 - 1e-9)]:
        just_inside = [x - math.log(end * inside) for x in logs]
        just_outside = [x - math.log(end / inside) for x in logs]
        assert scipy_stats.wilcoxon(just_inside, method="exact").pvalue > 0.05
        assert scipy_stats.wilcoxon(just_outside, method="exact").pvalue <= 0.05


@pytest.mark.parametrize("rounds", [6, 8, 10])
def test_equal_schedules_are_told_apart_in_at_most_five_percent_of_runs(rounds: int) -> None:
    """By counting, not by chance: under every assignment of signs to the same noise sizes."""
    sizes = [0.01 * 1.3**i for i in range(rounds)]
    signs = list(itertools.product([1, -1], repeat=rounds))
    ones = [1.0] * rounds
    found = 0
    for assignment in signs:
        rates = [math.exp(sign * size) for sign, size in zip(assignment, sizes, strict=True)]
        ratio = SpeedRatio.from_rates(rates, ones)
        found += not ratio.low <= 1.0 <= ratio.high
    assert found / len(signs) <= 0.05


def test_a_three_percent_difference_is_found_in_noise_of_two_percent() -> None:
    rng = random.Random(11)
    found = 0
    for _ in range(200):
        rates = [[speed * math.exp(rng.gauss(0, 0.02)) for _ in range(20)] for speed in (1.03, 1.0)]
        found += SpeedRatio.from_rates(*rates).low > 1.0
    assert found >= 180


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_refused_and_never_a_rate(seconds: float) -> None:
    with pytest.raises(RuntimeFailureError, match="no decode rate"):
        measure_ratio(Clockwork(lambda _schedule, _i: seconds), "a", "b", settings())


@pytest.mark.parametrize("rate", [0.0, -3.0, math.nan, math.inf])
def test_a_rate_that_is_not_finite_and_positive_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="finite and positive"):
        SpeedRatio.from_rates([1.0] * 5 + [rate], [1.0] * 6)


def test_series_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="pair up"):
        SpeedRatio.from_rates([1.0] * 6, [1.0] * 7)


@pytest.mark.parametrize(("confidence", "rounds"), [(0.5, 2), (0.9, 5), (0.95, 6), (0.99, 8)])
def test_too_few_rounds_for_the_confidence_are_refused(confidence: float, rounds: int) -> None:
    assert fewest_rounds(confidence) == rounds
    MeasureSettings(rounds=rounds, confidence=confidence)
    with pytest.raises(ValueError, match=f"at least {rounds}"):
        MeasureSettings(rounds=rounds - 1, confidence=confidence)
    with pytest.raises(ValueError, match="cannot give"):
        SpeedRatio.from_rates([1.0] * (rounds - 1), [1.0] * (rounds - 1), confidence)


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"prompt_tokens": 0}, {"warmup_rounds": -1}, {"confidence": 1.0}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        settings(**wrong)


def test_the_medians_are_of_the_counted_rounds() -> None:
    ratio = SpeedRatio.from_rates([1, 2, 3, 4, 5, 6], [2, 2, 2, 2, 2, 2])
    assert ratio.candidate_tokens_per_s == statistics.median([1, 2, 3, 4, 5, 6])


# --- when to stop ----------------------------------------------------------------------------------------------------


def noisy(means: dict[str, float], spread: float, seed: int = 0) -> Clockwork:
    dice = random.Random(seed)
    return Clockwork(lambda schedule, _i: means[schedule] * math.exp(dice.gauss(0, spread)))


def test_rounds_are_added_until_the_interval_is_narrow_enough() -> None:
    adaptive = settings(most_rounds=60, half_width=0.01)
    quiet = measure_ratio(noisy({"a": 0.01, "b": 0.01}, 0.001), "a", "b", adaptive)
    loud = measure_ratio(noisy({"a": 0.01, "b": 0.01}, 0.012), "a", "b", adaptive)
    assert (quiet.rounds, quiet.ended) == (adaptive.looks[0], "narrow")
    assert loud.ended == "narrow"
    assert quiet.rounds < loud.rounds <= 60
    assert max(quiet.half_width, loud.half_width) <= 0.01


def test_to_stop_where_it_looks_narrow_does_not_find_what_is_not_there() -> None:
    adaptive = settings(most_rounds=24, half_width=0.015)
    measured = [measure_ratio(noisy({"a": 1, "b": 1}, 0.012, seed), "a", "b", adaptive) for seed in range(400)]
    assert {one.ended for one in measured} == {"narrow", "rounds"}
    assert sum(not one.low <= 1 <= one.high for one in measured) <= 0.05 * 400 + 13  # and three standard deviations


def test_the_budget_ends_what_never_becomes_narrow() -> None:
    measured = measure_ratio(noisy({"a": 0.01, "b": 0.01}, 0.2), "a", "b", settings(most_rounds=15, half_width=0.001))
    assert (measured.rounds, measured.ended) == (15, "rounds")


def test_a_sure_loser_costs_only_the_first_rounds_and_a_winner_is_measured_on() -> None:
    adaptive = settings(most_rounds=24, half_width=0.0001)
    runtime = noisy({"slow": 0.012, "fast": 0.008, "base": 0.010}, 0.005)
    slow, fast = measure_many(runtime, ["slow", "fast"], "base", adaptive, rival=1.1)
    assert (slow.rounds, slow.ended) == (adaptive.looks[0], "beaten")
    assert (fast.rounds, fast.ended) == (24, "rounds")


def test_in_a_race_the_losers_cost_the_first_rounds_and_only_racers_set_the_pace() -> None:
    adaptive = settings(most_rounds=24, half_width=0.0001)
    times = {"slow": 0.012, "good": 0.009, "wrong": 0.006, "base": 0.010}
    slow, good, wrong = measure_many(noisy(times, 0.005), ["slow", "good", "wrong"], "base", adaptive, racers=[0, 1])
    assert (slow.rounds, slow.ended) == (adaptive.looks[0], "beaten")
    assert (good.rounds, good.ended) == (24, "rounds"), "what fails the gate is no rival, however fast"
    assert (wrong.rounds, wrong.ended) == (24, "rounds")


def test_the_best_of_a_race_is_rarely_given_up() -> None:
    adaptive = settings(most_rounds=24, half_width=0.0001)
    times = {"best": 0.0097, "next": 0.01, "base": 0.01}
    races = [
        measure_many(noisy(times, 0.02, seed), ["best", "next"], "base", adaptive, racers=[0, 1]) for seed in range(200)
    ]
    assert sum(best.ended == "beaten" for best, _ in races) <= 0.05 * 200 + 8


def test_an_equal_of_the_rival_is_rarely_given_up() -> None:
    adaptive = settings(most_rounds=24, half_width=0.0001)
    beaten = sum(
        measure_ratio(noisy({"a": 0.01, "b": 0.01}, 0.02, seed), "a", "b", adaptive, rival=1.0).ended == "beaten"
        for seed in range(200)
    )
    assert beaten <= 0.05 * 200 + 8  # 5 % and three standard deviations of a count of 200


def test_why_a_measurement_ended_survives_the_storage() -> None:
    measured = measure_ratio(noisy({"a": 0.01, "b": 0.01}, 0.001), "a", "b", settings(most_rounds=24, half_width=0.01))
    assert SpeedRatio.from_dict(measured.to_dict()) == measured
    with pytest.raises(ValueError, match="Ended"):
        SpeedRatio.from_dict(measured.to_dict() | {"ended": "why not"})


@pytest.mark.parametrize("bad", [{"most_rounds": 5}, {"half_width": 0.0}, {"half_width": math.nan}])
def test_settings_that_could_not_end_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        settings(**bad)


# --- prompts, and a machine that is not quiet ------------------------------------------------------------------------


def test_prefill_is_a_ratio_of_its_own() -> None:
    runtime = Clockwork(lambda schedule, _i: {"a": 0.01, "b": 0.02}[schedule])
    (measured,) = measure_prefill(runtime, ["a"], "b", settings(), 128)
    assert measured.ratio == pytest.approx(2)
    assert measured.baseline_tokens_per_s == pytest.approx(500)


def test_a_runtime_that_does_not_time_prompts_has_no_prefill_ratio() -> None:
    class Silent(Clockwork):
        def decode_timing(self, **request: int) -> DecodeTiming:
            timing = super().decode_timing(**request)
            return DecodeTiming(timing.tokens, timing.seconds)

    assert measure_prefill(Silent(lambda *_: 0.01), ["a"], "b", settings(), 128) is None


def test_a_machine_that_throttles_is_reported() -> None:
    runtime = Clockwork(lambda _schedule, i: 0.01 * (1 + 0.01 * i))
    (warning,) = measure_ratio(runtime, "a", "b", settings(rounds=12)).warnings()
    assert "slower" in warning


def test_disturbed_rounds_are_named() -> None:
    runtime = Clockwork(
        lambda _schedule, i: 0.03 if i == 8 else 0.01
    )  # the baseline's turn of round 3, after two of warm-up
    (warning,) = measure_ratio(runtime, "a", "b", settings(rounds=8)).warnings()
    assert "1 of 8 rounds" in warning
    assert "round 3" in warning


def test_a_quiet_machine_is_not_complained_about() -> None:
    assert (
        sum(
            bool(measure_ratio(noisy({"a": 1, "b": 1}, 0.02, s), "a", "b", settings(rounds=12)).warnings())
            for s in range(100)
        )
        <= 4
    )
