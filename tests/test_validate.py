from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakelab import NEEDS, answer_by, make_facts, make_probes, make_runtime, schedule, speed
from hypothesis import given
from hypothesis import strategies as st

from routing_lab.errors import NothingAcceptedError, RuntimeFailureError, UsageError, UserFileError
from routing_lab.gate import AcceptanceRule, Result
from routing_lab.measure import MeasureSettings
from routing_lab.model import ModelFacts
from routing_lab.schedule import Schedule
from routing_lab.validate import SpeedRule, ValidateSettings, Validation, ValidationProgress, best_of, validate

GOOD = schedule(4, 4, 2, 2, name="good")
FASTER_BUT_LOSES_A_HOLDOUT_PROBE = schedule(4, 2, 2, 2, name="loses-h1")
FASTEST_BUT_FAILS_THE_GATE = schedule(2, 2, 2, 2, name="fails-g2")
OWN = schedule(8, 8, 8, 8, name="own")


@pytest.fixture
def facts(tmp_path: Path) -> ModelFacts:
    return make_facts(tmp_path)


def run(facts: ModelFacts, *schedules: Schedule, runtime: Any = None, probes: Any = None, **changes: Any) -> Validation:
    settings = ValidateSettings(**{"measure": MeasureSettings(rounds=6, tokens=8), **changes})
    return validate(runtime or make_runtime(facts), probes or make_probes(), schedules, settings)


def test_the_fastest_schedule_that_survives_gets_the_certificate(facts: ModelFacts) -> None:
    certificate = run(
        facts, FASTEST_BUT_FAILS_THE_GATE, FASTER_BUT_LOSES_A_HOLDOUT_PROBE, GOOD, schedule(8, 8, 8, 4)
    ).require_certificate()
    assert certificate.schedule.name == "good"
    assert certificate.schedule.experts_used == "0-1:4,2-3:2"
    assert certificate.covers(GOOD, facts, certificate.model.digest)


@given(
    st.lists(
        st.tuples(st.floats(1.01, 2), st.floats(0.001, 0.2), st.integers(0, 240)), min_size=1, max_size=6, unique=True
    )
)
def test_the_certificate_goes_to_the_most_right_answers_among_the_surely_not_slower(
    results: list[tuple[float, float, int]],
) -> None:
    accepted = [
        SimpleNamespace(
            speed=SimpleNamespace(ratio=ratio, low=ratio - half, high=ratio + half),
            holdout=SimpleNamespace(candidate_correct=correct),
        )
        for ratio, half, correct in results
    ]
    best = best_of(accepted)  # type: ignore[arg-type]
    fastest = max(accepted, key=lambda one: one.speed.ratio)
    assert best.speed.high >= fastest.speed.low
    assert best.holdout.candidate_correct >= fastest.holdout.candidate_correct
    for other in accepted:
        if other.speed.high >= fastest.speed.low:
            assert other.holdout.candidate_correct <= best.holdout.candidate_correct


def test_every_schedule_is_reported_with_its_reasons(facts: ModelFacts) -> None:
    results = run(facts, FASTEST_BUT_FAILS_THE_GATE, FASTER_BUT_LOSES_A_HOLDOUT_PROBE, GOOD).results
    assert [result.acceptance.accepted for result in results] == [False, False, True]
    assert "g2" in results[0].acceptance.reasons[0]
    assert results[1].gate.result is Result.PASS
    assert results[1].holdout.lost == ("h1",)
    assert "holdout" in results[1].acceptance.reasons[0]


def test_when_none_survives_the_error_says_why_for_each(facts: ModelFacts) -> None:
    validation = run(facts, FASTEST_BUT_FAILS_THE_GATE, FASTER_BUT_LOSES_A_HOLDOUT_PROBE, OWN)
    assert validation.certificate is None
    with pytest.raises(NothingAcceptedError) as caught:
        validation.require_certificate()
    message = str(caught.value)
    assert "fails-g2: gate: fail" in message
    assert "loses-h1: holdout: accuracy 0.2500 below" in message
    assert "own: speed: 1.000 (1.000 to 1.000) is not surely above 1" in message


def test_a_speed_that_more_rounds_may_settle_says_so(facts: ModelFacts) -> None:
    noise = random.Random(0)
    wild = make_runtime(facts, speed=lambda counts: speed(counts) * noise.uniform(0.5, 1.5))
    unsure = run(facts, schedule(8, 8, 8, 7), runtime=wild).results[0]
    assert unsure.speed.low <= 1 < unsure.speed.high
    assert "more --rounds or a quieter machine" in unsure.acceptance.reasons[-1]
    assert "more --rounds" not in run(facts, OWN).results[0].acceptance.reasons[-1]


def test_the_whole_gate_and_holdout_are_asked_even_after_failures(facts: ModelFacts) -> None:
    result = run(facts, FASTEST_BUT_FAILS_THE_GATE).results[0]
    assert (result.gate.run, result.gate.total) == (4, 4)
    assert result.holdout.n == 4


def test_nothing_is_asked_twice_of_the_same_schedule(facts: ModelFacts) -> None:
    asked: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def answer(prompt: str, counts: Mapping[int, int]) -> str:
        asked[prompt, tuple(counts.values())] += 1
        return answer_by(NEEDS)(prompt, counts)

    run(facts, GOOD, schedule(3, 3, 3, 3), schedule(4, 2, 4, 2), runtime=make_runtime(facts, answer=answer))
    assert set(asked.values()) == {1}
    # Baseline, three candidates; all have the total 12, whose even spread is the second candidate.
    assert len(asked) == 4 * 8


def test_the_even_spread_of_the_same_total_is_measured_and_judged_beside_it(facts: ModelFacts) -> None:
    def uneven(counts: Mapping[int, int]) -> float:
        return 1000 / (8 + sum(counts.values()) + counts[0])

    certificate = run(facts, GOOD, runtime=make_runtime(facts, speed=uneven)).require_certificate()
    even = certificate.even_spread
    assert even is not None
    assert even.schedule.experts_used == "0-3:3"
    assert not even.accepted
    assert "g2" in run(facts, GOOD, runtime=make_runtime(facts, speed=uneven)).results[0].even_spread_reasons[0]
    assert even.gate.failures == ("g2",)
    counts = dict(enumerate([4, 4, 2, 2]))
    assert even.certified_over_even.ratio == pytest.approx(uneven(counts) / uneven(dict.fromkeys(range(4), 3)))
    assert even.speed.ratio == pytest.approx(uneven(dict.fromkeys(range(4), 3)) / uneven(dict.fromkeys(range(4), 8)))


def test_a_schedule_that_is_its_own_even_spread_is_not_compared_with_itself(facts: ModelFacts) -> None:
    assert run(facts, schedule(4, 4, 4, 4)).require_certificate().even_spread is None


def test_the_acceptance_rule_decides_on_the_holdout(facts: ModelFacts) -> None:
    lax = run(facts, FASTER_BUT_LOSES_A_HOLDOUT_PROBE, acceptance_rule=AcceptanceRule(margin=0.25))
    strict = run(facts, FASTER_BUT_LOSES_A_HOLDOUT_PROBE, acceptance_rule=AcceptanceRule(margin=0.25, strict=True))
    assert lax.certificate is not None
    assert lax.certificate.acceptance_rule.margin == 0.25
    assert strict.certificate is None


def test_the_speed_rule_looks_at_the_lower_end_of_the_interval(facts: ModelFacts) -> None:
    ratio = speed({0: 4, 1: 4, 2: 2, 3: 2}) / speed(dict.fromkeys(range(4), 8))
    assert run(facts, GOOD, speed_rule=SpeedRule(ratio - 0.001)).certificate is not None
    assert run(facts, GOOD, speed_rule=SpeedRule(ratio + 0.001)).certificate is None


def failing_on(times: set[int]) -> Callable[[str, Mapping[int, int]], bool]:
    """Lose the process on these requests for an answer of ``GOOD``, counted from 1."""
    counts = dict(enumerate([4, 4, 2, 2]))
    asked = 0

    def fail(request: str, given: Mapping[int, int]) -> bool:
        nonlocal asked
        mine = request == "generate" and dict(given) == counts
        asked += mine
        return mine and asked in times

    return fail


def test_a_probe_on_which_the_process_is_lost_twice_is_no_acceptance(facts: ModelFacts) -> None:
    probes = make_probes()
    validation = run(facts, GOOD, runtime=make_runtime(facts, fail=failing_on({6, 1 + len(probes.items)})))
    assert validation.certificate is None
    assert "the runtime failed on h1" in validation.results[0].acceptance.reasons[0]


def test_a_probe_on_which_the_process_is_lost_once_is_asked_again(facts: ModelFacts) -> None:
    (result,) = run(facts, GOOD, runtime=make_runtime(facts, fail=failing_on({3, 6}))).results
    assert result.acceptance.accepted
    assert all(outcome.correct for outcome in (*result.gate_outcomes, *result.holdout_outcomes))


def test_a_holdout_that_was_given_up_is_no_acceptance(facts: ModelFacts) -> None:
    counts = dict(enumerate([4, 4, 2, 2]))
    asked = 0

    def fail(request: str, given: Mapping[int, int]) -> bool:
        nonlocal asked
        asked += request == "generate" and dict(given) == counts
        return request == "generate" and dict(given) == counts and asked > 4

    validation = run(facts, GOOD, runtime=make_runtime(facts, fail=fail), probes=make_probes(holdout=9))
    assert validation.certificate is None
    assert "holdout: undecided" in validation.results[0].acceptance.reasons[0]


def test_a_process_lost_once_while_speed_is_measured_costs_only_that_measurement(facts: ModelFacts) -> None:
    lost: list[str] = []

    def once(request: str, _counts: object) -> bool:
        if request != "decode_timing" or lost:
            return False
        lost.append(request)
        return True

    said: list[str] = []
    settings = ValidateSettings()
    whole = validate(make_runtime(facts, needs={}), make_probes(), [schedule(4, 4, 4, 4)], settings)
    mended = validate(
        make_runtime(facts, needs={}, fail=once),
        make_probes(),
        [schedule(4, 4, 4, 4)],
        settings,
        on_progress=lambda now: said.append(now.doing),
    )
    assert lost
    assert "measuring given again (the model's process was lost), round 1 of 24" in said
    assert mended.results == whole.results


def test_a_process_lost_while_speed_is_measured_is_an_error(facts: ModelFacts) -> None:
    runtime = make_runtime(facts, fail=lambda request, _counts: request == "decode_timing")
    with pytest.raises(RuntimeFailureError):
        run(facts, GOOD, runtime=runtime)


@pytest.mark.parametrize("missing", ["gate", "holdout"])
def test_both_splits_are_needed(facts: ModelFacts, missing: str) -> None:
    with pytest.raises(UsageError, match=f"no {missing} probes"):
        run(facts, GOOD, probes=make_probes(**{missing: 0}))


def test_no_schedule_at_all_is_refused(facts: ModelFacts) -> None:
    with pytest.raises(UsageError, match="no schedule"):
        run(facts)


def test_a_schedule_that_does_not_fit_is_refused_before_anything_runs(facts: ModelFacts) -> None:
    runtime = make_runtime(facts, fail=lambda _request, _counts: True)
    with pytest.raises(UserFileError):
        run(facts, schedule(1, 2, 3, 99), runtime=runtime)


def test_progress_counts_every_probe_to_the_end(facts: ModelFacts) -> None:
    seen: list[ValidationProgress] = []
    settings = ValidateSettings(measure=MeasureSettings(rounds=6, tokens=8))
    validate(make_runtime(facts), make_probes(), [GOOD], settings, on_progress=seen.append)
    assert [progress.done for progress in seen if "measuring" not in progress.doing] == list(range(1, 25))
    assert {progress.total for progress in seen} == {24}
