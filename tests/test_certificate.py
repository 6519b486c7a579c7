from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakelab import make_facts, make_probes, make_runtime, schedule
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routing_lab.certificate import Certificate
from routing_lab.certificate.plain import content_digest
from routing_lab.errors import UserFileError
from routing_lab.export import export
from routing_lab.gate import AcceptanceRule
from routing_lab.measure import MeasureSettings
from routing_lab.model import ModelFacts, model_digest
from routing_lab.placement import Placement
from routing_lab.runtime.base import RuntimeOptions
from routing_lab.validate import ValidateSettings, validate
from routing_lab.yamlfile import parse_yaml

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


@pytest.fixture(scope="module")
def small(facts: ModelFacts) -> Certificate:
    """With every kind of value, and quick to read."""
    options = RuntimeOptions(threads=2, placement=Placement(gpu_layers=9, host_experts=(1, 2), name="split"))
    rules = ValidateSettings(measure=MeasureSettings(rounds=6, tokens=8), acceptance_rule=AcceptanceRule(0.3))
    return validate(make_runtime(facts, options=options), make_probes(), [SCHEDULE], rules).require_certificate()


def test_a_certificate_survives_its_file(certificate: Certificate, tmp_path: Path) -> None:
    certificate.save(tmp_path / "certificates" / "demo.yaml")
    loaded = Certificate.load(tmp_path / "certificates" / "demo.yaml")
    assert loaded == certificate
    assert loaded.digest == certificate.digest


def test_machines_that_lent_a_device_are_named_and_reach_the_exported_command(
    facts: ModelFacts, tmp_path: Path
) -> None:
    options = RuntimeOptions(threads=2, placement=Placement(gpu_layers=9), rpc_servers=("10.0.0.7:50052", "[::1]:9"))
    rules = ValidateSettings(measure=MeasureSettings(rounds=6, tokens=8), acceptance_rule=AcceptanceRule(0.3))
    runtime = make_runtime(facts, options=options)
    certificate = validate(runtime, make_probes(), [SCHEDULE], rules).require_certificate()
    certificate.save(tmp_path / "c.yaml")
    loaded = Certificate.load(tmp_path / "c.yaml")
    assert loaded.options.rpc_servers == options.rpc_servers
    command = export(facts, certificate=loaded, library=tmp_path / "override.so").command
    assert command.argv[command.argv.index("--rpc") + 1] == "10.0.0.7:50052,[::1]:9"
    text = (tmp_path / "c.yaml").read_text(encoding="utf-8").replace("10.0.0.7:50052", "10.0.0.7")
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserFileError, match=r"options.rpc_servers.*not HOST:PORT"):
        Certificate.load(tmp_path / "c.yaml")


@given(
    margin=st.floats(0.01, 1, exclude_max=True),
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
        even_spread=None,
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
    content = {name: value for name, value in data.items() if name != "digest"}
    return json.dumps(content | {"digest": content_digest(content)})


def test_conclusions_that_do_not_follow_are_refused_even_with_a_fitting_digest(certificate: Certificate) -> None:
    data = yaml.safe_load(certificate.to_yaml())
    data["speed"]["ratio"] = 9.9
    data["gate"]["passed"] = 3
    data["holdout"]["lost"] = []
    with pytest.raises(UserFileError) as caught:
        Certificate.from_yaml(with_digest(data))
    said = {problem.where: problem.what for problem in caught.value.problems}
    assert said == {
        "gate.passed": "is 3, and 4 follows from the answers and rates",
        "holdout.lost": "is (), and (h1) follows from the answers and rates",
        "speed.ratio": f"is 9.9, and {certificate.speed.ratio} follows from the answers and rates",
    }


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
        "schedule.experts_used",
        "acceptance_rule.margin",
    }


def change(data: Any, path: str, value: object) -> None:
    """Set the value at a path such as ``gate_answers.3.status``; ``DELETE`` removes it."""
    *parents, last = (int(key) if key.isdecimal() else key for key in path.split("."))
    for key in parents:
        data = data[key]
    if value is DELETE:
        del data[last]
    else:
        data[last] = value


DELETE = object()


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("speed.candidate_rates", [100.0] * 5, "speed.candidate_rates: rounds do not pair up: 5 and 6"),
        ("speed.candidate_rates.2", 0, "speed.candidate_rates[2]: is 0.0, not within"),
        ("even_spread.speed.baseline_rates.0", -1.0, "even_spread.speed.baseline_rates[0]: is -1.0"),
        ("speed.candidate_rates", [50.0] * 5000, "speed.candidate_rates: has 5000 rounds, above 400"),
        ("speed.confidence", 1.5, "speed.confidence: is 1.5, not between 0 and 1"),
        ("speed.confidence", 0.9999, "speed.candidate_rates: 6 rounds cannot give"),
        ("speed.ratio", 10**400, "speed.ratio: is the number 1000"),
        ("speed.low", 0.5, "speed_rule: is not met"),
        ("even_spread.certified_over_even.baseline_rates.0", 1.0, "are not those of even_spread.speed"),
        ("holdout_answers.3", DELETE, "probes.holdout: is 100, and holdout_answers has 99"),
        ("baseline_holdout_answers.3", DELETE, "baseline_holdout_answers: has other probes"),
        ("gate_answers", [], "probes.gate: is 4, and gate_answers has 0"),
        ("gate_answers.1.probe", "g0", "gate_answers: probe 'g0' is there twice"),
        ("gate_answers.1.probe", "h7", "holdout_answers: probe 'h7' is there twice"),
        ("gate_answers.0.status", "wrong_answer", "gate.result: is pass, and fail follows"),
        ("probes.gate", -1, "probes.gate: is -1, not within"),
        ("model.blocks", -5, "model.blocks: is -5, not within"),
        ("model.blocks", 3, "model.blocks: is 3, and block 3 is named"),
        ("model.blocks", 10**30, "model.blocks: is 1000"),
        ("model.digest", "sha256:x", "model.digest: is 'sha256:x', not sha256:"),
        ("model.experts", 3, "schedule.experts_used: has a count of 4, and model.experts is 3"),
        ("model.experts_used", "0-2:8", "schedule.experts_used: lists blocks 0-3, and model.experts_used lists 0-2"),
        ("schedule.experts_used", "", "schedule.experts_used: names no block"),
        ("schedule.experts_used", "0-3:99", "schedule.experts_used: has a count of 99, and model.experts is 16"),
        (
            "schedule.name",
            "a\nrm -rf",
            "schedule.name: is the text 'a\\nrm -rf', which has characters that do not print",
        ),
        ("model.name", "\x1b[2J", "model.name: is the text '\\x1b[2J', which has characters that do not print"),
        ("created", "2026-11-30\nx", "created: is the text '2026-11-30\\nx', which has characters"),
        ("created", "yesterday", "created: is 'yesterday', not a time such as"),
        ("options.context_tokens", -1, "options.context_tokens: is -1, not within"),
        ("options.kv_type", "q2; reboot", "options.kv_type: is 'q2; reboot', not one of f16, f32"),
        ("placement.host_experts.0", 77, "model.blocks: is 4, and block 77 is named"),
        ("placement.host_experts.0", -1, "placement.host_experts[0]: is -1, not within"),
        (
            "placement.host_tensors",
            [{"kind": "attention", "blocks": [77]}],
            "model.blocks: is 4, and block 77 is named",
        ),
        (
            "placement.model",
            {"architecture": "qwen3moe", "blocks": 9, "experts": 16},
            "placement.model: is qwen3moe with 9",
        ),
        ("acceptance_rule.margin", 0.001, "acceptance_rule: is not met: holdout: accuracy 0.0100 below"),
        ("speed_rule.min_ratio_low", 5, "speed_rule: is not met"),
        ("holdout_failure_bound_95", 0.0, "holdout_failure_bound_95: is 0.0, and 0.04"),
        ("even_spread.accepted", "yes", "even_spread.accepted: is the text 'yes', not true or false"),
        ("even_spread.schedule.experts_used", "0:1,1-3:3", "is no even spread of the schedule's total"),
        ("even_spread.gate.passed", 1, "even_spread.gate.passed: is 1, and"),
        ("even_spread.gate.run", -7, "even_spread.gate: its run, errors and failures do not fit"),
        ("even_spread.holdout.n", 7, "even_spread.holdout."),
        ("even_spread.holdout.gained", ["h1"], "even_spread.holdout."),
        ("certificate", True, "is schema True"),
    ],
)
def test_a_value_that_cannot_be_is_named_even_with_a_fitting_digest(
    certificate: Certificate, path: str, value: object, said: str
) -> None:
    data = yaml.safe_load(certificate.to_yaml())
    change(data, path, value)
    with pytest.raises(UserFileError) as caught:
        Certificate.from_yaml(with_digest(data))
    assert said in str(caught.value)
    assert str(caught.value).splitlines() == [line for line in str(caught.value).splitlines() if line.isprintable()]


def leaves(data: Any, path: str = "") -> Iterator[str]:
    """Paths of all values, inner ones included."""
    if isinstance(data, (dict, list)):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield f"{path}{key}"
            yield from leaves(value, f"{path}{key}.")


HOSTILE = st.one_of(
    st.sampled_from([DELETE, None, True, False, 0, -1, 1, 2, 10**9, 10**30, 10**400, -0.0, 1.5, 1e308, 5e-324, [], {}]),
    st.sampled_from(
        ["", " ", "correct", "0-3:1", "0:4,1-3:2", "0-9999999:1", "a\nb", "\0", "\ud800", "f16", "$(id)", "NaN"]
    ),
    st.floats(),
    st.integers(),
    st.text(max_size=20),
    st.lists(st.integers(-1, 3) | st.sampled_from(["g1", "h1"]) | st.floats(1, 100), max_size=8),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)
# Nothing else in the file says what these should be.
FREE = (
    r"created|(model|runtime)\.\w+|options\.\w+|placement(\.\w+)?(\.\d+)?|(even_spread\.)?schedule\.name|probes\.(name|digest)"
    r"|acceptance_rule\.\w+|speed_rule\.\w+|\w+_answers\.\d+\.(reason|extracted)|baseline_gate_answers(\.\d+(\.\w+)?)?"
    # The fake is equally fast in every round, so that any confidence gives this interval.
    r"|even_spread|(even_spread\.)?(speed|certified_over_even)\.confidence"
)


def meaning(data: Any) -> Any:
    """A certificate's content, where what may be written in two ways is written in one."""
    if isinstance(data, dict):
        return {
            key: sorted(set(value)) if key == "host_experts" else meaning(value)
            for key, value in data.items()
            if value is not None and key != "digest"
        }
    return list(map(meaning, data)) if isinstance(data, list) else data


@given(st.data())
@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_stands_in_a_field_is_refused_or_means_what_is_written(
    small: Certificate, data: st.DataObject
) -> None:
    content: Any = parse_yaml(small.to_yaml(), "small")
    part = data.draw(st.sampled_from([name for name in content if name != "digest"]))
    path = data.draw(st.sampled_from([part, *leaves(content[part], f"{part}.")]))
    change(content, path, data.draw(HOSTILE))
    try:
        read = Certificate.from_yaml(with_digest(content))
    except UserFileError:
        return
    assert meaning(parse_yaml(read.to_yaml(), "read")) == meaning(content)
    assert read == small or re.fullmatch(FREE, path), path


def test_what_does_not_print_is_escaped_when_a_certificate_is_made(certificate: Certificate) -> None:
    model = replace(certificate.model, name="two\nlines \x1b[31m", file="\udcff.gguf")
    answers = (replace(certificate.holdout_answers[1], extracted="a\tb"), *certificate.holdout_answers[2:])
    made = replace(certificate, model=model, holdout_answers=(certificate.holdout_answers[0], *answers))
    assert (made.model.name, made.model.file) == (r"two\nlines \x1b[31m", r"\udcff.gguf")
    assert made.holdout_answers[1].extracted == r"a\tb"
    assert Certificate.from_yaml(made.to_yaml()) == made


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
