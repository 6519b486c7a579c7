"""Decide, from outcomes alone, whether a schedule passes: verdicts, what they prove, and the acceptance rule.

Everything here is pure: no runtime, no file, no clock. Two decisions are made:

* ``decide`` looks at one run over the gate probes and says ``pass``, ``fail`` or ``undecided``.
* ``accept`` looks at the gate verdict and at the holdout, paired with the baseline's run, and says whether the
  schedule may be certified under an ``AcceptanceRule``.

Every probability is a statement about fresh questions drawn as the probes were. It holds for the holdout. On gate
probes that a search has already selected schedules by, it is optimistic: the winner is the one that suits them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from routing_lab.answers import Status
from routing_lab.probes.power import CONFIDENCE, failure_bound, probes_needed, rule_of_three
from routing_lab.probes.run import Outcome

__all__ = [
    "Acceptance",
    "AcceptanceRule",
    "PairedDifference",
    "Policy",
    "Result",
    "Rule",
    "Verdict",
    "accept",
    "decide",
    "failure_bound",
    "paired_difference",
    "probes_needed",
    "rule_of_three",
]

# ---------------------------------------------------------------------------------------------------------------------
# The gate


class Result(StrEnum):
    """What a run over the gate probes says about a schedule."""

    PASS = "pass"  # noqa: S105 - not a password
    FAIL = "fail"
    UNDECIDED = "undecided"
    """No probe ran, some were skipped, or the runtime failed: neither ``pass`` nor ``fail`` would be true."""


class Rule(StrEnum):
    """What the gate demands of every probe."""

    ALL_CORRECT = "all_correct"
    NO_WORSE_THAN_BASELINE = "no_worse_than_baseline"
    """A probe that the baseline fails too is excused; whatever the baseline gets right must be right."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The demand of the gate; data, so that a certificate can name it."""

    rule: Rule = Rule.ALL_CORRECT

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", Rule(self.rule))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The gate's decision and what it rests on.

    ``passed + failed + errors == run``. ``failures`` are the probes that count against the schedule, in the order they
    were run; ``excused`` those that the baseline fails as well (never any under ``all_correct``). ``failure_bound_95``
    is ``failure_bound`` of the probes that were answered or left unanswered; runtime errors are no answers.
    """

    result: Result
    passed: int
    failed: int
    errors: int
    run: int
    total: int
    failures: tuple[str, ...]
    excused: tuple[str, ...]
    failure_bound_95: float
    reason: str


def decide(
    outcomes: Sequence[Outcome],
    total: int,
    policy: Policy | None = None,
    baseline_outcomes: Sequence[Outcome] | None = None,
) -> Verdict:
    """Judge one run over a gate of ``total`` probes.

    One probe that counts as failed is enough to fail, however many were skipped after it (that is what failing fast
    relies on). A pass needs every probe: one that was skipped, or that the runtime broke down on, leaves the verdict
    undecided. ``policy`` defaults to all correct; ``baseline_outcomes`` are needed by ``no_worse_than_baseline`` only.

    Raises:
        ValueError: More outcomes than probes, two outcomes of one probe, or no baseline outcome for a probe although
            the policy needs it.
    """
    policy = policy or Policy()
    by_probe = _by_probe(outcomes)
    if len(by_probe) > total:
        raise ValueError(f"{len(by_probe)} outcomes for a gate of {total} probes")
    excusable, unclear = _baseline_failures(by_probe, policy, baseline_outcomes)
    wrong = [outcome.probe for outcome in outcomes if _answered_wrong(outcome)]
    failures = tuple(probe for probe in wrong if probe not in excusable and probe not in unclear)
    errors = sum(outcome.status is Status.RUNTIME_ERROR for outcome in outcomes)
    passed = len(outcomes) - len(wrong) - errors
    result, reason = _result(outcomes, total, failures, passed, [probe for probe in wrong if probe in unclear])
    return Verdict(
        result=result,
        passed=passed,
        failed=len(wrong),
        errors=errors,
        run=len(outcomes),
        total=total,
        failures=failures,
        excused=tuple(probe for probe in wrong if probe in excusable),
        failure_bound_95=failure_bound(len(wrong), passed + len(wrong)),
        reason=reason,
    )


def _result(
    outcomes: Sequence[Outcome], total: int, failures: Sequence[str], passed: int, unclear: Sequence[str]
) -> tuple[Result, str]:
    """The verdict and its reason; the order of the questions is the order of precedence."""
    if failures:
        return Result.FAIL, f"{_count(len(failures), 'probe')} failed: {_listed(failures)}"
    if doubt := _doubt(outcomes, total, passed, unclear):
        return Result.UNDECIDED, doubt
    if passed < total:
        return Result.PASS, f"{passed} of {total} probes correct; the baseline fails the others too"
    return Result.PASS, f"all {total} probes correct"


def _doubt(outcomes: Sequence[Outcome], total: int, passed: int, unclear: Sequence[str]) -> str:
    """Why a run without failures is no pass; empty when it is one."""
    broken = [outcome.probe for outcome in outcomes if outcome.status is Status.RUNTIME_ERROR]
    doubts = [
        (not outcomes, "no probe ran"),
        (bool(broken), f"the runtime failed on {_listed(broken)}"),
        (bool(unclear), f"the runtime failed on the baseline's run of {_listed(unclear)}"),
        (len(outcomes) < total, f"{_count(total - len(outcomes), 'probe')} of {total} did not run"),
        (passed == 0, "the baseline fails every probe, so nothing was tested"),
    ]
    return next((doubt for holds, doubt in doubts if holds), "")


def _baseline_failures(
    by_probe: dict[str, Outcome], policy: Policy, baseline_outcomes: Sequence[Outcome] | None
) -> tuple[set[str], set[str]]:
    """The probes that the policy excuses, and those it cannot speak about because the baseline's run broke down."""
    if policy.rule is Rule.ALL_CORRECT:
        return set(), set()
    if baseline_outcomes is None:
        raise ValueError(f"the policy {policy.rule} needs the baseline's outcomes")
    baseline = _by_probe(baseline_outcomes)
    if missing := [probe for probe in by_probe if probe not in baseline]:
        raise ValueError(f"the baseline has no outcome for {_listed(missing)}")
    failed = {probe for probe, outcome in baseline.items() if _answered_wrong(outcome)}
    broken = {probe for probe, outcome in baseline.items() if outcome.status is Status.RUNTIME_ERROR}
    return failed, broken


def _answered_wrong(outcome: Outcome) -> bool:
    return outcome.status in {Status.WRONG_ANSWER, Status.NO_FINAL_ANSWER}


def _by_probe(outcomes: Sequence[Outcome]) -> dict[str, Outcome]:
    by_probe = {outcome.probe: outcome for outcome in outcomes}
    if len(by_probe) < len(outcomes):
        raise ValueError("a probe has more than one outcome")
    return by_probe


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _listed(probes: Sequence[str], most: int = 5) -> str:
    more = f" and {len(probes) - most} more" if len(probes) > most else ""
    return ", ".join(probes[:most]) + more


# ---------------------------------------------------------------------------------------------------------------------
# Candidate against baseline on the same probes


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Accuracy of a candidate minus accuracy of the baseline over the ``n`` probes that both answered.

    ``lost`` are the probes only the baseline gets right, ``gained`` those only the candidate does; ``difference`` is
    ``(len(gained) - len(lost)) / n``, negative when the candidate is worse, NaN never (0 when ``n`` is 0).
    ``low`` and ``high`` enclose the true difference with at least the stated ``confidence`` (see
    ``paired_difference``). ``errors`` are probes left out because the runtime failed on either side.
    """

    n: int
    baseline_correct: int
    candidate_correct: int
    lost: tuple[str, ...]
    gained: tuple[str, ...]
    difference: float
    low: float
    high: float
    confidence: float
    errors: tuple[str, ...]


def paired_difference(
    baseline_outcomes: Sequence[Outcome], candidate_outcomes: Sequence[Outcome], confidence: float = CONFIDENCE
) -> PairedDifference:
    """Compare two runs over the same probes, pair by pair.

    The interval is the difference of two Clopper-Pearson limits: the rate of lost probes and the rate of gained ones
    are each enclosed with a quarter of ``1 - confidence`` left at each end, and ``low = gained_low - lost_high``,
    ``high = gained_high - lost_low``. By Bonferroni's inequality its coverage is at least ``confidence`` for every
    number of probes and however the two rates depend on each other, which no interval from a normal approximation can
    say of a handful of lost probes. The price is width: with 10 lost and 8 gained of 240 probes it is 0.119 wide, that
    of Wald's normal approximation 0.069. (Narrower intervals with about the right coverage: Tango, Statistics in
    Medicine 17, 1998; Fay and Lumbard, Statistics in Medicine 40, 2021.) Like every bound here it takes the probes for
    a sample of the questions that matter; it knows nothing of others.

    Raises:
        ValueError: The runs are not over the same probes, or one has two outcomes of a probe.
    """
    baseline, candidate = _by_probe(baseline_outcomes), _by_probe(candidate_outcomes)
    if baseline.keys() != candidate.keys():
        only = sorted(baseline.keys() ^ candidate.keys())
        raise ValueError(f"the two runs are not over the same probes: {_listed(only)}")
    errors = tuple(
        probe for probe in baseline if Status.RUNTIME_ERROR in {baseline[probe].status, candidate[probe].status}
    )
    pairs = {
        probe: (baseline[probe].status is Status.CORRECT, candidate[probe].status is Status.CORRECT)
        for probe in baseline
        if probe not in errors
    }
    lost = tuple(probe for probe, pair in pairs.items() if pair == (True, False))
    gained = tuple(probe for probe, pair in pairs.items() if pair == (False, True))
    low, high = _difference_limits(len(lost), len(gained), len(pairs), confidence)
    return PairedDifference(
        n=len(pairs),
        baseline_correct=sum(right for right, _ in pairs.values()),
        candidate_correct=sum(right for _, right in pairs.values()),
        lost=lost,
        gained=gained,
        difference=(len(gained) - len(lost)) / len(pairs) if pairs else 0.0,
        low=low,
        high=high,
        confidence=confidence,
        errors=errors,
    )


def _difference_limits(lost: int, gained: int, n: int, confidence: float) -> tuple[float, float]:
    """Limits of P(gained) - P(lost); each of the four one-sided limits may err with ``(1 - confidence) / 4``."""
    each = 1 - (1 - confidence) / 4
    lost_low, lost_high = 1 - failure_bound(n - lost, n, each), failure_bound(lost, n, each)
    gained_low, gained_high = 1 - failure_bound(n - gained, n, each), failure_bound(gained, n, each)
    return gained_low - lost_high, gained_high - lost_low


# ---------------------------------------------------------------------------------------------------------------------
# Acceptance


@dataclass(frozen=True, slots=True)
class AcceptanceRule:
    """When a schedule may be certified; every gate probe has to be correct under any rule.

    On the holdout the candidate's accuracy may be at most ``margin`` below the baseline's on the same probes (observed
    difference; the exact interval is reported beside it). ``strict`` allows no probe to be lost that the baseline gets
    right, whatever is gained elsewhere.
    """

    margin: float = 0.02
    strict: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin must be at least 0 and below 1, got {self.margin}")

    def describe(self) -> str:
        """The rule in one sentence."""
        if self.strict:
            return "every gate probe correct; no holdout probe lost that the baseline gets right"
        return f"every gate probe correct; holdout accuracy at most {self.margin:.3g} below the baseline's"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Whether a schedule is accepted; ``reasons`` are all the objections, empty when it is."""

    accepted: bool
    reasons: tuple[str, ...]


def accept(gate: Verdict, holdout: PairedDifference, rule: AcceptanceRule | None = None) -> Acceptance:
    """Apply ``rule`` (default: margin 0.02) to a gate verdict and to a holdout paired with the baseline's run."""
    rule = rule or AcceptanceRule()
    reasons = [*_gate_objections(gate), *_holdout_objections(holdout, rule)]
    return Acceptance(accepted=not reasons, reasons=tuple(reasons))


def _gate_objections(gate: Verdict) -> list[str]:
    if gate.result is not Result.PASS:
        return [f"gate: {gate.result}: {gate.reason}"]
    if gate.excused:
        # A policy may excuse what the baseline fails too; a certificate promises correct answers.
        return [f"gate: not every probe is correct: {_listed(gate.excused)}"]
    return []


def _holdout_objections(holdout: PairedDifference, rule: AcceptanceRule) -> list[str]:
    if holdout.errors:
        return [f"holdout: undecided: the runtime failed on {_listed(holdout.errors)}"]
    if holdout.n == 0:
        return ["holdout: undecided: no probe ran"]
    # As fractions of what was written: 0.29 of 100 probes are 29, not 28.999.
    may_lose = Fraction(0) if rule.strict else Fraction(repr(rule.margin)) * holdout.n
    if holdout.baseline_correct <= may_lose:
        # Whoever answers nothing right loses no more than that, so anything at all would be accepted.
        right = f"the baseline is right on {holdout.baseline_correct} of {_count(holdout.n, 'probe')}"
        return [f"holdout: undecided: {right}, so no schedule could be refused by it"]
    if rule.strict:
        return [f"holdout: {_count(len(holdout.lost), 'probe')} lost: {_listed(holdout.lost)}"] if holdout.lost else []
    net_lost = len(holdout.lost) - len(holdout.gained)
    if net_lost > may_lose:
        return [
            f"holdout: accuracy {-holdout.difference:.4f} below the baseline's, more than the margin {rule.margin:.3g}"
        ]
    return []
