from __future__ import annotations

import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from fakelab import BLOCKS, make_facts, make_probes, make_runtime, make_space, speed

from routing_lab.errors import (
    AttestationError,
    InterruptedStudyError,
    NothingAcceptedError,
    RuntimeFailureError,
    UsageError,
)
from routing_lab.gate import Policy, Result, Rule
from routing_lab.measure import MeasureSettings
from routing_lab.model import ModelFacts
from routing_lab.placement import Placement
from routing_lab.runtime.base import RuntimeOptions
from routing_lab.search import Ending, Progress, Stop, StudyResult, StudySettings, load_study, run_study
from routing_lab.search.storage import TRIAL, open_storage

FAST = MeasureSettings(rounds=6, tokens=8)


@pytest.fixture(autouse=True)
def no_warning_passes() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def facts(tmp_path: Path) -> ModelFacts:
    return make_facts(tmp_path)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "studies.db"


def run(
    facts: ModelFacts, storage: Path, *, trials: int | None = 8, runtime: Any = None, **changes: Any
) -> StudyResult:
    given: dict[str, Any] = {"study": "s", "probe_set": make_probes(), "space": make_space(), "on_progress": None}
    for name in list(changes):
        if name in given:
            given[name] = changes.pop(name)
    settings = StudySettings(
        **{"trials": trials, "measure": FAST, "sampler": "random", "order": "speed", "verify": False, **changes}
    )
    return run_study(runtime or make_runtime(facts), storage=storage, settings=settings, **given)


# --- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_the_whole_space_is_searched_without_repeats_and_then_the_study_stops(
    facts: ModelFacts, storage: Path, sampler: str
) -> None:
    space = make_space((2, 8))
    result = run(facts, storage, trials=1000, sampler=sampler, runners_up=None, space=space)
    assert result.stopped is Stop.EXHAUSTED
    assert len(result.study.trials) == 2**BLOCKS - 1  # the baseline is known without a trial
    assert len({trial.key for trial in result.study.trials}) == len(result.study.trials)
    assert {trial.ending for trial in result.study.trials} == {Ending.EVALUATED}


def test_the_fastest_schedule_that_the_rules_allow_is_found(facts: ModelFacts, storage: Path) -> None:
    best = run(facts, storage, trials=1000).candidates[0]
    # Probe g2 needs 4 in block 0; everything else may go down to 2.
    assert best.key == "0:4,1-3:2"
    assert best.speed is not None
    assert best.speed.ratio == pytest.approx(speed({0: 4, 1: 2, 2: 2, 3: 2}) / speed(dict.fromkeys(range(4), 8)))


def test_every_result_says_what_the_runtime_really_did(facts: ModelFacts, storage: Path) -> None:
    for trial in run(facts, storage, runners_up=None).study.evaluated:
        assert trial.attested == trial.key
        assert trial.verdict.result is (Result.PASS if trial.schedule.resolve(facts)[0] >= 4 else Result.FAIL)


def test_the_study_ends_at_the_wanted_number_of_results(facts: ModelFacts, storage: Path) -> None:
    result = run(facts, storage, trials=5)
    assert (result.stopped, len(result.study.evaluated)) == (Stop.TRIALS, 5)


def test_a_study_out_of_time_stops_between_trials(facts: ModelFacts, storage: Path) -> None:
    assert run(facts, storage, hours=1e-9).stopped is Stop.HOURS


def test_uniform_schedules_come_first_the_gentlest_cut_before_the_others(facts: ModelFacts, storage: Path) -> None:
    first, second, third, *_ = run(facts, storage).study.trials
    assert (first.key, second.key) == ("0-3:4", "0-3:2")
    assert (first.origin, second.origin, third.origin) == ("uniform", "uniform", "random")


def test_a_gate_run_stops_at_the_first_failure_and_the_sampler_learns_how_early(
    facts: ModelFacts, storage: Path
) -> None:
    run(facts, storage)
    study = optuna.load_study(study_name="s", storage=open_storage(storage, create=False))
    trial = study.get_trials()[1]
    record = load_study(storage).trials[1]
    assert (record.key, record.verdict.run, record.verdict.failures) == ("0-3:2", 3, ("g2",))
    assert trial.constraints == {"failed probes": pytest.approx(1 / 3 * 4)}


def test_the_same_seed_gives_the_same_schedules(facts: ModelFacts, tmp_path: Path) -> None:
    runs = [run(facts, tmp_path / f"{i}.db", trials=14, sampler="tpe", seed=7) for i in range(2)]
    assert [trial.key for trial in runs[0].study.trials] == [trial.key for trial in runs[1].study.trials]


# --- what is skipped -------------------------------------------------------------------------------------------------


def test_a_schedule_surely_no_faster_than_the_baseline_skips_the_gate_and_is_no_pass(
    facts: ModelFacts, storage: Path
) -> None:
    asked: Counter[int] = Counter()

    def answer(prompt: str, counts: Any) -> str:
        asked[counts[0]] += 1
        return f"Answer: {prompt[1:-1]}"

    runtime = make_runtime(facts, answer=answer)
    space = make_space(counts=(8, 16))
    result = run(facts, storage, runtime=runtime, space=space)
    slow = result.study.trials[0]
    assert slow.key == "0-3:16"
    assert asked[16] == 0
    assert slow.gate_skipped == "surely no faster than the baseline"
    assert slow.verdict.result is Result.UNDECIDED
    assert slow.attested is None
    assert not slow.accepted


def test_a_schedule_surely_slower_than_enough_accepted_ones_skips_the_gate(facts: ModelFacts, storage: Path) -> None:
    result = run(facts, storage, trials=30, runners_up=2, runtime=make_runtime(facts, {}))
    for trial in result.study.trials:
        assert trial.speed is not None
        earlier = [t for t in result.study.trials[: trial.number] if t.accepted and t.speed]
        dominating = sum(t.speed.low > trial.speed.high for t in earlier if t.speed)
        assert (trial.gate_skipped is not None) == (dominating >= 2)


def test_with_no_bound_on_runners_up_every_gate_is_run(facts: ModelFacts, storage: Path) -> None:
    result = run(facts, storage, trials=16, runners_up=None)
    assert all(trial.gate_skipped is None for trial in result.study.trials)


# --- the baseline ----------------------------------------------------------------------------------------------------


def test_the_work_on_the_baseline_is_counted(facts: ModelFacts, storage: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    settings = StudySettings(trials=1, measure=FAST)
    more = {"study": "s", "storage": storage, "settings": settings, "on_baseline": lambda *step: steps.append(step)}
    run_study(make_runtime(facts), make_probes(), make_space(), **more)
    assert [step[1:] for step in steps if "probes" in step[0]] == [(done, 4) for done in range(1, 5)]
    assert [step[1:] for step in steps if "measuring" in step[0]] == [(done, 6) for done in range(1, 7)]


def test_the_baseline_is_measured_once_and_reported_first(facts: ModelFacts, storage: Path) -> None:
    seen: list[Progress] = []
    run(facts, storage, trials=3, on_progress=seen.append)
    assert (seen[0].done, seen[0].last, seen[0].pass_rate, seen[0].seconds_left) == (0, None, None, None)
    baseline = seen[0].baseline
    assert baseline.tokens_per_s == pytest.approx(1000 / 40)
    assert (baseline.speed.low, baseline.speed.high) == pytest.approx((1, 1))
    assert baseline.verdict.result is Result.PASS
    stored = load_study(storage).baseline
    assert stored is not None
    assert (stored.key, stored.speed, stored.verdict) == (baseline.key, baseline.speed, baseline.verdict)


def test_a_baseline_that_fails_a_probe_ends_a_strict_study_at_once_and_names_the_probes_and_the_ways_out(
    facts: ModelFacts, storage: Path
) -> None:
    seen: list[Progress] = []
    runtime = make_runtime(facts, {"g1": {0: 99}, "g3": {0: 99}})
    with pytest.raises(NothingAcceptedError) as caught:
        run(facts, storage, runtime=runtime, on_progress=seen.append)
    message = str(caught.value)
    assert "g1, g3" in message
    assert "fix or remove" in message
    assert "--policy no_worse_than_baseline" in message
    assert seen[0].baseline.failures == ("g1", "g3")
    stored = load_study(storage)
    assert stored.trials == ()
    assert stored.baseline is not None
    assert stored.baseline.failures == ("g1", "g3")


def test_under_no_worse_than_baseline_its_failures_are_excused_and_still_reported(
    facts: ModelFacts, storage: Path
) -> None:
    runtime = make_runtime(facts, {"g0": {0: 99}, "g2": {0: 4}})
    policy = Policy(Rule.NO_WORSE_THAN_BASELINE)
    result = run(facts, storage, runtime=runtime, policy=policy)
    assert result.study.baseline is not None
    assert result.study.baseline.failures == ("g0",)
    assert {trial.verdict.result for trial in result.study.evaluated if not trial.gate_skipped} == {
        Result.PASS,
        Result.FAIL,
    }
    for trial in result.study.evaluated:
        assert trial.verdict.failures in {(), ("g2",)}


def test_a_baseline_that_passes_nothing_ends_a_study_under_any_policy(facts: ModelFacts, storage: Path) -> None:
    runtime = make_runtime(facts, {f"g{i}": {0: 99} for i in range(4)})
    with pytest.raises(NothingAcceptedError, match="4 of 4"):
        run(facts, storage, runtime=runtime, policy=Policy(Rule.NO_WORSE_THAN_BASELINE))


def test_a_baseline_under_which_the_process_dies_is_an_error_and_no_verdict(facts: ModelFacts, storage: Path) -> None:
    runtime = make_runtime(facts, fail=lambda request, _counts: request == "generate")
    with pytest.raises(RuntimeFailureError, match="baseline could not be run: probe g0"):
        run(facts, storage, runtime=runtime)
    assert load_study(storage).baseline is None


# --- the model's process dies ----------------------------------------------------------------------------------------


def dying(facts: ModelFacts, request: str, when: Any) -> Any:
    return make_runtime(facts, fail=lambda asked, counts: asked == request and when(dict(counts)))


@pytest.mark.parametrize("request_", ["apply", "generate", "decode_timing"])
def test_a_process_lost_in_a_trial_marks_the_trial_and_the_study_goes_on(
    facts: ModelFacts, storage: Path, request_: str
) -> None:
    fatal = dict.fromkeys(range(4), 4)
    result = run(facts, storage, runtime=dying(facts, request_, lambda counts: counts == fatal))
    lost = result.study.trials[0]
    assert (lost.key, lost.ending) == ("0-3:4", Ending.RUNTIME_ERROR)
    assert lost.verdict.result is Result.UNDECIDED
    assert not lost.accepted
    assert lost.error
    assert len(result.study.evaluated) == 8


@pytest.mark.parametrize("at", [1, 7])
def test_what_was_killed_once_is_asked_again_and_nothing_is_missing(facts: ModelFacts, storage: Path, at: int) -> None:
    asked = 0

    def killed(request: str, _counts: object) -> bool:
        nonlocal asked
        asked += request == "generate"
        return request == "generate" and asked == at  # of the baseline, or of the first trial after its four probes

    calm = run(facts, storage.with_name("calm.db"), runners_up=None, verify=False)
    torn = run(facts, storage, runtime=make_runtime(facts, fail=killed), runners_up=None, verify=False)
    lost = [trial.key for trial in torn.study.trials if trial.ending is Ending.RUNTIME_ERROR]
    assert len(lost) == (at > 4)
    verdicts = [{one.key: one.verdict.result for one in study.evaluated} for study in (calm.study, torn.study)]
    assert verdicts[0] == verdicts[1]


def test_speed_measured_before_the_process_was_lost_is_kept(facts: ModelFacts, storage: Path) -> None:
    fatal = dict.fromkeys(range(4), 4)
    lost = run(facts, storage, runtime=dying(facts, "generate", lambda counts: counts == fatal)).study.trials[0]
    assert lost.speed is not None


def test_a_schedule_is_tried_again_after_one_lost_process_and_left_alone_after_two(
    facts: ModelFacts, storage: Path
) -> None:
    fatal = {0: 4, 1: 4, 2: 8, 3: 8}
    runtime = dying(facts, "generate", lambda counts: counts == fatal)
    result = run(facts, storage, trials=1000, runtime=runtime, runners_up=None, space=make_space((4, 8)))
    of_it = [trial.ending for trial in result.study.trials if trial.key == "0-1:4,2-3:8"]
    assert of_it == [Ending.RUNTIME_ERROR] * 2
    assert result.stopped is Stop.EXHAUSTED


def test_too_many_lost_processes_in_a_row_end_the_study_with_the_cause(facts: ModelFacts, storage: Path) -> None:
    own = dict.fromkeys(range(4), 8)
    runtime = dying(facts, "generate", lambda counts: counts != own)
    with pytest.raises(RuntimeFailureError, match=r"5 trials in a row.*saved.*told to fail in generate"):
        run(facts, storage, runtime=runtime, runners_up=None)
    assert [trial.ending for trial in load_study(storage).trials] == [Ending.RUNTIME_ERROR] * 5


def test_a_failed_attestation_ends_the_study_and_the_trial_is_no_result(facts: ModelFacts, storage: Path) -> None:
    runtime = make_runtime(facts, miscount=lambda _block, count: 8 if count == 4 else count)
    with pytest.raises(AttestationError):
        run(facts, storage, runtime=runtime)
    assert [trial.ending for trial in load_study(storage).trials] == [Ending.INTERRUPTED]


# --- interruption and resumption -------------------------------------------------------------------------------------


def interrupting(facts: ModelFacts, at: int, request: str = "generate") -> Any:
    """A runtime whose user loses patience at the given request of that kind."""
    asked = 0

    def fail(kind: str, _counts: Any) -> bool:
        nonlocal asked
        asked += kind == request
        if asked == at:
            raise KeyboardInterrupt
        return False

    return make_runtime(facts, fail=fail)


@pytest.mark.parametrize("at", [5, 9, 14])
def test_after_ctrl_c_nothing_finished_is_lost_and_the_same_call_goes_on(
    facts: ModelFacts, storage: Path, at: int
) -> None:
    with pytest.raises(InterruptedStudyError, match=r"routing-lab search --study s --storage .*studies\.db"):
        run(facts, storage, runtime=interrupting(facts, at))
    before = load_study(storage)
    assert before.trials[-1].ending is Ending.INTERRUPTED
    result = run(facts, storage)
    assert result.study.trials[: len(before.trials)] == before.trials
    assert len(result.study.evaluated) == 8
    assert len({trial.key for trial in result.study.evaluated}) == 8


def test_ctrl_c_during_the_baseline_leaves_a_study_that_goes_on(facts: ModelFacts, storage: Path) -> None:
    with pytest.raises(InterruptedStudyError, match="0 evaluated"):
        run(facts, storage, runtime=interrupting(facts, 2))
    assert len(run(facts, storage).study.evaluated) == 8


def test_an_interrupted_schedule_may_be_evaluated_again(facts: ModelFacts, storage: Path) -> None:
    with pytest.raises(InterruptedStudyError):
        run(facts, storage, runtime=interrupting(facts, 5), space=make_space((4, 8)))
    interrupted = load_study(storage).trials[0]
    result = run(facts, storage, trials=1000, runners_up=None, space=make_space((4, 8)))
    assert [t.ending for t in result.study.trials if t.key == interrupted.key] == [Ending.INTERRUPTED, Ending.EVALUATED]


def test_a_finished_study_is_not_run_again(facts: ModelFacts, storage: Path) -> None:
    first = run(facts, storage)
    assert first.evaluated_now == 8
    again = run(facts, storage, runtime=make_runtime(facts, fail=lambda _request, _counts: True))
    assert again.study.trials == first.study.trials
    assert again.evaluated_now == 0


def test_without_a_number_of_trials_only_time_and_space_end_a_study(facts: ModelFacts, storage: Path) -> None:
    seen: list[Progress] = []
    result = run(facts, storage, trials=None, hours=1.0, space=make_space((4, 8)), on_progress=seen.append)
    assert result.stopped is Stop.EXHAUSTED
    assert {progress.total for progress in seen} == {None}
    assert seen[-1].seconds_left == pytest.approx(3600, abs=120)
    assert run(facts, storage, trials=None, hours=1e-9, study="t").stopped is Stop.HOURS


def test_more_trials_extend_a_study_with_another_sampler(facts: ModelFacts, storage: Path) -> None:
    run(facts, storage, trials=12)
    result = run(facts, storage, trials=24, sampler="tpe")
    assert len(result.study.evaluated) == 24
    assert {trial.origin for trial in result.study.trials} == {"uniform", "random", "tpe"}


KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from fakelab import make_facts, make_probes, make_runtime, make_space, answer_by, NEEDS
from routing_lab.measure import MeasureSettings
from routing_lab.search import StudySettings, run_study
asked = 0
def answer(prompt, counts):
    global asked
    asked += 1
    if asked == 9:
        os.kill(os.getpid(), 9)
    return answer_by(NEEDS)(prompt, counts)
folder = Path({folder!r})
settings = StudySettings(trials=8, measure=MeasureSettings(rounds=6, tokens=8), sampler="random",
                         order="speed", verify=False)
run_study(make_runtime(make_facts(folder), answer=answer), make_probes(), make_space(), study="s",
          storage=folder / "runs" / "studies.db", settings=settings)
"""


def test_a_killed_process_leaves_a_trial_that_is_marked_and_a_study_that_goes_on(
    facts: ModelFacts, storage: Path
) -> None:
    code = KILLED.format(tests=str(Path(__file__).parent.parent), folder=str(storage.parent.parent))
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    result = run(facts, storage)
    endings = [trial.ending for trial in result.study.trials]
    assert endings.count(Ending.ABANDONED) == 1
    assert endings[0] is Ending.EVALUATED
    assert len(result.study.evaluated) == 8


def test_a_trial_killed_after_its_record_was_written_is_a_result(
    facts: ModelFacts, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def power_cut(*_args: Any, **_kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("routing_lab.search.session.Session._tell", power_cut)
    with pytest.raises(InterruptedStudyError):
        run(facts, storage)
    monkeypatch.undo()
    result = run(facts, storage)
    assert [trial.ending for trial in result.study.trials] == [Ending.EVALUATED] * 8


# --- another question ------------------------------------------------------------------------------------------------


def another_model(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "other"
    folder.mkdir()
    return {"runtime": make_runtime(make_facts(folder, b"other bytes"))}


DIFFERENCES = {
    "model": another_model,
    "probes": lambda _path: {"probe_set": make_probes(gate=5)},
    "search space": lambda _path: {"space": make_space(counts=(2, 8))},
    "policy": lambda _path: {"policy": Policy(Rule.NO_WORSE_THAN_BASELINE)},
    "placement": lambda path: {
        "runtime": make_runtime(make_facts(path), options=RuntimeOptions(placement=Placement(gpu_layers=9)))
    },
    "options": lambda path: {"runtime": make_runtime(make_facts(path), options=RuntimeOptions(threads=7))},
}


def test_a_study_is_not_continued_on_other_devices(facts: ModelFacts, storage: Path) -> None:
    run(facts, storage, trials=3)
    remote = make_runtime(facts, options=RuntimeOptions(rpc_servers=("10.0.0.1:50052",)))
    with pytest.raises(UsageError, match=r"placement: .*now it is .*devices of 10\.0\.0\.1:50052"):
        run(facts, storage, runtime=remote)


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_study_of_another_question_is_not_continued(
    facts: ModelFacts, storage: Path, tmp_path: Path, what: str
) -> None:
    before = run(facts, storage, trials=3).study
    with pytest.raises(UsageError, match=rf"(?s)study s in .*cannot go on.*\n  {what}: .*--study") as caught:
        run(facts, storage, **DIFFERENCES[what](tmp_path))
    assert str(caught.value).count("the study has") == 1
    assert load_study(storage) == before


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_study_without_a_trial_takes_another_question(
    facts: ModelFacts, storage: Path, tmp_path: Path, what: str
) -> None:
    helpless = {"g1": {0: 99}}
    with pytest.raises(NothingAcceptedError):
        run(facts, storage, runtime=make_runtime(facts, helpless))
    measured = load_study(storage).baseline
    changes = {"runtime": make_runtime(facts, helpless), "policy": Policy(Rule.NO_WORSE_THAN_BASELINE)}
    result = run(facts, storage, trials=3, **changes | DIFFERENCES[what](tmp_path))
    assert len(result.study.evaluated) == 3
    assert result.study.identity["policy"] == "no_worse_than_baseline"
    # The policy and the space leave the baseline what it was; of anything else it is measured anew.
    assert (result.study.baseline == measured) == (what in {"policy", "search space"})


def test_all_differences_are_named_at_once(facts: ModelFacts, storage: Path) -> None:
    run(facts, storage, trials=3)
    with pytest.raises(UsageError) as caught:
        run(facts, storage, probe_set=make_probes(gate=5), space=make_space(counts=(4, 8)))
    assert str(caught.value).count("the study has") == 2


def test_two_studies_share_a_storage(facts: ModelFacts, storage: Path) -> None:
    run(facts, storage, trials=3)
    run(facts, storage, trials=4, study="t", probe_set=make_probes(gate=5))
    assert len(load_study(storage, "s").trials) == 3
    assert len(load_study(storage, "t").trials) == 4


# --- refusals and progress -------------------------------------------------------------------------------------------


def test_a_probe_set_without_gate_probes_is_refused(facts: ModelFacts, storage: Path) -> None:
    with pytest.raises(UsageError, match="no gate probes"):
        run(facts, storage, probe_set=make_probes(gate=0))


@pytest.mark.parametrize(
    "wrong",
    [{"trials": 0}, {"hours": 0}, {"seed": -1}, {"sampler": "cma"}, {"stop_after_failures": 0}, {"runners_up": 0}],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        StudySettings(**wrong)


def test_progress_counts_results_and_estimates_the_rest(facts: ModelFacts, storage: Path) -> None:
    seen: list[Progress] = []
    run(facts, storage, trials=6, on_progress=seen.append, runners_up=None)
    assert [progress.done for progress in seen] == [0, 1, 2, 3, 4, 5, 6]
    assert {progress.total for progress in seen} == {6}
    ratios = [progress.best.speed.ratio for progress in seen if progress.best and progress.best.speed]
    assert ratios == sorted(ratios)
    last = seen[-1]
    assert last.seconds_left == 0
    verdicts = [trial.verdict.result for trial in load_study(storage).trials]
    assert last.pass_rate == verdicts.count(Result.PASS) / 6


def test_a_duplicate_from_another_process_costs_no_evaluation(
    facts: ModelFacts, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(facts, storage, trials=2)
    study = optuna.load_study(study_name="s", storage=open_storage(storage, create=False))
    study.enqueue_trial(study.get_trials()[0].params)
    result = run(facts, storage, trials=3)
    assert [trial.ending for trial in result.study.trials[2:]] == [Ending.DUPLICATE, Ending.EVALUATED]
    assert result.study.trials[2].speed is None


def test_the_storage_holds_each_record_once_with_its_schema(facts: ModelFacts, storage: Path) -> None:
    run(facts, storage, trials=3)
    study = optuna.load_study(study_name="s", storage=open_storage(storage, create=False))
    assert all(trial.user_attrs[TRIAL]["schema"] == 2 for trial in study.get_trials())
    assert study.user_attrs["routing_lab"]["schema"] == 2


def test_records_differ_only_in_time_between_two_runs_of_a_study(facts: ModelFacts, tmp_path: Path) -> None:
    first, second = (run(facts, tmp_path / f"{i}.db", trials=4).study.trials for i in range(2))
    assert [replace(trial, seconds=first[0].seconds) for trial in first] == [
        replace(trial, seconds=first[0].seconds) for trial in second
    ]
