"""One session of a study: propose a schedule, measure its speed, put it through the gate, write it down, go on.

**Order in a trial.** Speed first, then the gate. A screening measurement costs a fixed and small number of tokens; the
gate costs a completion per probe, on a reasoning model minutes each. So speed is measured for every schedule (and every
trial can be drawn in a plot), and the gate is skipped where speed alone decides: the schedule is surely no faster than
the baseline, or surely slower than enough accepted ones. "Surely" means by whole intervals. What was skipped is
recorded as skipped.

**What the sampler is told.** The value is the speed ratio. The constraint is the expected number of failed probes,
``failures / run * total``: after a gate run that stopped at its first failure, how early it stopped is all that is
known about how bad the schedule is. It is positive exactly when a probe failed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

import optuna
from optuna.trial import TrialState

from routing_lab.answers import Judge, Status
from routing_lab.errors import NothingAcceptedError, RuntimeFailureError
from routing_lab.gate import Result, Rule, Verdict, decide
from routing_lab.measure import SpeedRatio, measure_ratio
from routing_lab.probes import Outcome, ProbeSet, run_probes
from routing_lab.runtime.base import Runtime
from routing_lab.schedule import Schedule
from routing_lab.search.records import BaselineRecord, Ending, Seconds, TrialRecord
from routing_lab.search.sampler import Dimensions, FreshSampler, Point, make_sampler
from routing_lab.search.settings import StudySettings
from routing_lab.search.storage import BASELINE, TRIAL, read_trials

__all__ = ["Progress", "Session", "Stop"]

ATTEMPTS: Final = 2
"""Trials of one schedule that may end in a runtime error; one that kills the model every time is then left alone."""

CONSTRAINT: Final = "failed probes"
ORIGIN: Final = "routing_lab.origin"


class Stop(StrEnum):
    """Why a session ended."""

    TRIALS = "trials"
    HOURS = "hours"
    EXHAUSTED = "exhausted"
    """Every schedule of the space has been evaluated."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a study stands: reported after the baseline and after every trial.

    ``done`` and ``total`` count evaluated schedules. ``pass_rate`` is the share that passed among those whose gate was
    decided. ``seconds_left`` is an estimate from this session's trials; both are ``None`` before there is one.
    """

    done: int
    total: int
    baseline: BaselineRecord
    best: TrialRecord | None
    last: TrialRecord | None
    pass_rate: float | None
    seconds_left: float | None


class Session:
    """The running study: what is known in memory, and the Optuna study that it is written to.

    Args:
        runtime: The model.
        probe_set: Its gate probes decide.
        judge: Compares answers.
        settings: Budget and rules.
        dimensions: The space.
        study: The opened study; its sampler is set here.
        path: Its storage, for messages.
    """

    def __init__(
        self,
        *,
        runtime: Runtime,
        probe_set: ProbeSet,
        judge: Judge,
        settings: StudySettings,
        dimensions: Dimensions,
        study: optuna.Study,
        path: Path,
    ) -> None:
        self._runtime, self._probe_set, self._judge = runtime, probe_set, judge
        self._settings, self._dimensions, self._study, self._path = settings, dimensions, study, path
        self._gate = probe_set.split("gate")
        self._baseline_schedule = Schedule.baseline(runtime.facts)
        self._records: list[TrialRecord] = []
        self._taken: set[Point] = set()
        self._lost: Counter[Point] = Counter()
        self._errors_in_a_row = 0
        self._started = time.monotonic()
        self._done_before = 0

    @property
    def evaluated(self) -> list[TrialRecord]:
        """The results so far, those of earlier sessions included."""
        return [record for record in self._records if record.ending is Ending.EVALUATED]

    def run(self, on_progress: Callable[[Progress], None] | None) -> Stop:
        """Measure the baseline where that was not done yet, then run trials until a bound is reached.

        Raises:
            NothingAcceptedError: The baseline makes every verdict a failure.
            RuntimeFailureError: The model's process was lost during the baseline, or in too many trials in a row.
        """
        self._settle_unfinished()
        self._recall()
        baseline = self._baseline()
        report = on_progress or (lambda _progress: None)
        report(self._progress(baseline, None))
        self._refuse_hopeless(baseline)
        sampler = self._use_sampler()
        self._enqueue_uniform()
        while (stop := self._bound_reached(sampler)) is None:
            last = self._trial(baseline)
            report(self._progress(baseline, last))
            self._refuse_dying(last)
        return stop

    # ---- before the first trial ------------------------------------------------------------------------------------

    def _settle_unfinished(self) -> None:
        """End the trials that a killed process left running; one whose record was already written is a result."""
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if TRIAL in trial.user_attrs:
                record = TrialRecord.from_dict(trial.number, trial.user_attrs[TRIAL])
            else:
                record = self._record(trial.number, trial.params, "unknown", Ending.ABANDONED)
                self._write(optuna.Trial(self._study, trial._trial_id), record)  # noqa: SLF001 - Optuna has no other way
            self._tell(trial.number, record)

    def _recall(self) -> None:
        """Read what earlier sessions found."""
        for record in read_trials(self._study, self._path):
            self._remember(record)
        self._done_before = len(self.evaluated)
        if (own := self._dimensions.point_of(self._baseline_schedule)) is not None:
            self._taken.add(own)  # its ratio is 1 and its outcomes are known

    def _baseline(self) -> BaselineRecord:
        """The baseline as the first session found it, or measured now: all gate probes, and itself against itself."""
        if (stored := self._study.user_attrs.get(BASELINE)) is not None:
            return BaselineRecord.from_dict(stored)
        self._runtime.apply(self._baseline_schedule)
        outcomes = run_probes(self._runtime, self._probe_set, self._gate, self._judge, stop_after_failures=None)
        if broken := [outcome for outcome in outcomes if outcome.status is Status.RUNTIME_ERROR]:
            raise RuntimeFailureError(f"the baseline could not be run: probe {broken[0].probe}: {broken[0].reason}")
        record = BaselineRecord(
            key=self._baseline_schedule.key(self._runtime.facts),
            speed=measure_ratio(
                self._runtime, self._baseline_schedule, self._baseline_schedule, self._settings.measure
            ),
            verdict=decide(outcomes, len(self._gate)),
            outcomes=tuple(outcomes),
        )
        self._study.set_user_attr(BASELINE, record.to_dict())
        return record

    def _refuse_hopeless(self, baseline: BaselineRecord) -> None:
        """Under ``all_correct`` no schedule can be expected to pass a probe that the whole model fails."""
        strict = self._settings.policy.rule is Rule.ALL_CORRECT
        if baseline.failures and (strict or baseline.verdict.passed == 0):
            ways_out = "fix or remove these probes"
            if strict:
                ways_out += f", or search with the policy {Rule.NO_WORSE_THAN_BASELINE}, which excuses them"
            raise NothingAcceptedError(
                f"with all its own experts the model fails {len(baseline.failures)} of {len(self._gate)} gate probes: "
                f"{', '.join(baseline.failures)}; {ways_out}"
            )

    def _use_sampler(self) -> FreshSampler:
        # Another seed in every session: the same one would propose again what it proposed in the first.
        seed = (self._settings.seed + len(self._records)) % 2**31
        inner = make_sampler(self._settings.sampler, seed)
        sampler = FreshSampler(inner, self._dimensions, self._taken, seed=seed)
        self._study.sampler = sampler
        return sampler

    def _enqueue_uniform(self) -> None:
        """Let every study begin with the uniform schedules of its space, the gentlest cut first."""
        facts = self._runtime.facts
        counts = {count for choices in self._dimensions.choices.values() for count in choices}
        for count in sorted(counts, reverse=True):
            point = self._dimensions.point_of(Schedule.uniform(count, facts))
            if point is not None and point not in self._taken:
                self._study.enqueue_trial(
                    self._dimensions.params(point), user_attrs={ORIGIN: "uniform"}, skip_if_exists=True
                )

    # ---- a trial ---------------------------------------------------------------------------------------------------

    def _trial(self, baseline: BaselineRecord) -> TrialRecord:
        """Ask, screen, write. Whatever happens, the trial is ended in the storage before the error goes on."""
        trial = self._study.ask(self._dimensions.distributions)
        origin = trial.user_attrs.get(ORIGIN, self._settings.sampler)
        blank = self._record(trial.number, trial.params, origin, Ending.INTERRUPTED)
        record = blank
        try:
            if self._dimensions.point(trial.params) in self._taken:
                record = replace(blank, ending=Ending.DUPLICATE)
            else:
                record = self._screened(blank, baseline)
        except RuntimeFailureError as error:
            record = replace(blank, ending=Ending.RUNTIME_ERROR, error=str(error))
        finally:
            self._write(trial, record)
            self._tell(trial.number, record)
            self._remember(record)
        return record

    def _screened(self, blank: TrialRecord, baseline: BaselineRecord) -> TrialRecord:
        """Measure and, where speed leaves the question open, run the gate."""
        begun = time.perf_counter()
        speed = measure_ratio(self._runtime, blank.schedule, self._baseline_schedule, self._settings.measure)
        measured = time.perf_counter()
        record = replace(blank, ending=Ending.EVALUATED, speed=speed, seconds=Seconds(speed=measured - begun))
        if (skipped := self._gate_is_pointless(speed)) is not None:
            verdict = replace(record.verdict, reason=f"the gate was skipped: {skipped}")
            return replace(record, gate_skipped=skipped, verdict=verdict)
        record = self._gated(record, baseline)
        return replace(record, seconds=replace(record.seconds, gate=time.perf_counter() - measured))

    def _gate_is_pointless(self, speed: SpeedRatio) -> str | None:
        """Why the verdict would change nothing; ``None`` where it would."""
        if speed.high <= 1:
            return "surely no faster than the baseline"
        enough = self._settings.runners_up
        faster = sum(
            1 for record in self._records if record.accepted and record.speed and record.speed.low > speed.high
        )
        if enough is not None and faster >= enough:
            return f"surely slower than {faster} accepted schedules"
        return None

    def _gated(self, record: TrialRecord, baseline: BaselineRecord) -> TrialRecord:
        facts, policy = self._runtime.facts, self._settings.policy
        attested = self._runtime.apply(record.schedule)
        outcomes = run_probes(
            self._runtime,
            self._probe_set,
            self._gate,
            self._judge,
            stop_after_failures=self._settings.stop_after_failures,
            excused=() if policy.rule is Rule.ALL_CORRECT else baseline.failures,
        )
        verdict = decide(outcomes, len(self._gate), policy, baseline.outcomes)
        lost = verdict.result is Result.UNDECIDED
        return replace(
            record,
            ending=Ending.RUNTIME_ERROR if lost else Ending.EVALUATED,
            verdict=verdict,
            outcomes=tuple(outcomes),
            attested=Schedule.from_counts("attested", attested.selected).key(facts),
            error=_error_of(outcomes) if lost else None,
        )

    def _record(self, number: int, params: dict[str, int], origin: str, ending: Ending) -> TrialRecord:
        """A record of a schedule about which nothing is known yet."""
        facts = self._runtime.facts
        # A trial of a process that was killed between two parameters has no schedule; the model's own stands in.
        whole = params.keys() >= self._dimensions.choices.keys()
        schedule = self._dimensions.schedule(params) if whole else self._baseline_schedule.completed(facts)
        return TrialRecord(
            number=number,
            ending=ending,
            schedule=replace(schedule, name=f"{self._study.study_name}-{number}"),
            key=schedule.key(facts),
            origin=origin,
            speed=None,
            verdict=decide([], len(self._gate)),
            gate_skipped=None,
            outcomes=(),
            attested=None,
            seconds=Seconds(),
            error=None,
        )

    # ---- writing and remembering -----------------------------------------------------------------------------------

    def _write(self, trial: optuna.Trial, record: TrialRecord) -> None:
        """Constraint, then record, then state: a process killed in between leaves a trial that can be settled."""
        if record.verdict.run and record.ending is Ending.EVALUATED:
            trial.set_constraint(CONSTRAINT, _expected_failures(record.verdict))
        trial.set_user_attr(TRIAL, record.to_dict())
        if record.gate_skipped and record.speed:
            trial.report(record.speed.ratio, step=0)

    def _tell(self, number: int, record: TrialRecord) -> None:
        if record.ending is not Ending.EVALUATED or record.speed is None:
            self._study.tell(number, state=TrialState.FAIL)  # samplers pass over failed trials
        elif record.gate_skipped:
            self._study.tell(number, state=TrialState.PRUNED)
        else:
            self._study.tell(number, record.speed.ratio)

    def _remember(self, record: TrialRecord) -> None:
        self._records.append(record)
        point = self._dimensions.point_of(record.schedule)
        if point is None:
            return
        if record.ending is Ending.RUNTIME_ERROR:
            self._lost[point] += 1
        if record.ending is Ending.EVALUATED or self._lost[point] >= ATTEMPTS:
            self._taken.add(point)

    # ---- bounds and progress ---------------------------------------------------------------------------------------

    def _bound_reached(self, sampler: FreshSampler) -> Stop | None:
        settings = self._settings
        if len(self.evaluated) >= settings.trials:
            return Stop.TRIALS
        if settings.hours is not None and time.monotonic() - self._started >= settings.hours * 3600:
            return Stop.HOURS
        return Stop.EXHAUSTED if sampler.exhausted else None

    def _refuse_dying(self, last: TrialRecord) -> None:
        self._errors_in_a_row = self._errors_in_a_row + 1 if last.ending is Ending.RUNTIME_ERROR else 0
        if self._errors_in_a_row >= self._settings.most_runtime_errors:
            raise RuntimeFailureError(
                f"the model's process was lost in {self._errors_in_a_row} trials in a row, so the study stopped; what "
                "is finished is saved, and the same command goes on once the cause is removed. "
                f"The last error: {last.error}"
            )

    def _progress(self, baseline: BaselineRecord, last: TrialRecord | None) -> Progress:
        evaluated = self.evaluated
        results = [record.verdict.result for record in evaluated if record.gate_skipped is None]
        accepted = [record for record in evaluated if record.accepted]
        return Progress(
            done=len(evaluated),
            total=self._settings.trials,
            baseline=baseline,
            best=max(accepted, key=lambda record: record.speed.ratio if record.speed else 0.0, default=None),
            last=last,
            pass_rate=results.count(Result.PASS) / len(results) if results else None,
            seconds_left=self._seconds_left(len(evaluated)),
        )

    def _seconds_left(self, done: int) -> float | None:
        elapsed = time.monotonic() - self._started
        here = done - self._done_before
        if here == 0:
            return None
        left = elapsed / here * max(0, self._settings.trials - done)
        hours = self._settings.hours
        return left if hours is None else max(0.0, min(left, hours * 3600 - elapsed))


def _expected_failures(verdict: Verdict) -> float:
    """Failed probes to expect of the whole gate, from the part of it that was run."""
    return len(verdict.failures) / verdict.run * verdict.total


def _error_of(outcomes: Sequence[Outcome]) -> str | None:
    """What the runtime said when it was lost."""
    lost = (outcome for outcome in outcomes if outcome.status is Status.RUNTIME_ERROR)
    return next((f"probe {outcome.probe}: {outcome.reason}" for outcome in lost), None)
