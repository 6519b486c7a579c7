"""The files that people write and pass on, through the command line: schedules, certificates as schedules, models."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import DEMO_SCHEDULES, FIGURE_1, exit_code, fails, run_json
from fakelab import make_probes, make_runtime, schedule
from modelfiles import write_moe

from routing_lab import demo
from routing_lab.errors import UserFileError
from routing_lab.export.gguf_copy import LABEL_KEY
from routing_lab.measure import MeasureSettings
from routing_lab.model import ModelFacts
from routing_lab.schedule import Schedule
from routing_lab.validate import ValidateSettings, validate


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of the demo model; that a model of rules earned it is nothing to its schedule."""
    path = tmp_path_factory.mktemp("certified") / "certificate.yaml"
    runtime = make_runtime(ModelFacts.read(demo.model_path()))
    settings = ValidateSettings(measure=MeasureSettings(rounds=6, tokens=8))
    result = validate(runtime, make_probes(), [schedule(4, 4, 3, 3, 3, 2, name="found")], settings)
    path.write_text(result.require_certificate().to_yaml(), encoding="utf-8")
    return path


# ---------------------------------------------------------------------------------------------------------------------
# A certificate where a schedule is read


def test_export_writes_the_schedule_of_a_certificate_as_a_file(
    certificate: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "new" / "found.yaml"
    assert exit_code(["export", certificate, "--format", "schedule", "-o", written]) == 0
    assert capsys.readouterr().out == f"schedule: {written}\n"
    assert exit_code(["export", certificate, "--format", "schedule"]) == 0
    assert capsys.readouterr().out == written.read_text(encoding="utf-8")
    found = Schedule.load(written)
    assert found.ranges() == [(0, 1, 4), (2, 4, 3), (5, 5, 2)]
    assert (found.name, found.model is not None and found.model.experts_used) == ("found", 8)
    assert exit_code(["schedule", "check", written]) == 0


@pytest.mark.parametrize("more", [["--run"], ["--schedule", DEMO_SCHEDULES[0]], ["--port", "80"]], ids=str)
def test_a_schedule_is_exported_without_what_belongs_to_a_server(
    more: list[str], certificate: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nothing but" in fails(capsys, 2, "export", certificate, "--format", "schedule", *more)


def test_a_certificate_is_taken_where_a_schedule_is(certificate: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run_json(capsys, "schedule", "show", certificate)
    assert isinstance(shown, dict)
    assert (code, shown["schedule"], shown["experts_used"]) == (0, "found", "0-1:4,2-4:3,5:2")
    assert exit_code(["schedule", "diff", certificate, DEMO_SCHEDULES[0]]) == 0
    fails(capsys, 4, "attest", "--url", "http://127.0.0.1:1", "--schedule", certificate)


def test_a_changed_certificate_is_no_schedule_either(
    certificate: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = tmp_path / "changed.yaml"
    changed.write_text(certificate.read_text(encoding="utf-8").replace("5:2", "5:3", 1), encoding="utf-8")
    assert "was changed" in fails(capsys, 3, "schedule", "show", changed)


def test_code_that_loads_a_certificate_as_a_schedule_is_told_the_way(certificate: Path) -> None:
    with pytest.raises(UserFileError, match=r"is a certificate, not a schedule \(.* --format schedule"):
        Schedule.load(certificate)


# ---------------------------------------------------------------------------------------------------------------------
# Whose blocks a schedule's are


def test_a_schedule_that_names_its_model_is_shown_on_that_model(capsys: pytest.CaptureFixture[str]) -> None:
    for path in FIGURE_1:
        assert exit_code(["schedule", "show", path]) == 0
    assert "qwen35moe of 41 blocks, from the file's own section" in capsys.readouterr().out
    code, shown = run_json(capsys, "schedule", "show", FIGURE_1[2])
    assert isinstance(shown, dict)
    assert (code, shown["experts_used"], shown["model_from"]) == (0, "0-32:8,33-40:4", "schedule file")
    assert exit_code(["schedule", "check", *FIGURE_1, *DEMO_SCHEDULES]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("uniform-8, on qwen35moe of 41 blocks")
    assert said[-1].endswith(f"on {ModelFacts.read(demo.model_path()).name}")
    assert exit_code(["schedule", "diff", *FIGURE_1[:2]]) == 0
    assert capsys.readouterr().out == "0-40: 8 -> 6\n"


def test_two_schedules_for_two_models_are_not_compared(certificate: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "for another model" in fails(capsys, 3, "schedule", "diff", certificate, FIGURE_1[0])


def test_a_schedule_that_names_no_model_says_that_it_was_compared_with_the_demo_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.yaml").write_text("schedule: s\nexperts_used: {0-32: 4}\n", encoding="utf-8")
    for action, remedy in (("show", "give --model"), ("check", "give --model or --format-only")):
        error = fails(capsys, 3, "schedule", action, tmp_path / "s.yaml")
        assert "has 6 blocks (0-5); 6-32 are none" in error
        assert f"no --model given, so compared with routing-lab demo MoE ({remedy})" in error
    named = fails(capsys, 3, "schedule", "show", tmp_path / "s.yaml", "--model", demo.model_path())
    assert "no --model given" not in named
    assert exit_code(["schedule", "check", "--format-only", tmp_path / "s.yaml"]) == 0


def test_a_schedule_for_all_blocks_is_shown_on_any_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.yaml").write_text("schedule: s\nexperts_used: {all: 4, 0: 8}\n", encoding="utf-8")
    code, shown = run_json(capsys, "schedule", "show", tmp_path / "s.yaml")
    assert isinstance(shown, dict)
    assert (code, shown["experts_used"]) == (0, "0:8,1-5:4")


@pytest.mark.parametrize("argv", [["schedule", "show"], ["schedule", "check"], ["evaluate"]], ids=" ".join)
def test_what_is_wrong_with_a_file_and_what_does_not_fit_come_together(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.yaml").write_text("schedule: s\nexperts_used: {0-32: 0}\n", encoding="utf-8")
    error = fails(capsys, 3, *argv, tmp_path / "s.yaml")
    assert "6-32 are none" in error
    assert "is 0; a block consults at least 1 expert" in error


# ---------------------------------------------------------------------------------------------------------------------
# Models


def test_a_copy_of_a_model_shows_the_schedule_that_was_written_into_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = write_moe(tmp_path / "copy.gguf", {LABEL_KEY: "found (0-2:1), validated by c.yaml"})
    assert exit_code(["model", copy]) == 0
    assert "found (0-2:1), validated by c.yaml" in capsys.readouterr().out
    code, shown = run_json(capsys, "model", copy)
    assert isinstance(shown, dict)
    assert (code, shown["schedule_of_copy"]) == (0, "found (0-2:1), validated by c.yaml")
    assert exit_code(["model"]) == 0
    assert "copy with schedule" not in capsys.readouterr().out


@pytest.mark.model
def test_doctor_says_that_the_override_was_switched_off_and_not_that_it_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code(["doctor", "--stock"]) == 4
    said = capsys.readouterr().out
    assert "switched off by --stock" in said
    assert "unsupported" not in said
