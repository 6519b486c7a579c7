"""Evaluate given schedules side by side: for each its speed ratio and its verdict, as in the study's first figure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from routing_lab.answers import Judge, Status
from routing_lab.errors import AttestationError, RuntimeFailureError, RuntimeUnsupportedError, UsageError
from routing_lab.gate import Policy, Result, Verdict, decide
from routing_lab.measure import CountRounds, MeasureSettings, SpeedRatio, measure_many, measure_prefill
from routing_lab.probes import Outcome, ProbeSet, run_probes
from routing_lab.probes.verify import Calibration, Transcripts, Verification, calibrate, verify_probes
from routing_lab.runtime.base import Runtime
from routing_lab.schedule import Schedule

__all__ = ["EvaluateSettings", "Evaluation", "Row", "evaluate"]


@dataclass(frozen=True, slots=True)
class EvaluateSettings:
    """How schedules are measured and judged; by default every gate probe is asked, so that failures can be counted.

    ``verify`` of ``False`` decodes every answer instead of checking the baseline's as drafts. ``prefill_tokens`` is the
    length of the prompts whose rate is measured as well (0: it is not). In a ``race`` a schedule that is surely slower
    than one that passed is not measured any further; it takes ``measure.most_rounds`` for there to be anything to save.
    """

    measure: MeasureSettings = field(default_factory=MeasureSettings)
    policy: Policy = field(default_factory=Policy)
    stop_after_failures: int | None = None
    verify: bool = True
    prefill_tokens: int = 0
    race: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule beside the baseline.

    ``speed`` of ``None`` means that it could not be measured, and ``error`` says why. The baseline's own row has the
    ratio 1 by definition. ``prefill`` is the ratio of the rates at which prompts are processed, where it was measured.
    """

    schedule: Schedule
    key: str
    total_experts: int
    speed: SpeedRatio | None
    verdict: Verdict
    outcomes: tuple[Outcome, ...]
    error: str | None
    prefill: SpeedRatio | None = None

    @property
    def tokens_per_correct(self) -> float | None:
        """Generated tokens for each correct answer: rambling is slower than the rate says; ``None`` without one."""
        correct = sum(outcome.correct for outcome in self.outcomes)
        return sum(outcome.tokens for outcome in self.outcomes) / correct if correct else None

    @property
    def seconds_per_correct(self) -> float | None:
        """Seconds of decoding for each correct answer, at the rate that was measured."""
        if self.speed is None or self.tokens_per_correct is None:
            return None
        return self.tokens_per_correct / self.speed.candidate_tokens_per_s

    @property
    def status(self) -> Status | None:
        """``correct``, or the status of the first probe that is not; ``None`` when no probe ran."""
        wrong = (outcome.status for outcome in self.outcomes if not outcome.correct)
        return next(wrong, Status.CORRECT) if self.outcomes else None

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON can hold it."""
        return {
            "schedule": self.schedule.name,
            "experts_used": self.key,
            "total_experts": self.total_experts,
            "speed": None if self.speed is None else self.speed.to_dict(),
            "tokens_per_s": None if self.speed is None else self.speed.candidate_tokens_per_s,
            "prefill": None if self.prefill is None else self.prefill.to_dict(),
            "tokens_per_correct": self.tokens_per_correct,
            "seconds_per_correct": self.seconds_per_correct,
            "status": self.status,
            "verdict": asdict(self.verdict),
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The baseline's row and one for each schedule, in the order they were given.

    ``calibration`` says how the answers were found without decoding them (``None``: they were decoded).
    """

    baseline: Row
    rows: tuple[Row, ...]
    calibration: Calibration | None = None

    def warnings(self) -> tuple[str, ...]:
        """What the baseline's rates say about the machine while the schedules were measured."""
        longest = max((row.speed for row in self.rows if row.speed), key=lambda speed: speed.rounds, default=None)
        return () if longest is None else longest.warnings()

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON can hold it."""
        return {
            "baseline": self.baseline.to_dict(),
            "schedules": [row.to_dict() for row in self.rows],
            "calibration": None if self.calibration is None else self.calibration.to_dict(),
            "warnings": list(self.warnings()),
        }


def evaluate(
    runtime: Runtime,
    probe_set: ProbeSet,
    schedules: Sequence[Schedule],
    settings: EvaluateSettings | None = None,
    *,
    judge: Judge | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Evaluation:
    """Ask the gate probes under each schedule and measure all of them in the same rounds.

    A schedule that this runtime cannot set, or under which the model's process dies, gets a row that says so.

    Args:
        runtime: The model; left open.
        probe_set: Its gate probes are asked.
        schedules: Any number of schedules; the baseline is always added.
        settings: Rounds and policy.
        judge: Compares answers; one of its own by default.
        on_progress: Called with what is done next.

    Raises:
        UsageError: There is no gate probe.
        UserFileError: A schedule does not fit the model.
        AttestationError: The runtime does not do what it says.
        RuntimeFailureError: The model's process died under the baseline.
        RuntimeUnsupportedError: The baseline itself cannot be set.
    """
    if not probe_set.split("gate"):
        raise UsageError(f"probe set {probe_set.name} has no gate probes, so nothing could be decided")
    for schedule in schedules:
        schedule.resolve(runtime.facts)
    own: AbstractContextManager[Judge] = nullcontext(judge) if judge else Judge()
    with own as judging:
        table = _Table(runtime, probe_set, judging, settings or EvaluateSettings(), on_progress or (lambda _what: None))
        return table.of(schedules)


@dataclass(frozen=True, slots=True)
class _Answers:
    """What came of asking: outcomes, or why there are none."""

    outcomes: tuple[Outcome, ...] = ()
    error: str | None = None


class _Table:
    """The evaluation in progress."""

    def __init__(
        self,
        runtime: Runtime,
        probe_set: ProbeSet,
        judge: Judge,
        settings: EvaluateSettings,
        report: Callable[[str], None],
    ) -> None:
        self._runtime, self._probe_set, self._judge, self._settings = runtime, probe_set, judge, settings
        self._report = report
        self._gate = probe_set.split("gate")
        self._baseline = Schedule.baseline(runtime.facts)
        self._verification: Verification | None = None
        self._schedules = 1

    def of(self, schedules: Sequence[Schedule]) -> Evaluation:
        """The table: all answers first, then all speeds in common rounds."""
        self._schedules = len(schedules) + 1
        own = self._own_answers()
        answers = [self._answers(schedule, number) for number, schedule in enumerate(schedules, 2)]
        speeds = self._speeds(schedules, answers, own.outcomes)
        prefill = self._prefill(schedules, speeds)
        # Where nothing else could be measured, the baseline still can, or there is no table.
        measured = next((speed for speed in speeds if isinstance(speed, SpeedRatio)), None)
        itself = _against_itself(measured or self._measured([self._baseline])[0])
        return Evaluation(
            baseline=self._row(self._baseline, own, itself, None, own.outcomes),
            rows=tuple(
                self._row(schedule, got, speed, ratio, own.outcomes)
                for schedule, got, speed, ratio in zip(schedules, answers, speeds, prefill, strict=True)
            ),
            calibration=None if self._verification is None else self._verification.calibration,
        )

    def _own_answers(self) -> _Answers:
        """The baseline's answers, decoded; its completions are the drafts of all others."""
        asked = self._asking(self._baseline, 1)
        transcripts = Transcripts.of_baseline(self._runtime, self._probe_set, self._gate, self._judge, asked)
        if self._settings.verify:
            self._report("comparing answers that are checked with decoded ones")
            found = calibrate(self._runtime, self._probe_set, self._gate, transcripts)
            self._verification = Verification(transcripts, found)
        return _Answers(transcripts.outcomes)

    def _asking(self, schedule: Schedule, number: int) -> Callable[[Outcome], None]:
        """Say whose probes are asked, and what counts them."""
        who, done = f"asking {schedule.name} ({number} of {self._schedules})", itertools.count(1)
        self._report(who)
        return lambda _outcome: self._report(f"{who}, {next(done)} of {len(self._gate)} probes")

    def _round(self, what: str) -> CountRounds:
        """Say what is measured, and what counts its rounds; the first to come is the warm-up."""
        self._report(what)
        return lambda number, most: self._report(f"{what}, round {number} of at most {most}")

    def _answers(self, schedule: Schedule, number: int) -> _Answers:
        asked = self._asking(schedule, number)
        try:
            self._runtime.apply(schedule)
        except AttestationError:
            raise  # without attestation no answer means anything
        except (RuntimeUnsupportedError, RuntimeFailureError) as error:
            return _Answers(error=str(error))
        ask = run_probes
        if self._verification is not None:
            ask = partial(verify_probes, verification=self._verification)
        stop = self._settings.stop_after_failures
        return _Answers(
            tuple(
                ask(self._runtime, self._probe_set, self._gate, self._judge, stop_after_failures=stop, progress=asked)
            )
        )

    def _speeds(
        self, schedules: Sequence[Schedule], answers: Sequence[_Answers], own: Sequence[Outcome]
    ) -> list[SpeedRatio | str]:
        """For each schedule its ratio or why there is none."""
        usable = [index for index, got in enumerate(answers) if got.error is None]
        speeds: list[SpeedRatio | str] = [got.error or "not measured" for got in answers]
        wanted = [schedules[index] for index in usable]
        passed = [self._verdict(answers[index].outcomes, own).result is Result.PASS for index in usable]
        racers = [place for place, fine in enumerate(passed) if fine and self._settings.race]
        try:
            measured: Sequence[SpeedRatio | str] = self._measured(wanted, racers)
        except RuntimeFailureError:
            # One of them kills the process; alone with the baseline the others still get their numbers.
            measured = [self._speed_alone(schedule) for schedule in wanted]
        for index, speed in zip(usable, measured, strict=True):
            speeds[index] = speed
        return speeds

    def _measured(self, schedules: Sequence[Schedule], racers: Collection[int] = ()) -> list[SpeedRatio]:
        return measure_many(
            self._runtime,
            schedules,
            self._baseline,
            self._settings.measure,
            racers=racers,
            on_round=self._round("measuring speeds"),
        )

    def _verdict(self, outcomes: Sequence[Outcome], own: Sequence[Outcome]) -> Verdict:
        return decide(outcomes, len(self._gate), self._settings.policy, own)

    def _speed_alone(self, schedule: Schedule) -> SpeedRatio | str:
        try:
            return self._measured([schedule])[0]
        except RuntimeFailureError as error:
            return str(error)

    def _prefill(self, schedules: Sequence[Schedule], speeds: Sequence[SpeedRatio | str]) -> list[SpeedRatio | None]:
        """For each schedule the ratio of the rates at which prompts are processed, where there is one."""
        tokens = self._settings.prefill_tokens
        usable = [index for index, speed in enumerate(speeds) if not isinstance(speed, str)]
        ratios: list[SpeedRatio | None] = [None for _ in speeds]
        if not tokens or not usable:
            return ratios
        wanted = [schedules[index] for index in usable]
        try:
            measured = measure_prefill(
                self._runtime,
                wanted,
                self._baseline,
                self._settings.measure,
                tokens,
                on_round=self._round("measuring prompts"),
            )
        except RuntimeFailureError:
            measured = None  # its decode ratio is there, and the row's error is about that
        for index, ratio in zip(usable, measured or [], strict=False):
            ratios[index] = ratio
        return ratios

    def _row(
        self,
        schedule: Schedule,
        got: _Answers,
        speed: SpeedRatio | str,
        prefill: SpeedRatio | None,
        own: Sequence[Outcome],
    ) -> Row:
        facts = self._runtime.facts
        return Row(
            schedule=schedule,
            key=schedule.key(facts),
            total_experts=schedule.total(facts),
            speed=None if isinstance(speed, str) else speed,
            prefill=prefill,
            verdict=self._verdict(got.outcomes, own),
            outcomes=got.outcomes,
            error=speed if isinstance(speed, str) else None,
        )


def _against_itself(measured: SpeedRatio) -> SpeedRatio:
    """The baseline's own row, from the rounds that it shared with another schedule."""
    return SpeedRatio.from_rates(measured.baseline_rates, measured.baseline_rates, measured.confidence)
