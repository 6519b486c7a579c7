"""Strict YAML: what is refused, how it is said, and that nothing a file holds can hurt."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import pytest
import yaml
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
        ("1: a\n+1: b\n", "line 2: key '+1' is here twice"),
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


@pytest.mark.parametrize(
    "written",
    [
        "010",
        "0o10",
        "0x10",
        "0b11",
        "1_000",
        "1:30",
        "190:20:30",
        "08",
        "-010",
        "yes",
        "No",
        "on",
        "OFF",
        "y",
        "2026-11-30",
    ],
)
def test_what_only_yaml_1_1_takes_for_something_else_is_the_text_that_was_written(written: str) -> None:
    assert parse_yaml(f"{written}: {written}\nlist: [{written}]\n", "a.yaml") == {written: written, "list": [written]}
    top = Fields.parse(f"a: {written}\n", "a.yaml")
    top.integer("a")
    with pytest.raises(UserFileError, match=f"a: is the text '{written}', not a whole number"):
        top.finish()
    assert yaml.safe_load(render_yaml({"a": written})) == {"a": written}  # and other readers see the text too


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("0", 0),
        ("-7", -7),
        ("+12", 12),
        ("1e5", 100000.0),
        ("1.50", 1.5),
        (".5", 0.5),
        ("-2.E-3", -0.002),
        ("~", None),
        ("", None),
        ("null", None),
        ("true", True),
        ("False", False),
    ],
)
def test_what_looks_like_a_number_a_truth_value_or_nothing_is_one(written: str, value: object) -> None:
    read = parse_yaml(f"a: {written}\n", "a.yaml")
    assert read == {"a": value}
    assert type(read["a"]) is type(value)


def test_a_key_is_a_whole_number_or_the_text_that_was_written() -> None:
    keys = {7: 0, "7.0": 0, "true": 0, "null": 0, "~": 0, "1e5": 0, "": 0, "010": 0}
    text = "{" + ", ".join('"": 0' if key == "" else f"{key}: 0" for key in keys) + "}"
    assert parse_yaml(text, "a.yaml") == keys


def test_a_text_that_looks_like_a_number_is_rendered_in_quotes() -> None:
    texts = ["1e5", "1.0", "1e-05", "+.5E3", ".nan"]
    assert parse_yaml(render_yaml({"a": texts}), "a.yaml") == {"a": texts}


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


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "device"])
def test_what_is_no_file_is_refused_at_once(nonfile, kind: str) -> None:
    with pytest.raises(UserFileError, match=r"cannot be read: it is a .*, not a file"):
        read_text(nonfile(kind))


def test_what_the_shell_has_opened_is_read() -> None:
    code = "import sys; from pathlib import Path; from routing_lab.yamlfile import read_text"
    code += "; print(read_text(Path('/dev/stdin')), read_text(Path(sys.argv[1])))"
    ours, theirs = os.pipe()
    os.write(theirs, b"from a command")
    os.close(theirs)
    done = subprocess.run(
        [sys.executable, "-c", code, f"/dev/fd/{ours}"],
        check=False,
        input="typed",
        capture_output=True,
        text=True,
        pass_fds=[ours],
    )
    os.close(ours)
    assert done.stdout == "typed from a command\n", done.stderr


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
        flag: yes
        kind: intger
        words: [a, 1, false]
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
        "flag: is the text 'yes', not true or false",
        "kind: is 'intger', not one of integer, rational (did you mean integer?)",
        "words[1]: is the number 1; the list is of texts (put it in quotes)",
        "words[2]: is false; the list is of texts (put it in quotes)",
        "sizes[1]: is true; the list is of whole numbers",
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
words = st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda word: word not in {"null", "true", "false"})


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
