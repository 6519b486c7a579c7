"""Exports in the forms that run them: every form there and back, with names that try to break out."""

from __future__ import annotations

import ast
import configparser
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from fakelab import make_facts, schedule
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modelfiles import make_facts as make_moe_facts
from served import ask, complete, serving, with_server_on_path

from routing_lab import demo
from routing_lab.errors import RuntimeUnsupportedError, UsageError
from routing_lab.export import UNVALIDATED, Export, ServerSettings, export
from routing_lab.export.forms import FORMATS, IMAGE, PARSERS
from routing_lab.model import ModelFacts
from routing_lab.overrides import parse_placement, parse_server_command
from routing_lab.placement import HostTensors, Placement, TensorKind
from routing_lab.runtime.router import ServedRouter, served_at
from routing_lab.runtime.server_process import free_port
from routing_lab.schedule import Schedule

LIBRARY = Path("/opt/lab/override.so")
# A pattern with marks that every form quotes in its own way, and a flag without a value.
PLACED = ServerSettings(
    placement=Placement(99, host_tensors=(HostTensors(TensorKind.ATTENTION, (0, 1)),), host_kv=True),
    threads=3,
    kv_type="f32",
)

HOSTILE = [
    "$(touch canary)",
    "a; touch canary",
    '"; import os; "',
    "coding: utf-7",
    "%n %h ${HOME} $$",
    "ends with \\",
    "[baseline]",
    "x = y # z",
    "'''",
    "é 名 {{ x }}",
]
names = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=20),
)


@pytest.fixture
def facts(tmp_path: Path) -> ModelFacts:
    return make_facts(tmp_path)


def made(facts: ModelFacts, wanted: Schedule, **options) -> Export:
    return export(facts, schedule=wanted, unvalidated=True, library=LIBRARY, **{"settings": PLACED, **options})


def in_folder(facts: ModelFacts, name: str) -> ModelFacts:
    """The same model under a path with a hostile name; nothing reads it here."""
    return replace(facts, files=(Path("/data") / name.replace("/", "_") / "model.gguf",))


@pytest.mark.parametrize("form", PARSERS)
@given(names, names, st.lists(st.integers(1, 16), min_size=4, max_size=4))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_schedule_survives_the_round_trip_through_every_form(facts, form, name, folder, counts) -> None:
    wanted = schedule(*counts, name=name)
    placed = in_folder(facts, folder)
    try:
        text = FORMATS[form](made(placed, wanted))
    except UsageError as error:
        assert "rename the file" in str(error)  # noqa: PT017 - the form has no way to say this path
        assert form == "ini" or not folder.isprintable()
        return
    assert PARSERS[form](text, placed).key(facts) == wanted.key(facts)


@pytest.mark.parametrize("form", FORMATS)
def test_every_form_of_an_unvalidated_export_says_so_at_its_head(facts, form) -> None:
    text = FORMATS[form](made(facts, schedule(4, 4, 4, 4)))
    head = text.split("\n\n")[0]
    assert UNVALIDATED in head


def test_a_preset_refuses_a_path_whose_end_llama_server_would_cut_off(facts) -> None:
    blank = replace(facts, files=(Path("/data/model.gguf "),))
    with pytest.raises(UsageError, match="blanks at its ends: rename the file"):
        FORMATS["ini"](made(blank, schedule(4, 4, 4, 4)))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_stays_in_its_comment_or_in_its_quotes(facts, form, name) -> None:
    text = FORMATS[form](made(facts, schedule(4, 4, 4, 4, name=name)))
    tame = FORMATS[form](made(facts, schedule(4, 4, 4, 4, name="tame")))
    assert len(text.splitlines()) == len(tame.splitlines())
    changed = [new for new, old in zip(text.splitlines(), tame.splitlines(), strict=True) if new != old]
    allowed = ("#", "Description=", "[schedule-", "schedule = Schedule.from_counts(")
    assert all(line.startswith(allowed) for line in changed)


def test_a_preset_has_the_baseline_and_the_schedule_as_entries_that_differ_in_the_count_only(facts) -> None:
    text = FORMATS["ini"](made(facts, schedule(4, 4, 4, 4, name="even")))
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string("[top]\n" + text)
    baseline, even = dict(parser["baseline"]), dict(parser["schedule-even"])
    assert even.pop("override-kv") == "qwen3moe.expert_used_count=int:4"
    assert baseline == even
    assert baseline["no-kv-offload"] == "true"
    assert not {"host", "port"} & set(baseline)


def test_counts_per_block_reach_one_entry_of_a_preset_only_and_the_baseline_insists_on_its_own(facts) -> None:
    text = FORMATS["ini"](made(facts, schedule(6, 6, 4, 4, name="late half")))
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string("[top]\n" + text)
    baseline, late = dict(parser["baseline"]), dict(parser["schedule-late-half"])
    assert late.pop("override-kv") == "routing_lab.experts_used=str:0-1:6/2-3:4"
    assert baseline.pop("override-kv") == "routing_lab.experts_used=str:own"
    assert baseline == late
    router = f"# env LD_PRELOAD={LIBRARY} llama-server --models-preset models.ini --host 127.0.0.1 --port 8080\n"
    assert router in text
    with pytest.raises(ValueError, match="LD_PRELOAD names no library"):
        PARSERS["ini"](text.replace(f"env LD_PRELOAD={LIBRARY} ", ""), facts)


def test_the_router_of_a_uniform_schedule_needs_no_library(facts) -> None:
    text = FORMATS["ini"](made(facts, schedule(4, 4, 4, 4), port=8123))
    assert "# llama-server --models-preset models.ini --host 127.0.0.1 --port 8123\n" in text
    assert "routing_lab" not in text.split("version = 1")[1]


@pytest.mark.parametrize("form", PARSERS)
@given(st.lists(st.integers(1, 512), min_size=64, max_size=100, unique=True))
@settings(max_examples=20)
def test_many_blocks_of_different_counts_survive_every_form(form, counts) -> None:
    facts = make_moe_facts(dict.fromkeys(range(len(counts)), 8), experts=512)
    wanted = schedule(*counts)
    text = FORMATS[form](made(facts, wanted, settings=ServerSettings()))
    assert PARSERS[form](text, facts).key(facts) == wanted.key(facts)


def test_a_service_mounts_model_and_library_and_listens_on_loopback_only(facts) -> None:
    document = yaml.safe_load(FORMATS["compose"](made(facts, schedule(6, 6, 4, 4))))
    service = document["services"]["llama-server"]
    assert service["image"] == IMAGE
    assert service["ports"] == ["127.0.0.1:8080:8080"]
    assert [mount["source"] for mount in service["volumes"]] == [str(facts.files[0]), str(LIBRARY)]
    assert service["environment"]["LD_PRELOAD"] == service["volumes"][1]["target"]
    assert service["volumes"][0]["target"] in service["command"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(facts, tmp_path) -> None:
    def verify(text: str) -> int:
        unit = tmp_path / "llama.service"
        unit.write_text(text, encoding="utf-8")
        command = [shutil.which("systemd-analyze") or "", "verify", "--user", str(unit)]
        env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        return subprocess.run(command, env=env, capture_output=True, check=False).returncode

    text = FORMATS["systemd"](made(facts, schedule(6, 6, 4, 4, name=HOSTILE[4])))
    if verify("[Service]\nExecStart=/usr/bin/env true\n") != 0:
        pytest.skip("systemd-analyze cannot verify units on this machine")
    assert verify(text) == 0
    assert verify(text.replace("Restart=on-failure", 'ExecStart=/usr/bin/env "open')) != 0


@pytest.mark.parametrize("form", PARSERS)
def test_a_model_is_named_by_its_whole_path(facts, form, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    relative = replace(facts, files=(Path(facts.files[0].name),))
    assert str(facts.files[0]) in FORMATS[form](made(relative, schedule(4, 4, 4, 4)))


@pytest.mark.model
def test_a_real_router_reads_the_preset_and_serves_both_entries(llama_server, tmp_path) -> None:
    """llama-server's own parser: every option of the command line arrives, and each entry answers."""
    facts = ModelFacts.read(demo.model_path())
    wanted = Schedule.uniform(4, facts, "even")
    preset = tmp_path / "models.ini"
    placement = Placement(0, (0, 1), host_tensors=(HostTensors(TensorKind.ATTENTION, (2,)),), host_kv=True)
    made_for = ServerSettings(placement=placement, context_tokens=512, threads=1)
    preset.write_text(FORMATS["ini"](export(facts, schedule=wanted, unvalidated=True, settings=made_for)))
    port = free_port()
    command = [str(llama_server), "--models-preset", str(preset), "--host", "127.0.0.1", "--port", str(port)]
    with serving(command, port, tmp_path / "log", env=with_server_on_path(llama_server)) as url:
        models = {model["id"]: model["status"]["args"] for model in ask(f"{url}/models")["data"]}
        assert set(models) == {"baseline", "schedule-even"}
        for name, args in models.items():
            assert parse_placement(args).host_experts == (0, 1)
            assert parse_placement(args).host_kv
            counted = parse_server_command(shlex.join(args), facts)
            assert counted.key(facts) == (wanted.key(facts) if name != "baseline" else "0-5:8")
        for name in models:
            assert complete(url, model=name).endswith("Answer: 433")
        found = served_at(url)
        assert isinstance(found, ServedRouter)
        with pytest.raises(RuntimeUnsupportedError, match=r"serves baseline, does not run under the override library"):
            found.require_models()


@pytest.mark.parametrize(
    ("form", "text"),
    [("ini", "nonsense"), ("ini", ""), ("systemd", "[Unit]"), ("compose", "{}"), ("python", "x = 1"), ("python", "(")],
)
def test_what_was_not_rendered_here_is_refused(facts, form, text) -> None:
    with pytest.raises(ValueError):
        PARSERS[form](text, facts)


@pytest.mark.model
def test_the_python_program_runs_and_attests_the_counts(tmp_path) -> None:
    facts = ModelFacts.read(demo.model_path())
    wanted = Schedule.from_counts("'coding: utf-7'", {0: 8, 1: 4, 2: 4, 3: 3, 4: 6, 5: 2})
    text = FORMATS["python"](export(facts, schedule=wanted, unvalidated=True, library=LIBRARY))
    program = tmp_path / "run.py"
    program.write_text(text, encoding="utf-8")
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout) == wanted.resolve(facts)
