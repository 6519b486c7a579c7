"""The command line as a user meets it: what is printed, where, and with which exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import DEMO_SCHEDULES, FIGURE_1, QUICK, ROOT, fails, run_json

from routing_lab import demo
from routing_lab.cli import main
from routing_lab.cli.app import COMMANDS
from routing_lab.probes import ProbeSet

# ---------------------------------------------------------------------------------------------------------------------
# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    if "ACTION" not in text:
        assert "example:" in text
        assert "--json" in text


def test_help_and_version_work_as_a_process_and_load_nothing_heavy() -> None:
    code = "import sys; sys.argv = ['routing-lab', '--version']; from routing_lab.cli import main\n"
    code += "main(); print('optuna' in sys.modules, 'llama_cpp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("routing-lab ")
    assert done.stdout.endswith("False False\n")


@pytest.mark.parametrize(
    ("shell", "environment"),
    [
        ("{} schedule show {} | head -1", {}),
        ("{} schedule show {} >&-", {}),
        ("{} schedule show {}", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "30"}),
        ("{} schedule show {}", {"PYTHONIOENCODING": "ascii"}),
    ],
)
def test_whatever_takes_the_output_there_is_no_traceback(shell: str, environment: dict[str, str]) -> None:
    command = shell.format(f"{sys.executable} -m routing_lab", DEMO_SCHEDULES[0])
    done = subprocess.run(
        ["/bin/bash", "-o", "pipefail", "-c", command], env=os.environ | environment, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


# ---------------------------------------------------------------------------------------------------------------------
# Commands that read files only


def test_model_without_a_file_is_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = run_json(capsys, "model")
    assert code == 0
    assert isinstance(facts, dict)
    assert facts["architecture"] == "qwen3moe"
    assert facts["routed_blocks"] == list(range(6))
    assert facts["files"] == [str(demo.model_path())]


def test_model_prints_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model"]) == 0
    out = capsys.readouterr().out
    assert "blocks with routed experts" in out
    assert "0-5" in out


def test_every_shipped_schedule_passes_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "check", *map(str, DEMO_SCHEDULES)]) == 0
    assert main(["schedule", "check", "--format-only", *map(str, FIGURE_1)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(DEMO_SCHEDULES) + len(FIGURE_1)
    assert len(FIGURE_1) == 9


def test_a_schedule_of_another_model_is_refused_with_every_file_named(capsys: pytest.CaptureFixture[str]) -> None:
    error = fails(capsys, 3, "schedule", "check", "--model", demo.model_path(), *FIGURE_1)
    assert all(path.name in error or path.stem in error for path in FIGURE_1)


def test_schedule_show_prints_ranges_override_and_strip(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "schedules" / "demo" / "late-half.yaml"
    code, fields = run_json(capsys, "schedule", "show", path)
    assert code == 0
    assert isinstance(fields, dict)
    assert fields["experts_used"] == "0-2:8,3-5:4"
    assert fields["override"] == 'ROUTING_LAB_EXPERTS="0-2:8,3-5:4"'
    assert fields["override_kv"] is None
    assert main(["schedule", "show", str(path)]) == 0
    assert "block" in capsys.readouterr().out


def test_schedule_diff_names_the_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    folder = ROOT / "schedules" / "demo"
    assert main(["schedule", "diff", str(folder / "early-half.yaml"), str(folder / "late-half.yaml")]) == 0
    assert capsys.readouterr().out == "0-2: 4 -> 8\n3-5: 8 -> 4\n"


def test_answers_check_prints_status_extracted_and_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "completion.txt"
    text.write_text("I think 7. Answer: 1,234", encoding="utf-8")
    argv = ["answers", "check", "--text-file", text, "--type", "integer", "--expected"]
    assert run_json(capsys, *argv, "1234") == (0, {"status": "correct", "extracted": "1,234", "reason": None})
    assert main([*map(str, argv), "1235"]) == 0
    assert capsys.readouterr().out == "wrong answer\t1,234\tanother answer\n"
    code, wrong = run_json(capsys, *argv, "1235")
    assert (code, wrong) == (0, {"status": "wrong_answer", "extracted": "1,234", "reason": "mismatch"})
    _, cut = run_json(capsys, *argv, "1234", "--finish-reason", "length")
    assert cut == {"status": "no_final_answer", "extracted": None, "reason": "budget"}


def test_answers_batch_prints_one_line_per_case_and_names_every_bad_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = tmp_path / "cases.jsonl"
    good = [{"text": f"Answer: {i}", "expected": "1", "type": "integer"} for i in range(3)]
    batch.write_text("\n".join(map(json.dumps, good)), encoding="utf-8")
    assert main(["answers", "check", "--batch", str(batch)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["status"] for line in lines] == ["wrong_answer", "correct", "wrong_answer"]
    batch.write_text('{"text": 1}\nnonsense\n{"text": "a", "expected": "x", "type": "integer"}\n', encoding="utf-8")
    error = fails(capsys, 3, "answers", "check", "--batch", batch)
    assert all(f"line {number}" in error for number in (1, 2, 3))


def test_probes_import_writes_a_set_and_lists_what_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "questions.csv", tmp_path / "probes.yaml"
    source.write_text("q,a\n1+1=?,2\n2+2=?,4\nwhy?,because\n3+3=?,6\n", encoding="utf-8")
    argv = ["probes", "import", source, "-o", output, "--question", "q", "--answer", "a", "--type", "integer"]
    code, result = run_json(capsys, *argv)
    assert code == 0
    assert isinstance(result, dict)
    assert (result["rows"], result["gate"], result["holdout"]) == (4, 2, 1)
    assert [rejection["row"] for rejection in result["rejected"]] == [2]
    assert len(ProbeSet.load(output).items) == 3
    assert "--type" in fails(capsys, 2, *argv[:-2])
    assert "missing" in fails(capsys, 3, "probes", "import", tmp_path / "missing.csv", *argv[3:])
    for option in ("--config", "--split"):
        assert "is a single file" in fails(capsys, 2, *argv, option, "main")


def test_probes_import_takes_the_part_of_a_folder_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = tmp_path / "data", tmp_path / "probes.yaml"
    for config, split, rows in (("a", "train", 1), ("a", "test", 2), ("b", "test", 3)):
        (folder / config).mkdir(parents=True, exist_ok=True)
        lines = "".join(f'{{"q": "{i}+1=?", "a": "{i + 1}"}}\n' for i in range(rows))
        (folder / config / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    names = "".join(f"- config_name: {config}\n  data_dir: {config}\n" for config in "ab")
    (folder / "README.md").write_text(f"---\nconfigs:\n{names}---\n", encoding="utf-8")
    argv = ["probes", "import", folder, "-o", output, "--question", "q", "--answer", "a", "--type", "integer"]
    for config, split, rows in (("a", "test", 2), ("b", "test", 3)):
        _, result = run_json(capsys, *argv, "--config", config, "--split", split)
        assert isinstance(result, dict)
        assert result["rows"] == rows
        assert ProbeSet.load(output).source["config"] == config
    assert "--config" in fails(capsys, 3, *argv)


# ---------------------------------------------------------------------------------------------------------------------
# A user's mistakes: one message and the documented exit code


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["search", "--trials", "0"],
        ["search", "--hours", "nan"],
        ["validate", "--margin", "2"],
        ["evaluate"],
        ["export"],
        ["doctor", "--threads", "-1"],
        ["search", "--model", "other.gguf"],
    ],
)
def test_a_wrong_call_is_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    fails(capsys, 2, *argv)


@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"not a model", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64])
@pytest.mark.parametrize("command", ["model", "schedule show"])
def test_a_bad_model_file_is_one_clear_error(
    command: str, content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.gguf"
    if content is not None:
        file.write_bytes(content)
    argv = ["model", file] if command == "model" else ["schedule", "show", DEMO_SCHEDULES[0], "--model", file]
    assert "model.gguf" in fails(capsys, 3, *argv)


def test_all_problems_of_a_schedule_file_are_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("schedule: bad\nexperts_used:\n  0-2: 0\n  2-3: x\n  9: 4\nexpert_used: 3\n", encoding="utf-8")
    error = fails(capsys, 3, "schedule", "check", file)
    assert error.count("experts_used") >= 2
    code, fields = run_json(capsys, "schedule", "check", file)
    assert code == 3
    assert isinstance(fields, dict)
    assert len(fields["error"]["problems"]) >= 2


def test_an_export_without_a_certificate_is_refused_and_labelled_when_insisted_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    schedule = DEMO_SCHEDULES[0]
    assert "--unvalidated" in fails(capsys, 2, "export", "--schedule", schedule)
    assert main(["export", "--schedule", str(schedule), "--unvalidated"]) == 0
    assert "UNVALIDATED" in capsys.readouterr().out


def test_validating_a_study_that_is_not_there_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = fails(capsys, 3, "validate", "--storage", tmp_path / "none.db", "--output", tmp_path / "c.yaml")
    assert "none.db" in error


def test_an_output_that_cannot_be_written_is_found_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails(capsys, 3, "validate", "--storage", tmp_path / "none.db", "--output", tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# The main job, with real llama.cpp on the demo model


@pytest.mark.model
def test_doctor_attests_the_override(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_json(capsys, "doctor")
    assert code == 0
    assert isinstance(report, dict)
    assert report["override"] == "attested"
    assert len(set(report["attested"].values())) == 2


@pytest.mark.model
def test_doctor_says_why_the_override_is_not_usable(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_json(capsys, "doctor", "--stock")
    assert code == 4
    assert isinstance(report, dict)
    assert report["override"] == "unsupported"
    assert report["reason"]


@pytest.mark.model
def test_probes_check_says_what_the_demo_probes_are_worth(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_json(capsys, "probes", "check", "--context", "512")
    assert code == 0
    assert isinstance(report, dict)
    gate, holdout = report["splits"]
    assert (gate["split"], gate["passed"], gate["probes"]) == ("gate", 60, 60)
    assert holdout["probes"] == 240
    assert holdout["passed"] >= 0.98 * 240
    assert all(one["smallest_margin"] > 0 for one in report["passes"])


@pytest.mark.model
def test_a_gate_that_the_baseline_fails_ends_with_the_documented_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probes = tmp_path / "wrong.yaml"
    probes.write_text(
        'probes: wrong\nprompt: raw\nmax_tokens: 48\nitems:\n  - {id: a, prompt: "Q: 47+86=?\\n", answer: "1", type: integer}\n',
        encoding="utf-8",
    )
    assert main(["probes", "check", str(probes), "--context", "512"]) == 5
    printed = capsys.readouterr()
    assert "baseline" in printed.err
    assert "gate: a schedule that answers all 1 fails at most 95 % of such questions (95 % sure)" in printed.out
    assert "to show at most 5 % it takes 59 probes, 58 more" in printed.out
    error = fails(capsys, 5, "search", "--probes", probes, "--context", "512", "--storage", tmp_path / "s.db")
    assert "a" in error
    assert "no_worse_than_baseline" in error


@pytest.mark.model
def test_a_study_without_a_trial_goes_on_with_the_policy_that_its_error_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probes = tmp_path / "probes.yaml"
    items = ('{id: a, prompt: "Q: 47+86=?\\n", answer: "1"', '{id: b, prompt: "Q: 41+86=?\\n", answer: "127"')
    listed = "".join(f"  - {item}, type: integer}}\n" for item in items)
    probes.write_text(f"probes: half\nprompt: raw\nmax_tokens: 48\nitems:\n{listed}", encoding="utf-8")
    argv = ["search", "--probes", str(probes), "--storage", str(tmp_path / "s.db"), "--trials", "1", *QUICK]
    assert "--policy no_worse_than_baseline" in fails(capsys, 5, *argv)
    code, study = run_json(capsys, *argv, "--policy", "no_worse_than_baseline")
    assert code in {0, 5}
    assert isinstance(study, dict)
    assert study["identity"]["policy"] == "no_worse_than_baseline"
    assert sum(trial["origin"] != "sensitivity" for trial in study["trials"]) == 1
    assert "cannot go on" in fails(capsys, 2, *argv)


@pytest.mark.model
def test_a_uniform_schedule_runs_without_the_override_and_another_one_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = ROOT / "schedules" / "demo"
    code, table = run_json(capsys, "evaluate", folder / "uniform-4.yaml", folder / "late-half.yaml", *QUICK, "--stock")
    assert code == 0
    assert isinstance(table, dict)
    uniform, late = table["schedules"]
    assert uniform["error"] is None
    assert uniform["speed"]["rounds"] in {8, 16, 32, 48}, "as often as it was looked at"
    assert late["speed"] is None
    assert "per block" in late["error"]


@pytest.mark.model
def test_search_validate_and_export_go_hand_in_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = ["--storage", str(tmp_path / "studies.db"), "--study", "t"]
    code, found = run_json(capsys, "search", *study, *QUICK, "--trials", "4")
    assert isinstance(found, dict)
    assert code in {0, 5}
    assert sum(trial["origin"] != "sensitivity" for trial in found["trials"]) == 4
    # The same command again has nothing left to do and says the same.
    code, again = run_json(capsys, "search", *study, *QUICK, "--trials", "4")
    assert isinstance(again, dict)
    assert [trial["key"] for trial in again["trials"]] == [trial["key"] for trial in found["trials"]]
    # To people it says that nothing was searched; and where only hours are given, the trials have no bound of their own.
    main(["search", *study, *QUICK, "--trials", "4"])
    assert "all 4 trials were there already" in capsys.readouterr().out
    main(["search", *study, *QUICK, "--hours", "0.001"])
    printed = capsys.readouterr()
    assert "stopped by --hours after" in printed.out
    # What is no terminal has a line for every trial.
    lines = [line for line in printed.err.splitlines() if line.startswith("trial ")]
    assert lines
    assert all("ratio " in line or "not timed (" in line for line in lines)
    # Whether these schedules are accepted depends on noise at 8 tokens; either way the word, the code and the file agree.
    certificate = tmp_path / "certificate.yaml"
    schedule = ROOT / "schedules" / "demo" / "uniform-6.yaml"
    code, result = run_json(
        capsys, "validate", "--schedule", schedule, *QUICK, "--margin", "0.1", "--output", certificate
    )
    capsys.readouterr()
    assert isinstance(result, dict)
    assert result["accepted"] == certificate.exists() == (code == 0)
    if code == 0:
        code, exported = run_json(capsys, "export", certificate)
        assert code == 0
        assert isinstance(exported, dict)
        assert exported["validated"] is True
        assert exported["environment"]["ROUTING_LAB_EXPERTS"] == "0-5:6"


@pytest.mark.model
def test_ctrl_c_saves_the_study_and_says_how_to_go_on(tmp_path: Path) -> None:
    import signal
    import time

    storage = tmp_path / "studies.db"
    argv = [sys.executable, "-m", "routing_lab", "search", "--storage", str(storage), "--study", "t", "--trials", "500"]
    process = subprocess.Popen([*argv, "--tokens", "8", "--context", "512"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not _evaluated(storage) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert f"routing-lab search --study t --storage {storage}" in error
    assert _evaluated(storage) >= 1
    assert not list(tmp_path.glob("*.lock"))


def _evaluated(storage: Path) -> int:
    from routing_lab.errors import RoutingLabError
    from routing_lab.search import load_study

    try:
        return len(load_study(storage, "t").evaluated)
    except RoutingLabError:
        return 0


def test_a_command_to_go_on_with_repeats_what_was_given_and_nothing_else() -> None:
    from argparse import Namespace

    from routing_lab.cli.options import command_line

    given = Namespace(
        context=4096, runtime="llama", rpc=["h:1", "h:2"], stock=False, model=Path("a b.gguf"), plain=True
    )
    words = command_line(given, "validate", "context", "runtime", "rpc", "stock", "model", "plain")
    assert words == "routing-lab validate --rpc h:1 --rpc h:2 --model 'a b.gguf' --plain"
