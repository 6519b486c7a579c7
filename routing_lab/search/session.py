"""One session of a study: propose a schedule, measure its speed, put it through the gate, write it down, go on.

**Order in a trial.** Two tests can end it: the speed (the schedule is surely no faster than the baseline, or surely
slower than enough accepted ones; "surely" means by whole intervals) and the gate (a probe failed). The one comes first
that costs less time for each schedule it rejects, by what this study has seen: of two independent tests that order is
the cheapest. Which it is depends on the model: a gate of drafts is cheap on a small one, and minutes long on one that
reasons. What was skipped is recorded as skipped, never as a value.

**Order in the gate.** The probes that failed most often in this study come first: a run ends at its first failure.

**What the sampler is told.** The value is the speed ratio. The constraint is the expected number of failed probes;
after a run that stopped at its first failure, how early it stopped is all that is known about how bad the schedule is.
Since the probes that ran are those that fail most often, each counts for as many as it fails more often than the
others (``_evidence``). The constraint is positive exactly when a probe failed.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final

import optuna
from optuna.trial import TrialState

from routing_lab.answers import Judge, Status
from routing_lab.errors import NothingAcceptedError, RuntimeFailureError
from routing_lab.gate import Result, Rule, decide
from routing_lab.measure import Ended, SpeedRatio, measure_ratio
from routing_lab.probes import Outcome, Probe, ProbeSet, run_probes
from routing_lab.probes.verify import Calibration, Transcripts, Verification, calibrate, verify_probes
from routing_lab.runtime.base import Runtime
from routing_lab.schedule import Schedule
from routing_lab.search.dimensions import Dimensions, Point
from routing_lab.search.records import BaselineRecord, Ending, Seconds, TrialRecord
from routing_lab.search.sampler import FreshSampler, make_sampler
from routing_lab.search.schedule_sampler import EVIDENCE, evidence_attribute
from routing_lab.search.settings import StudySettings
from routing_lab.search.storage import BASELINE, TRANSCRIPTS, TRIAL, read_trials
from routing_lab.search.surrogate import Evidence

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
        self._verification: Verification | None = None
        self._records: list[TrialRecord] = []
        self._taken: set[Point] = set()
        self._lost: Counter[Point] = Counter()
        self._failures: Counter[str] = Counter()
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
            record = BaselineRecord.from_dict(stored)
            self._prepare(record.calibration, self._stored_transcripts(record.outcomes))
            return record
        transcripts = Transcripts.of_baseline(self._runtime, self._probe_set, self._gate, self._judge)
        outcomes = transcripts.outcomes
        if broken := [outcome for outcome in outcomes if outcome.status is Status.RUNTIME_ERROR]:
            raise RuntimeFailureError(f"the baseline could not be run: probe {broken[0].probe}: {broken[0].reason}")
        calibration = None
        if self._settings.verify:
            calibration = calibrate(self._runtime, self._probe_set, self._gate, transcripts)
        record = BaselineRecord(
            key=self._baseline_schedule.key(self._runtime.facts),
            speed=measure_ratio(
                self._runtime, self._baseline_schedule, self._baseline_schedule, self._settings.measure
            ),
            verdict=decide(outcomes, len(self._gate)),
            outcomes=outcomes,
            calibration=calibration,
        )
        self._prepare(calibration, transcripts)
        self._study.set_user_attr(TRANSCRIPTS, transcripts.to_dict())
        self._study.set_user_attr(BASELINE, record.to_dict())
        return record

    def _stored_transcripts(self, outcomes: tuple[Outcome, ...]) -> Transcripts | None:
        stored = self._study.user_attrs.get(TRANSCRIPTS)
        return None if stored is None else Transcripts.from_dict(stored, outcomes)

    def _prepare(self, calibration: Calibration | None, transcripts: Transcripts | None) -> None:
        if self._settings.verify and calibration and transcripts and calibration.reason is None:
            self._verification = Verification(transcripts, calibration)

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
        inner = make_sampler(self._settings.sampler, seed, self._dimensions, self._taken)
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
        """Both tests, the one first that rejects more for its time; the other where the question is still open."""
        if self._gate_comes_first():
            record = self._gated(blank, baseline)
            if record.verdict.result is Result.PASS:
                return self._measured(record)
            return replace(record, speed_skipped="the gate was not passed")
        record = self._measured(blank)
        if (skipped := self._gate_is_pointless(record.speed, self._rival())) is not None:
            verdict = replace(record.verdict, reason=f"the gate was skipped: {skipped}")
            return replace(record, gate_skipped=skipped, verdict=verdict)
        return self._gated(record, baseline)

    def _measured(self, record: TrialRecord) -> TrialRecord:
        begun = time.perf_counter()
        speed = measure_ratio(
            self._runtime, record.schedule, self._baseline_schedule, self._settings.measure, rival=self._rival()
        )
        seconds = replace(record.seconds, speed=time.perf_counter() - begun)
        return replace(record, ending=Ending.EVALUATED, speed=speed, seconds=seconds)

    def _gate_comes_first(self) -> bool:
        """Whether the gate costs less time than the speed for each schedule it rejects."""
        if self._settings.order != "auto":
            return self._settings.order == "gate"
        evaluated = self.evaluated
        measured = [record for record in evaluated if record.seconds.speed]
        gated = [record for record in evaluated if record.seconds.gate]
        if not (measured and gated):
            return False
        rival = self._rival()
        too_slow = sum(self._gate_is_pointless(record.speed, rival) is not None for record in measured)
        failed = sum(record.verdict.result is Result.FAIL for record in gated)
        of_speed = sum(record.seconds.speed for record in measured) / (too_slow + 1)
        of_gate = sum(record.seconds.gate for record in gated) / (failed + 1)
        return of_gate < of_speed

    def _rival(self) -> float | None:
        """The ratio that a schedule has to reach to be wanted: of enough accepted ones, the slowest's lower end."""
        enough = self._settings.runners_up
        if enough is None:
            return None
        lows = heapq.nlargest(enough, (one.speed.low for one in self._records if one.accepted and one.speed))
        return lows[-1] if len(lows) == enough else None

    def _gate_is_pointless(self, speed: SpeedRatio | None, rival: float | None) -> str | None:
        """Why the verdict would change nothing; ``None`` where it would."""
        if speed is None:
            return None
        if speed.high <= 1:
            return "surely no faster than the baseline"
        if rival is not None and (speed.high < rival or speed.ended is Ended.BEATEN):
            return f"surely slower than {self._settings.runners_up} accepted schedules"
        return None

    def _gated(self, record: TrialRecord, baseline: BaselineRecord) -> TrialRecord:
        facts, policy = self._runtime.facts, self._settings.policy
        begun = time.perf_counter()
        attested = self._runtime.apply(record.schedule)
        outcomes = self._asked(() if policy.rule is Rule.ALL_CORRECT else baseline.failures)
        verdict = decide(outcomes, len(self._gate), policy, baseline.outcomes)
        lost = verdict.result is Result.UNDECIDED
        return replace(
            record,
            ending=Ending.RUNTIME_ERROR if lost else Ending.EVALUATED,
            verdict=verdict,
            outcomes=tuple(outcomes),
            attested=Schedule.from_counts("attested", attested.selected).key(facts),
            error=_error_of(outcomes) if lost else None,
            seconds=replace(record.seconds, gate=time.perf_counter() - begun),
        )

    def _asked(self, excused: Sequence[str]) -> list[Outcome]:
        """The gate under the schedule applied, most telling probes first."""
        stop, verification = self._settings.stop_after_failures, self._verification
        ask = run_probes if verification is None else partial(verify_probes, verification=verification)
        probes = self._telling_first()
        return ask(self._runtime, self._probe_set, probes, self._judge, stop_after_failures=stop, excused=excused)

    def _telling_first(self) -> list[Probe]:
        """The gate's probes, those that failed most often first; neighbours in length stay neighbours."""
        return sorted(self._gate, key=lambda probe: -self._failures[probe.id])

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
        seen = self._evidence(record) if record.verdict.run and record.ending is Ending.EVALUATED else None
        if seen is not None:
            trial.set_constraint(CONSTRAINT, seen.failed / seen.run * seen.total)
        trial.set_user_attr(EVIDENCE, evidence_attribute(record.speed.half_width if record.speed else None, seen))
        trial.set_user_attr(TRIAL, record.to_dict())
        if record.gate_skipped and record.speed:
            trial.report(record.speed.ratio, step=0)

    def _evidence(self, record: TrialRecord) -> Evidence:
        """What a gate run is worth: a probe that fails often says more than one that never does."""
        failures = record.verdict.failures
        if record.verdict.run == record.verdict.total:
            return Evidence(len(failures), record.verdict.run, record.verdict.total)
        weights = {probe.id: 1 + self._failures[probe.id] for probe in self._gate}
        usual = sum(weights.values()) / len(weights)
        run = sum(weights[outcome.probe] for outcome in record.outcomes) / usual
        return Evidence(len(failures), max(run, len(failures)), record.verdict.total)

    def _tell(self, number: int, record: TrialRecord) -> None:
        if record.ending is not Ending.EVALUATED:
            self._study.tell(number, state=TrialState.FAIL)  # samplers pass over failed trials
        elif record.gate_skipped or record.speed is None:
            self._study.tell(number, state=TrialState.PRUNED)
        else:
            self._study.tell(number, record.speed.ratio)

    def _remember(self, record: TrialRecord) -> None:
        self._records.append(record)
        self._failures.update(record.verdict.failures)
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


def _error_of(outcomes: Sequence[Outcome]) -> str | None:
    """What the runtime said when it was lost."""
    lost = (outcome for outcome in outcomes if outcome.status is Status.RUNTIME_ERROR)
    return next((f"probe {outcome.probe}: {outcome.reason}" for outcome in lost), None)
