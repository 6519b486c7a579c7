"""What the README and the pages of docs/ show is what happens."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from modelfiles import make_facts

from routing_lab import demo
from routing_lab.cli import main
from routing_lab.cli.app import _parser
from routing_lab.model import ModelFacts
from routing_lab.placement import Placement
from routing_lab.probes import ProbeSet
from routing_lab.schedule import Schedule
from routing_lab.space import SearchSpace

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SEARCH = ROOT / "docs" / "search.md"
PROBES = ROOT / "docs" / "probes.md"

Block = tuple[str, str]


def blocks(page: Path) -> list[Block]:
    """Language and text of every code block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every ``routing-lab`` in a shell block, that after a pipe too."""
    for language, text in blocks(page):
        for line in text.replace("\\\n", " ").splitlines() if language == "sh" else ():
            words = shlex.split(line, comments=True)
            while "routing-lab" in words:
                words = words[words.index("routing-lab") + 1 :]
                ends = [at for at, word in enumerate(words) if word in {">", "|", "&&"}]
                yield words[: min(ends, default=len(words))]


@pytest.mark.model
def test_the_example_in_the_readme_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.strip().splitlines()) <= 12
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts, answer, speed = done.stdout.splitlines()
    assert "3: 4" in counts
    assert answer.endswith("Answer: 433")
    assert re.fullmatch(r"\d\.\d\d \[\d\.\d\d, \d\.\d\d\]", speed)


def test_every_path_in_the_tree_of_the_readme_exists() -> None:
    (tree,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    folder: list[str] = []
    for line in tree.splitlines():
        indent, name = re.fullmatch(r"( *)(\S+).*", line).groups()  # type: ignore[union-attr]
        folder[len(indent) // 2 :] = [name.rstrip("/")]
        assert ROOT.joinpath(*folder).exists(), "/".join(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Pages that describe files and commands

READERS = {"schedule": Schedule, "space": SearchSpace, "probes": ProbeSet, "placement": Placement}
PAGES = [ROOT / "README.md", SEARCH, PROBES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_that_a_page_shows_is_read(page: Path) -> None:
    for language, text in blocks(page):
        if language == "yaml":
            READERS[text.partition(":")[0]].from_yaml(text, page.name)  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_that_a_page_shows_is_understood(page: Path) -> None:
    found = list(commands(page))
    assert found
    for words in found:
        _parser().parse_args(words)


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_no_block_of_a_page_is_of_a_kind_that_no_test_reads(page: Path) -> None:
    for language, text in blocks(page):
        assert language in {"yaml", "sh", "json"}, text
        if language == "sh":
            assert all("routing-lab " in line for line in text.replace("\\\n", " ").splitlines() if line.strip()), text


def test_every_relative_link_of_the_pages_leads_somewhere() -> None:
    for page in PAGES[1:]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_spaces_of_the_page_on_searching_fit_the_models_they_are_for() -> None:
    per_block, bands = (SearchSpace.from_yaml(text) for _, text in blocks(SEARCH) if text.startswith("space:"))
    facts = ModelFacts.read(demo.model_path())
    assert [name for name, _ in per_block.dimensions(facts)] == ["block 1", "block 2", "block 3"]
    assert per_block.schedule({"block 1": 2, "block 2": 2, "block 3": 2}, facts).resolve(facts)[5] == 4
    large = make_facts(dict.fromkeys(range(41), 8), experts=256)
    assert bands.size(large) == 64


def test_the_schedule_of_the_page_on_searching_has_a_count_for_every_block() -> None:
    (schedule,) = (Schedule.from_yaml(text) for _, text in blocks(SEARCH) if text.startswith("schedule:"))
    assert schedule.model is not None
    facts = schedule.model.facts()
    assert facts is not None
    assert schedule.key(facts) == "0-2:8,3-39:5,40-47:8"


@pytest.mark.parametrize(("block", "accepted"), [(0, True), (1, False)])
def test_the_page_on_probes_says_what_counts_as_an_answer(
    block: int, accepted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [text for language, text in blocks(PROBES) if language == "json"]
    (tmp_path / "cases.jsonl").write_text(cases[block], encoding="utf-8")
    assert main(["answers", "check", "--batch", str(tmp_path / "cases.jsonl")]) == 0
    judged = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(judged) == len(cases[block].splitlines()) > 5
    assert [one["id"] for one in judged if (one["status"] == "correct") is not accepted] == []


@pytest.mark.model
def test_the_demo_model_answers_the_prompts_that_the_page_says_it_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (text,) = [text for language, text in blocks(PROBES) if language == "yaml" and "prompt: raw" in text]
    chat = text.replace("prompt: raw", "prompt: chat").replace('"Q: ', '"').replace("=?\\n", "=?")
    assert '"347+86=?"' in chat
    for written in (text, chat):
        (tmp_path / "demo.yaml").write_text(written, encoding="utf-8")
        assert main(["probes", "check", str(tmp_path / "demo.yaml"), "--threads", "1", "--json"]) == 0
        assert all(split["passed"] == split["probes"] for split in json.loads(capsys.readouterr().out)["splits"])


def test_the_columns_that_the_page_on_searching_explains_are_those_of_the_tables() -> None:
    tables = (ROOT / "routing_lab" / "report" / "tables.py").read_text(encoding="utf-8")
    explained = re.findall(r"^\| (`.*?) \| ", SEARCH.read_text(encoding="utf-8"), re.MULTILINE)
    columns = {name for cell in explained for name in re.findall(r"`([^`]*)`", cell)}
    for column in ("trial", "experts in blocks", "gate", "experts", "prompts", "s/answer", "answers", "tok/s"):
        assert column in columns
        assert f'"{column}"' in tables
    assert "speed ratio [98.75 %]" in columns
    assert "speed ratio [" in tables
