"""The demo's probe set asks what training never saw, is answered rightly, and is what its script draws."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from fakelab import make_facts, make_runtime

from routing_lab.demo import probes_path
from routing_lab.demo.make_probes import GATE_PER_KIND, HOLDOUT_PER_KIND, SEED, drawn, screened
from routing_lab.demo.tasks import KINDS, is_held_out
from routing_lab.errors import NothingAcceptedError
from routing_lab.probes import ProbeSet

SHIPPED = ProbeSet.load(probes_path())
DRAWN = drawn(SEED)

FORMS = {
    "addition": r"(\d+)\+(\d+)",
    "subtraction": r"(\d+)-(\d+)",
    "multiplication": r"(\d+)\*(\d+)",
    "reversal": r"reverse ([a-z]+)",
    "sorting": r"sort (\d+)",
    "counting": r"count ([a-z]) in ([a-z]+)",
}


def solved(prompt: str) -> tuple[str, str, str]:
    """Kind, answer and type of a prompt, from its text alone and without the generator's code."""
    for kind, form in FORMS.items():
        if found := re.fullmatch(rf"Q: {form}=\?\n", prompt):
            return kind, *worked_out(kind, found)
    raise AssertionError(f"no kind asks {prompt!r}")


def worked_out(kind: str, found: re.Match[str]) -> tuple[str, str]:
    if kind == "reversal":
        letters = list(found[1])
        return "".join(letters.pop() for _ in found[1]), "text"
    if kind == "sorting":
        tally = Counter(found[1])
        return "".join(digit * tally[digit] for digit in "0123456789"), "text"
    if kind == "counting":
        return str(len(found[2]) - len(found[2].replace(found[1], ""))), "integer"
    a, b = int(found[1]), int(found[2])
    if kind == "multiplication":
        return str(sum([a] * b)), "integer"
    return str(a + b if kind == "addition" else a - b), "integer"


@pytest.mark.parametrize(("split", "each"), [("gate", 10), ("holdout", 40)])
def test_a_split_has_equally_many_problems_of_every_kind(split, each: int) -> None:
    probes = SHIPPED.split(split)
    assert len(probes) == each * len(KINDS)
    assert Counter(solved(probe.prompt)[0] for probe in probes) == dict.fromkeys(KINDS, each)


def test_every_answer_follows_from_its_prompt_alone() -> None:
    derived = {probe.id: solved(probe.prompt) for probe in SHIPPED.items}
    assert {probe.id: (*probe.tags, probe.answer, probe.type) for probe in SHIPPED.items} == derived


def test_training_never_saw_a_prompt_and_none_is_asked_twice() -> None:
    prompts = [probe.prompt for probe in SHIPPED.items]
    assert all(is_held_out(prompt) for prompt in prompts)
    assert len(set(prompts)) == len(prompts) == 300


def test_the_holdout_is_exactly_what_the_recorded_seed_draws() -> None:
    assert SHIPPED.source["seed"] == SEED
    assert SHIPPED.split("holdout") == DRAWN.split("holdout")


def test_the_gate_is_the_first_problems_drawn_but_for_those_that_the_file_says_were_replaced() -> None:
    place = {probe: index for index, probe in enumerate(DRAWN.split("gate"))}
    gate = SHIPPED.split("gate")
    assert [place[probe] for probe in gate] == sorted(place[probe] for probe in gate)
    replaced = 0
    for kind in KINDS:
        candidates = [probe for probe in place if kind in probe.tags]
        last = max(index for index, probe in enumerate(candidates) if probe in gate)
        replaced += last + 1 - GATE_PER_KIND
    assert SHIPPED.source["gate_problems_replaced"] == replaced


# --- screening, with a model that fails on purpose


def answering_all_but(failed: set[str]):
    answers = {probe.prompt: "wrong" if probe.id in failed else probe.answer for probe in DRAWN.items}

    def answer(prompt: str, _counts: Mapping[int, int]) -> str:
        return f"Answer: {answers[prompt]}"

    return answer


def screen(folder: Path, failed: set[str]) -> ProbeSet:
    return screened(DRAWN, make_runtime(make_facts(folder), answer=answering_all_but(failed)), SEED)


def test_a_gate_problem_that_the_full_model_fails_is_replaced_by_the_next_of_its_kind_and_counted(
    tmp_path: Path,
) -> None:
    found = screen(tmp_path, {"addition-g00", "sorting-g03", "sorting-g10"})
    gate = [probe.id for probe in found.split("gate")]
    assert gate[:GATE_PER_KIND] == [f"addition-g{number:02}" for number in range(1, 11)]
    sorting = [probe for probe in gate if probe.startswith("sorting")]
    assert sorting == [f"sorting-g{number:02}" for number in (0, 1, 2, 4, 5, 6, 7, 8, 9, 11)]
    assert found.source["gate_problems_replaced"] == 3


def test_a_spare_problem_that_is_not_needed_counts_as_no_replacement(tmp_path: Path) -> None:
    assert screen(tmp_path, {"addition-g15"}).source["gate_problems_replaced"] == 0


def test_the_holdout_is_never_screened(tmp_path: Path) -> None:
    found = screen(tmp_path, {probe.id for probe in DRAWN.split("holdout")})
    assert found.split("holdout") == DRAWN.split("holdout")
    assert len(found.split("holdout")) == HOLDOUT_PER_KIND * len(KINDS)


def test_a_model_that_cannot_fill_a_gate_gets_none(tmp_path: Path) -> None:
    failed = {f"counting-g{number:02}" for number in range(11)}
    with pytest.raises(NothingAcceptedError, match="answers 9 of 20 problems of counting"):
        screen(tmp_path, failed)


def test_screening_with_a_model_that_answers_everything_gives_the_probes_that_ship(tmp_path: Path) -> None:
    if SHIPPED.source["gate_problems_replaced"] == 0:
        found = screen(tmp_path, set())
        assert replace(found, source={}) == replace(SHIPPED, source={})
