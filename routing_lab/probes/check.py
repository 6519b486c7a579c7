"""What a probe set is worth on a model: run it with the model's own expert counts and report what the baseline does.

A probe that the baseline fails tests nothing. One that it passes by a hair's breadth (a small margin between the two
best tokens somewhere along the answer) may fall with the next build of the runtime, whatever the schedule. And a set
of n probes bounds the failure rate of a schedule that passes it only so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, get_args

from routing_lab.answers import Judge, Status
from routing_lab.errors import UsageError
from routing_lab.probes.power import failure_bound, probes_needed
from routing_lab.probes.probeset import ProbeSet, Split
from routing_lab.probes.run import Outcome, run_probes
from routing_lab.runtime.base import Runtime
from routing_lab.schedule import Schedule

__all__ = ["CLOSE_CALL", "BaselineFailure", "BaselinePass", "ProbesReport", "SplitReport", "check_probes"]

CLOSE_CALL: Final = 0.5
"""Logits below which the gap between the two best tokens is a close call: the second is then at least 60 % as likely
as the first (the ratio of their probabilities is the exponential of the gap)."""


@dataclass(frozen=True, slots=True)
class BaselineFailure:
    """A probe that the baseline does not answer correctly (or that the runtime failed on)."""

    probe: str
    split: Split
    status: Status
    reason: str | None
    expected: str
    extracted: str | None


@dataclass(frozen=True, slots=True)
class BaselinePass:
    """A probe that the baseline answers, and how close it came to answering otherwise.

    ``smallest_margin`` is the smallest gap in logits between the two best tokens along the completion; ``None`` where
    the runtime cannot say. ``tokens`` were generated of the ``budget`` allowed.
    """

    probe: str
    split: Split
    smallest_margin: float | None
    prompt_tokens: int
    tokens: int
    budget: int

    @property
    def is_close(self) -> bool:
        """Whether it may have gone the other way (see ``CLOSE_CALL``); ``False`` where the runtime cannot say."""
        return self.smallest_margin is not None and self.smallest_margin < CLOSE_CALL


@dataclass(frozen=True, slots=True)
class SplitReport:
    """One split: how many probes it has, how many the baseline passes, and what passing all of it would prove.

    ``bound_if_all_correct`` is the exact one-sided 95 % bound on the failure rate of a schedule that answers every
    probe; ``probes_wanted`` how many probes the wanted bound takes; ``probes_missing`` how many more than there are.
    ``prompt_tokens`` and ``tokens`` are sums over the split, ``most_tokens`` the longest completion.
    """

    split: Split
    probes: int
    passed: int
    bound_if_all_correct: float
    probes_wanted: int
    probes_missing: int
    prompt_tokens: int
    tokens: int
    most_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ProbesReport:
    """Everything ``probes check`` has to say; ``passes`` come closest call first."""

    name: str
    digest: str
    model: str
    wanted_bound: float
    splits: tuple[SplitReport, ...]
    failures: tuple[BaselineFailure, ...]
    passes: tuple[BaselinePass, ...]
    not_run: tuple[str, ...]
    """Probes that did not run because the runtime kept failing."""

    @property
    def sound(self) -> bool:
        """Whether the baseline answers every gate probe: a gate that it fails can accept nothing."""
        return not self.not_run and all(failure.split != "gate" for failure in self.failures)


def check_probes(
    runtime: Runtime,
    probe_set: ProbeSet,
    judge: Judge,
    *,
    wanted_bound: float = 0.05,
    progress: Callable[[Outcome], None] | None = None,
) -> ProbesReport:
    """Run every probe under the model's own counts, to the end, and report.

    Raises:
        UsageError: ``wanted_bound`` is not between 0 and 1.
        RuntimeUnsupportedError, AttestationError: The runtime cannot apply the baseline.
        RuntimeFailureError: The runtime fails while the baseline is applied; later failures are outcomes.
    """
    if not 0 < wanted_bound < 1:
        raise UsageError(f"the wanted bound on the failure rate must be between 0 and 1, got {wanted_bound}")
    runtime.apply(Schedule.baseline(runtime.facts))
    outcomes = run_probes(
        runtime, probe_set, probe_set.items, judge, stop_after_failures=None, margins=True, progress=progress
    )
    by_probe = {outcome.probe: outcome for outcome in outcomes}
    return ProbesReport(
        name=probe_set.name,
        digest=probe_set.digest,
        model=runtime.facts.name,
        wanted_bound=wanted_bound,
        splits=tuple(_split_report(probe_set, split, by_probe, wanted_bound) for split in get_args(Split)),
        failures=_failures(probe_set, by_probe),
        passes=_passes(probe_set, by_probe),
        not_run=tuple(probe.id for probe in probe_set.items if probe.id not in by_probe),
    )


def _split_report(probe_set: ProbeSet, split: Split, by_probe: dict[str, Outcome], wanted_bound: float) -> SplitReport:
    probes = probe_set.split(split)
    ran: Sequence[Outcome] = [by_probe[probe.id] for probe in probes if probe.id in by_probe]
    wanted = probes_needed(wanted_bound)
    return SplitReport(
        split=split,
        probes=len(probes),
        passed=sum(outcome.correct for outcome in ran),
        bound_if_all_correct=failure_bound(0, len(probes)),
        probes_wanted=wanted,
        probes_missing=max(0, wanted - len(probes)),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in ran),
        tokens=sum(outcome.tokens for outcome in ran),
        most_tokens=max((outcome.tokens for outcome in ran), default=0),
        seconds=sum(outcome.seconds for outcome in ran),
    )


def _failures(probe_set: ProbeSet, by_probe: dict[str, Outcome]) -> tuple[BaselineFailure, ...]:
    return tuple(
        BaselineFailure(
            probe=probe.id,
            split=probe.split,
            status=outcome.status,
            reason=outcome.reason,
            expected=probe.answer,
            extracted=outcome.extracted,
        )
        for probe in probe_set.items
        if (outcome := by_probe.get(probe.id)) is not None and not outcome.correct
    )


def _passes(probe_set: ProbeSet, by_probe: dict[str, Outcome]) -> tuple[BaselinePass, ...]:
    passes = [
        BaselinePass(
            probe=probe.id,
            split=probe.split,
            smallest_margin=outcome.smallest_margin,
            prompt_tokens=outcome.prompt_tokens,
            tokens=outcome.tokens,
            budget=probe_set.budget(probe),
        )
        for probe in probe_set.items
        if (outcome := by_probe.get(probe.id)) is not None and outcome.correct
    ]
    return tuple(sorted(passes, key=_closeness))


def _closeness(passed: BaselinePass) -> float:
    return float("inf") if passed.smallest_margin is None else passed.smallest_margin
