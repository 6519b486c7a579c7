"""Strict YAML: what is refused, how it is said, and that nothing a file holds can hurt."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing_lab.errors import UserFileError
from routing_lab.yamlfile import MAX_BYTES, Fields, parse_yaml, read_text, render_yaml


def problems(text: str) -> str:
    with pytest.raises(UserFileError) as caught:
        parse_yaml(text, "a.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: key 'a' is here twice"),
        ("items:\n- {x: 1, x: 2}\n- {y: 1, y: 2}\n", "2 problems"),
        ("1: a\n0x1: b\n", "line 2: key '0x1' is here twice"),
        ("a: &x [1]\nb: *x\n", "line 1: anchors and aliases"),
        ("a: !!python/object/apply:os.system [id]\n", "tags are not accepted"),
        ("a: !!int ''\n", "tags are not accepted"),
        ("a: [1, 2\n", "no valid YAML"),
        ("? [1]\n: 2\n", "a key is a list or a mapping"),
        ("a: 1\n---\nb: 2\n", "another document"),
        ("a: \x01\n", "control characters"),
        ("a: \ud800\n", "cannot be read"),
        ("a: " + "9" * 5000, "cannot be read"),
        ("a: " + "[" * 40 + "]" * 40, "nested deeper than 32 levels"),
        ("a: " + "[" * 100_000, "nest"),
    ],
)
def test_a_trap_is_one_clear_problem(text: str, said: str) -> None:
    message = problems(text)
    assert message.startswith("a.yaml: ")
    assert said in message


def test_a_billion_laughs_is_refused_at_once() -> None:
    bomb = "a0: &a0 [lol]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
    start = time.monotonic()
    assert "anchors and aliases" in problems(bomb)
    assert time.monotonic() - start < 1


def test_dates_and_merge_keys_stay_text() -> None:
    assert parse_yaml("a: 2026-13-45\n<<: b\n", "a.yaml") == {"a": "2026-13-45", "<<": "b"}


def test_an_oversized_text_is_refused(tmp_path) -> None:
    assert "16 MiB" in problems("#" * (MAX_BYTES + 1))
    large = tmp_path / "large.yaml"
    with large.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(UserFileError, match="16 MiB"):
        read_text(large)


def test_a_model_given_as_a_text_file_is_recognised(tmp_path) -> None:
    model = tmp_path / "model.yaml"
    model.write_bytes(b"GGUF\x03\x00\x00\x00\xff\xfe")
    with pytest.raises(UserFileError, match="--model"):
        read_text(model)


@pytest.mark.parametrize("name", ["absent.yaml", ".", "a\0b"])
def test_an_unreadable_file_is_named(tmp_path, name: str) -> None:
    with pytest.raises(UserFileError):
        Fields.load(tmp_path / name)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "[1, 2]", "word"])
def test_a_document_must_be_a_mapping(text: str) -> None:
    with pytest.raises(UserFileError, match="not a mapping"):
        Fields.parse(text, "a.yaml")


def test_every_problem_is_listed_with_its_path() -> None:
    top = Fields.parse(
        """
        name: 12
        budgett: 3
        limit: 0
        ratio: .nan
        flag: 1
        kind: intger
        words: [a, 1, no]
        sizes: [1, true, x]
        items:
        - {prompt: 47, ansver: x}
        - 5
        """,
        "a.yaml",
    )
    top.text("name")
    top.integer("budget", minimum=1)
    top.integer("limit", minimum=1)
    top.number("ratio")
    top.boolean("flag")
    top.choice("kind", ("integer", "rational"))
    top.texts("words")
    top.integers("sizes")
    for item in top.sections("items"):
        item.text("prompt")
        item.text("answer", default=None)
    with pytest.raises(UserFileError) as caught:
        top.finish()
    said = [str(problem) for problem in caught.value.problems]
    assert said == [
        "name: is the number 12, not a text (put it in quotes)",
        "budget: is missing; it should be a whole number",
        "limit: is 0, below the least allowed, 1",
        "ratio: is nan, not a finite number",
        "flag: is the number 1, not true or false",
        "kind: is 'intger', not one of integer, rational (did you mean integer?)",
        "words[1]: is the number 1; the list is of texts (put it in quotes)",
        "words[2]: is false (yes, no, on and off mean true and false); the list is of texts (put it in quotes)",
        "sizes[1]: is true (yes, no, on and off mean true and false); the list is of whole numbers",
        "sizes[2]: is the text 'x'; the list is of whole numbers",
        "items[1]: is the number 5, not a mapping of keys to values",
        "items[0].prompt: is the number 47, not a text (put it in quotes)",
        "budgett: is no key of this format (did you mean budget?)",
        "items[0].ansver: is no key of this format (did you mean answer?)",
    ]


def test_a_good_file_reads_to_plain_values() -> None:
    top = Fields.parse("a: x\nb: 3\nc: 2\nd: true\ne: [u]\nf: {g: h}\n", "a.yaml")
    assert (top.text("a"), top.integer("b"), top.number("c"), top.boolean("d")) == ("x", 3, 2.0, True)
    assert top.texts("e") == ("u",)
    section = top.section("f", required=True)
    assert section is not None
    assert section.text("g") == "h"
    assert top.integer("absent", default=None) is None
    assert top.section("absent") is None
    assert top.sections("absent", required=False) == []
    top.finish()


def test_a_free_section_accepts_any_key() -> None:
    top = Fields.parse("source: {anything: 1}\n", "a.yaml")
    section = top.section("source")
    assert section is not None
    section.all_read()
    top.finish()


scalars = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False) | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
words = st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(
    lambda word: word not in {"yes", "no", "on", "off", "y", "n", "null", "true", "false"}
)


@given(st.dictionaries(words, values, min_size=1, max_size=4), st.sets(words, max_size=3))
@settings(deadline=None)
def test_what_is_rendered_reads_back_the_same(data: dict[str, object], extra: set[str]) -> None:
    flow = extra | set(list(data)[:1])
    assert parse_yaml(render_yaml(data, flow=flow), "a.yaml") == data


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda raw: raw.decode("latin-1")))
@settings(deadline=None)
def test_no_text_gives_anything_but_a_document_or_a_clear_error(text: str) -> None:
    with contextlib.suppress(UserFileError):
        parse_yaml(text, "a.yaml")
