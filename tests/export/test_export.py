"""What leaves the lab: forms that say what was certified, and a label on everything that was not."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakelab import make_facts, make_probes, make_runtime, schedule

from routing_lab.certificate import Certificate
from routing_lab.errors import RuntimeUnsupportedError, UsageError, UserFileError
from routing_lab.export import UNVALIDATED, ServerSettings, export
from routing_lab.model import ModelFacts
from routing_lab.overrides import EXPERTS_ENV, parse_experts, parse_override_kv, parse_server_command
from routing_lab.placement import Placement
from routing_lab.runtime.base import RuntimeOptions
from routing_lab.schedule import Schedule
from routing_lab.validate import validate

LIBRARY = Path("/opt/lab/override.so")


@pytest.fixture
def facts(tmp_path: Path) -> ModelFacts:
    return make_facts(tmp_path)


def certify(facts: ModelFacts, wanted: Schedule, **options) -> Certificate:
    runtime = make_runtime(facts, needs={}, options=RuntimeOptions(**options))
    return validate(runtime, make_probes(), [wanted]).require_certificate()


MIXED = schedule(6, 6, 4, 4, name="mixed")
EVEN = schedule(4, 4, 4, 4, name="even")


def test_a_certified_schedule_comes_back_out_of_every_form(facts: ModelFacts) -> None:
    for wanted in (MIXED, EVEN):
        made = export(facts, certificate=certify(facts, wanted), library=LIBRARY)
        counts = dict(wanted.experts_used)
        assert parse_experts(made.environment[EXPERTS_ENV]) == counts
        assert parse_server_command(made.command.shell(), facts).resolve(facts) == counts
        assert parse_experts(made.experts_used) == counts


def test_a_stock_form_exists_exactly_for_uniform_schedules(facts: ModelFacts) -> None:
    even = export(facts, certificate=certify(facts, EVEN), library=LIBRARY)
    assert even.override_kv is not None
    assert [(kv.key, kv.value) for kv in parse_override_kv(even.override_kv)] == [("qwen3moe.expert_used_count", "4")]
    assert even.no_override_kv is None
    mixed = export(facts, certificate=certify(facts, MIXED), library=LIBRARY)
    assert mixed.override_kv is None
    assert "no stock form" in (mixed.no_override_kv or "")
    assert (mixed.no_override_kv or "-") in mixed.text()


def test_a_uniform_schedule_is_served_without_the_library(facts: ModelFacts) -> None:
    command = export(facts, certificate=certify(facts, EVEN), library=LIBRARY).command
    assert command.env == {}
    assert "--override-kv" in command.argv


def test_without_the_library_only_uniform_schedules_are_exported(facts: ModelFacts) -> None:
    made = export(facts, certificate=certify(facts, EVEN))
    assert made.environment == {}
    with pytest.raises(RuntimeUnsupportedError, match="no stock form"):
        export(facts, certificate=certify(facts, MIXED))


def test_the_label_names_the_certificate_and_its_date(facts: ModelFacts) -> None:
    certificate = certify(facts, MIXED)
    made = export(facts, certificate=certificate, certificate_file=Path("runs/demo.yaml"), library=LIBRARY)
    assert made.validated
    assert made.label == f"validated by runs/demo.yaml of {certificate.created}"
    assert f"# {made.label}\n" in made.text()
    assert UNVALIDATED not in made.text()
    assert UNVALIDATED not in json.dumps(made.to_dict())


def test_a_schedule_without_a_certificate_is_refused(facts: ModelFacts) -> None:
    with pytest.raises(UsageError, match=r"no certificate covers schedule mixed.*--unvalidated"):
        export(facts, schedule=MIXED, library=LIBRARY)


def test_a_certificate_does_not_cover_another_schedule(facts: ModelFacts) -> None:
    with pytest.raises(UsageError, match=r"covers 0-1:6,2-3:4, not schedule even \(0-3:4\)"):
        export(facts, certificate=certify(facts, MIXED), schedule=EVEN, library=LIBRARY)


def test_a_certificate_covers_the_same_counts_under_another_name(facts: ModelFacts) -> None:
    again = Schedule.from_counts("my-own-name", {0: 6, 1: 6, 2: 4, 3: 4})
    assert export(facts, certificate=certify(facts, MIXED), schedule=again, library=LIBRARY).validated


def test_a_certificate_does_not_cover_other_bytes_of_a_model(facts: ModelFacts, tmp_path: Path) -> None:
    certificate = certify(facts, MIXED)
    (tmp_path / "other").mkdir()
    other = make_facts(tmp_path / "other", content=b"another model")
    with pytest.raises(UsageError, match="about another model"):
        export(other, certificate=certificate, library=LIBRARY)
    assert not export(other, certificate=certificate, library=LIBRARY, unvalidated=True).validated


def test_every_rendering_of_an_unvalidated_export_says_so(facts: ModelFacts) -> None:
    for wanted in (MIXED, EVEN):
        made = export(facts, schedule=wanted, library=LIBRARY, unvalidated=True)
        data = made.to_dict()
        assert data["validated"] is False
        assert data["label"].startswith(UNVALIDATED)
        assert data["certificate"] is None
        copied = [line for line in made.text().splitlines() if line and not line.startswith("#")]
        assert copied
        assert all(line.endswith(f"# {UNVALIDATED}") for line in copied)


def test_permission_to_export_unvalidated_takes_nothing_from_a_certificate(facts: ModelFacts) -> None:
    assert export(facts, certificate=certify(facts, MIXED), library=LIBRARY, unvalidated=True).validated


def test_the_text_is_a_shell_script_whose_only_command_is_the_server(facts: ModelFacts) -> None:
    text = export(facts, certificate=certify(facts, MIXED), library=LIBRARY).text()
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    commands = [words for words in lines if words and not (len(words) == 1 and "=" in words[0])]
    assert len(commands) == 1
    assert "llama-server" in commands[0]
    assert text.endswith("\n")


def test_the_command_runs_the_model_as_it_was_certified(facts: ModelFacts) -> None:
    certificate = certify(facts, MIXED, context_tokens=512, threads=3, kv_type="f32", placement=Placement(gpu_layers=7))
    made = export(facts, certificate=certificate, library=LIBRARY)
    argv = list(made.command.argv)
    for flag, value in {
        "--model": str(facts.files[0]),
        "--ctx-size": "512",
        "--threads": "3",
        "--cache-type-k": "f32",
        "--cache-type-v": "f32",
        "--n-gpu-layers": "7",
        "--parallel": "1",
    }.items():
        assert argv[argv.index(flag) + 1] == value
    assert made.notes == ()


def test_rpc_servers_are_named_in_the_command(facts: ModelFacts) -> None:
    certificate = certify(facts, MIXED, placement=Placement(gpu_layers=7))
    made = export(facts, certificate=certificate, library=LIBRARY, rpc_servers=("10.0.0.7:50052", "h:1"))
    argv = list(made.command.argv)
    assert argv[argv.index("--rpc") + 1] == "10.0.0.7:50052,h:1"
    assert parse_server_command(made.command.shell(), facts).resolve(facts) == MIXED.resolve(facts)
    assert "--rpc" not in export(facts, certificate=certificate, library=LIBRARY).command.argv


def test_a_server_that_differs_from_the_acceptance_run_is_noted(facts: ModelFacts) -> None:
    certificate = certify(facts, MIXED)
    settings = replace(ServerSettings.of(certificate), placement=Placement(gpu_layers=9), kv_type="f32", parallel=4)
    made = export(facts, certificate=certificate, library=LIBRARY, settings=settings)
    assert [note.split()[0] for note in made.notes] == ["placement", "KV", "validated"]
    assert all(f"# {note}" in made.text() for note in made.notes)


def test_json_holds_plain_values_and_no_nan(facts: ModelFacts) -> None:
    data = export(facts, certificate=certify(facts, MIXED), library=LIBRARY).to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["command"]["env"][EXPERTS_ENV] == "0-1:6,2-3:4"


def test_nothing_to_export_is_a_usage_error(facts: ModelFacts) -> None:
    with pytest.raises(UsageError, match="nothing to export"):
        export(facts)


def test_a_library_that_the_loader_cannot_name_is_a_usage_error(facts: ModelFacts) -> None:
    with pytest.raises(UsageError, match="LD_PRELOAD cannot name"):
        export(facts, certificate=certify(facts, MIXED), library=Path("/with blank/override.so"))


def test_a_schedule_that_does_not_fit_is_refused_even_unvalidated(facts: ModelFacts) -> None:
    with pytest.raises(UserFileError, match="4 is none"):
        export(facts, schedule=schedule(4, 4, 4, 4, 4), library=LIBRARY, unvalidated=True)


# --- hostile names ---------------------------------------------------------------------------------------------------

BREAKOUTS = (
    "\ntouch canary\n",
    "\rtouch canary\r",
    "`touch canary`",
    "$(touch canary)",
    "'; touch canary; '",
    '"; touch canary; "',
    "x; touch canary #",
    "x && touch canary",
    "\\\ntouch canary",
    "\u2028touch canary",
    "\x1b]0;touch canary\x07",
    "-touch canary",
    "! touch canary",
)

SERVER = """#!/bin/sh
{ printf '%s\\0' "$0" "$@"; printf '%s=%s\\0' ROUTING_LAB_EXPERTS "$ROUTING_LAB_EXPERTS"; } > "$SEEN"
"""


@pytest.fixture
def run_by_bash(tmp_path: Path) -> Callable[[str], list[str]]:
    """Runs a script in a folder of its own and gives the words that llama-server, a stand-in, was called with."""
    server = tmp_path / "bin" / "llama-server"
    server.parent.mkdir()
    server.write_text(SERVER)
    server.chmod(0o755)

    def run(script: str) -> list[str]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        file = folder / "serve.sh"
        file.write_bytes(script.encode())
        environment = {"PATH": f"{server.parent}:{os.environ['PATH']}", "SEEN": str(folder / "seen")}
        for options in (["-n"], []):
            command = ["bash", *options, str(file)]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            # The dynamic loader complains about a library that is not there, and goes on.
            assert done.returncode == 0, done.stderr
        assert sorted(path.name for path in folder.iterdir()) == ["seen", "serve.sh"]
        return (folder / "seen").read_bytes().decode().split("\0")[:-1]

    return run


@pytest.mark.parametrize("name", BREAKOUTS, ids=ascii)
@pytest.mark.parametrize("wanted", [MIXED, EVEN], ids=["mixed", "even"])
def test_no_name_breaks_out_of_its_comment_or_quotes(
    facts: ModelFacts, tmp_path: Path, name: str, wanted: Schedule, run_by_bash: Callable[[str], list[str]]
) -> None:
    folder = tmp_path / f"models {name}"
    folder.mkdir()
    hostile = replace(make_facts(folder), name=name, architecture="qwen3moe")
    printable = "".join(filter(str.isprintable, name))
    named = replace(wanted, name=f"x {printable}")
    certificate = certify(hostile, named, placement=Placement(gpu_layers=3, name=name))
    parts = {"created": name, "model": replace(certificate.model, file=name, name=name)}
    certificate = replace(certificate, **parts)
    settings = replace(ServerSettings.of(certificate), host=name, placement=Placement(name=name), kv_type="f32")
    certified = {"certificate": certificate, "certificate_file": tmp_path / name, "settings": settings}
    for given in (certified, {"schedule": named, "unvalidated": True}):
        made = export(hostile, library=LIBRARY, **given)
        for script in (made.text(), made.command.shell()):
            program, *seen, experts = run_by_bash(script)
            assert Path(program).name == "llama-server"
            assert seen == list(made.command.argv[1:])
            assert experts.removeprefix(f"{EXPERTS_ENV}=") == made.command.env.get(EXPERTS_ENV, "")
        assert json.loads(json.dumps(made.to_dict())) == made.to_dict()
        if not made.validated:
            assert made.text().count(UNVALIDATED) >= 3


@pytest.mark.parametrize("name", BREAKOUTS, ids=ascii)
def test_an_architecture_that_is_no_word_is_refused_or_stays_in_its_quotes(
    facts: ModelFacts, name: str, run_by_bash: Callable[[str], list[str]]
) -> None:
    """The architecture is part of the stock form, and a GGUF may call itself anything."""
    try:
        made = export(replace(facts, architecture=f"q{name}"), schedule=EVEN, unvalidated=True, library=LIBRARY)
    except (UsageError, UserFileError, RuntimeUnsupportedError):
        return
    assert run_by_bash(made.text())[1:-1] == list(made.command.argv[1:])
