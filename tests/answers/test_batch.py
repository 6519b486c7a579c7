from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing_lab.answers import Extraction, Judge, Judgement, Reason, Status, check_batch, validate_expected

JUDGE = Judge()


def results(*lines):
    return [result.as_json() for result in check_batch(lines, JUDGE)]


def case(**fields):
    return json.dumps({"text": "Answer: 5", "expected": "5", "type": "integer", **fields})


def test_every_case_gives_one_result_in_order():
    found = results(case(), case(text="Answer: 6", id="b"), case(text="5", extract="last_number"))
    assert found == [
        {"line": 1, "status": "correct", "extracted": "5", "reason": None},
        {"line": 2, "id": "b", "status": "wrong_answer", "extracted": "6", "reason": "mismatch"},
        {"line": 3, "status": "correct", "extracted": "5", "reason": None},
    ]


def test_blank_lines_are_skipped_and_counted():
    assert [result["line"] for result in results("", case(), "  \n", case())] == [2, 4]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "a case is an object"),
        (case(typ="x"), "unknown fields: typ"),
        (json.dumps({"text": "x"}), "expected must be a string; type must be a string"),
        (case(type="number"), "type must be one of"),
        (case(expected="five"), "no integer"),
        (case(places=2), "places is demanded for decimal answers"),
        (case(places="2"), "places must be a whole number"),
        (case(finish_reason="eos"), "finish_reason must be one of"),
        (case(extract="any"), "extract must be one of"),
        (case(thinking_open=1), "thinking_open must be true or false"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_reported_with_its_number_and_stops_nothing(line, message):
    bad, good = results(line, case())
    assert bad["line"] == 1
    assert message in bad["error"]
    assert good == {"line": 2, "status": "correct", "extracted": "5", "reason": None}


@given(line=st.one_of(st.text(), st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(json.dumps),
                      st.dictionaries(st.sampled_from(["text", "expected", "type", "places", "id"]), st.text() | st.integers() | st.none()).map(json.dumps)))  # fmt: skip
def test_a_batch_is_total(line):
    for result in results(line):
        assert ("error" in result) != ("status" in result)


@pytest.mark.parametrize(
    ("expected", "answer_type", "places", "message"),
    [
        ("five", "integer", None, "no integer"),
        ("5.5", "integer", None, "no integer"),
        ("12 or 13", "integer", None, "ambiguous"),
        ("1/0", "rational", None, "no rational"),
        ("3.145", "decimal", 2, "more than the stated 2 places"),
        ("3.14", "decimal", None, "places is demanded"),
        ("3.14", "decimal", 99, "from 0 to"),
        ("AB", "choice", None, "no choice"),
        ("the square of x", "expression", None, "no expression"),
        ("10^10^10", "expression", None, "too_large"),
        ("", "text", None, "1 to"),
        ("x" * 30_000, "text", None, "1 to"),
        ("x", "word", None, "unknown answer type"),
    ],
)
def test_an_expected_answer_that_nothing_can_equal_is_refused_with_the_reason(expected, answer_type, places, message):
    with pytest.raises(ValueError, match=message):
        validate_expected(expected, answer_type, places)


def test_a_result_cannot_contradict_itself():
    with pytest.raises(ValueError, match="answer or a reason"):
        Extraction("5", Reason.BUDGET)
    with pytest.raises(ValueError, match="cannot have the reason"):
        Judgement(Status.CORRECT, "5", Reason.MISMATCH)


def test_a_long_answer_is_shown_in_part():
    judgement = JUDGE.judge("Answer: " + "a" * 5_000, expected="b", answer_type="text")
    assert len(judgement.extracted) == 1_000
