"""What a study sums up as it goes is what counting everything anew would give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from fakelab import make_facts, make_space, schedule
from hypothesis import given
from hypothesis import strategies as st

from routing_lab.answers import Status
from routing_lab.gate import Result, decide
from routing_lab.measure import Ended, SpeedRatio
from routing_lab.probes import Outcome
from routing_lab.search import Ending, Seconds, StudySettings, TrialRecord
from routing_lab.search.dimensions import Dimensions
from routing_lab.search.history import History

with TemporaryDirectory() as _folder:
    FACTS = make_facts(Path(_folder))
DIMENSIONS = Dimensions(make_space((2, 4, 8)), FACTS)


def outcome(*, correct: bool) -> Outcome:
    return Outcome("p", Status.CORRECT if correct else Status.WRONG_ANSWER, None, None, "", 1, 1, 0.0, 0.0)


@st.composite
def records(draw: Any) -> TrialRecord:
    ratio = draw(st.sampled_from([0.9, 1.0, 1.1, 1.2, 1.3]))
    width = draw(st.sampled_from([0.0, 0.05, 0.2]))
    ended = draw(st.sampled_from([Ended.ROUNDS, Ended.BEATEN]))
    speed = SpeedRatio(ratio, ratio - width, ratio + width, 0.95, (ratio,) * 6, (1.0,) * 6, ended)
    gated = draw(st.booleans())
    timed = draw(st.booleans()) or not gated
    given = schedule(*(draw(st.sampled_from([2, 4, 8])) for _ in range(4)))
    return TrialRecord(
        number=0,
        ending=draw(st.sampled_from([Ending.EVALUATED, Ending.EVALUATED, Ending.EVALUATED, Ending.RUNTIME_ERROR])),
        schedule=given,
        key=given.key(FACTS),
        origin=draw(st.sampled_from(["schedule", "schedule", "uniform", "sensitivity"])),
        speed=speed if timed else None,
        verdict=decide([outcome(correct=draw(st.booleans()))] if gated else [], 1),
        gate_skipped=None if gated else "surely no faster than the baseline",
        outcomes=(),
        attested=None,
        seconds=Seconds(draw(st.sampled_from([0.5, 3.0])) if timed else 0.0, 1.0 if gated else 0.0),
        error=None,
    )


@given(st.lists(records(), max_size=25), st.sampled_from([None, 1, 2, 3]))
def test_what_is_summed_up_is_what_counting_anew_gives(trials: list[TrialRecord], enough: int | None) -> None:
    history = History(DIMENSIONS, StudySettings(runners_up=enough))
    for trial in trials:
        history.add(trial)
    results = [one for one in trials if one.ending is Ending.EVALUATED and not one.is_single_cut]
    accepted = [one for one in results if one.accepted and one.speed]
    assert history.evaluated == len(results)
    assert history.best == max(accepted, key=lambda one: one.speed.ratio if one.speed else 0, default=None)
    decided = [one.verdict.result for one in results if one.gate_skipped is None]
    assert history.pass_rate == (decided.count(Result.PASS) / len(decided) if decided else None)
    lows = sorted((one.speed.low for one in accepted if one.speed), reverse=True)
    assert history.rival() == (lows[enough - 1] if enough and len(lows) >= enough else None)
    assert history.gate_comes_first() == gate_first(history, results)


def gate_first(history: History, results: list[TrialRecord]) -> bool:
    measured = [one for one in results if one.seconds.speed]
    gated = [one for one in results if one.seconds.gate]
    if not (measured and gated):
        return False
    slow = sum(
        history.too_slow(one.speed) is not None or (one.speed is not None and one.speed.ended is Ended.BEATEN)
        for one in measured
    )
    failed = sum(one.verdict.result is Result.FAIL for one in gated)
    return sum(one.seconds.gate for one in gated) / (failed + 1) < sum(one.seconds.speed for one in measured) / (
        slow + 1
    )


def test_a_single_cut_that_passed_is_not_taken_and_one_that_failed_is() -> None:
    history = History(DIMENSIONS, StudySettings())
    base = TrialRecord(
        0, Ending.EVALUATED, schedule(2, 8, 8, 8), "", "sensitivity", None, decide([outcome(correct=True)], 1), None, (),
        None, Seconds(), None,
    )  # fmt: skip
    history.add(base)
    failed = replace(base, schedule=schedule(8, 2, 8, 8), verdict=decide([outcome(correct=False)], 1))
    history.add(failed)
    assert history.taken == {(2, 0, 2, 2)}
    assert history.cuts == {(0, 2, 2, 2): True, (2, 0, 2, 2): False}
    assert history.evaluated == 0


@pytest.mark.parametrize("order", ["speed", "gate"])
def test_an_order_that_was_asked_for_is_kept(order: Any) -> None:
    assert History(DIMENSIONS, StudySettings(order=order)).gate_comes_first() is (order == "gate")
