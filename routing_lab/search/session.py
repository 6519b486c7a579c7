"""One session of a study: propose a schedule, measure its speed, put it through the gate, write it down, go on.

**Order in a trial.** Two tests can end it: the speed (the schedule is surely no faster than the baseline, or surely
slower than enough accepted ones; "surely" means by whole intervals) and the gate (a probe failed). The one comes first
that costs less time for each schedule it rejects, by what this study has seen: of two independent tests that order is
the cheapest. Which it is depends on the model: a gate of drafts is cheap on a small one, and minutes long on one that
reasons. What was skipped is recorded as skipped, never as a value.

**The sensitivity pass.** Where the study begins with it, every dimension is first cut alone, as trials of that
origin that are not timed. For a map the whole gate is asked, so that its result is a graded one. They are no candidates
and are not counted, and a cut that passed may be proposed again.

**Order in the gate.** The probes that failed most often in this study come first: a run ends at its first failure.

**What the sampler is told.** The value is the speed ratio. The constraint is the expected number of failed probes;
after a run that stopped at its first failure, how early it stopped is all that is known about how bad the schedule is.
Since the probes that ran are those that fail most often, each counts for as many as it fails more often than the
others (``_evidence``). The constraint is positive exactly when a probe failed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
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
from routing_lab.measure import measure_ratio
from routing_lab.probes import Outcome, Probe, ProbeSet, run_probes
from routing_lab.probes.verify import Calibration, Transcripts, Verification, calibrate, verify_probes
from routing_lab.runtime.base import Runtime
from routing_lab.schedule import Schedule
from routing_lab.search.dimensions import Dimensions, Point
from routing_lab.search.history import History
from routing_lab.search.records import SINGLE_CUT, BaselineRecord, Ending, Seconds, TrialRecord
from routing_lab.search.sampler import FreshSampler, make_sampler
from routing_lab.search.schedule_sampler import EVIDENCE, evidence_attribute
from routing_lab.search.sensitivity import SingleCuts
from routing_lab.search.settings import StudySettings
from routing_lab.search.storage import BASELINE, TRANSCRIPTS, TRIAL, read_trials
from routing_lab.search.surrogate import Evidence

__all__ = ["Progress", "Session", "Step", "Stop"]

CONSTRAINT: Final = "failed probes"
ORIGIN: Final = "routing_lab.origin"


Step = Callable[[str, int, int], None]
"""Called with what is done before the first trial, how much of it is done, and how much there is."""


class Stop(StrEnum):
    """Why a session ended."""

    TRIALS = "trials"
    HOURS = "hours"
    EXHAUSTED = "exhausted"
    """Every schedule of the space has been evaluated."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a study stands: reported after the baseline and after every trial.

    ``done`` and ``total`` count evaluated schedules (``None``: only time bounds them). ``pass_rate`` is the share that
    passed among those whose gate was decided. ``seconds_left`` is an estimate from this session's trials; both are
    ``None`` before there is one.
    ``cuts_done`` gate runs of the sensitivity pass are done, and at least ``cuts_ahead`` are to come.
    """

    done: int
    total: int | None
    baseline: BaselineRecord
    best: TrialRecord | None
    last: TrialRecord | None
    pass_rate: float | None
    seconds_left: float | None
    cuts_done: int = 0
    cuts_ahead: int = 0


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
        on_baseline: Called while the baseline is asked and measured.

    Raises:
        UsageError: The study is to begin with the sensitivity pass, and the space has none.
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
        on_baseline: Step | None = None,
    ) -> None:
        self._step = on_baseline or (lambda _doing, _done, _total: None)
        self._runtime, self._probe_set, self._judge = runtime, probe_set, judge
        self._settings, self._dimensions, self._study, self._path = settings, dimensions, study, path
        self._gate = probe_set.split("gate")
        self._baseline_schedule = Schedule.baseline(runtime.facts)
        self._verification: Verification | None = None
        self._history = History(dimensions, settings)
        self._cuts = SingleCuts.of_start(dimensions, settings)
        self._errors_in_a_row = 0
        self._started = time.monotonic()
        self._trial_seconds = 0.0
        self._done_before = 0

    @property
    def evaluated(self) -> int:
        """Results so far, those of earlier sessions included, without the sensitivity pass."""
        return self._history.evaluated

    @property
    def evaluated_now(self) -> int:
        """Results of this session alone."""
        return self.evaluated - self._done_before

    @property
    def saved(self) -> str:
        """What an interrupt leaves, in words."""
        schedules, cuts = f"{self.evaluated} evaluated schedules", len(self._history.cuts)
        return f"{schedules} and what {cuts} parts lose when cut alone" if cuts else schedules

    def run(self, report: Callable[[Progress], None]) -> Stop:
        """Measure the baseline where that was not done yet, then run trials until a bound is reached.

        Raises:
            NothingAcceptedError: The baseline makes every verdict a failure.
            RuntimeFailureError: The model's process was lost during the baseline, or in too many trials in a row.
        """
        self._settle_unfinished()
        self._recall()
        baseline = self._baseline()
        report(self._progress(baseline, None))
        self._refuse_hopeless(baseline)
        sampler = self._use_sampler()
        self._prepare_start()
        while (stop := self._bound_reached(sampler)) is None:
            self._enqueue_cut()
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
            self._history.add(record)
        self._done_before = self.evaluated
        if (own := self._dimensions.point_of(self._baseline_schedule)) is not None:
            self._history.taken.add(own)  # its ratio is 1 and its outcomes are known

    def _baseline(self) -> BaselineRecord:
        """The baseline as the first session found it, or measured now: all gate probes, and itself against itself."""
        if (stored := self._study.user_attrs.get(BASELINE)) is not None:
            record = BaselineRecord.from_dict(stored)
            self._prepare(record.calibration, self._stored_transcripts(record.outcomes))
            return record
        done = itertools.count(1)
        transcripts = Transcripts.of_baseline(
            self._runtime,
            self._probe_set,
            self._gate,
            self._judge,
            lambda _outcome: self._step("gate probes asked", next(done), len(self._gate)),
        )
        outcomes = transcripts.outcomes
        if broken := [outcome for outcome in outcomes if outcome.status is Status.RUNTIME_ERROR]:
            raise RuntimeFailureError(f"the baseline could not be run: probe {broken[0].probe}: {broken[0].reason}")
        calibration = None
        if self._settings.verify:
            calibration = calibrate(self._runtime, self._probe_set, self._gate, transcripts)
        record = BaselineRecord(
            key=self._baseline_schedule.key(self._runtime.facts),
            speed=measure_ratio(
                self._runtime,
                self._baseline_schedule,
                self._baseline_schedule,
                self._settings.measure,
                on_round=lambda number, most: self._step("measuring, rounds at most", number, most),
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
                ways_out += f", or run the same command with --policy {Rule.NO_WORSE_THAN_BASELINE}, which excuses them"
            raise NothingAcceptedError(
                f"with all its own experts the model fails {len(baseline.failures)} of {len(self._gate)} gate probes: "
                f"{', '.join(baseline.failures)}; {ways_out}"
            )

    def _use_sampler(self) -> FreshSampler:
        # Another seed in every session: the same one would propose again what it proposed in the first.
        seed, taken = (self._settings.seed + self._history.trials) % 2**31, self._history.taken
        inner = make_sampler(self._settings.sampler, seed, self._dimensions, taken)
        sampler = FreshSampler(inner, self._dimensions, taken, seed=seed)
        self._study.sampler = sampler
        return sampler

    def _prepare_start(self) -> None:
        """See to what comes before the sampler's own proposals.

        Where drafts turned out to be no evidence here, the uniform schedules stand in for the sensitivity pass.
        """
        if self._verification is None:
            self._cuts = None
        if self._cuts is None and self._settings.start != "none":
            self._enqueue_uniform()

    def _enqueue_uniform(self) -> None:
        """Let the study begin with the uniform schedules of its space, the gentlest cut first."""
        facts = self._runtime.facts
        counts = {count for choices in self._dimensions.choices.values() for count in choices}
        for count in sorted(counts, reverse=True):
            point = self._dimensions.point_of(Schedule.uniform(count, facts))
            if point is not None and point not in self._history.taken:
                self._study.enqueue_trial(
                    self._dimensions.params(point), user_attrs={ORIGIN: "uniform"}, skip_if_exists=True
                )

    def _enqueue_cut(self) -> None:
        """Put the next schedule of the sensitivity pass in front; which one it is depends on the last."""
        ahead = self._cuts_ahead()
        # One that a killed process had put there waits still.
        if ahead and not self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            self._study.enqueue_trial(self._dimensions.params(ahead[0]), user_attrs={ORIGIN: SINGLE_CUT})

    def _cuts_ahead(self) -> list[Point]:
        return [] if self._cuts is None else self._cuts.ahead(self._history.cuts)

    # ---- a trial ---------------------------------------------------------------------------------------------------

    def _trial(self, baseline: BaselineRecord) -> TrialRecord:
        """Ask, screen, write. Whatever happens, the trial is ended in the storage before the error goes on."""
        trial = self._study.ask(self._dimensions.distributions)
        origin = trial.user_attrs.get(ORIGIN, self._settings.sampler)
        blank = self._record(trial.number, trial.params, origin, Ending.INTERRUPTED)
        record = blank
        begun = time.monotonic()
        try:
            if self._dimensions.point(trial.params) in self._history.taken and not blank.is_single_cut:
                record = replace(blank, ending=Ending.DUPLICATE)
            else:
                record = self._screened(blank, baseline)
        except RuntimeFailureError as error:
            record = replace(blank, ending=Ending.RUNTIME_ERROR, error=str(error))
        finally:
            self._write(trial, record)
            self._tell(trial.number, record)
            self._history.add(record)
        self._ask_again(record, trial.params)
        if not record.is_single_cut:
            self._trial_seconds += time.monotonic() - begun
        return record

    def _ask_again(self, record: TrialRecord, params: Mapping[str, int]) -> None:
        """Line a schedule up again on which the process was lost for the first time: it may have been killed."""
        point = self._dimensions.point_of(record.schedule)
        lost = record.ending is Ending.RUNTIME_ERROR and not record.is_single_cut
        if lost and point is not None and point not in self._history.taken:
            self._study.enqueue_trial(dict(params), user_attrs={ORIGIN: record.origin})

    def _screened(self, blank: TrialRecord, baseline: BaselineRecord) -> TrialRecord:
        """Both tests, the one first that rejects more for its time; the other where the question is still open."""
        stop = self._settings.stop_after_failures
        if blank.is_single_cut:
            record = self._gated(blank, baseline, None if self._settings.start == "map" else stop)
            return replace(record, speed_skipped="cut alone, to see what that loses")
        if self._history.gate_comes_first():
            record = self._gated(blank, baseline, stop)
            if record.verdict.result is Result.PASS:
                return self._measured(record)
            return replace(record, speed_skipped="the gate was not passed")
        record = self._measured(blank)
        if (skipped := self._history.too_slow(record.speed)) is not None:
            verdict = replace(record.verdict, reason=f"the gate was skipped: {skipped}")
            return replace(record, gate_skipped=skipped, verdict=verdict)
        return self._gated(record, baseline, stop)

    def _measured(self, record: TrialRecord) -> TrialRecord:
        begun = time.perf_counter()
        measure, rival = self._settings.measure, self._history.rival()
        speed = measure_ratio(self._runtime, record.schedule, self._baseline_schedule, measure, rival=rival)
        seconds = replace(record.seconds, speed=time.perf_counter() - begun)
        return replace(record, ending=Ending.EVALUATED, speed=speed, seconds=seconds)

    def _gated(self, record: TrialRecord, baseline: BaselineRecord, stop: int | None) -> TrialRecord:
        """``record`` with its gate run, which ends at that many failures (``None``: at the last probe)."""
        facts, policy = self._runtime.facts, self._settings.policy
        begun = time.perf_counter()
        attested = self._runtime.apply(record.schedule)
        outcomes = self._asked(() if policy.rule is Rule.ALL_CORRECT else baseline.failures, stop)
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

    def _asked(self, excused: Sequence[str], stop: int | None) -> list[Outcome]:
        """The gate under the schedule applied, most telling probes first."""
        verification = self._verification
        ask = run_probes if verification is None else partial(verify_probes, verification=verification)
        probes = self._telling_first()
        return ask(self._runtime, self._probe_set, probes, self._judge, stop_after_failures=stop, excused=excused)

    def _telling_first(self) -> list[Probe]:
        """The gate's probes, those that failed most often first; neighbours in length stay neighbours."""
        return sorted(self._gate, key=lambda probe: -self._history.failures[probe.id])

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
        weights = {probe.id: 1 + self._history.failures[probe.id] for probe in self._gate}
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

    # ---- bounds and progress ---------------------------------------------------------------------------------------

    def _bound_reached(self, sampler: FreshSampler) -> Stop | None:
        settings = self._settings
        if settings.trials is not None and self.evaluated >= settings.trials:
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
        history = self._history
        return Progress(
            done=history.evaluated,
            total=self._settings.trials,
            baseline=baseline,
            best=history.best,
            last=last,
            pass_rate=history.pass_rate,
            seconds_left=self._seconds_left(),
            cuts_done=len(history.cuts),
            cuts_ahead=len(self._cuts_ahead()),
        )

    def _seconds_left(self) -> float | None:
        here, trials, hours = self.evaluated_now, self._settings.trials, self._settings.hours
        if here == 0:
            return None
        by_trials = math.inf if trials is None else self._trial_seconds / here * max(0, trials - self.evaluated)
        by_hours = math.inf if hours is None else max(0.0, hours * 3600 - (time.monotonic() - self._started))
        left = min(by_trials, by_hours)
        return left if math.isfinite(left) else None


def _error_of(outcomes: Sequence[Outcome]) -> str | None:
    """What the runtime said when it was lost."""
    lost = (outcome for outcome in outcomes if outcome.status is Status.RUNTIME_ERROR)
    return next((f"probe {outcome.probe}: {outcome.reason}" for outcome in lost), None)
