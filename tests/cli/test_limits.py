"""Numbers and names that cannot work are refused before a model is loaded, with the limit in the message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commandline import DEMO_SCHEDULES, ROOT, exit_code, fails

from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.search.storage import study_lock

EVALUATE = ["evaluate", str(DEMO_SCHEDULES[0])]


@pytest.fixture(autouse=True)
def no_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(LlamaRuntime, "_start", refuse)


@pytest.mark.parametrize(
    ("argv", "limit"),
    [
        ([*EVALUATE, "--gpu-layers", "99999999999"], "1048576"),
        ([*EVALUATE, "--gpu-layers", "-1"], "at least 0"),
        ([*EVALUATE, "--context", "99999999999"], "16777216"),
        ([*EVALUATE, "--context", "4097"], "at most 4096 tokens"),
        ([*EVALUATE, "--threads", "100000000000"], "512"),
        ([*EVALUATE, "--threads", "9" * 5000], "a whole number"),
        ([*EVALUATE, "--rounds", "1000000000"], "300"),
        ([*EVALUATE, "--rounds", "5"], "at least 6"),
        ([*EVALUATE, "--tokens", "4080"], "--context 4096"),
        ([*EVALUATE, "--host-experts", "5-2"], "backwards"),
        ([*EVALUATE, "--context", "256"], "--prefill 256"),
        ([*EVALUATE, "--prefill", "4096"], "context of 4096"),
        (["search", "--hours", "1e-9"], "0.001"),
        (["search", "--hours", "nan"], "8760"),
        (["search", "--hours", "inf"], "8760"),
        (["search", "--trials", "1" + "0" * 30], "1000000"),
        (["search", "--seed", "2147483648"], "2147483647"),
        (["search", "--study", "../../etc/x"], "letters"),
        (["validate", "--study", "a b"], "letters"),
        (["report", "--study", ""], "letters"),
        (["search", "--storage", "postgresql://host/db"], "SQLite"),
        (["search", "--storage", ""], "no file name"),
        (["probes", "check", "--bound", "nan"], "from 0"),
        (["report", "--rows", "0"], "at least 1"),
        (["answers", "check", "--type", "rational", "--expected", "-1/2"], "--expected=-1/2"),
    ],
)
def test_a_number_or_name_out_of_its_limits_is_a_usage_error_that_names_them(
    argv: list[str], limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = fails(capsys, 2, *argv)
    assert limit in error
    assert len(error) < 500


def test_usage_errors_are_json_too_where_json_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["nonsense"], ["search", "--trials", "x"], [], ["schedule"], ["schedule", "nonsense"], ["evaluate"]):
        assert exit_code([*argv, "--json"]) == 2
        error = json.loads(capsys.readouterr().out)["error"]
        assert (error["kind"], error["exit_code"]) == ("UsageError", 2)
        assert "--help" in error["message"]
    assert exit_code(["schedule", "check", "--", "--json"]) == 3  # here it is the name of a file
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", ["folder", "device", "text"])
@pytest.mark.parametrize("command", ["search", "validate", "report"])
def test_a_storage_that_is_no_database_is_refused_and_nothing_is_left_beside_it(
    command: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no database", encoding="utf-8")
    (tmp_path / "device").symlink_to("/dev/null")
    before = set(tmp_path.iterdir())
    fails(capsys, 3, command, "--storage", tmp_path / kind)
    assert set(tmp_path.iterdir()) - before <= {tmp_path / "certificate.yaml"}
    assert not list(Path("/dev").glob("null-*"))


def test_a_study_that_another_process_runs_is_found_before_the_model_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = tmp_path / "s.db"
    with study_lock(storage, "t"):
        assert "another process" in fails(capsys, 2, "search", "--storage", storage, "--study", "t")


@pytest.mark.parametrize("command", ["evaluate", "search", "validate"])
def test_probes_without_the_split_that_is_needed_are_found_before_the_model_loads(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probes = tmp_path / "p.yaml"
    split = "gate" if command == "validate" else "holdout"
    item = f'{{id: a, prompt: "1+1=?", answer: "2", type: integer, split: {split}}}'
    probes.write_text(f"probes: one-sided\nprompt: raw\nmax_tokens: 8\nitems:\n  - {item}\n", encoding="utf-8")
    schedule = ROOT / "schedules" / "demo" / "uniform-6.yaml"
    argv: dict[str, list[str | Path]] = {
        "evaluate": ["evaluate", schedule],
        "search": ["search", "--storage", tmp_path / "s.db"],
        "validate": ["validate", "--schedule", schedule, "--output", tmp_path / "c.yaml"],
    }
    missing = "holdout" if command == "validate" else "gate"
    assert f"no {missing} probes" in fails(capsys, 2, *argv[command], "--probes", probes)
