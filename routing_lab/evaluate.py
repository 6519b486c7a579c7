"""Evaluate given schedules side by side: for each its speed ratio and its verdict, as in the study's first figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from routing_lab.answers import Judge, Status
from routing_lab.errors import AttestationError, RuntimeFailureError, RuntimeUnsupportedError, UsageError
from routing_lab.gate import Policy, Verdict, decide
from routing_lab.measure import MeasureSettings, SpeedRatio, measure_rates, measure_ratio
from routing_lab.probes import Outcome, ProbeSet, run_probes
from routing_lab.runtime.base import Runtime
from routing_lab.schedule import Schedule

__all__ = ["EvaluateSettings", "Evaluation", "Row", "evaluate"]


@dataclass(frozen=True, slots=True)
class EvaluateSettings:
    """How schedules are measured and judged; by default every gate probe is asked, so that failures can be counted."""

    measure: MeasureSettings = field(default_factory=MeasureSettings)
    policy: Policy = field(default_factory=Policy)
    stop_after_failures: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule beside the baseline.

    ``speed`` of ``None`` means that it could not be measured, and ``error`` says why. The baseline's own row has the
    ratio 1 by definition.
    """

    schedule: Schedule
    key: str
    total_experts: int
    speed: SpeedRatio | None
    verdict: Verdict
    outcomes: tuple[Outcome, ...]
    error: str | None

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
            "status": self.status,
            "verdict": asdict(self.verdict),
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The baseline's row and one for each schedule, in the order they were given."""

    baseline: Row
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON can hold it."""
        return {"baseline": self.baseline.to_dict(), "schedules": [row.to_dict() for row in self.rows]}


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

    def of(self, schedules: Sequence[Schedule]) -> Evaluation:
        """The table: all answers first, then all speeds in common rounds."""
        everything = [self._baseline, *schedules]
        answers = [self._answers(schedule) for schedule in everything]
        self._report("measuring speeds")
        speeds = self._speeds(everything, answers)
        own = answers[0].outcomes
        rows = [
            self._row(schedule, got, speed, own)
            for schedule, got, speed in zip(everything, answers, speeds, strict=True)
        ]
        return Evaluation(rows[0], tuple(rows[1:]))

    def _answers(self, schedule: Schedule) -> _Answers:
        self._report(f"asking {schedule.name}")
        try:
            self._runtime.apply(schedule)
        except (RuntimeUnsupportedError, RuntimeFailureError) as error:
            # Without a baseline there is no table, and without attestation no answer means anything.
            if schedule is self._baseline or isinstance(error, AttestationError):
                raise
            return _Answers(error=str(error))
        stop = None if schedule is self._baseline else self._settings.stop_after_failures
        return _Answers(
            tuple(run_probes(self._runtime, self._probe_set, self._gate, self._judge, stop_after_failures=stop))
        )

    def _speeds(self, schedules: Sequence[Schedule], answers: Sequence[_Answers]) -> list[SpeedRatio | str]:
        """For each schedule its ratio or why there is none; the first one is the baseline, against itself."""
        usable = [index for index, got in enumerate(answers) if got.error is None]
        speeds: list[SpeedRatio | str] = [got.error or "not measured" for got in answers]
        try:
            rates = measure_rates(self._runtime, [schedules[index] for index in usable], self._settings.measure)
        except RuntimeFailureError:
            # One of them kills the process; alone with the baseline the others still get their numbers.
            for index in usable:
                speeds[index] = self._speed_alone(schedules[index])
            return speeds
        for index, series in zip(usable, rates, strict=True):
            speeds[index] = SpeedRatio.from_rates(series, rates[0], self._settings.measure.confidence)
        return speeds

    def _speed_alone(self, schedule: Schedule) -> SpeedRatio | str:
        try:
            return measure_ratio(self._runtime, schedule, self._baseline, self._settings.measure)
        except RuntimeFailureError as error:
            if schedule is self._baseline:
                raise
            return str(error)

    def _row(self, schedule: Schedule, got: _Answers, speed: SpeedRatio | str, own: Sequence[Outcome]) -> Row:
        facts = self._runtime.facts
        return Row(
            schedule=schedule,
            key=schedule.key(facts),
            total_experts=schedule.total(facts),
            speed=None if isinstance(speed, str) else speed,
            verdict=decide(got.outcomes, len(self._gate), self._settings.policy, own),
            outcomes=got.outcomes,
            error=speed if isinstance(speed, str) else None,
        )
