"""Commands on a real llama-server, as a user meets them."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rpcserver import llama_bin, rpc_server
from served import complete, serving, with_server_on_path
from test_commands import DEMO_SCHEDULES, fails, run_json

from routing_lab import demo
from routing_lab.certificate import Certificate
from routing_lab.cli import attest, main
from routing_lab.errors import RuntimeUnsupportedError
from routing_lab.export import ServerSettings, export
from routing_lab.measure import MeasureSettings
from routing_lab.model import ModelFacts
from routing_lab.probes import ProbeSet
from routing_lab.runtime.native import override_library
from routing_lab.runtime.report import ServedSchedule
from routing_lab.runtime.server_process import free_port
from routing_lab.schedule import Schedule

SERVER = ("--runtime", "server", "--llama-server")
START_S = 60.0
QUICK = ("--rounds", "6", "--tokens", "16", "--context", "512")


def wait_until(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + START_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def few_probes(tmp_path: Path) -> Path:
    """Every tenth probe of the demo model's own set."""
    whole = ProbeSet.load(demo.probes_path())
    path = tmp_path / "few.yaml"
    dataclasses.replace(whole, items=whole.items[::10]).save(path)
    return path


@pytest.mark.model
def test_evaluate_gives_the_answers_of_the_library_in_process(
    llama_server: Path, few_probes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedules = [file for file in DEMO_SCHEDULES if file.stem in {"uniform-1", "uniform-4", "late-half"}]
    words = ("evaluate", *schedules, "--probes", few_probes, *QUICK)
    outcomes = []
    for runtime in (SERVER, ()):
        code, result = run_json(capsys, *words, *runtime, *([llama_server] if runtime else []))
        assert code == 0
        outcomes.append([(row["schedule"], row["verdict"]) for row in result["schedules"]])
    assert outcomes[0] == outcomes[1]


@pytest.mark.model
def test_a_search_of_ten_trials_and_its_acceptance_name_the_server(
    llama_server: Path, few_probes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = (
        "--probes",
        few_probes,
        "--study",
        "served",
        "--storage",
        tmp_path / "studies.db",
        *QUICK,
        *SERVER,
        llama_server,
    )
    code, result = run_json(capsys, "search", "--trials", "10", *study)
    assert code == 0
    assert result["accepted"]
    assert result["identity"]["runtime"].startswith("llama-server ")
    certificate = tmp_path / "certificate.yaml"
    code, result = run_json(capsys, "validate", "--top", "1", "--output", certificate, *study)
    # Whether the interval of so few short rounds lies above 1 is a matter of luck.
    assert code in {0, 5}
    if code == 0:
        assert Certificate.load(certificate).runtime.name == "llama-server"


@pytest.fixture
def endpoint() -> Iterator[str]:
    with rpc_server(llama_bin()) as device:
        yield device.endpoint


@pytest.mark.model
def test_the_server_takes_the_devices_of_an_rpc_server(
    llama_server: Path, few_probes: Path, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    placed = ("--rpc", endpoint, "--gpu-layers", "99", "--host-experts", "2-3")
    words = ("probes", "check", few_probes, "--context", "512", *SERVER, llama_server)
    code, report = run_json(capsys, *words, *placed)
    assert code == 0
    gate = next(one for one in report["splits"] if one["split"] == "gate")
    assert gate["passed"] == gate["probes"] > 0


@pytest.mark.model
def test_probes_are_checked_on_the_server(
    llama_server: Path, few_probes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = run_json(capsys, "probes", "check", few_probes, "--context", "512", *SERVER, llama_server)
    assert code == 0
    assert result


@pytest.mark.model
def test_doctor_attests_a_server(llama_server: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_json(capsys, "doctor", *SERVER, llama_server)
    assert code == 0
    assert report["override"] == "attested"
    assert "libllama" in report["library"]


def test_a_server_that_is_missing_or_cannot_serve_ends_with_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = tmp_path / "fake-llama-server"
    fake.write_text("#!/bin/sh\necho 'version: 1234 (0a1b2c3)'\n")
    fake.chmod(0o755)
    for path, said in ((tmp_path / "nothing", "does not exist"), (fake, "1234 (0a1b2c3)")):
        message = fails(capsys, 4, "evaluate", DEMO_SCHEDULES[0], *SERVER, path)
        assert said in message
        assert "make llama-server" in message
    assert main(["doctor", *SERVER, str(fake), "--json"]) == 4
    assert "1234 (0a1b2c3)" in json.loads(capsys.readouterr().out)["reason"]


def test_a_model_that_is_missing_ends_with_3(
    few_probes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", tmp_path / "absent.gguf", "--probes", few_probes, "--runtime", "server")
    message = fails(capsys, 3, "evaluate", DEMO_SCHEDULES[0], *words)
    assert "absent.gguf" in message


@pytest.mark.parametrize(
    "words",
    [("--llama-server", "x"), ("--runtime", "server", "--stock"), ("--runtime", "server", "--library", "x")],
)
def test_an_option_of_the_other_runtime_is_a_mistake(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    fails(capsys, 2, "evaluate", DEMO_SCHEDULES[0], *words)
    fails(capsys, 2, "doctor", *words)


# ---------------------------------------------------------------------------------------------------------------------
# attest, on a server that the lab did not start


KEY = "0:8,1:3,2-3:16,4:1,5:8"


@pytest.fixture(scope="module")
def users_server(llama_server: Path) -> Iterator[str]:
    """Started by the very line that export prints, warm-up and all; its URL."""
    mixed = Schedule.from_counts("mixed", {1: 3, 2: 16, 3: 16, 4: 1})
    settings = ServerSettings(threads=1, port=free_port())
    printed = export(
        ModelFacts.read(demo.model_path()),
        schedule=mixed,
        unvalidated=True,
        library=override_library(),
        settings=settings,
    ).text()
    line = printed.splitlines()[-1]
    environment = {**os.environ, "PATH": f"{llama_server.parent}{os.pathsep}{os.environ['PATH']}"}
    shell = ["sh", "-c", f"exec {line}"]
    with subprocess.Popen(shell, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as one:
        try:
            wait_for_health(settings.port)
            yield f"http://127.0.0.1:{settings.port}"
        finally:
            one.kill()


def wait_for_health(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.05)
    pytest.fail("llama-server was not ready within a minute")


@pytest.mark.model
def test_attest_reads_the_counts_of_a_server_that_has_not_been_asked_anything(
    users_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, served = run_json(capsys, "attest", "--url", users_server)
    assert code == 0
    assert (served["experts_used"], served["prompt_experts_used"], served["own"]) == (KEY, KEY, "0-5:8")
    assert served["program"] == "llama-server"
    assert main(["attest", "--url", users_server]) == 0
    assert f"{KEY}, read back" in capsys.readouterr().out


@pytest.mark.model
def test_attest_compares_with_a_schedule(users_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same, other = tmp_path / "same.yaml", tmp_path / "other.yaml"
    same.write_text("schedule: same\nexperts_used: {1: 3, 2-3: 16, 4: 1}\n")
    other.write_text("schedule: other\nexperts_used: {1: 3, 2-3: 16, 4: 2}\n")
    assert main(["attest", "--url", users_server, "--schedule", str(same)]) == 0
    message = fails(capsys, 4, "attest", "--url", users_server, "--schedule", other)
    assert "differs from other in block 4: wanted 4:2, decodes with 4:1" in message


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({1: 4, 3: 6, 4: 6, 5: 6}, "in blocks 1, 3-5: wanted 1:4,3-5:6, decodes with 1:2,3-5:8"),
        ({1: 2, 4: 1}, "in block 4: wanted 4:1, decodes with 4:8"),
        ({1: 2, 5: 7, 6: 8}, "in blocks 5-6: wanted 5:7,6:8, decodes with 5:8 and has no routed experts in block 6"),
        ({1: 2, 7: 8}, "in block 7: wanted 7:8, has no routed experts in block 7"),
        ({}, "in block 1: wanted 1:8, decodes with 1:2"),
    ],
)
def test_attest_names_every_block_that_differs_at_once(wanted: dict[int, int], said: str) -> None:
    own = dict.fromkeys(range(6), 8)
    served = ServedSchedule(7, "llama-server", 0, own | {1: 2}, own, own, "command line", None, None)
    attest._compare(Schedule("mine-a", tuple({**own, 1: 2}.items())), served)
    with pytest.raises(RuntimeUnsupportedError) as caught:
        attest._compare(Schedule("mine-a", tuple(wanted.items())), served)
    assert str(caught.value) == f"process 7 differs from mine-a {said}"


@pytest.mark.model
def test_attest_wants_one_server_that_has_decoded_and_does_not_choose_between_two_that_share_a_port(
    llama_server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    address = ("attest", "--url", f"http://127.0.0.1:{port}")
    with contextlib.ExitStack() as both:
        for count in (3, 5):
            env = with_server_on_path(llama_server) | {
                "LD_PRELOAD": str(override_library()),
                "ROUTING_LAB_EXPERTS": f"0-5:{count}",
            }
            command = [str(llama_server), "--model", str(demo.model_path()), "--threads", "1", "--ctx-size", "256"]
            command += ["--host", "127.0.0.1", "--port", str(port), "--reuse-port"]
            log = tmp_path / f"{count}.log"
            url = both.enter_context(serving(command, port, log, env=env))
            if count == 3:
                assert "send it any request first" in fails(capsys, 4, *address)
                complete(url)
                assert run_json(capsys, *address)[1]["experts_used"] == "0-5:3"
            assert wait_until(lambda log=log: "listening on" in log.read_text())
        message = fails(capsys, 4, *address)
    assert f"all listen on port {port}, each with a schedule of its own" in message


def test_attest_says_what_it_found_where_there_is_no_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing listens" in fails(capsys, 4, "attest", "--url", f"http://127.0.0.1:{free_port()}")
    with socket.create_server(("127.0.0.1", 0)) as other:
        message = fails(capsys, 4, "attest", "--url", f"localhost:{other.getsockname()[1]}")
    assert f"process {os.getpid()}" in message
    assert "does not run under the override library" in message
    assert "is not this machine's loopback" in fails(capsys, 4, "attest", "--url", "http://192.0.2.7:8080")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1", "http://127.0.0.1:port", "ftp://127.0.0.1:21", "", "http://[::1:8"]
)
def test_attest_wants_an_address_with_a_port(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no address" in fails(capsys, 2, "attest", "--url", url)


# ---------------------------------------------------------------------------------------------------------------------
# export --run


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    # An export without a certificate leaves the threads to the server, which on a busy machine wait for each other.
    monkeypatch.setattr("routing_lab.export.proof._SETTINGS", MeasureSettings(tokens=4, rounds=6, warmup_rounds=0))


@pytest.mark.model
@pytest.mark.parametrize("name", ["late-half", "uniform-4"])
def test_an_export_that_is_run_is_attested_asked_and_measured(
    name: str, short: None, llama_server: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = next(file for file in DEMO_SCHEDULES if file.stem == name)
    port = free_port()
    words = ("export", "--schedule", schedule, "--unvalidated", "--port", port, "--run", "--llama-server", llama_server)
    assert main([str(word) for word in words]) == 0
    printed = capsys.readouterr().out
    counts = {"late-half": "0-2:8,3-5:4", "uniform-4": "0-5:4"}[name]
    assert ("--override-kv qwen3moe" in printed.split("# the whole command")[1]) is (name == "uniform-4")
    assert f"# ran on port {port}: llama-server " in printed
    assert f"# attested: {counts}\n" in printed
    assert "# probe addition-g00: correct\n" in printed
    assert "# speed ratio " in printed
    # What follows the command is comment: the output is still a script.
    assert subprocess.run(["/bin/sh", "-n"], input=printed, text=True, check=False).returncode == 0


@pytest.mark.model
def test_an_export_whose_server_answers_wrongly_ends_with_5(
    short: None, llama_server: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = next(file for file in DEMO_SCHEDULES if file.stem == "first-block-1")
    words = ("--schedule", schedule, "--unvalidated", "--port", free_port(), "--run", "--llama-server", llama_server)
    assert "runs the schedule, but probe addition-g00 got wrong_answer" in fails(capsys, 5, "export", *words)


@pytest.mark.model
def test_an_export_whose_port_is_taken_ends_with_4(llama_server: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        words = ("--port", other.getsockname()[1], "--run", "--llama-server", llama_server)
        message = fails(capsys, 4, "export", "--schedule", DEMO_SCHEDULES[0], "--unvalidated", *words)
    assert "is taken by another program" in message


@pytest.mark.model
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_export_that_is_interrupted_while_it_runs_leaves_no_server_and_no_file(
    number: signal.Signals, llama_server: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "routing_lab", "export", "--schedule", DEMO_SCHEDULES[0], "--unvalidated", "--run"]
    command += ["--llama-server", llama_server, "--port", str(free_port())]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as lab:
        assert wait_until(lambda: any(tmp_path.iterdir()))
        lab.send_signal(number)
        printed, _ = lab.communicate(timeout=60)
    assert (lab.returncode, printed) == (130, b"")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["shell", "gguf"])
def test_a_path_that_cannot_be_printed_is_refused_and_not_printed_otherwise(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = os.fsdecode(b"not-utf\xff-8.gguf")
    words = ["export", "--schedule", DEMO_SCHEDULES[0], "--unvalidated", "--format", form]
    if form == "gguf":
        words += ["-o", tmp_path / name]
    else:
        (tmp_path / name).symlink_to(demo.model_path())
        words += ["--model", tmp_path / name]
    assert "cannot hold: rename the file" in fails(capsys, 2, *words)


@pytest.mark.parametrize("form", ["shell", "ini", "systemd"])
def test_the_server_that_is_named_or_found_is_the_one_that_is_printed(
    form: str, llama_server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = next(str(file) for file in DEMO_SCHEDULES if file.stem == "late-half")
    words = ["export", "--schedule", mixed, "--unvalidated", "--format", form]
    monkeypatch.setenv("PATH", f"{llama_server.parent}:/usr/bin:/bin")
    assert main(words) == 0
    by_name = capsys.readouterr().out
    assert str(llama_server) not in by_name
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr("routing_lab.runtime.server_binary.BUILT_BY_MAKE", llama_server)
    for more in ([], ["--llama-server", str(llama_server)]):
        assert main([*words, *more]) == 0
        assert str(llama_server) in capsys.readouterr().out
    assert main([*words, "--llama-server", str(tmp_path / "none")]) == 4
    assert "does not exist" in capsys.readouterr().err
