"""Import: a row becomes a probe with an exact answer or is listed with the reason; the network is never touched."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing_lab.errors import UsageError, UserFileError
from routing_lab.probes.dataset import MAX_FIELD_CHARACTERS, RECIPES, DatasetImport, Recipe, import_probes

PLAIN = Recipe(name="plain", question="q", answer="a", answer_type="integer")
REQUEST = "\n\nEnd with 'Answer: <number>'."


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever asks the hub in here fails at once, as on a machine without a network."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def jsonl(folder: Path, rows, name: str = "rows.jsonl") -> str:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def parquet(folder: Path, rows, name: str = "rows.parquet") -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), folder / name)
    return str(folder / name)


def csv_file(folder: Path, rows, name: str = "rows.csv", separator: str = ",") -> str:
    with (folder / name).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)
    return str(folder / name)


def sums(n: int):
    return [{"q": f"{i}+1=?", "a": i + 1} for i in range(n)]


def reasons(done: DatasetImport) -> dict[int, str]:
    return {rejection.row: rejection.reason for rejection in done.rejections}


# --- sources


@pytest.mark.parametrize("write", [jsonl, parquet, csv_file])
def test_every_format_gives_the_same_probes(tmp_path: Path, write) -> None:
    done = import_probes(write(tmp_path, sums(6)), PLAIN)
    assert {(probe.id, probe.prompt, probe.answer) for probe in done.probe_set.items} == {
        (f"plain-{i:05d}", f"{i}+1=?{REQUEST}", str(i + 1)) for i in range(6)
    }


def test_a_tab_separated_file_is_read(tmp_path: Path) -> None:
    assert len(import_probes(csv_file(tmp_path, sums(3), "rows.tsv", "\t"), PLAIN).probe_set.items) == 3


def test_a_csv_file_keeps_the_spelling_of_its_answers(tmp_path: Path) -> None:
    rows = [{"q": "code?", "a": "007"}, {"q": "word?", "a": "null"}, {"q": "price?", "a": "0.50"}]
    recipe = Recipe(name="words", question="q", answer="a", answer_type="text")
    done = import_probes(csv_file(tmp_path, rows), recipe)
    assert {probe.answer for probe in done.probe_set.items} == {"007", "null", "0.50"}


def test_whole_numbers_of_a_column_with_fractions_stay_whole(tmp_path: Path) -> None:
    rows = [{"q": "one?", "a": 42}, {"q": "two?", "a": 2.5}]
    recipe = Recipe(name="halves", question="q", answer="a", answer_type="rational")
    done = import_probes(parquet(tmp_path, [{**row, "a": float(row["a"])} for row in rows]), recipe)
    assert {probe.answer for probe in done.probe_set.items} == {"42", "2.5"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"q": "a", "a": 1}\n{"q":', "cannot be read as json"),
        ("rows.parquet", "no parquet", "cannot be read as parquet"),
        ("rows.csv", "q,q\n1,2\n", "name every column"),
        ("rows.csv", "", "name every column"),
        ("rows.csv", b"q,a\n\xff\xfe,1\n", "cannot be read as csv"),
        ("rows.csv", "q," + "a" * 200_000 + "\n1,2\n", "cannot be read as csv"),
        ("rows.txt", "q a", "has no known ending"),
        ("rows.jsonl", None, "is no file"),
        ("rows.jsonl", "", "has no rows"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, name: str, content, message: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserFileError, match=message):
        import_probes(str(file), PLAIN)


@pytest.mark.parametrize("row", ["What is 1,000+1?,1001", "1+1,2,", '"1,1",2,3'])
def test_a_line_of_more_fields_than_there_are_columns_is_refused_and_not_shifted(tmp_path: Path, row: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(f"q,a\n2+2,4\n{row}\n")
    with pytest.raises(UserFileError, match="line 3 has more fields than the 2 columns that the first line names"):
        import_probes(str(file), PLAIN)
    file.write_text('q,a\n2+2,4\n"What is 1,000+1?",1001\n')
    prompts = {probe.prompt for probe in import_probes(str(file), PLAIN).probe_set.items}
    assert prompts == {f"2+2{REQUEST}", f"What is 1,000+1?{REQUEST}"}


@pytest.mark.parametrize(
    ("name", "content"), [("t.csv", "q\0,a\n1,2\n"), ("t.jsonl", '{"q\\u0000": "1", "a": 2, "q": "x"}\n')]
)
def test_a_column_with_a_nul_in_its_name_is_one_clear_error(tmp_path: Path, name: str, content: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(UserFileError, match="cannot be read as"):
        import_probes(str(file), PLAIN)


@pytest.mark.parametrize("source", ["gsm8k", "openai/gsm8k"])
def test_a_hub_that_cannot_be_reached_is_a_usage_error_with_a_way_out(source: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be reached for openai/gsm8k.*parquet"):
        import_probes(source, RECIPES["gsm8k"])


def test_a_source_that_is_nothing_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="neither a file nor"):
        import_probes("what is this?", PLAIN)
    with pytest.raises(UsageError, match="ready recipes: gsm8k"):
        import_probes("someone/something")


def test_rows_of_the_hub_go_the_same_way_as_local_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_list([{"question": "How many?", "answer": "Two and two.\n#### 1,234"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (probe,) = import_probes("gsm8k").probe_set.items
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]
    assert (probe.id, probe.answer, probe.type) == ("gsm8k-00000", "1,234", "integer")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set as its repository holds it: two configurations, one with two splits."""
    root = tmp_path / "downloaded"
    for name, rows in {"easy/train": 3, "easy/test": 2, "hard/train": 1}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        parquet(root / name.split("/")[0], sums(rows), f"{name.split('/')[1]}.parquet")
    configs = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in ("easy", "hard"))
    (root / "README.md").write_text(f"---\nconfigs:\n{configs}---\n", encoding="utf-8")
    return root


@pytest.mark.parametrize(("config", "split", "rows"), [("easy", "train", 3), ("easy", "test", 2), ("hard", "train", 1)])
def test_a_folder_is_read_by_configuration_and_split(folder: Path, config: str, split: str, rows: int) -> None:
    done = import_probes(str(folder), replace(PLAIN, config=config, split=split))
    assert len(done.probe_set.items) == rows
    source = done.probe_set.source
    assert (source["data set"], source["config"], source["split"]) == (str(folder), config, split)


def test_a_part_that_a_folder_does_not_have_is_named_with_the_way_out(folder: Path) -> None:
    for part in ({"config": "hardest"}, {"config": "easy", "split": "exam"}, {}):
        with pytest.raises(UserFileError, match=r"downloaded: cannot be read as a data set: .*--config and --split"):
            import_probes(str(folder), replace(PLAIN, **part))
    (folder / "empty").mkdir()
    with pytest.raises(UserFileError, match="empty: cannot be read as a data set"):
        import_probes(str(folder / "empty"), PLAIN)


def test_the_set_says_which_part_of_which_source_it_was_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    rows = [{"question": "How many?", "answer": "#### 4"}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_args, **_options: datasets.Dataset.from_list(rows))
    source = import_probes("other/copy", replace(RECIPES["gsm8k"], split="train")).probe_set.source
    assert (source["data set"], source["config"], source["split"]) == ("other/copy", "main", "train")
    monkeypatch.undo()
    assert not {"config", "split"} & import_probes(jsonl(tmp_path, sums(1)), PLAIN).probe_set.source.keys()


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, nonfile, kind: str) -> None:
    path = tmp_path / "rows.parquet"
    path.symlink_to(nonfile(kind))
    with pytest.raises(UserFileError, match="is no file"):
        import_probes(str(path), PLAIN)


def test_a_missing_column_is_named_beside_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no column question, answer; it has q, a"):
        import_probes(jsonl(tmp_path, sums(2)), RECIPES["gsm8k"])


# --- ready recipes, on files with the columns of the hub's data sets

HUB_ROWS = {
    "gsm8k": {"question": "Ann has 3 bags of 4. How many?", "answer": "3*4 = <<3*4=12>>12\n#### 12"},
    "math-500": {
        "problem": r"What is $\frac12+\frac13$?",
        "solution": "...",
        "answer": r"\frac{5}{6}",
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": "test/prealgebra/1.json",
    },
    "aime-2024": {"id": 60, "problem": "Find m+n.", "solution": "...", "answer": "033", "url": "...", "year": "2024"},
    "aime-2025": {"problem": "Find the sum.", "answer": "70", "id": "0"},
    "mmlu": {"question": "2+2?", "subject": "elementary_mathematics", "choices": ["3", "4", "5", "22"], "answer": 1},
    "mmlu-pro": {
        "question_id": 70,
        "question": "Which?",
        "options": [f"option {i}" for i in range(10)],
        "answer": "I",
        "answer_index": 8,
        "category": "business",
    },
}
HUB_ANSWERS = {
    "gsm8k": "12",
    "math-500": r"\frac{5}{6}",
    "aime-2024": "033",
    "aime-2025": "70",
    "mmlu": "B",
    "mmlu-pro": "I",
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_ready_recipe_fits_the_columns_of_its_data_set(tmp_path: Path, name: str) -> None:
    done = import_probes(parquet(tmp_path, [HUB_ROWS[name]]), RECIPES[name])
    (probe,) = done.probe_set.items
    assert not done.rejections
    assert probe.answer == HUB_ANSWERS[name]
    assert HUB_ROWS[name][RECIPES[name].question] in probe.prompt
    assert "Answer: " in probe.prompt
    assert done.probe_set.prompt == "chat"


def test_choices_are_lettered_in_the_prompt(tmp_path: Path) -> None:
    (probe,) = import_probes(parquet(tmp_path, [HUB_ROWS["mmlu"]]), RECIPES["mmlu"]).probe_set.items
    assert "A. 3\nB. 4\nC. 5\nD. 22" in probe.prompt


# --- rows


def test_every_row_that_gives_no_probe_is_listed_with_its_reason(tmp_path: Path) -> None:
    rows = [
        {"q": "fine?", "a": "= 7"},
        {"q": "no match?", "a": "seven"},
        {"q": " ", "a": "= 7"},
        {"q": "no answer?", "a": None},
        {"q": "not exact?", "a": "= about 7"},
        {"q": "fine?", "a": "= 7"},
        {"q": "x" * (MAX_FIELD_CHARACTERS + 1), "a": "= 7"},
    ]
    recipe = Recipe(name="eq", question="q", answer="a", answer_type="integer", answer_regex="= (.+)")
    done = import_probes(jsonl(tmp_path, rows), recipe)
    found = reasons(done)
    assert len(done.probe_set.items) + len(found) == len(rows) == done.examined == done.rows
    assert "no match of the answer regex" in found[1]
    assert found[2] == "q is blank"
    assert "a is no text or number" in found[3]
    assert "cannot be checked as integer" in found[4]
    assert "same question as another row" in (found.get(5) or found.get(0))
    assert "too long" in found[6]
    assert sum(done.reasons().values()) == 6
    assert done.reasons()["answer cannot be checked as integer"] == 1
    assert done.probe_set.source["rejected"] == 6


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"choices": ["a", "a"], "answer": 0}, "two choices are the same"),
        ({"choices": [], "answer": 0}, "choices are no list"),
        ({"choices": ["a", "b"], "answer": 2}, "answer is none of the choices"),
        ({"choices": ["a", "b"], "answer": "C"}, "answer is none of the choices"),
        ({"choices": [f"c{i}" for i in range(27)], "answer": 0}, "too many"),
    ],
)
def test_a_choice_question_without_a_single_right_letter_is_rejected(tmp_path: Path, row, reason: str) -> None:
    good = {
        "question": "good?",
        "choices": ["a", "b"],
        "answer": row["answer"].__class__(0) if row["answer"] != "C" else "A",
    }
    done = import_probes(jsonl(tmp_path, [good, {"question": "bad?", **row}]), RECIPES["mmlu"])
    assert list(reasons(done)) == [1]
    assert reason in reasons(done)[1]


@pytest.mark.parametrize("answer", ["B", "1", "yellow"])
def test_the_right_choice_may_be_a_letter_a_place_or_its_text(tmp_path: Path, answer: str) -> None:
    row = {"question": "colour?", "choices": '["red", "yellow", "blue"]', "answer": answer}
    (probe,) = import_probes(csv_file(tmp_path, [row]), RECIPES["mmlu"]).probe_set.items
    assert probe.answer == "B"


def test_when_nothing_is_left_the_reasons_are_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(UserFileError, match=r"no row of 1 gives a probe: .*cannot be checked as integer"):
        import_probes(jsonl(tmp_path, [{"q": "x?", "a": "many"}]), PLAIN)


def test_a_template_replaces_its_names_once_and_leaves_other_braces_alone(tmp_path: Path) -> None:
    recipe = Recipe(name="t", question="q", answer="a", answer_type="integer", template=r"{question} Use \boxed{}. {x}")
    (probe,) = import_probes(jsonl(tmp_path, [{"q": "What is {question}{choices}?", "a": 1}]), recipe).probe_set.items
    assert probe.prompt == r"What is {question}{choices}? Use \boxed{}. {x}"


@pytest.mark.parametrize(
    ("changes", "prompt"),
    [
        ({}, "What?\n\nEnd with 'Answer: <number>'."),
        ({"template": "{question}"}, "What?"),
        ({"prompt": "raw"}, " What?\n"),
        ({"choices": "c", "answer_type": "choice"}, "What?\n\nA. 1\nB. 2\n\nEnd with 'Answer: <letter>'."),
        ({"choices": "c", "answer_type": "choice", "prompt": "raw"}, " What?\n\n\nA. 1\nB. 2"),
    ],
)
def test_a_chat_prompt_asks_for_a_declaration_and_a_raw_one_stays_as_it_is(tmp_path: Path, changes, prompt) -> None:
    recipe = Recipe(**{"name": "t", "question": "q", "answer": "a", "answer_type": "integer", **changes})
    (probe,) = import_probes(jsonl(tmp_path, [{"q": " What?\n", "a": 1, "c": ["1", "2"]}]), recipe).probe_set.items
    assert probe.prompt == prompt


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("t.csv", 'q,a\n"two\nlines",1\n\nbad?,four\ngood?,4\n', "line 5"),
        ("t.tsv", "q\ta\ngood?\t4\nbad?\tfour\n", "line 3"),
        ("t.jsonl", '{"q": "good?", "a": "4"}\n\n{"q": "bad?", "a": "four"}\n', "line 3"),
        ("t.json", '[{"q": "good?", "a": "4"},\n{"q": "better?", "a": "4"},\n\n{"q": "bad?", "a": "four"}\n]', "row 3"),
    ],
)
def test_a_rejected_row_is_named_by_its_line_where_there_are_lines(
    tmp_path: Path, name: str, content: str, where: str
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    (rejection,) = import_probes(str(tmp_path / name), PLAIN).rejections
    assert rejection.where == where
    assert "'four'" in rejection.reason
    assert "write it in digits" in rejection.reason


@pytest.mark.parametrize("name", ["my questions (v2)", "_private", "问题", "x" * 300])
def test_any_name_gives_ids(tmp_path: Path, name: str) -> None:
    recipe = Recipe(name=name, question="q", answer="a", answer_type="integer")
    assert len(import_probes(jsonl(tmp_path, sums(3)), recipe).probe_set.items) == 3


# --- sampling


@given(n=st.integers(1, 12), limit=st.none() | st.integers(1, 15), share=st.floats(0, 1), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_splits_partition_the_sample(tmp_path_factory, n: int, limit, share: float, seed: int) -> None:
    source = jsonl(tmp_path_factory.mktemp("rows"), sums(n))
    done = import_probes(source, PLAIN, limit=limit, seed=seed, gate_share=share)
    items = done.probe_set.items
    assert len(items) == min(n, limit or n)
    gate, holdout = done.probe_set.split("gate"), done.probe_set.split("holdout")
    assert len(gate) + len(holdout) == len(items)
    assert len(gate) == math.ceil(share * len(items))
    assert done.examined == len(items)
    again = import_probes(source, PLAIN, limit=limit, seed=seed, gate_share=share)
    assert again.probe_set == done.probe_set


def test_another_seed_takes_other_rows(tmp_path: Path) -> None:
    source = jsonl(tmp_path, sums(200))
    one, other = (import_probes(source, PLAIN, limit=20, seed=seed).probe_set for seed in (1, 2))
    assert {probe.id for probe in one.items} != {probe.id for probe in other.items}


def test_an_imported_set_says_where_it_comes_from_and_survives_its_file(tmp_path: Path) -> None:
    done = import_probes(jsonl(tmp_path, sums(5)), PLAIN, seed=3, name="five sums")
    done.probe_set.save(tmp_path / "five.yaml")
    again = done.probe_set.load(tmp_path / "five.yaml")
    assert again == done.probe_set
    assert (again.name, again.source["seed"], again.source["rows"]) == ("five sums", 3, 5)


@pytest.mark.parametrize(
    "options", [{"limit": 0}, {"gate_share": -0.1}, {"gate_share": 1.1}, {"gate_share": float("nan")}]
)
def test_an_option_out_of_range_is_a_usage_error(options) -> None:
    with pytest.raises(UsageError):
        import_probes("rows.jsonl", PLAIN, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer_regex": "("}, "is no regular expression"),
        ({"answer_regex": "(a)(b)"}, "has 2 groups"),
        ({"answer_type": "number"}, "unknown answer type"),
        ({"answer_type": "decimal"}, "need a number of places"),
        ({"places": 2}, "need a number of places"),
        ({"template": "no question"}, "has no {question}"),
        ({"choices": "c", "template": "{question}"}, "go together"),
        ({"template": "{question} {choices}"}, "go together"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_a_usage_error(changes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Recipe(**{"name": "r", "question": "q", "answer": "a", "answer_type": "integer", **changes})
