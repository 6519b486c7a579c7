"""One small study, start to certificate, on the demo model in real llama.cpp, with its process killed on the way."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from routing_lab.certificate import Certificate, SpeedRule
from routing_lab.demo import model_path, tasks
from routing_lab.gate import AcceptanceRule, Policy, Result, Rule
from routing_lab.measure import MeasureSettings
from routing_lab.model import model_digest
from routing_lab.probes import Probe, ProbeSet
from routing_lab.runtime import RuntimeOptions
from routing_lab.runtime.base import DecodeTiming, Generation
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.schedule import Schedule
from routing_lab.search import Ending, StudySettings, load_study, run_study
from routing_lab.space import SearchSpace
from routing_lab.validate import ValidateSettings, validate

pytestmark = pytest.mark.model

MEASURE = MeasureSettings(rounds=6, tokens=16)
# One thread: with more, llama.cpp's threads wait for each other in a busy loop, and a second busy process on the machine
# makes that a hundred times slower.
OPTIONS = RuntimeOptions(context_tokens=512, threads=1)


class Mortal(LlamaRuntime):
    """Its process is killed in the middle of the request of the given kind and number."""

    fatal: tuple[str, int] = ("", 0)
    deaths = 0

    def _doom(self, request: str) -> None:
        kind, number = self.fatal
        if kind == request:
            self.fatal = (kind, number - 1)
            if number == 1:
                pid = self.process_id
                assert pid is not None
                self.deaths += 1
                threading.Timer(0.002, os.kill, (pid, signal.SIGKILL)).start()

    def generate(self, prompt: str, **options: Any) -> Generation:
        self._doom("generate")
        return super().generate(prompt, **options)

    def verify(self, drafts: Any, **options: Any) -> Any:
        self._doom("verify")
        return super().verify(drafts, **options)

    def decode_timing(self, **options: Any) -> DecodeTiming:
        self._doom("decode_timing")
        return super().decode_timing(**options)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Mortal]:
    with Mortal(model_path(), OPTIONS) as one:
        yield one


@pytest.fixture(scope="module")
def probes(runtime: Mortal) -> ProbeSet:
    """Fresh problems; the gate holds only such as the model gets right with all its experts."""
    runtime.apply(Schedule.baseline(runtime.facts))
    gate, holdout = [], []
    for index, problem in enumerate(tasks.fresh_problems("addition", 24, seed=11)):
        right = runtime.generate(problem.prompt, max_tokens=64).text.strip().endswith(f"Answer: {problem.answer}")
        chosen = gate if right and len(gate) < 8 else holdout
        split: Any = "gate" if chosen is gate else "holdout"
        chosen.append(Probe(f"p{index}", problem.prompt, problem.answer, "integer", split))
    return ProbeSet("fresh-additions", tuple(gate + holdout), max_tokens=64)


@pytest.mark.parametrize(("request_", "number"), [("decode_timing", 20), ("generate", 9)])
def test_a_study_survives_the_kill_of_its_process_and_its_winner_is_validated(
    runtime: Mortal, probes: ProbeSet, tmp_path: Path, request_: str, number: int
) -> None:
    # The 20th timing and the 9th completion (the baseline needs 14 and 8) belong to the first trial.
    storage, space = tmp_path / "s.db", SearchSpace.default(runtime.facts)
    settings = StudySettings(
        trials=4,
        measure=MEASURE,
        runners_up=None,
        policy=Policy(Rule.NO_WORSE_THAN_BASELINE),
        order="speed",
        verify=False,
    )
    runtime.fatal, before = (request_, number), runtime.deaths
    result = run_study(runtime, probes, space, study="s", storage=storage, settings=settings)
    assert runtime.deaths == before + 1
    endings = [trial.ending for trial in result.study.trials]
    assert endings == [Ending.RUNTIME_ERROR] + [Ending.EVALUATED] * 4
    assert "SIGKILL" in (result.study.trials[0].error or "")
    assert load_study(storage) == result.study
    for trial in result.study.evaluated:
        assert trial.speed is not None
        assert trial.gate_skipped or trial.attested == trial.key


def test_a_process_lost_while_drafts_were_checked_costs_no_trial(
    runtime: Mortal, probes: ProbeSet, tmp_path: Path
) -> None:
    storage, space = tmp_path / "s.db", SearchSpace.default(runtime.facts)
    settings = StudySettings(
        trials=2, measure=MEASURE, policy=Policy(Rule.NO_WORSE_THAN_BASELINE), order="gate", start="uniform"
    )
    # Two checks calibrate; the third is the first trial's.
    runtime.fatal, before = ("verify", 3), runtime.deaths
    result = run_study(runtime, probes, space, study="s", storage=storage, settings=settings)
    assert runtime.deaths == before + 1
    assert [trial.ending for trial in result.study.trials] == [Ending.EVALUATED] * 2
    assert all(outcome.kept is None for outcome in result.study.trials[0].outcomes)
    assert result.study.baseline is not None
    assert result.study.baseline.calibration is not None
    assert result.study.baseline.calibration.reason is None
    assert load_study(storage) == result.study


def test_an_acceptance_run_on_the_real_model_ends_in_a_certificate_that_covers_the_schedule(
    runtime: Mortal, probes: ProbeSet, tmp_path: Path
) -> None:
    """The rules are set so that one expert less in one block passes whatever the machine does meanwhile."""
    facts = runtime.facts
    block = facts.routed_blocks[-1]
    nearly = Schedule.from_counts("one-less", {block: facts.experts_used[block] - 1})
    lax = ValidateSettings(MEASURE, AcceptanceRule(margin=0.9), SpeedRule(min_ratio_low=0.01))
    validation = validate(runtime, probes, [nearly], lax)
    result = validation.results[0]
    if result.gate.result is not Result.PASS:
        pytest.skip(f"one expert less already fails the gate: {result.gate.reason}")
    path = tmp_path / "certificate.yaml"
    validation.require_certificate().save(path)
    certificate = Certificate.load(path)
    assert certificate.covers(nearly, facts, model_digest(facts))
    assert certificate.runtime == runtime.build
    assert certificate.probes.digest == probes.digest
