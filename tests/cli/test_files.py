"""Files on the command line: inputs that are none, and outputs that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import DEMO_SCHEDULES, exit_code, fails, run_json
from fakelab import make_facts, make_probes, make_runtime, make_space, schedule

from routing_lab.certificate import Certificate
from routing_lab.cli import main, options
from routing_lab.cli.files import check_output, write_output
from routing_lab.errors import UserFileError
from routing_lab.measure import MeasureSettings
from routing_lab.search import StudySettings, load_study, run_study

# ---------------------------------------------------------------------------------------------------------------------
# Inputs

READING = [
    ["schedule", "check"],
    ["schedule", "diff", str(DEMO_SCHEDULES[0])],
    ["model"],
    ["schedule", "show", str(DEMO_SCHEDULES[0]), "--model"],
    ["evaluate"],
    ["evaluate", str(DEMO_SCHEDULES[0]), "--probes"],
    ["evaluate", str(DEMO_SCHEDULES[0]), "--placement"],
    ["search", "--space"],
    ["validate", "--schedule"],
    ["export"],
    ["probes", "check"],
    ["probes", "import", "-o", "unused.yaml", "--question", "q", "--answer", "a", "--type", "integer"],
    ["answers", "check", "--type", "integer", "--expected", "1", "--text-file"],
    ["answers", "check", "--batch"],
]


@pytest.mark.parametrize("argv", READING, ids=" ".join)
def test_a_pipe_a_socket_and_a_device_are_refused_as_inputs_at_once(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        for name in ("pipe", "socket", "/dev/zero"):
            assert name in fails(capsys, 3, *argv, name)


@pytest.mark.parametrize("argv", [*READING, ["report", "--storage"], ["doctor", "--library"]], ids=" ".join)
def test_a_name_that_no_file_can_have_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("x" * 5000, "a\0b"):
        assert len(fails(capsys, 3, *argv, name)) < 300


def test_an_output_with_an_impossible_name_is_refused(study: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("x" * 5000, "a\0b"):
        fails(capsys, 3, "report", *study, "--csv", name)


def test_of_a_hundred_thousand_problems_the_terminal_shows_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no.jsonl").write_text("x\n" * 1000, encoding="utf-8")
    error = fails(capsys, 3, "answers", "check", "--batch", tmp_path / "no.jsonl")
    assert "1000 problems" in error
    assert "and 800 more" in error
    assert error.count("\n") == 202


def test_standard_input_is_taken_where_text_is_read() -> None:
    command = [sys.executable, "-m", "routing_lab", "schedule", "check", "/dev/stdin"]
    with DEMO_SCHEDULES[0].open("rb") as file:
        done = subprocess.run(command, stdin=file, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Outputs


@pytest.fixture(scope="module")
def storage_of_a_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with a few trials, of a model of rules."""
    folder = tmp_path_factory.mktemp("study")
    settings = StudySettings(trials=4, measure=MeasureSettings(rounds=6, tokens=8), sampler="random", start="uniform")
    runtime = make_runtime(make_facts(folder))
    run_study(runtime, make_probes(), make_space(), study="t", storage=folder / "s.db", settings=settings)
    load_study(folder / "s.db", "t")  # the last one to close it leaves everything in the one file
    return folder / "s.db"


@pytest.fixture
def study(tmp_path: Path, storage_of_a_study: Path) -> list[str]:
    """``--storage`` and ``--study`` of a copy."""
    (tmp_path / "runs").mkdir()
    shutil.copytree(storage_of_a_study.parent, tmp_path / "runs", dirs_exist_ok=True)
    return ["--storage", str(tmp_path / "runs" / "s.db"), "--study", "t"]


def test_report_writes_what_it_was_asked_for_and_says_where(
    study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, figure = tmp_path / "new" / "t.csv", tmp_path / "f.PNG"
    assert main(["report", *study, "--csv", str(table), "--figure", str(figure)]) == 0
    assert f"written: {table}, {figure}" in capsys.readouterr().out
    assert len(table.read_text(encoding="utf-8").splitlines()) == 5
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.PNG", "new", "runs"]


@pytest.mark.parametrize("name", ["x.xyz", "plain", "x.png.gz", ".png"])
def test_a_figure_in_an_unknown_format_is_refused_before_anything_is_printed(
    name: str, study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(["report", *study, "--figure", tmp_path / name]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert ".png, .svg, .pdf" in said.err
    assert not list(tmp_path.glob("*.png*"))


@pytest.mark.parametrize("option", ["--csv", "--figure"])
@pytest.mark.parametrize("name", ["folder.png", "file.png/x.png", "/proc/x.png", "/dev/full", "circle.png", "pipe.png"])
def test_an_output_that_cannot_be_written_is_one_message(
    option: str, name: str, study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if option == "--figure" and name == "/dev/full":
        (tmp_path / "full.png").symlink_to(name)
        name = "full.png"
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file.png").touch()
    (tmp_path / "circle.png").symlink_to(tmp_path / "circle.png")
    os.mkfifo(tmp_path / "pipe.png")
    assert "cannot be written" in fails(capsys, 3, "report", *study, option, tmp_path / name)


@pytest.mark.parametrize("alias", ["itself", "another spelling", "a link"])
def test_an_output_never_writes_over_an_input(
    alias: str, study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def named(path: Path) -> Path:
        if alias == "a link":
            (tmp_path / f"{path.name}.link").symlink_to(path)
            return tmp_path / f"{path.name}.link"
        return path if alias == "itself" else path.parent / "nowhere" / ".." / path.name

    storage = Path(study[1])
    given = tmp_path / "s.yaml"
    given.write_bytes(DEMO_SCHEDULES[0].read_bytes())
    source = tmp_path / "q.csv"
    source.write_text("q,a\n1+1=?,2\n", encoding="utf-8")
    columns = ["--question", "q", "--answer", "a", "--type", "integer"]
    before = [path.read_bytes() for path in (given, source)]
    fails(capsys, 2, "report", *study, "--csv", named(storage))
    fails(capsys, 2, "validate", *study, "--output", storage)
    fails(capsys, 2, "validate", "--schedule", given, "--output", named(given))
    fails(capsys, 2, "probes", "import", source, "-o", named(source), *columns)
    assert [path.read_bytes() for path in (given, source)] == before
    assert len(load_study(storage, "t").trials) == 4


def test_two_outputs_never_share_a_file(study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "twice" in fails(capsys, 2, "report", *study, "--csv", tmp_path / "x.png", "--figure", tmp_path / "x.png")


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    """A limit on the size of files stands for a disk that is full: both refuse the bytes, not the file."""
    target = tmp_path / "certificate.yaml"
    target.write_text("old", encoding="utf-8")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        for refused in (lambda: check_output(target), lambda: write_output(target, bytes(2000))):
            with pytest.raises(UserFileError, match="cannot be written"):
                refused()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["certificate.yaml"]
    assert target.read_text(encoding="utf-8") == "old"
    target.chmod(0o640)
    whole = target.open("rb")
    link = tmp_path / "link"
    link.symlink_to(target)
    write_output(link, b"new")
    assert (link.is_symlink(), target.read_bytes(), target.stat().st_mode & 0o777) == (True, b"new", 0o640)
    with whole:
        assert whole.read() == b"old"  # whoever has it open meets no half of the new one


@pytest.fixture
def acceptance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """``validate`` with a model of rules, under which the schedule is surely accepted."""
    facts = make_facts(tmp_path)

    @contextlib.contextmanager
    def fake(_args: object) -> Iterator[object]:
        yield make_runtime(facts)

    monkeypatch.setattr(options, "open_runtime", fake)
    monkeypatch.setattr(options, "read_facts", lambda _args: facts)
    schedule(4, 4, 2, 2, name="good").save(tmp_path / "good.yaml")
    make_probes().save(tmp_path / "probes.yaml")
    named = ["--schedule", str(tmp_path / "good.yaml"), "--probes", str(tmp_path / "probes.yaml")]
    return ["validate", *named, "--rounds", "6", "--tokens", "8"]


def test_a_certificate_that_cannot_be_written_is_printed_instead(
    acceptance: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*acceptance, "--output", "/dev/full"]) == 3
    said = capsys.readouterr()
    assert "/dev/full: cannot be written" in said.err
    assert "printed instead" in said.err
    printed = said.out[said.out.index("\n\n", said.out.index("accepted: ")) :]
    text = printed[printed.index("certificate:") :]
    assert Certificate.from_yaml(text).schedule.name == "good"
    code, fields = run_json(capsys, *acceptance, "--output", "/dev/full")
    assert isinstance(fields, dict)
    assert (code, fields["accepted"], fields["certificate"]) == (3, True, None)
    assert Certificate.from_yaml(fields["certificate_yaml"]).schedule.name == "good"


def test_a_certificate_is_written_where_it_was_asked_for(
    acceptance: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "c.yaml"
    code, fields = run_json(capsys, *acceptance, "--output", output)
    assert isinstance(fields, dict)
    assert (code, fields["certificate"]) == (0, str(output))
    assert Certificate.load(output).schedule.name == "good"
