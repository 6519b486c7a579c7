from __future__ import annotations

import random
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing_lab.demo import tasks, vocabulary

LONGEST_COMPLETION = 47  # and the end-of-sequence token


def expected_answer(prompt: str) -> str:
    """Solve a prompt from its text alone, without anything of the generator."""
    question = re.fullmatch(r"Q: (.+)=\?\n", prompt)
    assert question
    if word := re.fullmatch(r"reverse ([a-z]+)", question[1]):
        return "".join(reversed(word[1]))
    if digits := re.fullmatch(r"sort (\d+)", question[1]):
        return "".join(d * digits[1].count(d) for d in "0123456789")
    if count := re.fullmatch(r"count ([a-z]) in ([a-z]+)", question[1]):
        return str(len(re.findall(count[1], count[2])))
    first, sign, second = re.split(r"([-+*])", question[1])
    a, b = int(first), int(second)
    return str({"+": a + b, "-": a - b, "*": a * b}[sign])


def column_results(scratchpad: str) -> str:
    """Read the number off a digit-by-digit scratchpad: the low digit of each step, and the last carry."""
    results = re.findall(r"=(\d)(\d);", scratchpad)
    number = "".join(low for _, low in reversed(results))
    return str(int(results[-1][0] + number))


GOLDEN_HELD_OUT = [310, 323, 324, 330, 336, 345, 358]

kinds = st.sampled_from(tasks.KINDS)
seeds = st.integers(0, 2**32)


@given(kind=kinds, seed=seeds)
def test_the_answer_is_what_an_independent_solver_finds(kind: str, seed: int) -> None:
    problem = tasks.generate(kind, random.Random(seed))
    assert problem.answer == expected_answer(problem.prompt)


@given(kind=st.sampled_from(["addition", "subtraction", "multiplication"]), seed=seeds)
def test_the_scratchpad_of_arithmetic_leads_to_the_answer(kind: str, seed: int) -> None:
    problem = tasks.generate(kind, random.Random(seed))
    assert column_results(problem.scratchpad) == problem.answer


@given(seed=seeds)
def test_the_scratchpad_of_counting_spells_the_word_with_a_running_count(seed: int) -> None:
    problem = tasks.generate("counting", random.Random(seed))
    letter, word = re.findall(r"count (.) in (.+)=", problem.prompt)[0]
    counts = [str(word[: end + 1].count(letter)) for end in range(len(word))]
    assert problem.scratchpad == "".join(a + b for a, b in zip(word, counts, strict=True)) + ";"


@given(kind=kinds, seed=seeds)
def test_a_problem_is_short_and_inside_the_vocabulary(kind: str, seed: int) -> None:
    problem = tasks.generate(kind, random.Random(seed))
    text = problem.prompt + problem.completion
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert len(problem.completion) <= LONGEST_COMPLETION
    assert problem.completion.endswith(f"Answer: {problem.answer}")


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_answers_with_leading_zeros_or_letters_are_text_and_numbers_are_integers(kind: str) -> None:
    problem = tasks.generate(kind, random.Random(0))
    assert problem.answer_type == ("text" if kind in {"reversal", "sorting"} else "integer")


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_the_same_seed_gives_the_same_problems(kind: str) -> None:
    assert tasks.fresh_problems(kind, 30, seed=5) == tasks.fresh_problems(kind, 30, seed=5)
    assert tasks.fresh_problems(kind, 30, seed=5) != tasks.fresh_problems(kind, 30, seed=6)


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_fresh_problems_are_held_out_and_different(kind: str) -> None:
    problems = tasks.fresh_problems(kind, 500, seed=1)
    assert len({problem.prompt for problem in problems}) == 500
    assert all(tasks.is_held_out(problem.prompt) for problem in problems)


def test_training_takes_every_kind_in_turn_and_never_a_held_out_question() -> None:
    stream = tasks.training_problems(random.Random(3))
    problems = [next(stream) for _ in range(6000)]
    assert not any(tasks.is_held_out(problem.prompt) for problem in problems)
    assert [problem.kind for problem in problems] == [*tasks.KINDS] * 1000


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_about_a_tenth_of_the_questions_is_held_out(kind: str) -> None:
    rng = random.Random(9)
    held_out = sum(tasks.is_held_out(tasks.generate(kind, rng).prompt) for _ in range(5000))
    assert 400 < held_out < 600


def test_what_is_held_out_never_changes() -> None:
    # A change would let a shipped model meet questions it was trained on.
    prompts = [f"Q: {number}+86=?\n" for number in range(300, 360)]
    assert [300 + i for i, prompt in enumerate(prompts) if tasks.is_held_out(prompt)] == GOLDEN_HELD_OUT


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'division'.*addition"):
        tasks.generate("division", random.Random(0))


def test_more_fresh_problems_than_there_are_is_an_error_and_not_an_endless_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "is_held_out", lambda prompt: prompt == "Q: 347+86=?\n")
    with pytest.raises(ValueError, match="held-out problems of kind 'addition'"):
        tasks.fresh_problems("addition", 2, seed=0)


def test_a_negative_number_of_problems_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        tasks.fresh_problems("addition", -1, seed=0)


def test_a_character_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="é"):
        vocabulary.encode("café")


def test_importing_the_demo_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, routing_lab.demo as demo, routing_lab.demo.tasks; demo.model_path(); "
        "print([m for m in ('torch', 'gguf', 'llama_cpp', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
