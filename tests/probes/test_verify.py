from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from fakelab import NEEDS, answer_by, make_facts, make_probes, make_runtime, schedule

from routing_lab.answers import Judge
from routing_lab.demo import model_path, probes_path
from routing_lab.errors import AttestationError
from routing_lab.probes import Outcome, ProbeSet, run_probes
from routing_lab.probes.verify import Calibration, Transcripts, Verification, calibrate, verify_probes
from routing_lab.runtime import Capability
from routing_lab.runtime.base import DRAFTS_TOGETHER
from routing_lab.runtime.fake import FakeRuntime
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.schedule import Schedule


@pytest.fixture
def judge() -> Judge:
    with Judge() as made:
        yield made


def said(outcomes: list[Outcome]) -> dict[str, tuple[object, ...]]:
    return {one.probe: (one.status, one.reason, one.extracted, one.text, one.tokens) for one in outcomes}


def prepared(runtime: FakeRuntime, probes: ProbeSet, judge: Judge) -> Verification:
    gate = probes.split("gate")
    transcripts = Transcripts.of_baseline(runtime, probes, gate, judge)
    return Verification(transcripts, calibrate(runtime, probes, gate, transcripts))


# --- pure logic, on the fake -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(8, 8, 8, 8), (4, 2, 4, 2), (2, 2, 2, 2)])
@pytest.mark.parametrize("stop_after", [None, 1])
def test_checked_outcomes_are_those_of_decoding(
    tmp_path: Path, judge: Judge, counts: tuple[int, ...], stop_after: int | None
) -> None:
    runtime, probes = make_runtime(make_facts(tmp_path)), make_probes(gate=20)
    verification = prepared(runtime, probes, judge)
    runtime.apply(schedule(*counts))
    gate = probes.split("gate")
    decoded = said(run_probes(runtime, probes, gate, judge, stop_after_failures=stop_after))
    checked = said(verify_probes(runtime, probes, gate, judge, verification, stop_after_failures=stop_after))
    assert {probe: checked[probe] for probe in decoded} == decoded


def test_a_run_ends_with_the_batch_of_its_failure(tmp_path: Path, judge: Judge) -> None:
    runtime, probes = make_runtime(make_facts(tmp_path)), make_probes(gate=3 * DRAFTS_TOGETHER)
    verification = prepared(runtime, probes, judge)
    runtime.apply(schedule(2, 8, 8, 8))  # g2 fails
    outcomes = verify_probes(runtime, probes, probes.split("gate"), judge, verification)
    assert len(outcomes) == DRAFTS_TOGETHER
    assert [outcome.probe for outcome in outcomes if not outcome.correct] == ["g2"]


def test_how_far_a_candidate_kept_to_the_draft_is_told(tmp_path: Path, judge: Judge) -> None:
    runtime, probes = make_runtime(make_facts(tmp_path)), make_probes()
    verification = prepared(runtime, probes, judge)
    runtime.apply(schedule(2, 8, 8, 8))
    outcomes = verify_probes(runtime, probes, probes.split("gate"), judge, verification, stop_after_failures=None)
    kept = {outcome.probe: outcome.kept for outcome in outcomes}
    assert kept["g2"] == len("Answer: ")
    assert kept["g1"] == len("Answer: 1") + 1


def test_excused_probes_do_not_end_a_run(tmp_path: Path, judge: Judge) -> None:
    runtime, probes = make_runtime(make_facts(tmp_path)), make_probes(gate=20)
    verification = prepared(runtime, probes, judge)
    runtime.apply(schedule(2, 8, 8, 8))
    outcomes = verify_probes(runtime, probes, probes.split("gate"), judge, verification, excused=["g2"])
    assert len(outcomes) == 20


def test_a_lost_batch_is_decoded_probe_by_probe(tmp_path: Path, judge: Judge) -> None:
    asked: list[str] = []

    def fail(request: str, counts: Mapping[int, int]) -> bool:
        asked.append(request)
        return request == "verify" and counts[0] == 4

    runtime, probes = make_runtime(make_facts(tmp_path), fail=fail), make_probes(gate=DRAFTS_TOGETHER)
    verification = prepared(make_runtime(make_facts(tmp_path)), probes, judge)
    runtime.apply(schedule(4, 8, 8, 8))
    asked.clear()
    outcomes = verify_probes(runtime, probes, probes.split("gate"), judge, verification)
    assert all(outcome.correct and outcome.kept is None for outcome in outcomes)
    assert asked.count("verify") == 1


def test_doubtful_probes_are_decoded(tmp_path: Path, judge: Judge) -> None:
    runtime, probes = make_runtime(make_facts(tmp_path)), make_probes()
    verification = prepared(runtime, probes, judge)
    unsure = Verification(verification.transcripts, Calibration(2.0, 10, 0, 1.0, 0.1))  # the fake's margins are 1
    outcomes = verify_probes(runtime, probes, probes.split("gate"), judge, unsure)
    assert [outcome.kept for outcome in outcomes] == [None] * 4


@pytest.mark.parametrize(
    ("doubtful", "words"), [(0.0, "; 0 % of them"), (0.001, "; < 1 % of them"), (0.125, "; 12 % of them")]
)
def test_a_calibration_says_in_words_how_many_answers_were_too_close(doubtful: float, words: str) -> None:
    said = Calibration(3.8e-06, 2032, 2000, 1.9e-06, doubtful).describe()
    assert words in said
    assert "logits" not in said
    assert said.endswith("too close to call and were decoded.")


def test_where_most_would_be_doubtful_no_draft_is_checked(tmp_path: Path, judge: Judge) -> None:
    class Rough(FakeRuntime):
        """Its batches are off by one logit: a fake of a device whose kernels for batches differ."""

        def verify(self, *args: object, **kwargs: object) -> list:
            checked = super().verify(*args, **kwargs)
            return [
                replace(one, generation=replace(one.generation, margins=tuple(2.0 for _ in one.generation.margins)))
                for one in checked
            ]

    runtime, probes = Rough(make_facts(tmp_path), answer=answer_by(NEEDS)), make_probes()
    verification = prepared(runtime, probes, judge)
    assert verification.calibration.tie_margin == 2.0
    assert verification.calibration.reason is not None
    assert verification.calibration.describe().startswith("Every answer was decoded: 100 % of the answers")
    outcomes = verify_probes(runtime, probes, probes.split("gate"), judge, verification)
    assert [outcome.kept for outcome in outcomes] == [None] * 4


def test_another_token_at_a_position_counts_with_both_gaps(tmp_path: Path, judge: Judge) -> None:
    class Flipping(FakeRuntime):
        """Its batches find another best token at the first position: a fake of a near-tie that falls the other way."""

        def verify(self, *args: object, **kwargs: object) -> list:
            return [replace(one, kept=0) for one in super().verify(*args, **kwargs)]

    probes = make_probes()
    calibration = prepared(Flipping(make_facts(tmp_path), answer=answer_by(NEEDS)), probes, judge).calibration
    assert calibration.largest_difference == 2.0
    assert calibration.identical == 0


def test_a_runtime_that_cannot_check_drafts_decodes(tmp_path: Path, judge: Judge) -> None:
    class Plain:
        """The fake without ``verify``."""

        def __init__(self, inner: FakeRuntime) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            if name == "verify":
                raise AttributeError(name)
            return getattr(self._inner, name)

    runtime, probes = Plain(make_runtime(make_facts(tmp_path))), make_probes()
    verification = prepared(runtime, probes, judge)
    assert verification.calibration.reason == "this runtime cannot check drafts"
    outcomes = verify_probes(runtime, probes, probes.split("gate"), judge, verification)
    assert all(outcome.correct for outcome in outcomes)


@pytest.mark.parametrize("how", ["cannot be set", "is lost"])
def test_what_cannot_be_compared_is_decoded(tmp_path: Path, judge: Judge, how: str) -> None:
    def fail(request: str, counts: Mapping[int, int]) -> bool:
        return how == "is lost" and request == "verify" and counts[0] == 4

    able = Capability.UNIFORM_ONLY if how == "cannot be set" else Capability.PRELOAD
    facts = replace(make_facts(tmp_path), experts_used={0: 8, 1: 8, 2: 8, 3: 4 if how == "cannot be set" else 8})
    runtime, probes = make_runtime(facts, fail=fail), make_probes()
    transcripts = Transcripts.of_baseline(runtime, probes, probes.split("gate"), judge)
    unable = make_runtime(facts, fail=fail, capability=able)
    calibration = calibrate(unable, probes, probes.split("gate"), transcripts)
    assert calibration.reason is not None
    assert calibration.reason.startswith("batches could not be compared")


def test_a_count_that_is_not_the_wanted_one_ends_a_calibration(tmp_path: Path, judge: Judge) -> None:
    runtime, probes = make_runtime(make_facts(tmp_path)), make_probes()
    transcripts = Transcripts.of_baseline(runtime, probes, probes.split("gate"), judge)
    wrong = make_runtime(make_facts(tmp_path), miscount=lambda _block, count: count + 1)
    with pytest.raises(AttestationError):
        calibrate(wrong, probes, probes.split("gate"), transcripts)


# --- real llama.cpp --------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_the_verdicts_of_random_schedules_on_the_demo_model_are_those_of_decoding(judge: Judge) -> None:
    probes = ProbeSet.load(probes_path())
    gate = probes.split("gate")
    dice = random.Random(20261130)
    with LlamaRuntime(model_path()) as runtime:
        verification = prepared(runtime, probes, judge)
        assert verification.calibration.reason is None
        for _ in range(8):
            counts = {block: dice.choice([1, 2, 3, 4, 5, 6, 8, 12]) for block in runtime.facts.routed_blocks}
            runtime.apply(Schedule.from_counts("random", counts))
            decoded = said(run_probes(runtime, probes, gate, judge, stop_after_failures=None))
            checked = verify_probes(runtime, probes, gate, judge, verification, stop_after_failures=None)
            assert said(checked) == decoded, counts


@pytest.mark.model
def test_most_tokens_of_a_passing_schedule_are_not_decoded(judge: Judge) -> None:
    probes = ProbeSet.load(probes_path())
    with LlamaRuntime(model_path()) as runtime:
        verification = prepared(runtime, probes, judge)
        runtime.apply(Schedule.uniform(7, runtime.facts))
        outcomes = verify_probes(runtime, probes, probes.split("gate"), judge, verification)
    kept = sum(outcome.kept or 0 for outcome in outcomes)
    assert len(outcomes) == 60
    assert kept >= 0.95 * sum(outcome.tokens for outcome in outcomes)
