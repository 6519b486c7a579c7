"""Every form that ``export`` prints is run just as it is printed, on the demo model, and its counts are read back."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from commandline import ROOT, fails, run_json
from fakelab import make_probes, make_runtime
from served import complete, serving, with_server_on_path

from routing_lab import demo
from routing_lab.cli import main
from routing_lab.model import ModelFacts
from routing_lab.overrides import ServerCommand, parse_server_command
from routing_lab.runtime.base import RuntimeOptions
from routing_lab.runtime.native import override_library
from routing_lab.runtime.server_process import free_port
from routing_lab.schedule import Schedule
from routing_lab.validate import validate

KEY = "0:8,1:5,2:4,3:7,4:3,5:6"
OWN = "0-5:8"
Words = tuple[list[str], dict[str, str]]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of the demo model for one thread; that a model of rules earned it is nothing to an export."""
    path = tmp_path_factory.mktemp("certified") / "certificate.yaml"
    facts = ModelFacts.read(demo.model_path())
    runtime = make_runtime(facts, needs={}, options=RuntimeOptions(threads=1, context_tokens=512))
    wanted = Schedule.from_counts("night run", {1: 5, 2: 4, 3: 7, 4: 3, 5: 6})
    validate(runtime, make_probes(), [wanted]).require_certificate().save(path)
    return path


@pytest.fixture
def printed(certificate: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str, int], str]:
    # A path with marks that the forms quote in different ways.
    model = tmp_path / "50% of $HOME's best" / "demo.gguf"
    model.parent.mkdir()
    model.symlink_to(demo.model_path())

    def export(form: str, port: int) -> str:
        words = ["export", str(certificate), "--model", str(model), "--format", form, "--port", str(port)]
        assert main(words) == 0
        return capsys.readouterr().out

    return export


def run_shell(text: str, folder: Path, path: dict[str, str]) -> Words:
    """The whole script, by the shell."""
    script = folder / "serve.sh"
    script.write_text(text)
    return ["/bin/sh", str(script)], path


def run_systemd(text: str, folder: Path, path: dict[str, str]) -> Words:
    """The unit's command in an environment that holds the unit's variables and the session's PATH, nothing else."""
    env = {"PATH": path["PATH"]}
    command: list[str] = []
    for key, _, value in (line.partition("=") for line in text.splitlines() if not line.startswith(("#", "["))):
        if key == "Environment":
            (assignment,) = unit_words(value)
            name, _, content = assignment.partition("=")
            env[name] = content
        elif key == "ExecStart":
            command = [expanded(word) for word in unit_words(value)]
    return command, env


def unit_words(line: str) -> list[str]:
    """man systemd.syntax: blanks separate words, double quotes hold them together, a backslash escapes, %% is %."""
    assert not re.search("%[^%]", line.replace("%%", "")), "a specifier"
    return shlex.split(line.replace("%%", "%"))  # Python expands nothing, and quotes mean the same


def expanded(word: str) -> str:
    """What systemd (in ExecStart) and compose make of a word: variables of ours are not set there, and $$ is $."""
    return re.sub(r"\$\$|\$\w+|\$\{[^}]*\}", lambda found: "$" if found[0] == "$$" else "", word)


def run_compose(text: str, folder: Path, path: dict[str, str]) -> Words:
    """What a container would run, its mounts mapped back to the host and its port to loopback."""
    service = yaml.safe_load(text)["services"]["llama-server"]
    places = {mount["target"]: expanded(mount["source"]) for mount in service["volumes"]}

    def outside(word: str) -> str:
        word = expanded(word)
        return "127.0.0.1" if word == "0.0.0.0" else places.get(word, word)  # noqa: S104 - compared, not bound

    env = {key: outside(value) for key, value in service["environment"].items()}
    inside = service["environment"]["LD_PRELOAD"], service["command"][service["command"].index("--model") + 1]
    assert set(inside) == set(places), "model and library, and nothing else, come from the host"
    return ["llama-server", *map(outside, service["command"])], {"PATH": path["PATH"], **env}


@pytest.mark.model
@pytest.mark.parametrize("run", [run_shell, run_systemd, run_compose])
def test_a_printed_server_serves_the_schedule(
    run: Callable[[str, Path, dict[str, str]], Words],
    printed: Callable[[str, int], str],
    llama_server: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    port = free_port()
    text = printed(run.__name__.removeprefix("run_"), port)
    command, env = run(text, tmp_path, with_server_on_path(llama_server))
    command[0] = shutil.which(command[0], path=env["PATH"]) or command[0]
    with serving(command, port, tmp_path / "log", env=env, cwd=tmp_path) as url:
        code, served = run_json(capsys, "attest", "--url", url)
    assert code == 0
    assert (served["experts_used"], served["own"], served["source"]) == (KEY, OWN, "environment")


@pytest.mark.model
def test_the_printed_program_runs_the_schedule(printed: Callable[[str, int], str], tmp_path: Path) -> None:
    program = tmp_path / "run.py"
    program.write_text(printed("python", 8080), encoding="utf-8")
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "{0: 8, 1: 5, 2: 4, 3: 7, 4: 3, 5: 6}\n"), done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# The models preset, in llama-server's router


def start_router(text: str, folder: Path) -> tuple[list[str], int]:
    """The command in the preset's comment, and its port; the preset is saved as the comment says."""
    (folder / "models.ini").write_text(text)
    (line,) = re.findall(r"^# save this file as models\.ini; .*\n# (.*)$", text, re.MULTILINE)
    return ["/bin/sh", "-c", f"exec {line}"], ServerCommand.from_shell(line).port


@pytest.fixture
def router(printed: Callable[[str, int], str], llama_server: Path, tmp_path: Path) -> Iterator[str]:
    command, port = start_router(printed("ini", free_port()), tmp_path)
    with serving(command, port, tmp_path / "log", env=with_server_on_path(llama_server), cwd=tmp_path) as url:
        yield url


@pytest.mark.model
def test_a_printed_preset_serves_baseline_and_schedule_side_by_side_and_both_are_attested(
    router: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = fails(capsys, 4, "attest", "--url", router)
    assert "has loaded none of baseline, schedule-night-run yet" in message
    schedule = tmp_path / "night.yaml"
    schedule.write_text("schedule: night run\nexperts_used: {1: 5, 2: 4, 3: 7, 4: 3, 5: 6}\n")
    message = fails(capsys, 4, "attest", "--url", router, "--schedule", schedule)
    assert "has not loaded schedule-night-run yet" in message
    if curl := shutil.which("curl"):
        hint = [curl, "-s", *shlex.split(re.search(r"curl (.*)", message)[1])]
        assert '"success":true' in subprocess.run(hint, capture_output=True, text=True, check=True).stdout
    said = {name: complete(router, model=name) for name in ("baseline", "schedule-night-run")}
    assert said["baseline"].endswith("Answer: 433")

    others = {**os.environ, "LLAMA_SERVER_ROUTER_PORT": "1"}  # a server of another router
    with subprocess.Popen(["/bin/sleep", "60"], env=others) as other:
        code, served = run_json(capsys, "attest", "--url", router)
        other.kill()
    assert code == 0
    assert served["program"] == "llama-server"
    assert served["not_loaded"] == []
    rows = [(row["model"], row["experts_used"], row["own"], row["source"]) for row in served["models"]]
    assert rows == [("baseline", OWN, OWN, "command line"), ("schedule-night-run", KEY, OWN, "command line")]
    assert len({served["process"], *(row["process"] for row in served["models"])}) == 3
    assert main(["attest", "--url", router]) == 0
    assert re.search(rf"schedule-night-run *\n.*\ndecodes with +{KEY}, read back", capsys.readouterr().out)

    assert main(["attest", "--url", router, "--schedule", str(schedule)]) == 0
    assert KEY in capsys.readouterr().out
    message = fails(capsys, 4, "attest", "--url", router, "--schedule", schedule, "--entry", "baseline")
    assert "differs from night run in blocks 1-5: wanted 1:5,2:4,3:7,4:3,5:6, decodes with 1-5:8" in message
    assert "has no model nobody; it has baseline" in fails(capsys, 2, "attest", "--url", router, "--entry", "nobody")
    log = (tmp_path / "log").read_text(errors="replace")
    assert log.count("routing_lab: experts per block") == 1
    assert f"routing_lab: experts per block {KEY}" in log


@pytest.mark.model
def test_a_router_that_wants_a_key_is_attested_without_it(
    printed: Callable[[str, int], str], llama_server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, port = start_router(printed("ini", free_port()), tmp_path)
    command[-1] += " --api-key secret"
    with serving(command, port, tmp_path / "log", env=with_server_on_path(llama_server), cwd=tmp_path) as url:
        assert "has loaded none yet" in fails(capsys, 4, "attest", "--url", url)
        complete(url, "secret", model="schedule-night-run", n_predict=1)
        code, served = run_json(capsys, "attest", "--url", url, "--entry", "schedule-night-run")
    assert (code, [row["experts_used"] for row in served["models"]]) == (0, [KEY])


# ---------------------------------------------------------------------------------------------------------------------
# The argument by itself


PART = "routing_lab.experts_used"
ARGUMENT = ("--override-kv", f"{PART}.2of2=str:4:3/5:6,a=int:1,{PART}.1of2=str:0:8/1:5/2:4/3:7")


def one_server(port: int, *more: str) -> list[str]:
    settings = "--ctx-size 512 --parallel 1 --fit off --threads 1 --port"
    words = ["llama-server", "--model", str(demo.model_path()), *settings.split(), str(port)]
    return [*words, *more]


@pytest.mark.model
def test_a_control_file_takes_the_place_of_the_command_line_and_says_so(
    llama_server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control, port = tmp_path / "control", free_port()
    more = {"LD_PRELOAD": str(override_library()), "ROUTING_LAB_CONTROL": str(control)}
    log = tmp_path / "log"
    with serving(one_server(port, *ARGUMENT), port, log, env=with_server_on_path(llama_server) | more) as url:
        served = run_json(capsys, "attest", "--url", url)[1]
        assert (served["experts_used"], served["source"], served["generation"]) == (KEY, "command line", 0)
        (tmp_path / "draft").write_text("routing_lab control 1\ngeneration 1\nexperts 0-5:2\nend\n")
        (tmp_path / "draft").rename(control)
        complete(url, n_predict=2)
        served = run_json(capsys, "attest", "--url", url)[1]
        assert "--entry names a model of a router" in fails(capsys, 2, "attest", "--url", url, "--entry", "x")
    assert (served["experts_used"], served["source"], served["generation"]) == ("0-5:2", "control file", 1)
    assert f"the control file {control} takes the place of the command line: 0-5:2\n" in log.read_text()


@pytest.mark.model
def test_without_the_library_the_argument_does_nothing_and_attest_says_so(
    llama_server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    with serving(one_server(port, *ARGUMENT), port, tmp_path / "log", env=with_server_on_path(llama_server)) as url:
        assert complete(url).endswith("Answer: 433")
        assert "does not run under the override library" in fails(capsys, 4, "attest", "--url", url)


@pytest.mark.model
@pytest.mark.parametrize("last", ["a=int:1", "qwen3moe.expert_used_count=int:5"])
def test_of_several_stock_overrides_the_first_of_a_key_counts_as_the_parser_says(
    last: str, llama_server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    command = one_server(port, "--override-kv", "qwen3moe.expert_used_count=int:4", "--override-kv", last)
    env = with_server_on_path(llama_server) | {"LD_PRELOAD": str(override_library())}
    with serving(command, port, tmp_path / "log", env=env) as url:
        served = run_json(capsys, "attest", "--url", url)[1]
    facts = ModelFacts.read(demo.model_path())
    assert served["experts_used"] == parse_server_command(shlex.join(command), facts).key(facts) == "0-5:4"
    assert served["source"] == "nothing"
