"""The gate never says more than the outcomes do."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta

from routing_lab.answers import Status
from routing_lab.gate import (
    AcceptanceRule,
    PairedDifference,
    Policy,
    Result,
    Rule,
    Verdict,
    accept,
    decide,
    failure_bound,
    paired_difference,
    probes_needed,
    rule_of_three,
)
from routing_lab.probes import Outcome

STATUSES = st.sampled_from(list(Status))
ANSWERED = st.sampled_from([Status.CORRECT, Status.WRONG_ANSWER, Status.NO_FINAL_ANSWER])
NO_WORSE = Policy(Rule.NO_WORSE_THAN_BASELINE)


def outcome(probe: str, status: Status) -> Outcome:
    return Outcome(probe, status, None, None, "", 1, 1, 0.1, 0.1)


def run(*statuses: Status) -> list[Outcome]:
    return [outcome(f"p{index}", status) for index, status in enumerate(statuses)]


def runs(lost: int, gained: int, both: int, neither: int = 0) -> tuple[list[Outcome], list[Outcome]]:
    """A baseline's run and a candidate's with so many pairs of each kind."""
    right, wrong = Status.CORRECT, Status.WRONG_ANSWER
    pairs = [(right, wrong)] * lost + [(wrong, right)] * gained + [(right, right)] * both + [(wrong, wrong)] * neither
    return run(*(pair[0] for pair in pairs)), run(*(pair[1] for pair in pairs))


# --- bounds


def binomial(k: int, n: int, rate: Fraction) -> Fraction:
    return math.comb(n, k) * rate**k * (1 - rate) ** (n - k)


@pytest.mark.parametrize("n", [1, 2, 5, 12, 30])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_the_bound_covers_every_true_rate_with_at_least_its_confidence(n: int, confidence: float) -> None:
    bounds = [failure_bound(k, n, confidence) for k in range(n + 1)]
    # The worst rates for coverage lie just above a bound; the others are checked on a grid.
    rates = [Fraction(step, 40) for step in range(1, 40)] + [
        Fraction(bound) + Fraction(1, 10**9) for bound in bounds[:-1]
    ]
    for rate in rates:
        covered = sum(binomial(k, n, rate) for k in range(n + 1) if bounds[k] >= rate)
        assert covered >= Fraction(confidence) - Fraction(1, 10**7)


@given(n=st.integers(1, 3000), data=st.data(), confidence=st.sampled_from([0.9, 0.95, 0.9875]))
def test_the_bound_is_the_quantile_of_the_beta_distribution(n: int, data: st.DataObject, confidence: float) -> None:
    failures = data.draw(st.integers(0, n))
    expected = 1.0 if failures == n else beta.ppf(confidence, failures + 1, n - failures)
    assert failure_bound(failures, n, confidence) == pytest.approx(expected, rel=1e-9)


@given(n=st.integers(1, 400), data=st.data())
def test_the_bound_rises_with_failures_and_falls_with_probes(n: int, data: st.DataObject) -> None:
    failures = data.draw(st.integers(0, n - 1))
    bound = failure_bound(failures, n)
    assert failures / n < bound < failure_bound(failures + 1, n)
    assert failure_bound(failures, n + 1) < bound
    assert bound < failure_bound(failures, n, 0.99)


def test_nothing_is_excluded_without_probes_or_when_all_fail() -> None:
    assert failure_bound(0, 0) == 1.0
    assert failure_bound(7, 7) == 1.0


@given(n=st.integers(30, 100_000))
def test_the_rule_of_three_is_a_little_above_the_exact_bound(n: int) -> None:
    assert failure_bound(0, n) < rule_of_three(n) < 1.06 * failure_bound(0, n)


@given(bound=st.floats(0.005, 0.9), failures=st.integers(0, 5))
def test_probes_needed_is_the_least_number_that_reaches_the_bound(bound: float, failures: int) -> None:
    n = probes_needed(bound, failures)
    assert failure_bound(failures, n) <= bound
    assert n - 1 <= failures or failure_bound(failures, n - 1) > bound


def test_the_well_known_numbers_of_probes() -> None:
    assert [probes_needed(bound) for bound in (0.1, 0.05, 0.02, 0.01)] == [29, 59, 149, 299]


@pytest.mark.parametrize(
    "call",
    [
        lambda: failure_bound(-1, 3),
        lambda: failure_bound(4, 3),
        lambda: failure_bound(1, 3, 1.0),
        lambda: failure_bound(1, 3, math.nan),
        lambda: probes_needed(0.0),
        lambda: probes_needed(1.0),
        lambda: probes_needed(math.nan),
        lambda: probes_needed(0.1, -1),
        lambda: rule_of_three(0),
    ],
)
def test_a_bound_of_nonsense_is_refused(call) -> None:
    with pytest.raises(ValueError):
        call()


def test_sixty_right_answers_of_sixty_leave_a_failure_rate_of_almost_five_percent() -> None:
    assert failure_bound(0, 60) == pytest.approx(0.0487, abs=5e-5)
    assert failure_bound(0, 240) == pytest.approx(0.0124, abs=5e-5)
    assert rule_of_three(60) == 0.05


# --- verdicts


@given(statuses=st.lists(STATUSES, max_size=8), skipped=st.integers(0, 3))
def test_a_pass_means_that_every_probe_ran_and_is_correct(statuses: list[Status], skipped: int) -> None:
    verdict = decide(run(*statuses), len(statuses) + skipped)
    all_correct = bool(statuses) and not skipped and set(statuses) == {Status.CORRECT}
    assert (verdict.result is Result.PASS) == all_correct


@given(statuses=st.lists(STATUSES, max_size=8), skipped=st.integers(0, 3))
def test_a_fail_means_that_a_probe_was_answered_wrongly_or_not_at_all(statuses: list[Status], skipped: int) -> None:
    verdict = decide(run(*statuses), len(statuses) + skipped)
    wrong = {Status.WRONG_ANSWER, Status.NO_FINAL_ANSWER} & set(statuses)
    assert (verdict.result is Result.FAIL) == bool(wrong)
    assert bool(verdict.failures) == bool(wrong)


@given(
    statuses=st.lists(STATUSES, min_size=1, max_size=8),
    skipped=st.integers(0, 3),
    policy=st.sampled_from([None, NO_WORSE]),
)
def test_the_counts_of_a_verdict_add_up(statuses: list[Status], skipped: int, policy: Policy | None) -> None:
    baseline = run(*statuses[::-1])
    verdict = decide(run(*statuses), len(statuses) + skipped, policy, baseline)
    assert verdict.passed + verdict.failed + verdict.errors == verdict.run == len(statuses)
    assert set(verdict.failures).isdisjoint(verdict.excused)
    assert len(verdict.failures) + len(verdict.excused) <= verdict.failed
    assert verdict.reason
    assert verdict.failure_bound_95 == failure_bound(verdict.failed, verdict.passed + verdict.failed)


@given(statuses=st.lists(STATUSES, min_size=2, max_size=8), cut=st.integers(1, 7))
def test_stopping_early_never_turns_a_verdict_around(statuses: list[Status], cut: int) -> None:
    whole = decide(run(*statuses), len(statuses)).result
    short = decide(run(*statuses[:cut]), len(statuses)).result
    assert short in {whole, Result.UNDECIDED}


@given(pairs=st.lists(st.tuples(STATUSES, STATUSES), min_size=1, max_size=8))
def test_no_worse_passes_only_where_everything_the_baseline_gets_right_is_right(pairs) -> None:
    baseline, candidate = run(*(pair[0] for pair in pairs)), run(*(pair[1] for pair in pairs))
    verdict = decide(candidate, len(pairs), NO_WORSE, baseline)
    kept = all(after is Status.CORRECT for before, after in pairs if before is Status.CORRECT)
    if verdict.result is Result.PASS:
        assert kept
        assert verdict.passed > 0
        assert Status.RUNTIME_ERROR not in {after for _, after in pairs}
    if decide(candidate, len(pairs)).result is Result.PASS:
        assert verdict.result is Result.PASS


def test_a_baseline_that_fails_everything_tests_nothing() -> None:
    wrong = run(Status.WRONG_ANSWER, Status.NO_FINAL_ANSWER)
    assert decide(wrong, 2, NO_WORSE, wrong).result is Result.UNDECIDED


def test_a_probe_on_which_the_baselines_run_broke_down_is_no_excuse_and_no_failure() -> None:
    candidate, baseline = run(Status.CORRECT, Status.WRONG_ANSWER), run(Status.CORRECT, Status.RUNTIME_ERROR)
    verdict = decide(candidate, 2, NO_WORSE, baseline)
    assert (verdict.result, verdict.failures, verdict.excused) == (Result.UNDECIDED, (), ())


def test_an_empty_gate_is_undecided() -> None:
    assert decide([], 0).result is Result.UNDECIDED
    assert decide([], 5).failure_bound_95 == 1.0


def test_outcomes_that_do_not_fit_the_gate_are_refused() -> None:
    one = run(Status.CORRECT)
    with pytest.raises(ValueError, match="2 outcomes for a gate of 1"):
        decide(run(Status.CORRECT, Status.CORRECT), 1)
    with pytest.raises(ValueError, match="more than one outcome"):
        decide([*one, *one], 2)
    with pytest.raises(ValueError, match="needs the baseline"):
        decide(one, 1, NO_WORSE)
    with pytest.raises(ValueError, match="no outcome for p0"):
        decide(one, 1, NO_WORSE, [])


def test_a_policy_is_known_by_its_word() -> None:
    assert Policy("no_worse_than_baseline") == NO_WORSE  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mostly_right"):
        Policy("mostly_right")  # type: ignore[arg-type]


# --- paired difference


@pytest.mark.parametrize("n", [1, 3, 8, 20])
def test_the_interval_covers_every_true_difference_with_at_least_its_confidence(n: int) -> None:
    tables = [(lost, gained) for lost in range(n + 1) for gained in range(n + 1 - lost)]
    limits = {}
    for lost, gained in tables:
        difference = paired_difference(*runs(lost, gained, n - lost - gained))
        limits[lost, gained] = (difference.low, difference.high)
    for lost_rate, gained_rate in itertools.product((0.0, 0.02, 0.1, 0.3, 0.5, 0.9), repeat=2):
        if lost_rate + gained_rate > 1:
            continue
        rest = max(0.0, 1 - lost_rate - gained_rate)
        covered = math.fsum(
            math.comb(n, lost)
            * math.comb(n - lost, gained)
            * lost_rate**lost
            * gained_rate**gained
            * rest ** (n - lost - gained)
            for lost, gained in tables
            if limits[lost, gained][0] - 1e-12 <= gained_rate - lost_rate <= limits[lost, gained][1] + 1e-12
        )
        assert covered >= 0.95 - 1e-9


@given(lost=st.integers(0, 30), gained=st.integers(0, 30), both=st.integers(0, 200), neither=st.integers(0, 20))
def test_the_interval_encloses_the_observed_difference(lost: int, gained: int, both: int, neither: int) -> None:
    baseline, candidate = runs(lost, gained, both, neither)
    found = paired_difference(baseline, candidate)
    assert (found.n, len(found.lost), len(found.gained)) == (lost + gained + both + neither, lost, gained)
    assert (found.baseline_correct, found.candidate_correct) == (both + lost, both + gained)
    assert -1 <= found.low <= found.difference <= found.high <= 1
    if found.n:
        assert found.difference == pytest.approx((found.candidate_correct - found.baseline_correct) / found.n)


@given(lost=st.integers(0, 20), gained=st.integers(0, 20), both=st.integers(0, 100))
def test_swapping_the_runs_turns_the_difference_around(lost: int, gained: int, both: int) -> None:
    baseline, candidate = runs(lost, gained, both)
    one, other = paired_difference(baseline, candidate), paired_difference(candidate, baseline)
    assert (one.lost, one.gained) == (other.gained, other.lost)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))


def test_without_pairs_every_difference_is_possible() -> None:
    nothing = paired_difference([], [])
    assert (nothing.n, nothing.difference, nothing.low, nothing.high) == (0, 0.0, -1.0, 1.0)


def test_nothing_lost_on_240_probes_excludes_a_loss_of_two_percent() -> None:
    assert paired_difference(*runs(0, 0, 240)).low > -0.02


def test_a_runtime_error_on_either_side_is_no_pair() -> None:
    broken, right, wrong = Status.RUNTIME_ERROR, Status.CORRECT, Status.WRONG_ANSWER
    found = paired_difference(run(right, broken, right), run(broken, right, wrong))
    assert (found.n, found.errors, found.lost) == (1, ("p0", "p1"), ("p2",))


def test_runs_over_different_probes_are_refused() -> None:
    with pytest.raises(ValueError, match="not over the same probes: p1"):
        paired_difference(run(Status.CORRECT), run(Status.CORRECT, Status.CORRECT))


# --- acceptance

PASSED = decide(run(Status.CORRECT), 1)


def holdout(lost: int, gained: int, n: int = 240) -> PairedDifference:
    return paired_difference(*runs(lost, gained, n - lost - gained))


@given(statuses=st.lists(st.sampled_from([Status.CORRECT, Status.RUNTIME_ERROR]), min_size=1, max_size=8))
def test_a_runtime_error_leaves_the_verdict_undecided_as_long_as_nothing_was_answered_wrongly(statuses) -> None:
    verdict = decide(run(*statuses), len(statuses))
    broken = Status.RUNTIME_ERROR in statuses
    assert (verdict.result is Result.UNDECIDED) == broken
    assert verdict.errors == statuses.count(Status.RUNTIME_ERROR)
    assert ("the runtime failed on" in verdict.reason) == broken


@given(pairs=st.lists(st.tuples(STATUSES, STATUSES), min_size=1, max_size=8))
def test_only_no_worse_than_baseline_excuses_and_only_what_the_baseline_fails_too(pairs) -> None:
    baseline, candidate = run(*(pair[0] for pair in pairs)), run(*(pair[1] for pair in pairs))
    assert decide(candidate, len(pairs), Policy(Rule.ALL_CORRECT), baseline).excused == ()
    wrong = {Status.WRONG_ANSWER, Status.NO_FINAL_ANSWER}
    both = tuple(f"p{index}" for index, pair in enumerate(pairs) if wrong.issuperset(pair))
    assert decide(candidate, len(pairs), NO_WORSE, baseline).excused == both


@given(lost=st.integers(0, 20), gained=st.integers(0, 20), hundredths=st.integers(0, 20))
def test_the_margin_is_exact_where_floating_point_is_not(lost: int, gained: int, hundredths: int) -> None:
    rule = AcceptanceRule(margin=hundredths / 100)
    assert accept(PASSED, holdout(lost, gained, 100), rule).accepted == (lost - gained <= hundredths)


@pytest.mark.parametrize("hundredths", [29, 57, 58])
def test_a_net_loss_of_just_the_margin_is_accepted_where_the_float_product_falls_short_of_it(hundredths: int) -> None:
    rule = AcceptanceRule(margin=hundredths / 100)
    assert rule.margin * 100 < hundredths
    assert accept(PASSED, holdout(hundredths, 0, 100), rule).accepted
    assert not accept(PASSED, holdout(hundredths + 1, 0, 100), rule).accepted


@given(lost=st.integers(0, 5), gained=st.integers(0, 20))
def test_strict_forgives_no_lost_probe_whatever_is_gained(lost: int, gained: int) -> None:
    assert accept(PASSED, holdout(lost, gained), AcceptanceRule(strict=True)).accepted == (lost == 0)


def test_the_default_margin_allows_a_net_loss_of_4_in_240_and_not_of_5() -> None:
    assert accept(PASSED, holdout(4, 0)).accepted
    refused = accept(PASSED, holdout(5, 0))
    assert not refused.accepted
    assert "0.0208 below" in refused.reasons[0]


@given(
    statuses=st.lists(STATUSES, max_size=5), skipped=st.integers(0, 2), margin=st.floats(0, 0.99), strict=st.booleans()
)
def test_no_rule_accepts_without_a_passed_gate(statuses, skipped: int, margin: float, strict: bool) -> None:
    gate = decide(run(*statuses), len(statuses) + skipped)
    if accept(gate, holdout(0, 0), AcceptanceRule(margin, strict)).accepted:
        assert gate.result is Result.PASS


def test_a_gate_that_passed_only_by_excuses_is_not_accepted() -> None:
    run_ = run(Status.CORRECT, Status.WRONG_ANSWER)
    excused: Verdict = decide(run_, 2, NO_WORSE, run_)
    assert excused.result is Result.PASS
    assert accept(excused, holdout(0, 0)).reasons == ("gate: not every probe is correct: p1",)


def test_a_holdout_that_did_not_run_or_broke_down_is_not_accepted() -> None:
    assert not accept(PASSED, holdout(0, 0, 0)).accepted
    broken = paired_difference(run(Status.CORRECT, Status.CORRECT), run(Status.CORRECT, Status.RUNTIME_ERROR))
    assert not accept(PASSED, broken).accepted


def answered(right: int, n: int) -> list[Outcome]:
    return run(*[Status.CORRECT] * right, *[Status.WRONG_ANSWER] * (n - right))


@pytest.mark.parametrize(
    ("right", "n", "rule", "says_something"),
    [
        (0, 40, AcceptanceRule(), False),
        (0, 40, AcceptanceRule(strict=True), False),
        (1, 40, AcceptanceRule(strict=True), True),
        (1, 50, AcceptanceRule(), False),  # a net loss of one is what the margin allows
        (2, 50, AcceptanceRule(), True),
        (29, 100, AcceptanceRule(margin=0.29), False),
        (30, 100, AcceptanceRule(margin=0.29), True),
    ],
)
def test_a_holdout_that_could_refuse_nobody_accepts_nobody(right, n, rule, says_something) -> None:
    baseline = answered(right, n)
    accepted = accept(PASSED, paired_difference(baseline, baseline), rule)
    assert accepted.accepted == says_something
    # What makes the difference: whether a schedule that answers nothing would be refused.
    assert not accept(PASSED, paired_difference(baseline, answered(0, n)), rule).accepted
    if not says_something:
        assert f"the baseline is right on {right} of {n} probes" in accepted.reasons[0]


def test_all_objections_are_given_at_once() -> None:
    assert len(accept(decide([], 1), holdout(9, 0)).reasons) == 2


@pytest.mark.parametrize("margin", [-0.1, 1.0, math.nan])
def test_a_margin_outside_its_range_is_refused(margin: float) -> None:
    with pytest.raises(ValueError, match="margin"):
        AcceptanceRule(margin)
