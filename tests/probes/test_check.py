"""`probes check` tells what a set is worth: what the baseline fails, how close it came, what passing would prove."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakelab import make_facts, make_probes, make_runtime

from routing_lab import demo
from routing_lab.answers import Judge, Reason, Status, reason_words
from routing_lab.cli.probes import closeness
from routing_lab.errors import UsageError
from routing_lab.probes import ProbeSet
from routing_lab.probes.check import check_probes
from routing_lab.probes.power import failure_bound
from routing_lab.runtime import RuntimeOptions, open_runtime


def check(runtime, probe_set, **options):
    with Judge() as judge:
        return check_probes(runtime, probe_set, judge, **options)


def test_a_baseline_that_answers_everything_makes_a_sound_set(tmp_path: Path) -> None:
    report = check(make_runtime(make_facts(tmp_path)), make_probes(4, 6))
    assert report.sound
    assert not report.failures
    assert len(report.passes) == 10
    gate, holdout = report.splits
    assert (gate.split, gate.probes, gate.passed) == ("gate", 4, 4)
    assert (holdout.split, holdout.probes, holdout.passed) == ("holdout", 6, 6)


def test_what_the_baseline_fails_is_listed_with_both_answers(tmp_path: Path) -> None:
    runtime = make_runtime(make_facts(tmp_path), {"g2": {0: 16}, "h1": {0: 16}})
    report = check(runtime, make_probes())
    assert [(failure.probe, failure.split, failure.expected, failure.extracted) for failure in report.failures] == [
        ("g2", "gate", "2", "99"),
        ("h1", "holdout", "1", "99"),
    ]
    assert not report.sound


def test_a_failed_holdout_probe_leaves_the_set_sound(tmp_path: Path) -> None:
    assert check(make_runtime(make_facts(tmp_path), {"h1": {0: 16}}), make_probes()).sound


def test_passes_come_closest_call_first(tmp_path: Path) -> None:
    runtime = make_runtime(make_facts(tmp_path))
    margins = {"g0?": 3.0, "g1?": 0.25, "g2?": 9.0, "g3?": 1.0}
    plain = runtime.generate

    def generate(prompt: str, **options):
        return replace(plain(prompt, **options), smallest_margin=margins[prompt])

    runtime.generate = generate
    report = check(runtime, make_probes(4, 0))
    assert [passed.probe for passed in report.passes if passed.is_close] == ["g1"]
    assert [(passed.probe, passed.smallest_margin) for passed in report.passes] == [
        ("g1", 0.25),
        ("g3", 1.0),
        ("g0", 3.0),
        ("g2", 9.0),
    ]


def test_the_report_says_what_passing_proves_and_how_many_probes_a_wanted_bound_takes(tmp_path: Path) -> None:
    report = check(make_runtime(make_facts(tmp_path)), make_probes(4, 70), wanted_bound=0.05)
    gate, holdout = report.splits
    assert gate.bound_if_all_correct == failure_bound(0, 4)
    assert (gate.probes_wanted, gate.probes_missing) == (59, 55)
    assert (holdout.probes_wanted, holdout.probes_missing) == (59, 0)


def test_tokens_are_counted(tmp_path: Path) -> None:
    report = check(make_runtime(make_facts(tmp_path)), make_probes(3, 0))
    gate, holdout = report.splits
    assert gate.prompt_tokens == 9
    assert gate.tokens == sum(passed.tokens for passed in report.passes)
    assert gate.most_tokens == max(passed.tokens for passed in report.passes)
    assert (holdout.probes, holdout.tokens, holdout.bound_if_all_correct) == (0, 0, 1.0)


def test_a_runtime_that_keeps_dying_leaves_probes_that_did_not_run(tmp_path: Path) -> None:
    runtime = make_runtime(make_facts(tmp_path), fail=lambda request, _counts: request == "generate")
    report = check(runtime, make_probes(5, 0))
    assert {failure.status for failure in report.failures} == {Status.RUNTIME_ERROR}
    assert report.not_run == ("g3", "g4")
    assert not report.sound


@pytest.mark.parametrize("bound", [0, 1, float("nan")])
def test_a_bound_of_nonsense_is_a_usage_error(tmp_path: Path, bound: float) -> None:
    with pytest.raises(UsageError):
        check(make_runtime(make_facts(tmp_path)), make_probes(), wanted_bound=bound)


@pytest.mark.model
def test_the_demo_model_answers_every_probe_of_its_own_gate() -> None:
    with open_runtime(demo.model_path(), RuntimeOptions(context_tokens=512)) as runtime:
        report = check(runtime, ProbeSet.load(demo.probes_path()))
    assert report.sound
    assert all(passed.smallest_margin is not None and passed.smallest_margin > 0 for passed in report.passes)
    assert all(passed.tokens < passed.budget for passed in report.passes)


def test_every_reason_has_words_and_what_a_runtime_said_stays_as_it_is() -> None:
    assert all("_" not in reason_words(reason) and reason_words(reason) != reason for reason in Reason)
    assert reason_words("the process died") == "the process died"


@pytest.mark.parametrize(
    ("margins", "said"), [((8.84, 9.0), "no close call: "), ((0.1, 0.7), "close call g0 (gate): ")]
)
def test_only_a_close_call_is_called_one(tmp_path: Path, margins: tuple[float, ...], said: str) -> None:
    report = check(make_runtime(make_facts(tmp_path)), make_probes(2, 0))
    passes = [replace(one, smallest_margin=margin) for one, margin in zip(report.passes, margins, strict=True)]
    lines = closeness(replace(report, passes=tuple(passes)), 5)
    assert len(lines) == 1
    assert lines[0].startswith(said)
