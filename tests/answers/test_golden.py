from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml

from routing_lab.answers import ANSWER_TYPES, Judge, extract, validate_expected
from routing_lab.answers.numbers import read_number
from routing_lab.answers.syntax import parse

CASES = yaml.safe_load(Path(__file__).with_name("golden.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def judge():
    with Judge() as own:
        yield own


def _name(case):
    return f"{case['type']}: {case['text'][-40:]!r} ({case['why']})".encode("ascii", "backslashreplace").decode()


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_a_golden_case_is_judged_as_written(judge, case):
    validate_expected(case["expected"], case["type"], case.get("places"))
    judgement = judge.judge(
        case["text"],
        expected=case["expected"],
        answer_type=case["type"],
        finish_reason=case.get("finish_reason"),
        places=case.get("places"),
        mode=case.get("extract", "declared"),
        thinking_open=case.get("thinking_open", False),
    )
    assert (judgement.status, judgement.reason) == (case["status"], case.get("reason"))


def test_the_golden_file_is_large_and_says_why_and_covers_every_type():
    assert len(CASES) >= 250
    assert all(case["why"].strip() for case in CASES)
    counts = Counter(case["type"] for case in CASES)
    assert set(counts) == set(ANSWER_TYPES)
    assert {case["status"] for case in CASES} == {"correct", "wrong_answer", "no_final_answer"}


def test_no_golden_case_is_there_twice():
    keys = [tuple(sorted((k, str(v)) for k, v in case.items() if k != "why")) for case in CASES]
    assert len(keys) == len(set(keys))


@pytest.mark.timeout(120)
def test_every_beginning_of_a_golden_text_is_read_to_an_end():
    # What is cut anywhere leaves something open: brackets, subscripts, environments, numbers.
    for case in CASES:
        for end in range(len(case["text"])):
            text = case["text"][:end]
            extract(text)
            parse(text)
            parse(text.removeprefix("\\boxed{"))
            read_number(text)
