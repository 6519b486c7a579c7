from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from routing_lab.model import ModelFacts
from routing_lab.runtime import RuntimeOptions
from routing_lab.runtime.doctor import examine, mixed_schedule

pytestmark = pytest.mark.model


def test_a_good_installation_is_attested_on_a_mixed_schedule(model: Path, facts: ModelFacts) -> None:
    report = examine(model)
    assert report.override == "attested"
    assert report.reason is None
    assert report.attested == mixed_schedule(facts).resolve(facts)
    assert len(set(report.attested.values())) > 1
    assert report.usable
    assert report.cores >= 1
    assert 0 < report.memory_available_bytes <= report.memory_total_bytes
    assert [device.kind for device in report.devices].count("cpu") == 1


def test_the_report_is_json(model: Path) -> None:
    assert json.loads(json.dumps(dataclasses.asdict(examine(model))))["override"] == "attested"


def test_without_the_override_the_report_says_why_and_that_models_still_run(model: Path) -> None:
    report = examine(model, RuntimeOptions(context_tokens=256, override="off"))
    assert report.override == "unsupported"
    assert report.capability == "uniform_only"
    assert report.reason == "the expert override is switched off"
    assert report.usable


def test_a_broken_set_up_is_reported_not_raised(model: Path, tmp_path: Path) -> None:
    for report in (examine(model, RuntimeOptions(library_dir=tmp_path)), examine(tmp_path / "absent.gguf")):
        assert report.override == "unsupported"
        assert report.reason
        assert not report.usable
