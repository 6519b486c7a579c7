from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fakelab import schedule
from hypothesis import given
from hypothesis import strategies as st

from routing_lab.answers import Status
from routing_lab.gate import decide
from routing_lab.measure import SpeedRatio
from routing_lab.probes import Outcome
from routing_lab.search import BaselineRecord, Ending, Seconds, StudyRecord, TrialRecord, candidates

RATES = st.lists(st.floats(1, 1e4), min_size=6, max_size=8)
# Six places are what a record keeps of a duration.
SECONDS = st.integers(0, 10**9).map(lambda microseconds: round(microseconds / 1e6, 6))


@st.composite
def outcomes(draw: Any, probe: str) -> Outcome:
    status = draw(st.sampled_from(Status))
    correct = status is Status.CORRECT
    return Outcome(
        probe=probe,
        status=status,
        reason=draw(st.none() | st.text(min_size=1, max_size=10)),
        extracted=None if correct else draw(st.none() | st.text(min_size=1, max_size=10)),
        text="" if correct else draw(st.text(max_size=50)),
        prompt_tokens=draw(st.integers(0, 5000)),
        tokens=draw(st.integers(0, 5000)),
        seconds=draw(SECONDS),
        llama_seconds=draw(SECONDS),
        smallest_margin=draw(st.none() | st.floats(0, 50)),
    )


@st.composite
def records(draw: Any) -> TrialRecord:
    run = [draw(outcomes(f"p{i}")) for i in range(draw(st.integers(0, 4)))]
    rates = draw(RATES)
    counts = draw(st.lists(st.integers(1, 16), min_size=1, max_size=6))
    given_schedule = schedule(*counts, name="study-3")
    return TrialRecord(
        number=draw(st.integers(0, 100)),
        ending=draw(st.sampled_from(Ending)),
        schedule=given_schedule,
        key=",".join(
            f"{first}:{count}" if first == last else f"{first}-{last}:{count}"
            for first, last, count in given_schedule.ranges()
        ),
        origin="tpe",
        speed=draw(st.none() | st.just(SpeedRatio.from_rates(rates, rates[::-1]))),
        verdict=decide(run, 4),
        gate_skipped=draw(st.none() | st.just("surely no faster than the baseline")),
        outcomes=tuple(run),
        attested=draw(st.none() | st.just("0:3")),
        seconds=Seconds(draw(SECONDS), draw(SECONDS)),
        error=draw(st.none() | st.text(max_size=20)),
    )


@given(records())
def test_a_trial_survives_the_storage(record: TrialRecord) -> None:
    stored = json.loads(json.dumps(record.to_dict(), allow_nan=False))
    assert TrialRecord.from_dict(record.number, stored) == record


@given(st.lists(outcomes("p0"), min_size=1, max_size=1), RATES)
def test_a_baseline_survives_the_storage(run: list[Outcome], rates: list[float]) -> None:
    record = BaselineRecord("0-3:8", SpeedRatio.from_rates(rates, rates), decide(run, 1), tuple(run))
    assert BaselineRecord.from_dict(json.loads(json.dumps(record.to_dict(), allow_nan=False))) == record


def test_of_a_wrong_answer_the_end_of_the_text_is_kept_and_of_a_correct_one_nothing() -> None:
    wrong = Outcome("w", Status.WRONG_ANSWER, None, "3", "x" * 1000 + "end", 1, 1, 0.0, 0.0)
    right = replace(wrong, probe="r", status=Status.CORRECT)
    record = TrialRecord.from_dict(0, json.loads(json.dumps(a_trial(run=[wrong, right], total=2).to_dict())))
    assert record.outcomes[0].text.endswith("xend")
    assert len(record.outcomes[0].text) == 400
    assert (record.outcomes[1].text, record.outcomes[1].extracted) == ("", None)


def test_the_record_of_a_passing_gate_of_two_hundred_probes_stays_small() -> None:
    run = [
        Outcome(f"addition-{i:03}", Status.CORRECT, None, "433", "some text", 12, 40, 0.0412345, 0.0401234)
        for i in range(200)
    ]
    assert len(json.dumps(a_trial(run=run, total=200).to_dict())) < 14_000


def a_trial(
    *, number: int = 0, ratio: float = 1.2, run: list[Outcome] | None = None, total: int = 1, **changes: Any
) -> TrialRecord:
    run = [Outcome("p", Status.CORRECT, None, None, "", 1, 1, 0.0, 0.0)] if run is None else run
    record = TrialRecord(
        number=number,
        ending=Ending.EVALUATED,
        schedule=schedule(4, 4),
        key="0-1:4",
        origin="tpe",
        speed=SpeedRatio.from_rates([ratio * 100] * 6, [100.0] * 6),
        verdict=decide(run, total),
        gate_skipped=None,
        outcomes=tuple(run),
        attested="0-1:4",
        seconds=Seconds(),
        error=None,
    )
    return replace(record, **changes)


def test_candidates_are_the_accepted_trials_fastest_first() -> None:
    wrong = [Outcome("p", Status.WRONG_ANSWER, None, None, "", 1, 1, 0.0, 0.0)]
    trials = (
        a_trial(number=0, ratio=1.1),
        a_trial(number=1, ratio=1.9, run=wrong),
        a_trial(number=2, ratio=1.3),
        a_trial(number=3, ratio=1.8, run=[]),
        a_trial(number=4, ratio=1.7, ending=Ending.RUNTIME_ERROR),
        a_trial(number=5, speed=None),
        a_trial(number=6, ratio=1.3),
    )
    study = StudyRecord("s", "s.db", {}, {}, {}, None, trials)
    assert [trial.number for trial in candidates(study)] == [2, 6, 0]
    assert [trial.number for trial in candidates(study, 1)] == [2]


def test_the_total_counts_the_experts_of_all_blocks() -> None:
    assert a_trial().total_experts == 8


@pytest.mark.parametrize("key", sorted(a_trial().to_dict().keys() - {"schema"}))
def test_a_record_that_lacks_a_field_is_refused(key: str) -> None:
    stored = a_trial().to_dict()
    del stored[key]
    with pytest.raises(KeyError):
        TrialRecord.from_dict(0, stored)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path] * bool(path) + [place for key, value in inner for place in places(value, (*path, key))]


@given(
    records(),
    st.data(),
    st.sampled_from([None, True, -1, 10**400, 1.5, float("nan"), "", "x", "0:1", [], {}, [[1]], [None] * 6, {"a": 1}]),
)
def test_a_record_with_anything_written_over_a_value_is_read_whole_or_refused(
    record: TrialRecord, data: st.DataObject, hostile: object
) -> None:
    stored = json.loads(json.dumps(record.to_dict()))
    *parents, last = data.draw(st.sampled_from(places(stored)))
    part = stored
    for key in parents:
        part = part[key]
    part[last] = hostile
    try:
        read = TrialRecord.from_dict(record.number, stored)
    except (KeyError, TypeError, ValueError):
        return
    json.dumps(read.to_dict())
    assert all(type(outcome.probe) is str and type(outcome.tokens) is int for outcome in read.outcomes)
