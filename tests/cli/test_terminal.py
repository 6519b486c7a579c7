"""What names from strangers do to a terminal: nothing, whatever characters they hold; JSON keeps them exactly."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from commandline import DEMO_SCHEDULES, QUICK, fails, run_json
from hypothesis import given
from hypothesis import strategies as st
from modelfiles import write_moe
from rich.console import Console
from rich.table import Table

from routing_lab.cli import main
from routing_lab.cli.app import COMMANDS
from routing_lab.cli.output import activity, console, json_text, say_error, shown
from routing_lab.errors import NothingAcceptedError, Problem, RuntimeFailureError, UserFileError
from routing_lab.visible import visible

HOSTILE = "[/x]\x1b[31m\r\x07 a\nb \u202e\x9b2J"


@given(st.text() | st.binary().map(lambda raw: raw.decode("utf-8", "surrogateescape")))
def test_visible_text_is_one_line_of_printable_characters_and_keeps_the_printable_ones(text: str) -> None:
    assert visible(text).isprintable()
    if text.isprintable():
        assert visible(text) == text


@given(st.recursive(st.text() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_gives_every_text_back_and_holds_no_character_that_acts_on_a_terminal(value: object) -> None:
    text = json_text(value, indent=2)
    assert json.loads(text) == value
    assert all(line.isprintable() for line in text.split("\n"))


def test_json_is_plain_ascii_where_stdout_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace"))
    assert json.loads(json_text("Qwen é 漢").encode("ascii")) == "Qwen é 漢"


@given(st.text())
def test_a_rich_console_prints_shown_text_as_it_is(text: str) -> None:
    out = io.StringIO()
    Console(file=out, width=10**6, highlight=False).print(shown(text), soft_wrap=True)
    assert out.getvalue() == visible(text) + "\n"


def test_no_text_and_no_cell_of_a_table_acts_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(HOSTILE)
    table.add_row(HOSTILE)
    out = console()
    out.print(table)
    out.print(HOSTILE)
    printed = capsys.readouterr().out
    assert all(line.isprintable() for line in printed.splitlines())
    assert printed.count("[/x]") == 3


@pytest.mark.parametrize(("columns", "width"), [(None, 160), ("100", 100), ("300", 300), ("wide", 160)])
def test_a_file_gets_lines_of_a_fixed_width_without_blanks_at_their_ends(
    columns: str | None, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    table = Table("a", "b", box=None, expand=True)
    table.add_row("1", "2")
    out = console()
    assert out.width == width
    out.print(table)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["a", "b"], ["1", "2"]]
    assert lines == [line.rstrip() for line in lines]


@pytest.mark.parametrize(
    "error",
    [
        UserFileError(f"{HOSTILE}.yaml", [Problem(HOSTILE, f"is {HOSTILE}", HOSTILE)] * 2),
        NothingAcceptedError(f"no schedule was accepted:\n{HOSTILE}\nrouting-lab: error: forged"),
        RuntimeFailureError("the process died", f"log\n{HOSTILE}"),
    ],
)
def test_an_error_message_is_safe_and_no_name_in_it_begins_a_message(
    error: UserFileError, capsys: pytest.CaptureFixture[str]
) -> None:
    say_error(error)
    lines = capsys.readouterr().err.splitlines()
    assert all(line.isprintable() for line in lines)
    assert [line.startswith("routing-lab: error:") for line in lines].count(True) == 1


def test_a_model_that_names_itself_with_control_characters_cannot_act_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_moe(tmp_path / "model.gguf", {"general.name": HOSTILE})
    assert main(["model", str(model)]) == 0
    out = capsys.readouterr().out
    assert r"[/x]\x1b[31m\r\x07 a\nb \u202e\x9b2J" in out
    assert all(line.isprintable() for line in out.splitlines())
    code, facts = run_json(capsys, "model", model)
    assert isinstance(facts, dict)
    assert (code, facts["name"]) == (0, HOSTILE)


def test_file_names_with_control_characters_are_shown_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a\n\x1b[31m[/b].yaml".replace("/", "")
    file.write_bytes(DEMO_SCHEDULES[0].read_bytes())
    assert main(["schedule", "check", str(file)]) == 0
    out = capsys.readouterr().out
    assert r"a\n\x1b[31m[b].yaml: ok" in out
    assert out.count("\n") == 1
    assert r"missing\x1b" in fails(capsys, 3, "schedule", "check", tmp_path / "missing\x1b[2J")


def test_progress_takes_any_name_and_a_stderr_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with activity(f"asking {HOSTILE}") as say_doing:
        say_doing(HOSTILE)
    assert r"[/x]\x1b[31m" in terminal.getvalue()
    assert "\x1b[31m" not in terminal.getvalue()
    with Path("/dev/full").open("w", buffering=1, encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with activity("asking") as say_doing:
            say_doing("more")


@pytest.mark.model
@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_markup_in_the_name_of_a_schedule_is_text(
    json_too: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = tmp_path / "s.yaml"
    schedule.write_text('schedule: "[/x] [bold]b"\nexperts_used: {0-5: 7}\n', encoding="utf-8")
    probes = tmp_path / "probes.yaml"
    items = '{id: a, prompt: "Q: 47+86=?\\n", answer: "133", type: integer}'
    probes.write_text(f'probes: "[/p]"\nprompt: raw\nmax_tokens: 48\nitems:\n  - {items}\n', encoding="utf-8")
    assert main(["evaluate", str(schedule), "--probes", str(probes), *QUICK, *json_too]) == 0
    assert "[/x] [bold]b" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_every_help_fits_the_terminal_apart_from_examples(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        text, _, _ = capsys.readouterr().out.partition("example:")
        # argparse breaks no list of choices, and the one of answer types is longer than a narrow line.
        assert all(len(line) <= columns for line in text.splitlines() if "[--" not in line)
