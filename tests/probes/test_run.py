"""Running probes: every completion becomes an outcome, a dying process too, and nothing else is swallowed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from fakelab import make_facts, make_probes, make_runtime, schedule
from hypothesis import given
from hypothesis import strategies as st

from routing_lab.answers import Judge, Status
from routing_lab.errors import RuntimeFailureError, UsageError
from routing_lab.probes import KEPT_CHARACTERS, Probe, ProbeSet, run_probes
from routing_lab.probes.run import MAX_CONSECUTIVE_ERRORS, rendered_prompt, thinking_is_open
from routing_lab.runtime.base import Generation


class Scripted:
    """The two calls that running a probe makes; a reply is a text, or an exception to raise."""

    def __init__(self, replies: Sequence[str | Exception], template: str = "<user>{}<assistant>") -> None:
        self.replies = list(replies)
        self.template = template
        self.asked: list[dict] = []

    def render_chat(self, user: str, *, thinking: bool | None = None) -> str:
        return self.template.format(user) + {None: "", True: "<think>\n", False: "<think>\n\n</think>\n"}[thinking]

    def generate(self, prompt: str, *, max_tokens: int, stop: Sequence[str] = (), margins: bool = False) -> Generation:
        self.asked.append({"prompt": prompt, "max_tokens": max_tokens, "stop": tuple(stop), "margins": margins})
        reply = self.replies[len(self.asked) - 1]
        if isinstance(reply, Exception):
            raise reply
        return Generation(reply, "stop", len(prompt), len(reply), 0.5, 0.4, 1.25 if margins else None)


def run(runtime, probe_set: ProbeSet, **options):
    with Judge() as judge:
        return run_probes(runtime, probe_set, probe_set.items, judge, **options)


def sums(n: int, **options) -> ProbeSet:
    """n probes; the answer of each is its number."""
    return ProbeSet("sums", tuple(Probe(f"p{i}", f"{i}+0=?", str(i), "integer") for i in range(n)), **options)


def dead() -> RuntimeFailureError:
    return RuntimeFailureError("the model's process died")


KINDS = {
    "right": (None, Status.CORRECT),
    "wrong": ("Answer: 999", Status.WRONG_ANSWER),
    "silent": ("I do not know.", Status.NO_FINAL_ANSWER),
    "dead": (None, Status.RUNTIME_ERROR),
}


def scripted(kinds: Sequence[str]) -> Scripted:
    special = {"right": lambda i: f"Answer: {i}", "dead": lambda _i: dead()}
    return Scripted([special[kind](i) if kind in special else KINDS[kind][0] for i, kind in enumerate(kinds)])


@given(
    kinds=st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=9),
    stop_after=st.none() | st.integers(1, 4),
    excused=st.sets(st.integers(0, 8)),
)
def test_outcomes_are_those_of_the_probes_in_order_up_to_the_stop(kinds, stop_after, excused) -> None:
    options = {"stop_after_failures": stop_after, "excused": {f"p{i}" for i in excused}}
    outcomes = run(scripted(kinds), sums(len(kinds)), **options)
    assert [outcome.status for outcome in outcomes] == [KINDS[kind][1] for kind in kinds[: len(outcomes)]]
    assert [outcome.probe for outcome in outcomes] == [f"p{i}" for i in range(len(outcomes))]
    failed = [i for i, outcome in enumerate(outcomes) if not outcome.correct and i not in excused]
    if stop_after is not None:
        assert len(failed) <= stop_after
    if len(outcomes) < len(kinds):
        died = [kind == "dead" for kind in kinds[: len(outcomes)]][-MAX_CONSECUTIVE_ERRORS:]
        assert len(failed) == stop_after or died == [True] * MAX_CONSECUTIVE_ERRORS


def test_a_prompt_that_does_not_fit_is_named_by_its_probe_with_the_way_out() -> None:
    runtime = Scripted(["Answer: 0", UsageError("the prompt has 5000 tokens and leaves no room in a context of 4096")])
    with pytest.raises(UsageError, match=r"^probe p1: the prompt has 5000 tokens .* give a larger --context"):
        run(runtime, sums(2))


def test_an_outcome_keeps_what_the_runtime_and_the_judge_said() -> None:
    (outcome,) = run(Scripted(["so\nAnswer: 0"]), sums(1), margins=True)
    assert (outcome.status, outcome.extracted, outcome.reason, outcome.text) == (
        Status.CORRECT,
        "0",
        None,
        "so\nAnswer: 0",
    )
    assert (outcome.prompt_tokens, outcome.tokens, outcome.seconds, outcome.llama_seconds) == (5, 12, 0.5, 0.4)
    assert outcome.smallest_margin == 1.25


def test_a_long_completion_keeps_its_end() -> None:
    (outcome,) = run(Scripted(["x" * 5000 + "\nAnswer: 0"]), sums(1))
    assert outcome.correct
    assert len(outcome.text) == KEPT_CHARACTERS
    assert outcome.text.endswith("Answer: 0")


def test_a_runtime_error_says_why_and_the_run_goes_on_with_the_next_probe() -> None:
    outcomes = run(scripted(["right", "dead", "right"]), sums(3), stop_after_failures=None)
    assert [outcome.status for outcome in outcomes] == [Status.CORRECT, Status.RUNTIME_ERROR, Status.CORRECT]
    assert outcomes[1].reason == "the model's process died"


def test_a_runtime_that_keeps_dying_is_not_asked_for_ever() -> None:
    runtime = scripted(["dead"] * 20)
    assert len(run(runtime, sums(20), stop_after_failures=None)) == MAX_CONSECUTIVE_ERRORS == len(runtime.asked)


def test_runtime_errors_with_an_answer_between_them_do_not_end_the_run() -> None:
    kinds = ["dead", "dead", "right"] * 3
    assert len(run(scripted(kinds), sums(len(kinds)), stop_after_failures=None)) == len(kinds)


@pytest.mark.parametrize("error", [UsageError("the prompt does not fit"), ValueError("a bug"), KeyboardInterrupt()])
def test_any_other_exception_is_let_through(error) -> None:
    class Broken(Scripted):
        def generate(self, *args, **kwargs):
            raise error

    with pytest.raises(type(error)):
        run(Broken([]), sums(1))


def test_progress_sees_every_outcome_in_order() -> None:
    seen = []
    outcomes = run(scripted(["right", "wrong"]), sums(2), progress=seen.append)
    assert seen == outcomes


def test_a_stop_after_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="stop_after_failures"):
        run(Scripted([]), sums(1), stop_after_failures=0)


def test_budget_stop_and_prompt_reach_the_runtime() -> None:
    items = (Probe("a", "raw text\n", "1", "integer"), Probe("b", "other", "1", "integer", max_tokens=7))
    runtime = Scripted(["Answer: 1"] * 2)
    run(runtime, ProbeSet("s", items, max_tokens=50, stop=("\nQ:",)))
    assert runtime.asked == [
        {"prompt": "raw text\n", "max_tokens": 50, "stop": ("\nQ:",), "margins": False},
        {"prompt": "other", "max_tokens": 7, "stop": ("\nQ:",), "margins": False},
    ]


@pytest.mark.parametrize(
    ("thinking", "rendered"),
    [
        (None, "<user>0+0=?<assistant>"),
        (True, "<user>0+0=?<assistant><think>\n"),
        (False, "<user>0+0=?<assistant><think>\n\n</think>\n"),
    ],
)
def test_chat_probes_go_through_the_models_own_template(thinking, rendered: str) -> None:
    probe_set = sums(1, prompt="chat", thinking=thinking)
    assert rendered_prompt(Scripted([]), probe_set, probe_set.items[0]) == rendered


def test_a_completion_that_starts_inside_reasoning_has_to_leave_it_before_it_answers() -> None:
    open_set, closed_set = sums(1, prompt="chat", thinking=True), sums(1, prompt="chat", thinking=False)
    inside = "maybe Answer: 0"
    assert run(Scripted([inside]), open_set)[0].status is Status.NO_FINAL_ANSWER
    assert run(Scripted([inside]), closed_set)[0].status is Status.CORRECT
    assert run(Scripted(["maybe 5</think>Answer: 0"]), open_set)[0].status is Status.CORRECT


@pytest.mark.parametrize(
    ("rendered", "user", "is_open"),
    [
        ("<user>hi<assistant><think>\n", "hi", True),
        ("<user>hi<assistant><think>\n\n</think>\n\n", "hi", False),
        ("<user>hi<assistant>", "hi", False),
        ("<user>What does <think> mean?<assistant>", "What does <think> mean?", False),
        ("raw prompt that ends in <think>\n", "", True),
        ("the template changed the message <think>", "something else", True),
    ],
)
def test_only_a_tag_that_is_not_the_users_own_opens_reasoning(rendered: str, user: str, is_open: bool) -> None:
    assert thinking_is_open(rendered, user) is is_open


def test_the_last_number_counts_only_where_the_set_says_so() -> None:
    assert run(Scripted(["it is 0"]), sums(1))[0].status is Status.NO_FINAL_ANSWER
    assert run(Scripted(["it is 0"]), sums(1, extract="last_number"))[0].status is Status.CORRECT


def test_the_fake_runtime_answers_by_its_counts(tmp_path: Path) -> None:
    runtime = make_runtime(make_facts(tmp_path))
    probe_set = make_probes()
    assert all(outcome.correct for outcome in run(runtime, probe_set))


def test_probes_run_under_the_schedule_that_is_applied_and_stop_at_its_first_failure(tmp_path: Path) -> None:
    runtime = make_runtime(make_facts(tmp_path))
    runtime.apply(schedule(2, 8, 8, 8))  # probe g2 needs four experts in block 0
    assert [(outcome.probe, outcome.correct) for outcome in run(runtime, make_probes())] == [
        ("g0", True),
        ("g1", True),
        ("g2", False),
    ]


@pytest.mark.parametrize("request_", ["generate", "render_chat"])
def test_a_request_that_loses_the_process_is_an_outcome_and_the_next_probe_runs(tmp_path: Path, request_: str) -> None:
    failing = iter([False, True, False, False])
    runtime = make_runtime(
        make_facts(tmp_path),
        answer=lambda prompt, _counts: f"Answer: {prompt.removeprefix('user: ')[0]}",
        fail=lambda request, _counts: request == request_ and next(failing),
    )
    outcomes = run(runtime, sums(4, prompt="chat"), stop_after_failures=None)
    right, broken = Status.CORRECT, Status.RUNTIME_ERROR
    assert [outcome.status for outcome in outcomes] == [right, broken, right, right]
    assert f"told to fail in {request_}" in str(outcomes[1].reason)
    assert (outcomes[1].text, outcomes[1].tokens, outcomes[1].extracted) == ("", 0, None)


def test_a_completion_that_its_budget_cut_is_no_answer_and_says_so(tmp_path: Path) -> None:
    runtime = make_runtime(make_facts(tmp_path), answer=lambda _prompt, _counts: "thinking about it for long")
    (outcome,) = run(runtime, sums(1, max_tokens=8))
    assert (outcome.status, outcome.reason, outcome.tokens) == (Status.NO_FINAL_ANSWER, "budget", 8)
