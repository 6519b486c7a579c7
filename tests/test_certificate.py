from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from fakelab import make_facts, make_probes, make_runtime, schedule
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routing_lab.certificate import Certificate
from routing_lab.errors import UserFileError
from routing_lab.gate import AcceptanceRule
from routing_lab.measure import MeasureSettings
from routing_lab.model import ModelFacts, model_digest
from routing_lab.placement import Placement
from routing_lab.runtime.base import RuntimeOptions
from routing_lab.validate import ValidateSettings, validate

# Loses h1 of 100 holdout probes, which the margin allows: every kind of answer is in the certificate.
SCHEDULE = schedule(4, 2, 2, 2, name="demo-7")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    return make_facts(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def certificate(facts: ModelFacts) -> Certificate:
    options = RuntimeOptions(threads=2, placement=Placement(gpu_layers=9, host_experts=(1, 2), name="split"))
    runtime = make_runtime(facts, options=options)
    rules = ValidateSettings(measure=MeasureSettings(rounds=6, tokens=8))
    return validate(runtime, make_probes(holdout=100), [SCHEDULE], rules).require_certificate()


def test_a_certificate_survives_its_file(certificate: Certificate, tmp_path: Path) -> None:
    certificate.save(tmp_path / "certificates" / "demo.yaml")
    loaded = Certificate.load(tmp_path / "certificates" / "demo.yaml")
    assert loaded == certificate
    assert loaded.digest == certificate.digest


@given(
    margin=st.floats(0, 1, exclude_max=True),
    counts=st.lists(st.integers(1, 16), min_size=4, max_size=4),
    name=st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=30),
    threads=st.none() | st.integers(1, 999),
)
@settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
def test_whatever_it_holds_survives(
    certificate: Certificate, margin: float, counts: list[int], name: str, threads: int | None
) -> None:
    key = ",".join(f"{block}:{count}" for block, count in enumerate(counts))
    changed = replace(
        certificate,
        acceptance_rule=AcceptanceRule(margin),
        schedule=replace(certificate.schedule, name=name, experts_used=key),
        options=replace(certificate.options, threads=threads),
    )
    assert Certificate.from_yaml(changed.to_yaml()) == changed


def test_it_is_plain_yaml_that_says_what_was_validated(certificate: Certificate) -> None:
    data = yaml.safe_load(certificate.to_yaml())
    assert data["certificate"] == 1
    assert data["schedule"] == {"name": "demo-7", "experts_used": "0:4,1-3:2"}
    assert data["model"]["experts_used"] == "0-3:8"
    assert data["placement"]["host_experts"] == [1, 2]
    assert data["runtime"]["name"] == "fake"
    assert data["holdout"]["lost"] == ["h1"]
    assert data["holdout_answers"][1] == {
        "probe": "h1",
        "status": "wrong_answer",
        "reason": "mismatch",
        "extracted": "99",
    }
    assert data["holdout_answers"][2] == {"probe": "h2", "status": "correct"}
    assert data["digest"].startswith("sha256:")


def test_exact_bounds_are_in_it(certificate: Certificate) -> None:
    assert certificate.gate.failure_bound_95 == pytest.approx(1 - 0.05 ** (1 / 4))
    assert 0.01 < certificate.holdout_failure_bound_95 < 0.05
    assert certificate.holdout.low < certificate.holdout.difference == pytest.approx(-0.01)


def test_it_covers_its_schedule_on_its_model_and_nothing_else(certificate: Certificate, facts: ModelFacts) -> None:
    digest = model_digest(facts)
    assert certificate.covers(schedule(4, 2, 2, 2, name="another name"), facts, digest)
    assert not certificate.covers(schedule(4, 2, 2, 4), facts, digest)
    assert not certificate.covers(SCHEDULE, facts, "sha256:0")


def test_the_certified_schedule_is_a_schedule(certificate: Certificate, facts: ModelFacts) -> None:
    assert certificate.schedule.schedule.key(facts) == SCHEDULE.key(facts)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("0:4,1-3:2", "0:4,1-3:1"),
        ("status: wrong_answer", "status: correct"),
        ("margin: 0.02", "margin: 0.5"),
        ("gpu_layers: 9", "gpu_layers: 0"),
    ],
)
def test_a_change_by_hand_is_noticed(certificate: Certificate, before: str, after: str) -> None:
    text = certificate.to_yaml()
    assert before in text
    with pytest.raises(UserFileError, match="does not belong to the content"):
        Certificate.from_yaml(text.replace(before, after, 1))


def test_layout_is_no_change(certificate: Certificate) -> None:
    data = yaml.safe_load(certificate.to_yaml())
    assert Certificate.from_yaml(json.dumps(data, indent=1)) == certificate
    assert Certificate.from_yaml("# a note\n" + certificate.to_yaml()) == certificate


def with_digest(data: dict[str, object]) -> str:
    from routing_lab.certificate import _content_digest

    content = {name: value for name, value in data.items() if name != "digest"}
    return json.dumps(content | {"digest": _content_digest(content)})


def test_conclusions_that_do_not_follow_are_refused_even_with_a_fitting_digest(certificate: Certificate) -> None:
    data = yaml.safe_load(certificate.to_yaml())
    data["speed"]["ratio"] = 9.9
    data["gate"]["passed"] = 3
    data["holdout"]["lost"] = []
    with pytest.raises(UserFileError) as caught:
        Certificate.from_yaml(with_digest(data))
    assert [problem.where for problem in caught.value.problems] == ["gate", "holdout", "speed"]


def test_every_problem_is_listed_with_its_place(certificate: Certificate) -> None:
    data = yaml.safe_load(certificate.to_yaml())
    del data["model"]["digest"]
    data["options"]["threads"] = "two"
    data["options"]["context_tokens"] = True
    data["holdout_answers"][3]["status"] = "fine"
    data["gate"]["surprise"] = 1
    data["even_spread"] = 7
    data["schedule"]["experts_used"] = "0-3"
    data["acceptance_rule"]["margin"] = 2
    with pytest.raises(UserFileError) as caught:
        Certificate.from_yaml(with_digest(data))
    assert {problem.where for problem in caught.value.problems} == {
        "model.digest",
        "options.threads",
        "options.context_tokens",
        "holdout_answers[3].status",
        "gate.surprise",
        "even_spread",
        "schedule",
        "acceptance_rule",
    }


@pytest.mark.parametrize("text", ["", "[]", "a: 1", "certificate: 1", "{certificate: 1, 2: 3, a: 4}", "schedule: x"])
def test_what_is_no_certificate_is_one_clear_error(text: str) -> None:
    with pytest.raises(UserFileError):
        Certificate.from_yaml(text)


def test_another_schema_is_refused(certificate: Certificate) -> None:
    with pytest.raises(UserFileError, match=r"schema 2.*reads 1"):
        Certificate.from_yaml(certificate.to_yaml().replace("certificate: 1", "certificate: 2", 1))


def test_a_missing_file_and_a_place_that_cannot_be_written_are_clear_errors(
    certificate: Certificate, tmp_path: Path
) -> None:
    with pytest.raises(UserFileError, match="cannot be read"):
        Certificate.load(tmp_path / "none.yaml")
    (tmp_path / "file").touch()
    with pytest.raises(UserFileError, match="cannot be written"):
        certificate.save(tmp_path / "file" / "c.yaml")
