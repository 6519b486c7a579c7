from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest
from hostile import hostile_texts

from routing_lab.answers import ANSWER_TYPES, AnswerType, Judge, Status, extract

EXPECTED: dict[AnswerType, str] = {
    "integer": "424242",
    "rational": "424243/7",
    "decimal": "42.42",
    "expression": "q^7+p",
    "choice": "Q",
    "text": "only this very text",
}
# Kept in memory by every test of this file: building the 2 MB texts again for each would be most of the time.
LARGE = 200_000
CANARY = f"/tmp/routing-lab-canary-{os.getpid()}"
TEXTS = dict(hostile_texts(CANARY))


@pytest.fixture(scope="module")
def judge():
    with Judge() as own:
        own.judge(r"\boxed{x}", expected="y", answer_type="expression")
        yield own


def test_the_corpus_is_as_large_as_it_claims():
    assert len(TEXTS) >= 60
    assert max(map(len, TEXTS.values())) >= 2_000_000


@pytest.mark.parametrize("name", TEXTS)
def test_no_hostile_text_is_correct_or_takes_two_seconds(judge, name):
    # The large texts spend their time in extraction, which is the same for every type.
    for answer_type in ANSWER_TYPES if len(TEXTS[name]) < LARGE else ("integer", "expression"):
        places = 2 if answer_type == "decimal" else None
        started = time.perf_counter()
        judgement = judge.judge(TEXTS[name], expected=EXPECTED[answer_type], answer_type=answer_type, places=places)
        took = time.perf_counter() - started
        assert judgement.status in {Status.WRONG_ANSWER, Status.NO_FINAL_ANSWER}
        assert took < 2.0, f"{answer_type} took {took:.2f} s"
    assert not Path(CANARY).exists(), "something in the text was executed"


@pytest.mark.parametrize("mode", ["declared", "last_number"])
def test_extraction_of_hostile_texts_keeps_this_process_small(mode):
    for text in TEXTS.values():
        extract(text, mode=mode)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak_bytes < 1.5 * 2**30


def test_the_judge_still_answers_after_all_of_them(judge):
    judgement = judge.judge(r"\boxed{x^2+2x+1}", expected="(x+1)^2", answer_type="expression")
    assert judgement.status is Status.CORRECT
