"""A probe set file says exactly what is asked, or everything that is wrong with it."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from routing_lab.errors import UserFileError
from routing_lab.probes import Probe, ProbeSet

# Any text that a tokenizer takes, control characters, line separators and quotes included.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40).filter(
    str.strip
)
ANSWERS = st.one_of(
    st.integers(-(10**9), 10**9).map(lambda n: {"answer": str(n), "type": "integer"}),
    st.fractions(min_value=Fraction(1, 99), max_denominator=99).map(
        lambda f: {"answer": f"{f.numerator}/{f.denominator}", "type": "rational"}
    ),
    st.integers(0, 10**6).map(lambda n: {"answer": f"{n / 100:.2f}", "type": "decimal", "places": 2}),
    st.sampled_from("ABCD").map(lambda letter: {"answer": letter, "type": "choice"}),
    st.text("abcxyz", min_size=1, max_size=9).map(lambda word: {"answer": word, "type": "text"}),
)
ITEMS = st.builds(
    lambda prompt, answer, split, max_tokens, tags: {
        **answer,
        "prompt": prompt,
        "split": split,
        "max_tokens": max_tokens,
        "tags": tags,
    },
    TEXTS,
    ANSWERS,
    st.sampled_from(["gate", "holdout"]),
    st.none() | st.integers(1, 10**6),
    st.lists(TEXTS, max_size=2).map(tuple),
)


@st.composite
def probe_sets(draw: st.DrawFn) -> ProbeSet:
    items = draw(st.lists(ITEMS, min_size=1, max_size=5, unique_by=lambda item: item["prompt"]))
    prompt = draw(st.sampled_from(["raw", "chat"]))
    return ProbeSet(
        name=draw(TEXTS),
        prompt=prompt,
        thinking=draw(st.none() | st.booleans()) if prompt == "chat" else None,
        max_tokens=draw(st.integers(1, 10**6)),
        stop=draw(st.lists(TEXTS, max_size=3).map(tuple)),
        extract=draw(st.sampled_from(["declared", "last_number"])),
        source=draw(st.dictionaries(st.text("abc xyz", min_size=1, max_size=9), st.integers() | TEXTS, max_size=3)),
        items=tuple(Probe(id=f"p-{index}", **item) for index, item in enumerate(items)),
    )


def small(**changes) -> ProbeSet:
    items = (
        Probe("add", "1+1=?", "2", "integer"),
        Probe("half", "1/4+1/4=?", "1/2", "rational", split="holdout", tags=("fractions",)),
    )
    return ProbeSet(**{"name": "small", "items": items, **changes})


@given(probe_set=probe_sets())
def test_what_is_written_is_read_back(probe_set: ProbeSet) -> None:
    again = ProbeSet.from_yaml(probe_set.to_yaml())
    assert again == probe_set
    assert again.digest == probe_set.digest


@example(text="next line \x85 separators \u2028\u2029")
@example(text="\x85at the edges\x85")
@example(text="\ufeff a byte order mark")
@example(text="\r\n carriage \r returns \n")
@example(text="family \U0001f468\u200d\U0001f469\u200d\U0001f467 and the last \U0010ffff")
@example(text="""'single' "double" \\ back: slash # - {flow} [style] &a *b !c %d @e `f`""")
@example(text="null")
@example(text="\x1b[31m red \x7f")
@given(text=TEXTS)
def test_a_text_comes_back_character_for_character_wherever_it_stands(text: str, tmp_path_factory) -> None:
    probe = Probe("a", text, "1", "integer", tags=(text,))
    written = ProbeSet(name=text, items=(probe,), stop=(text,), source={"says": text})
    file = tmp_path_factory.mktemp("texts") / "set.yaml"
    written.save(file)
    assert ProbeSet.load(file) == written


def test_a_saved_set_is_loaded_back(tmp_path: Path) -> None:
    small().save(tmp_path / "small.yaml")
    assert ProbeSet.load(tmp_path / "small.yaml") == small()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserFileError, match="cannot be written"):
        small().save(tmp_path / "nowhere" / "small.yaml")


def test_layout_order_names_tags_and_source_leave_the_digest_alone() -> None:
    base = small()
    loose = """
        probes:   another name
        max_tokens: 256
        prompt: "raw"
        source: {seed: 1}
        items:
          - {type: rational, split: holdout, id: half, answer: "1/2", prompt: "1/4+1/4=?", tags: [b]}
          - id: add
            prompt: '1+1=?'
            answer: '2'
            type: integer
            max_tokens: 256
    """
    assert ProbeSet.from_yaml(textwrap.dedent(loose)).digest == base.digest


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "sum"},
        {"prompt": "1+1 =?"},
        {"answer": "3"},
        {"type": "rational"},
        {"split": "holdout"},
        {"max_tokens": 9},
        {"type": "decimal", "answer": "2.0", "places": 1},
    ],
)
def test_whatever_changes_a_probe_changes_the_digest(changes) -> None:
    base = small()
    assert replace(base, items=(replace(base.items[0], **changes), base.items[1])).digest != base.digest


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": "chat"},
        {"prompt": "chat", "thinking": False},
        {"max_tokens": 255},
        {"stop": ("\n",)},
        {"extract": "last_number"},
    ],
)
def test_whatever_changes_how_probes_are_asked_changes_the_digest(changes) -> None:
    assert small(**changes).digest != small().digest


def test_the_digest_is_the_same_on_every_machine() -> None:
    assert small().digest == "sha256:76e4a1621a503c7cea1d43cd49690bcae84b0dfc12701f699b68908b758ad0b6"


def test_splits_partition_the_set_in_order_and_budgets_fall_back() -> None:
    base = small(max_tokens=99)
    assert [probe.id for probe in base.split("gate")] == ["add"]
    assert [probe.id for probe in base.split("holdout")] == ["half"]
    assert base.budget(base.items[0]) == 99
    assert base.budget(replace(base.items[0], max_tokens=7)) == 7


def problems_of(text: str) -> list[str]:
    with pytest.raises(UserFileError) as caught:
        ProbeSet.from_yaml(textwrap.dedent(text), "set.yaml")
    return [str(problem) for problem in caught.value.problems]


def test_every_problem_of_a_file_is_reported_at_once_with_its_path() -> None:
    found = problems_of(
        """
        probes: ""
        prompt: raw
        thinking: true
        max_tokens: 0
        stop: ["", "Q:"]
        temperature: 0.7
        items:
          - {id: a, prompt: "1+1=?", answer: "two", type: integer}
          - {id: a, prompt: "2+2=?", answer: "4", type: intger}
          - {id: "b c", prompt: " ", answer: "1", type: integer}
          - {id: d, prompt: "1+1=?", answer: "2", type: integer, split: test}
          - {id: e, prompt: "pi?", answer: "3.14", type: decimal}
          - {id: f, prompt: "e?", answer: "3", type: integer, places: 2}
          - {id: g, prompt: "x?", answer: "", type: integer, max_tokens: 0}
          - {id: h, prompt: "y?", answer: 7, type: integer}
          - {id: i, answer: "7", type: integer, tags: [" "]}
          - {id: j, prompt: "z?", answer: "maybe", type: choice}
        """
    )
    expected = [
        "items[0].answer: cannot be checked as integer: 'two'",
        "items[1].type: is 'intger', not one of",
        "items[2].id: is 'b c'",
        "items[2].prompt: is blank",
        "items[3].split: is 'test', not one of gate, holdout",
        "items[4].places: is missing",
        "items[5].places: is 2, but the type is integer",
        "items[6].answer: is blank",
        "items[6].max_tokens: is 0",
        "items[7].answer: is the number 7, not a text (put it in quotes)",
        "items[8].prompt: is missing",
        "items[8].tags: has a blank tag",
        "items[9].answer: cannot be checked as choice: 'maybe'",
        "probes: is blank",
        "thinking: means nothing for raw prompts",
        "max_tokens: is 0",
        "stop: has an empty text",
        "items[1].id: is the same as that of items[0]",
        "items[3].prompt: is the same as that of items[0]",
        "temperature: is no key of this format",
    ]
    unmatched = [start for start in expected if not any(line.startswith(start) for line in found)]
    assert not unmatched, found
    assert len(found) == len(expected), found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("probes: x\nprompt: raw\nitems: []\n", "items: is empty"),
        ("probes: x\nprompt: raw\n", "items: is missing"),
        ("probes: x\nprompt: raw\nitems: 5\n", "items: is the number 5"),
        ("probes: x\nprompt: raw\nitems: [5]\n", "items[0]: is the number 5"),
        ("probes: x\nitems: [{id: a, prompt: p, answer: '1', type: integer}]\n", "prompt: is missing"),
        (
            "probes: x\nprompt: raw\nextract: best\nitems: [{id: a, prompt: p, answer: '1', type: integer}]\n",
            "extract: is 'best'",
        ),
        (
            'probes: x\nprompt: raw\nitems: [{id: a, prompt: "a\\0b", answer: "1", type: integer}]\n',
            "items[0].prompt: has a NUL",
        ),
        (
            "probes: x\nprompt: raw\nsource: here\nitems: [{id: a, prompt: p, answer: '1', type: integer}]\n",
            "source: is the text",
        ),
    ],
)
def test_a_single_problem_is_the_only_one_reported(text: str, problem: str) -> None:
    (found,) = problems_of(text)
    assert found.startswith(problem)


ONE_ITEM = "items: [{id: a, prompt: p, answer: '1', type: integer}]\n"


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ("prompt: raw\n", "probes: is missing"),
        ("probes: 5\nprompt: raw\n", "probes: is the number 5, not a text"),
        ("probes: x\nprompt: chatt\nthinking: false\n", "prompt: is 'chatt'"),
        ("probes: x\nthinking: false\n", "prompt: is missing"),
        ("probes: x\nprompt: raw\nthinking: 0\n", "thinking: is the number 0, not true or false"),
        ("probes: x\nprompt: raw\nmax_tokens: 1.5\n", "max_tokens: is the number 1.5, not a whole number"),
        ("probes: x\nprompt: raw\nmax_tokens: false\n", "max_tokens: is false"),
        ("probes: x\nprompt: raw\nmax_tokens: null\n", "max_tokens: is nothing, not a whole number"),
    ],
)
def test_nothing_is_said_of_the_stand_in_for_a_value_that_could_not_be_read(header: str, problem: str) -> None:
    (found,) = problems_of(header + ONE_ITEM)
    assert found.startswith(problem)


def test_nothing_is_said_of_the_stand_in_for_an_items_value_either() -> None:
    item = "{id: a, prompt: p, answer: '1', type: integer, max_tokens: false}"
    (found,) = problems_of(f"probes: x\nprompt: raw\nitems: [{item}]\n")
    assert found.startswith("items[0].max_tokens: is false")


def test_a_list_with_an_element_of_another_kind_is_still_checked_for_the_rest() -> None:
    found = problems_of("probes: x\nprompt: raw\nstop: ['', 5]\n" + ONE_ITEM)
    assert [line.split(":")[0] for line in found] == ["stop[1]", "stop"]


def test_files_that_are_no_probe_set_at_all_are_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    (tmp_path / "broken.yaml").write_text("probes: [")
    for name in ("binary.yaml", "empty.yaml", "list.yaml", "broken.yaml", "missing.yaml", "."):
        with pytest.raises(UserFileError) as caught:
            ProbeSet.load(tmp_path / name)
        assert caught.value.exit_code == 3
        assert str(tmp_path / name) in str(caught.value)


def test_a_key_that_is_there_twice_is_named_with_its_line() -> None:
    found = problems_of("probes: x\nprompt: raw\nprompt: chat\n" + ONE_ITEM)
    assert found == ["line 3: key 'prompt' is here twice (keep one of them)"]


@pytest.mark.parametrize("text", ["half \ud800", "\0"])
def test_no_text_of_a_set_may_hold_what_no_file_or_tokenizer_takes(text: str) -> None:
    with pytest.raises(UserFileError, match="tags: has a NUL or half a surrogate pair"):
        Probe("a", "p", "1", "integer", tags=("fine", text))
    with pytest.raises(UserFileError, match="stop: has a NUL or half a surrogate pair"):
        small(stop=("fine", text))


@pytest.mark.parametrize(
    "values",
    [
        {"id": "", "prompt": "p", "answer": "1", "type": "integer"},
        {"id": "a", "prompt": "p", "answer": "1", "type": "number"},
        {"id": "a", "prompt": "p", "answer": "1", "type": "integer", "split": "train"},
        {"id": "a", "prompt": "p", "answer": "1.234", "type": "decimal", "places": 99},
        {"id": "a", "prompt": "\ud800", "answer": "1", "type": "integer"},
    ],
)
def test_a_probe_made_in_code_obeys_the_same_rules(values) -> None:
    with pytest.raises(UserFileError):
        Probe(**values)


@pytest.mark.parametrize(
    "changes", [{"items": ()}, {"prompt": "system"}, {"thinking": True}, {"max_tokens": 0}, {"stop": ("",)}]
)
def test_a_set_made_in_code_obeys_the_same_rules(changes) -> None:
    with pytest.raises(UserFileError):
        small(**changes)


def test_a_set_cannot_ask_a_question_twice() -> None:
    probe = small().items[0]
    with pytest.raises(UserFileError, match=r"items\[1\]\.prompt"):
        small(items=(probe, replace(probe, id="again", split="holdout")))


@pytest.mark.parametrize(
    "source",
    [
        {"a": (1, 2)},
        {"a": {1, 2}},
        {"a": Path("x")},
        {"a": float("nan")},
        {7: "x"},
        {"a": "\ud800"},
        {"a": 10**5000},
        [1],
    ],
    ids=lambda source: ascii(source)[:20] if "a" not in source or source["a"] != 10**5000 else "huge",
)
def test_a_source_that_a_file_cannot_give_back_is_refused_in_code(source: object) -> None:
    item = Probe("a", "1+1=?", "2", "integer")
    with pytest.raises(UserFileError, match="source: holds what a file cannot give back"):
        ProbeSet(name="x", items=(item,), source=source)  # type: ignore[arg-type]


def test_a_source_of_plain_values_survives() -> None:
    source = {"script": "make.py", "seed": 7, "share": 0.5, "parts": [{"a": None, "b": True}], "1e5": "1e5", "": "\n"}
    written = ProbeSet(name="x", items=(Probe("a", "1+1=?", "2", "integer"),), source=source)
    assert ProbeSet.from_yaml(written.to_yaml()).source == source
