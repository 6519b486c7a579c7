"""What must hold for every number and every text, not only for the golden ones."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing_lab.answers import Judge, Reason, Status, extract
from routing_lab.answers.extraction import strip_markup
from routing_lab.answers.numbers import Number, read_number
from routing_lab.answers.syntax import Node, parse
from routing_lab.answers.wording import fold_text, read_choice

JUDGE = Judge()
INTEGERS = st.one_of(st.integers(-2000, 2000), st.integers(-(10**40), 10**40))
FRACTIONS = st.fractions(min_value=-1000, max_value=1000, max_denominator=200)
# Text in which the pieces that extraction looks for are likely.
PIECES = st.sampled_from(
    ["Answer:", "the answer is", "\\boxed{", "}", "{", "####", "答案", "<think>", "</think>", "\n", " ", "$", "**", "5", "1,234",
     "\\frac{1}{2}", " or ", ".", "(B)", "\\text{", "\\(", "\\)", "x^2", "<|im_end|>", "=", "%", "\\", "\ud800", "\x00", "½", "²"],
)  # fmt: skip
TEXTS = st.one_of(st.text(), st.lists(PIECES, max_size=30).map("".join))


def grouped(number: int, separator: str) -> str:
    return f"{number:,}".replace(",", separator)


def spellings(number: int) -> list[str]:
    sign, size = ("-" if number < 0 else ""), abs(number)
    digits = f"{sign}{size}"
    return [
        digits, f"{digits}.0", f"{digits}.", f"{digits}.000", f"${digits}$", f"**{digits}**", f"\\({digits}\\)", f"`{digits}`",
        f'"{digits}"', f"{sign}${size}", f"{sign}€{size}", f"{digits} apples", f"{digits} km", f"{digits}%", f"{digits}\\%",
        f"{digits}^\\circ", f"{digits}\\text{{ cm}}", f"x = {digits}", f"n={digits}", f"{digits}e0", f"{digits}*10^0",
        f"{digits} \\times 10^{{0}}", f"({digits})", f"{sign}0{size}", digits.replace("-", "−"), digits.replace("-", "–"),
        grouped(number, ","), grouped(number, " "), grouped(number, "{,}"), grouped(number, "\\,"), grouped(number, "\u202f"),
        grouped(number, "'"), grouped(number, "_"), f"{digits}, as shown", f"exactly {digits}", f"{digits} dollars.",
        digits.translate({ord("0") + d: 0xFF10 + d for d in range(10)}), f"\\mathbf{{{digits}}}", f"{digits}个",
    ]  # fmt: skip


def status(text, expected, answer_type, **options):
    return JUDGE.judge(text, expected=expected, answer_type=answer_type, **options).status


@given(number=INTEGERS, data=st.data())
@settings(max_examples=400, deadline=None)
def test_every_spelling_of_an_integer_equals_it(number, data):
    spelling = data.draw(st.sampled_from(spellings(number)))
    form = data.draw(
        st.sampled_from(["Answer: {}", "\\boxed{{{}}}", "so the answer is {}", "答案：{}", "Final Answer: {}\n"])
    )
    assert status(form.format(spelling), str(number), "integer") is Status.CORRECT


@given(pair=st.tuples(INTEGERS, INTEGERS).filter(lambda pair: pair[0] != pair[1]), data=st.data())
@settings(max_examples=400, deadline=None)
def test_no_spelling_of_an_integer_equals_another_integer(pair, data):
    spelling = data.draw(st.sampled_from(spellings(pair[0])))
    for answer_type in ("integer", "expression"):
        assert status(f"Answer: {spelling}", str(pair[1]), answer_type) is not Status.CORRECT


@given(number=INTEGERS, delta=st.sampled_from([-10, -1, 1, 9, 10, 100, 1000]), data=st.data())
@settings(max_examples=400, deadline=None)
def test_no_spelling_of_an_integer_equals_a_neighbour(number, delta, data):
    spelling = data.draw(st.sampled_from(spellings(number)))
    assert status(f"Answer: {spelling}", str(number + delta), "integer") is not Status.CORRECT


@given(
    pair=st.tuples(INTEGERS, INTEGERS).filter(lambda pair: pair[0] != pair[1]),
    between=st.sampled_from([" or ", " and ", ", ", "; ", " to "]),
)
@settings(deadline=None)
def test_two_different_integers_are_never_one_answer(pair, between):
    for expected in pair:
        assert status(f"Answer: {pair[0]}{between}{pair[1]}", str(expected), "integer") is not Status.CORRECT


@given(value=FRACTIONS, data=st.data())
@settings(max_examples=300, deadline=None)
def test_every_spelling_of_a_fraction_equals_it_and_its_percentage(value, data):
    sign, size = ("-" if value < 0 else ""), abs(value)
    whole, rest = divmod(size.numerator, size.denominator)
    forms = [f"{value.numerator}/{value.denominator}", f"{sign}\\frac{{{size.numerator}}}{{{size.denominator}}}",
             f"\\dfrac{{{value.numerator}}}{{{size.denominator}}}", f"{3 * value.numerator}/{3 * value.denominator}",
             f"{sign}{whole} {rest}/{size.denominator}", f"{sign}{whole}\\frac{{{rest}}}{{{size.denominator}}}"]  # fmt: skip
    assert status(f"Answer: {data.draw(st.sampled_from(forms))}", str(value), "rational") is Status.CORRECT
    assert (
        status(f"Answer: {value.numerator}/{value.denominator}", str(value + Fraction(1, 999)), "rational")
        is not Status.CORRECT
    )


@given(digits=st.integers(-(10**9), 10**9), places=st.integers(0, 9))
@settings(deadline=None)
def test_a_decimal_equals_itself_and_not_its_neighbour(digits, places):
    def written(value: int) -> str:
        sign, size = ("-" if value < 0 else ""), f"{abs(value):0{places + 1}d}"
        return f"{sign}{size[: len(size) - places]}.{size[len(size) - places :]}" if places else f"{sign}{size}"

    assert status(f"Answer: {written(digits)}", written(digits), "decimal", places=places) is Status.CORRECT
    assert status(f"Answer: {written(digits)}", written(digits + 1), "decimal", places=places) is Status.WRONG_ANSWER
    assert (
        status(f"Answer: {written(digits)}5", written(digits) if places else f"{digits}.", "decimal", places=places)
        is not Status.CORRECT
    )


@given(
    text=TEXTS,
    finish=st.sampled_from(["stop", "length", None]),
    mode=st.sampled_from(["declared", "last_number"]),
    opened=st.booleans(),
)
@settings(max_examples=1000, deadline=None)
def test_extraction_is_total(text, finish, mode, opened):
    found = extract(text, finish_reason=finish, mode=mode, thinking_open=opened)
    assert (found.answer is None) != (found.reason is None)
    if found.answer is not None:
        assert found.answer


@given(text=TEXTS)
@settings(max_examples=500, deadline=None)
def test_reading_is_total_for_every_type(text):
    assert isinstance(read_number(text), Number | Reason)
    assert isinstance(parse(text), Node | Reason)
    assert isinstance(read_choice(text), str)
    assert isinstance(fold_text(text), str)


@given(text=TEXTS)
@settings(max_examples=500, deadline=None)
def test_a_text_in_reasoning_declares_nothing(text):
    if "think" not in text.casefold():
        assert extract(f"<think>{text}").answer is None
        assert extract(f"<think>{text}</think>").answer is None
        assert extract(f"<think>{text}</think>Answer: q").answer == "q"


@given(text=st.text(alphabet="ab *_`$.()\"'", max_size=20))
@settings(max_examples=500)
def test_stripping_markup_twice_changes_nothing_more(text):
    once = strip_markup(text)
    assert strip_markup(once) == once


@given(text=st.text(max_size=30))
@settings(max_examples=500)
def test_folding_a_text_twice_changes_nothing_more(text):
    assert fold_text(fold_text(text)) == fold_text(text)


@given(number=INTEGERS)
def test_a_cut_line_is_never_an_answer(number):
    assert extract(f"Answer: {number}", finish_reason="length").reason is Reason.BUDGET
    assert extract(f"\\boxed{{{number}", finish_reason="length").reason is Reason.BUDGET


EXPRESSIONS = st.recursive(
    st.one_of(st.integers(0, 9).map(str), st.sampled_from(["x", "y", "a", "\\pi", "\\frac{1}{2}"])),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(
            lambda parts: f"({parts[0]}{parts[1]}{parts[2]})"
        ),
        inner.map(lambda part: f"({part})^2"),
        inner.map(lambda part: f"\\sqrt{{{part}}}"),
    ),
    max_leaves=4,
)


@given(expression=EXPRESSIONS)
@settings(max_examples=60, deadline=None)
def test_an_expression_equals_itself_rewritten_and_not_itself_plus_one(expression):
    assert status(f"\\boxed{{1+{expression}}}", f"{expression}+1", "expression") is Status.CORRECT
    assert status(f"\\boxed{{{expression}+1}}", expression, "expression") is Status.WRONG_ANSWER


@pytest.fixture(scope="module", autouse=True)
def _close_the_judge():
    yield
    JUDGE.close()
