"""The acceptance run: fresh rounds and every probe for the best schedules of a search, a certificate for the best.

A search picks what suits its gate probes and its noise. So nothing of the search is taken over: speed is measured
anew with more rounds, all gate probes are asked again, and the holdout, which the search never saw, is paired with
the baseline's answers. Beside each schedule runs the one that spreads the same total evenly, because a search that
cannot beat an even cut has found nothing.

All answers are given by plain greedy decoding, one sequence at a time, from an empty cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from routing_lab.answers import Judge, Status
from routing_lab.certificate import (
    Answer,
    Certificate,
    CertifiedModel,
    CertifiedOptions,
    CertifiedProbes,
    CertifiedSchedule,
    EvenSpread,
    SpeedRule,
    now,
)
from routing_lab.errors import NothingAcceptedError, RuntimeFailureError, UsageError
from routing_lab.gate import (
    Acceptance,
    AcceptanceRule,
    PairedDifference,
    Verdict,
    accept,
    decide,
    failure_bound,
    paired_difference,
)
from routing_lab.measure import MeasureSettings, SpeedRatio, measure_rates
from routing_lab.model import model_digest
from routing_lab.probes import Outcome, ProbeSet, run_probes
from routing_lab.probes.run import run_probe
from routing_lab.runtime.base import Runtime
from routing_lab.schedule import Schedule

__all__ = ["AcceptanceResult", "ValidateSettings", "Validation", "ValidationProgress", "best_of", "validate"]


@dataclass(frozen=True, slots=True)
class ValidateSettings:
    """How the acceptance run measures and what it demands."""

    measure: MeasureSettings = field(default_factory=lambda: MeasureSettings(rounds=24))
    acceptance_rule: AcceptanceRule = field(default_factory=AcceptanceRule)
    speed_rule: SpeedRule = field(default_factory=SpeedRule)


@dataclass(frozen=True, slots=True)
class ValidationProgress:
    """What is being done; ``done`` and ``total`` count the probes of the whole run."""

    doing: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class AcceptanceResult:
    """One schedule in the acceptance run: a validated result, never a screening one.

    ``speed`` compares with the baseline. ``even_spread`` is ``None`` where the schedule is its own even spread, and
    ``even_spread_reasons`` are the objections to it.
    """

    schedule: Schedule
    speed: SpeedRatio
    gate: Verdict
    gate_outcomes: tuple[Outcome, ...]
    holdout: PairedDifference
    holdout_outcomes: tuple[Outcome, ...]
    even_spread: EvenSpread | None
    acceptance: Acceptance
    even_spread_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Validation:
    """The whole acceptance run; ``certificate`` is of the best accepted schedule, ``None`` if there is none."""

    results: tuple[AcceptanceResult, ...]
    certificate: Certificate | None

    def warnings(self) -> tuple[str, ...]:
        """What the baseline's rates say about the machine while each schedule was measured."""
        return tuple(f"{one.schedule.name}: {said}" for one in self.results for said in one.speed.warnings())

    def require_certificate(self) -> Certificate:
        """The certificate. Raises ``NothingAcceptedError``, which says why each schedule was refused."""
        if self.certificate is None:
            reasons = [f"{result.schedule.name}: {'; '.join(result.acceptance.reasons)}" for result in self.results]
            raise NothingAcceptedError("\n  ".join(["no schedule was accepted:", *reasons]))
        return self.certificate


def validate(
    runtime: Runtime,
    probe_set: ProbeSet,
    schedules: Sequence[Schedule],
    settings: ValidateSettings | None = None,
    *,
    judge: Judge | None = None,
    on_progress: Callable[[ValidationProgress], None] | None = None,
) -> Validation:
    """Put ``schedules`` through the acceptance run.

    Args:
        runtime: The model, with the options and the placement that the server will have; left open.
        probe_set: Both its splits are asked in full.
        schedules: The best of a search, or any others.
        settings: Rounds and rules.
        judge: Compares answers; one of its own by default.
        on_progress: Called for every probe and before every measurement.

    Raises:
        UsageError: No schedule, or a split without probes.
        UserFileError: A schedule does not fit the model.
        RuntimeFailureError: The model's process was lost twice while the speed of one schedule was measured.
    """
    if not schedules:
        raise UsageError("there is no schedule to validate")
    for split in ("gate", "holdout"):
        if not probe_set.split(split):
            raise UsageError(f"probe set {probe_set.name} has no {split} probes; an acceptance run needs both splits")
    own: AbstractContextManager[Judge] = nullcontext(judge) if judge else Judge()
    with own as judging:
        run = _AcceptanceRun(runtime, probe_set, judging, settings or ValidateSettings(), on_progress)
        return run.of([schedule.completed(runtime.facts) for schedule in schedules])


def best_of(accepted: Sequence[AcceptanceResult]) -> AcceptanceResult:
    """The accepted schedule that gets the certificate.

    The fastest one, unless others are as fast as far as the intervals can tell (they overlap): among those, the one
    with the most right answers on the holdout.
    """
    fastest = max(accepted, key=lambda result: result.speed.ratio)
    as_fast = [result for result in accepted if result.speed.high >= fastest.speed.low]
    return max(as_fast, key=lambda result: (result.holdout.candidate_correct, result.speed.ratio))


@dataclass(frozen=True, slots=True)
class _Answers:
    """One schedule's outcomes on both splits."""

    gate: tuple[Outcome, ...]
    holdout: tuple[Outcome, ...]


class _AcceptanceRun:
    """State of one run: the answers so far, by schedule, so that nothing is asked twice."""

    def __init__(
        self,
        runtime: Runtime,
        probe_set: ProbeSet,
        judge: Judge,
        settings: ValidateSettings,
        on_progress: Callable[[ValidationProgress], None] | None,
    ) -> None:
        self._runtime, self._probe_set, self._judge, self._settings = runtime, probe_set, judge, settings
        self._report = on_progress or (lambda _progress: None)
        self._baseline = Schedule.baseline(runtime.facts)
        self._known: dict[str, _Answers] = {}
        self._probes_done = self._probes_total = 0

    def of(self, schedules: Sequence[Schedule]) -> Validation:
        """All results, and the certificate of the best that was accepted."""
        wanted = {schedule.key(self._runtime.facts) for schedule in self._all_schedules(schedules)}
        self._probes_total = len(wanted) * len(self._probe_set.items)
        results = tuple(self._result(schedule) for schedule in schedules)
        accepted = [result for result in results if result.acceptance.accepted]
        if not accepted:
            return Validation(results, None)
        return Validation(results, self._certificate(best_of(accepted)))

    def _all_schedules(self, schedules: Sequence[Schedule]) -> list[Schedule]:
        even = [spread for schedule in schedules if (spread := self._even_spread_of(schedule)) is not None]
        return [self._baseline, *schedules, *even]

    def _even_spread_of(self, schedule: Schedule) -> Schedule | None:
        """The even spread of the same total; ``None`` when ``schedule`` is that already."""
        facts = self._runtime.facts
        even = Schedule.even_spread(schedule.total(facts), facts).completed(facts)
        return None if even.key(facts) == schedule.key(facts) else even

    def _result(self, schedule: Schedule) -> AcceptanceResult:
        even = self._even_spread_of(schedule)
        answers = self._answers(schedule)
        of_even = None if even is None else self._answers(even)
        measured = [self._baseline, schedule] if even is None else [self._baseline, schedule, even]
        rates = self._rates(schedule, measured)
        speed = self._ratio(rates[1], rates[0])
        gate, holdout, acceptance = self._judged(answers, speed)
        beside, reasons = (None, ()) if even is None or of_even is None else self._beside(even, of_even, rates)
        return AcceptanceResult(
            schedule=schedule,
            speed=speed,
            gate=gate,
            gate_outcomes=answers.gate,
            holdout=holdout,
            holdout_outcomes=answers.holdout,
            even_spread=beside,
            acceptance=acceptance,
            even_spread_reasons=reasons,
        )

    def _rates(self, schedule: Schedule, measured: Sequence[Schedule]) -> list[tuple[float, ...]]:
        """All rounds; anew where the model's process is lost in one of them, since the answers took far longer."""

        def counted(number: int, rounds: int) -> None:
            self._doing(f"measuring {schedule.name}{again}, round {number} of {rounds}")

        again = ""
        self._doing(f"measuring {schedule.name}")
        try:
            return measure_rates(self._runtime, measured, self._settings.measure, on_round=counted)
        except RuntimeFailureError:
            again = " again (the model's process was lost)"
            return measure_rates(self._runtime, measured, self._settings.measure, on_round=counted)

    def _beside(
        self, even: Schedule, answers: _Answers, rates: Sequence[Sequence[float]]
    ) -> tuple[EvenSpread, tuple[str, ...]]:
        """The even spread, judged by the same rules from the same rounds, and the objections to it."""
        speed = self._ratio(rates[2], rates[0])
        gate, holdout, acceptance = self._judged(answers, speed)
        spread = EvenSpread(
            schedule=self._certified(even),
            speed=speed,
            certified_over_even=self._ratio(rates[1], rates[2]),
            gate=gate,
            holdout=holdout,
            accepted=acceptance.accepted,
        )
        return spread, acceptance.reasons

    def _ratio(self, candidate: Sequence[float], baseline: Sequence[float]) -> SpeedRatio:
        return SpeedRatio.from_rates(candidate, baseline, self._settings.measure.confidence)

    def _judged(self, answers: _Answers, speed: SpeedRatio) -> tuple[Verdict, PairedDifference, Acceptance]:
        """Apply the acceptance rule, then the speed rule; all objections are listed."""
        gate = decide(answers.gate, len(self._probe_set.split("gate")))
        holdout = _paired(self._answers(self._baseline).holdout, answers.holdout)
        acceptance = accept(gate, holdout, self._settings.acceptance_rule)
        least = self._settings.speed_rule.min_ratio_low
        if speed.low > least:
            return gate, holdout, acceptance
        slow = f"speed: {speed.ratio:.3f} ({speed.low:.3f} to {speed.high:.3f}) is not surely above {least:g}"
        if speed.high > least:
            slow += "; more --rounds or a quieter machine may tell"
        return gate, holdout, Acceptance(accepted=False, reasons=(*acceptance.reasons, slow))

    def _answers(self, schedule: Schedule) -> _Answers:
        """Every probe of both splits under ``schedule``, asked once."""
        key = schedule.key(self._runtime.facts)
        if key not in self._known:
            self._runtime.apply(schedule)
            self._known[key] = _Answers(self._asked(schedule, "gate"), self._asked(schedule, "holdout"))
        return self._known[key]

    def _asked(self, schedule: Schedule, split: str) -> tuple[Outcome, ...]:
        probes = self._probe_set.split("gate" if split == "gate" else "holdout")

        def count(_outcome: Outcome) -> None:
            self._probes_done += 1
            self._doing(f"{split} of {schedule.name}")

        outcomes = run_probes(
            self._runtime, self._probe_set, probes, self._judge, stop_after_failures=None, progress=count
        )
        if len(outcomes) < len(probes):
            return tuple(outcomes)  # it died again and again
        # A process that something else killed says nothing about the schedule, and hours may hang on it.
        lost = (outcome.status is Status.RUNTIME_ERROR for outcome in outcomes)
        return tuple(
            run_probe(self._runtime, self._probe_set, probe, self._judge) if again else outcome
            for probe, outcome, again in zip(probes, outcomes, lost, strict=True)
        )

    def _doing(self, what: str) -> None:
        self._report(ValidationProgress(what, self._probes_done, self._probes_total))

    # ---- the certificate -------------------------------------------------------------------------------------------

    def _certificate(self, result: AcceptanceResult) -> Certificate:
        runtime, facts, options = self._runtime, self._runtime.facts, self._runtime.options
        baseline = self._answers(self._baseline)
        failed = len(result.holdout_outcomes) - sum(outcome.correct for outcome in result.holdout_outcomes)
        return Certificate(
            created=now(),
            model=CertifiedModel(
                file=facts.files[0].name,
                name=facts.name,
                architecture=facts.architecture,
                digest=model_digest(facts),
                blocks=facts.blocks,
                experts=facts.experts,
                experts_used=self._baseline.key(facts),
            ),
            runtime=runtime.build,
            options=CertifiedOptions(
                threads=options.threads,
                context_tokens=options.context_tokens,
                batch_tokens=options.batch_tokens,
                kv_type=options.kv_type,
                rpc_servers=options.rpc_servers or None,
            ),
            placement=options.placement,
            schedule=self._certified(result.schedule),
            probes=CertifiedProbes(
                name=self._probe_set.name,
                digest=self._probe_set.digest,
                gate=len(result.gate_outcomes),
                holdout=len(result.holdout_outcomes),
            ),
            acceptance_rule=self._settings.acceptance_rule,
            speed_rule=self._settings.speed_rule,
            speed=result.speed,
            gate=result.gate,
            holdout=result.holdout,
            holdout_failure_bound_95=failure_bound(failed, len(result.holdout_outcomes)),
            even_spread=result.even_spread,
            gate_answers=_kept(result.gate_outcomes),
            holdout_answers=_kept(result.holdout_outcomes),
            baseline_gate_answers=_kept(baseline.gate),
            baseline_holdout_answers=_kept(baseline.holdout),
        )

    def _certified(self, schedule: Schedule) -> CertifiedSchedule:
        return CertifiedSchedule(schedule.name, schedule.key(self._runtime.facts))


def _kept(outcomes: Sequence[Outcome]) -> tuple[Answer, ...]:
    return tuple(Answer.of(outcome) for outcome in outcomes)


def _paired(baseline: Sequence[Outcome], candidate: Sequence[Outcome]) -> PairedDifference:
    """Pair the runs over the probes that both reached: a run gives up when its model's process dies again and again.

    The last probe that such a run reached is a runtime error, so the difference counts as undecided all the same.
    """
    reached = {outcome.probe for outcome in baseline} & {outcome.probe for outcome in candidate}
    return paired_difference(
        [outcome for outcome in baseline if outcome.probe in reached],
        [outcome for outcome in candidate if outcome.probe in reached],
    )
