"""The published placement tables that ship with the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from routing_lab.errors import UserFileError
from routing_lab.placement import Placement
from routing_lab.placement.published import COLUMNS, PublishedTable

PLACEMENTS = Path(__file__).parent.parent.parent / "placements"
TABLES = sorted((PLACEMENTS / "published").glob("*.yaml"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_shipped_table_is_readable_and_names_its_source(path) -> None:
    table = PublishedTable.load(path)
    assert table.name == path.stem
    assert table.what
    assert table.rows
    assert set(table.columns) <= set(COLUMNS)


def test_the_shipped_numbers_are_the_published_ones() -> None:
    rates = {path.stem: [row["tokens_per_s"] for row in PublishedTable.load(path).rows] for path in TABLES}
    assert rates == {
        "12-gb": [94],
        "laptop-16-gb-context": [5.67, 5.56, 5.85],
        "laptop-16-gb-expert-layers": [5.29, 4.66, 5.67],
        "laptop-16-gb-models": [5.67, 4.03, 5.18, 3.69, 4.37, 5.23, 4.40, 5.77, 2.11, 9.03],
        "rtx-5080": [30, 45],
    }


@pytest.mark.parametrize("path", sorted(PLACEMENTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_placement_is_readable(path) -> None:
    assert Placement.load(path).name == path.stem


def test_every_problem_of_a_table_is_listed(tmp_path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("published: x\nrows:\n  - {label: 3, tokens_per_s: fast, speed: 1}\n")
    with pytest.raises(UserFileError) as caught:
        PublishedTable.load(path)
    assert [problem.where for problem in caught.value.problems] == [
        "source",
        "rows[0].label",
        "rows[0].tokens_per_s",
        "rows[0].speed",
    ]


def test_what_cannot_stand_in_a_table_is_refused(tmp_path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(
        r'published: "x\e[2J"'
        "\n"
        r'source: {what: "a\nwarning: b", hardware: "c\u202e"}'
        "\n"
        r'rows: [{label: "\a", tokens_per_s: 5, tokens_per_s_to: 4}]'
    )
    with pytest.raises(UserFileError) as caught:
        PublishedTable.load(path)
    wrong = {problem.where: problem.what for problem in caught.value.problems}
    assert list(wrong) == ["published", "source.what", "source.hardware", "rows[0].label", "rows[0].tokens_per_s_to"]
    assert wrong["source.what"] == r"is 'a\nwarning: b', which has characters that do not print"
    assert wrong["rows[0].tokens_per_s_to"] == "is 4, below tokens_per_s, 5"


def test_a_table_without_rows_is_none(tmp_path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("published: x\nsource: {what: y}\nrows: []\n")
    with pytest.raises(UserFileError, match="rows: is empty"):
        PublishedTable.load(path)
