from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fakelab import make_facts, make_probes, make_runtime, schedule

from routing_lab.answers import Status
from routing_lab.errors import AttestationError, RuntimeFailureError, UsageError, UserFileError
from routing_lab.evaluate import EvaluateSettings, Evaluation, evaluate
from routing_lab.gate import Policy, Result, Rule
from routing_lab.measure import MeasureSettings
from routing_lab.model import ModelFacts
from routing_lab.runtime.base import Capability

HALF, QUARTER, MIXED = (schedule(*counts) for counts in [(4,) * 4, (2,) * 4, (4, 4, 2, 2)])


@pytest.fixture
def facts(tmp_path: Path) -> ModelFacts:
    return make_facts(tmp_path)


def run(facts: ModelFacts, *schedules: Any, runtime: Any = None, **changes: Any) -> Evaluation:
    settings = EvaluateSettings(**{"measure": MeasureSettings(rounds=6, tokens=8), **changes})
    return evaluate(runtime or make_runtime(facts), make_probes(), schedules, settings)


def test_every_schedule_gets_its_ratio_and_its_status_in_the_given_order(facts: ModelFacts) -> None:
    rows = run(facts, QUARTER, HALF, MIXED).rows
    assert [row.key for row in rows] == ["0-3:2", "0-3:4", "0-1:4,2-3:2"]
    assert [row.speed and row.speed.ratio for row in rows] == pytest.approx([40 / 16, 40 / 24, 40 / 20])
    assert [row.status for row in rows] == [Status.WRONG_ANSWER, Status.CORRECT, Status.CORRECT]
    assert [row.verdict.result for row in rows] == [Result.FAIL, Result.PASS, Result.PASS]
    assert [row.total_experts for row in rows] == [8, 16, 12]


def test_the_baseline_is_always_there_with_the_ratio_one(facts: ModelFacts) -> None:
    baseline = run(facts).baseline
    assert baseline.speed is not None
    assert (baseline.speed.low, baseline.speed.ratio, baseline.speed.high) == (1, 1, 1)
    assert baseline.speed.candidate_tokens_per_s == pytest.approx(25)
    assert baseline.status is Status.CORRECT


def test_all_gate_probes_are_asked_unless_told_otherwise(facts: ModelFacts) -> None:
    assert run(facts, QUARTER).rows[0].verdict.run == 4
    assert run(facts, QUARTER, stop_after_failures=1, verify=False).rows[0].verdict.run == 3


def test_drafts_and_decoding_give_the_same_table_but_for_time(facts: ModelFacts) -> None:
    drafted, decoded = (run(facts, QUARTER, MIXED, HALF, verify=verify) for verify in (True, False))
    assert drafted.calibration is not None
    assert decoded.calibration is None
    assert [row.verdict for row in drafted.rows] == [row.verdict for row in decoded.rows]
    assert [row.tokens_per_correct for row in drafted.rows] == [row.tokens_per_correct for row in decoded.rows]
    assert any(outcome.kept for outcome in drafted.rows[0].outcomes)


def test_a_race_measures_no_further_what_is_slower_than_one_that_passed(facts: ModelFacts) -> None:
    measure = MeasureSettings(rounds=6, tokens=8, most_rounds=24, half_width=0.01)
    ended = {
        race: [row.speed.ended for row in run(facts, HALF, QUARTER, MIXED, measure=measure, race=race).rows]
        for race in (False, True)
    }
    assert ended == {False: ["narrow"] * 3, True: ["beaten", "narrow", "narrow"]}


def test_prompts_have_a_ratio_of_their_own(facts: ModelFacts) -> None:
    (half,) = run(facts, HALF, prefill_tokens=64).rows
    assert half.prefill is not None
    assert half.prefill.ratio == pytest.approx(half.speed.ratio)
    assert run(facts, HALF).rows[0].prefill is None


def test_seconds_per_correct_answer_count_what_a_wrong_answer_cost(facts: ModelFacts) -> None:
    result = run(facts, QUARTER)
    (quarter,) = result.rows
    assert quarter.tokens_per_correct == pytest.approx(sum(one.tokens for one in quarter.outcomes) / 3)
    assert quarter.seconds_per_correct == pytest.approx(
        quarter.tokens_per_correct / quarter.speed.candidate_tokens_per_s
    )


def test_a_schedule_that_the_runtime_cannot_set_gets_a_row_that_says_so(facts: ModelFacts) -> None:
    runtime = make_runtime(facts, capability=Capability.UNIFORM_ONLY)
    mixed, half = run(facts, MIXED, HALF, runtime=runtime).rows
    assert (mixed.speed, mixed.status, mixed.verdict.result) == (None, None, Result.UNDECIDED)
    assert mixed.error is not None
    assert "per block" in mixed.error
    assert half.speed is not None


@pytest.mark.parametrize("request_", ["apply", "decode_timing"])
def test_a_schedule_that_kills_the_process_spoils_only_its_own_row(facts: ModelFacts, request_: str) -> None:
    def fail(asked: str, counts: Mapping[int, int]) -> bool:
        return asked == request_ and counts[3] == 2 and counts[0] == 4

    rows = run(facts, QUARTER, MIXED, HALF, runtime=make_runtime(facts, fail=fail)).rows
    assert [row.speed is None for row in rows] == [False, True, False]
    assert rows[1].error is not None


def test_a_process_lost_on_a_probe_leaves_the_verdict_undecided(facts: ModelFacts) -> None:
    runtime = make_runtime(facts, fail=lambda asked, counts: asked == "generate" and counts[0] == 4)
    row = run(facts, HALF, runtime=runtime).rows[0]
    assert row.verdict.result is Result.UNDECIDED
    assert row.status is Status.RUNTIME_ERROR


@pytest.mark.parametrize("request_", ["apply", "decode_timing"])
def test_without_a_baseline_there_is_no_table(facts: ModelFacts, request_: str) -> None:
    runtime = make_runtime(facts, fail=lambda asked, counts: asked == request_ and counts[0] == 8)
    with pytest.raises(RuntimeFailureError):
        run(facts, HALF, runtime=runtime)


def test_a_failed_attestation_ends_the_evaluation(facts: ModelFacts) -> None:
    runtime = make_runtime(facts, miscount=lambda _block, count: 8 if count == 4 else count)
    with pytest.raises(AttestationError):
        run(facts, HALF, runtime=runtime)


def test_the_policy_can_excuse_what_the_baseline_fails(facts: ModelFacts) -> None:
    needs = {"g0": {0: 99}}
    strict = run(facts, HALF, runtime=make_runtime(facts, needs)).rows[0]
    lax = run(facts, HALF, runtime=make_runtime(facts, needs), policy=Policy(Rule.NO_WORSE_THAN_BASELINE)).rows[0]
    assert (strict.verdict.result, lax.verdict.result) == (Result.FAIL, Result.PASS)
    assert lax.verdict.excused == ("g0",)


def test_a_schedule_that_does_not_fit_and_a_set_without_gate_probes_are_refused(facts: ModelFacts) -> None:
    with pytest.raises(UserFileError):
        run(facts, schedule(1, 2, 3, 99))
    with pytest.raises(UsageError, match="no gate probes"):
        evaluate(make_runtime(facts), make_probes(gate=0), [HALF])


def test_the_table_is_json(facts: ModelFacts) -> None:
    data = json.loads(json.dumps(run(facts, QUARTER).to_dict(), allow_nan=False))
    assert data["baseline"]["speed"]["ratio"] == 1
    assert data["schedules"][0]["status"] == "wrong_answer"
    assert data["schedules"][0]["verdict"]["failures"] == ["g2"]


def test_progress_counts_schedules_probes_and_rounds(facts: ModelFacts) -> None:
    said: list[str] = []
    settings = EvaluateSettings(measure=MeasureSettings(rounds=6, tokens=8), prefill_tokens=16)
    evaluate(make_runtime(facts), make_probes(), [HALF, QUARTER], settings, on_progress=said.append)
    assert said[0] == "asking baseline (1 of 3)"
    assert "asking baseline (1 of 3), 4 of 4 probes" in said
    assert "asking given (3 of 3), 4 of 4 probes" in said
    rounds = [one for one in said if one.startswith("measuring speeds")]
    assert rounds == ["measuring speeds"] + [f"measuring speeds, round {number} of at most 6" for number in range(1, 7)]
