"""The files that people write and pass on, through the command line: schedules, certificates as schedules, models."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import DEMO_SCHEDULES, exit_code, fails, run_json
from fakelab import make_probes, make_runtime, schedule

from routing_lab import demo
from routing_lab.errors import UserFileError
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
