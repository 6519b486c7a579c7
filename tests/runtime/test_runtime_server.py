"""An unmodified llama-server: held to the same contract, with the same answers and counts as the library in process."""

from __future__ import annotations

import http.server
import itertools
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from contract import PROMPT, RuntimeContract
from rpcserver import RpcServer, llama_bin, rpc_server
from test_runtime_override import bind_symbolically
from test_runtime_supervision import gone, signal_soon, wait_until

from routing_lab import demo
from routing_lab.answers import Judge
from routing_lab.errors import AttestationError, RuntimeFailureError, RuntimeUnsupportedError, UsageError, UserFileError
from routing_lab.model import ModelFacts
from routing_lab.overrides import ServerCommand
from routing_lab.placement import Placement
from routing_lab.probes import ProbeSet, run_probes
from routing_lab.runtime import Capability, RuntimeOptions, server_process
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.runtime.native import override_library
from routing_lab.runtime.process import ending
from routing_lab.runtime.report import (
    BuiltBlock,
    ServerReport,
    listening_processes,
    parse_report,
    read_report,
    sockets_listening_on,
)
from routing_lab.runtime.server import ServerRuntime, _smallest_margin, attest
from routing_lab.runtime.server_binary import BUILT_BY_MAKE, find_server
from routing_lab.runtime.server_process import ServerProcess
from routing_lab.schedule import Schedule

OPTIONS = RuntimeOptions(threads=1, context_tokens=1024, batch_tokens=32)
LONG = 4000  # tokens; seconds of decoding on any machine that runs these tests


@pytest.fixture(scope="module")
def runtime(model: Path, llama_server: Path) -> Iterator[ServerRuntime]:
    with ServerRuntime(model, OPTIONS, binary=llama_server) as one:
        yield one


@pytest.fixture(scope="module")
def in_process(model: Path) -> Iterator[LlamaRuntime]:
    with LlamaRuntime(model, OPTIONS) as one:
        yield one


@pytest.fixture
def own(model: Path, llama_server: Path) -> Iterator[ServerRuntime]:
    """A server for one test, which may break it."""
    options = RuntimeOptions(threads=1, context_tokens=4096, request_timeout_s=120)
    with ServerRuntime(model, options, binary=llama_server) as one:
        yield one


@pytest.mark.model
class TestServerRuntime(RuntimeContract):
    @pytest.fixture
    def lose_process(self, runtime: ServerRuntime) -> Callable[[], None]:
        return lambda: os.kill(runtime.process_id, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------------------------
# The same as in process


def random_schedules(facts: ModelFacts, count: int) -> Iterator[Schedule]:
    dice = random.Random(5)
    for number in range(count):
        counts = {block: dice.randint(1, facts.experts) for block in facts.routed_blocks}
        yield Schedule.from_counts(f"random-{number}", counts)


@pytest.mark.model
def test_a_hundred_random_schedules_have_the_counts_and_the_words_of_the_library_in_process(
    runtime: ServerRuntime, in_process: LlamaRuntime, facts: ModelFacts
) -> None:
    runtime.apply(Schedule.baseline(facts))
    process, loads = runtime.process_id, runtime.weight_loads
    margins = set()
    for schedule in random_schedules(facts, 100):
        served = runtime.apply(schedule)
        assert served == in_process.apply(schedule)
        assert dict(served.selected) == schedule.resolve(facts)
        one, other = (r.generate(PROMPT, max_tokens=12, margins=True) for r in (runtime, in_process))
        assert one.text == other.text, schedule.key(facts)
        assert one.smallest_margin == pytest.approx(other.smallest_margin, abs=1e-4)
        margins.add(round(one.smallest_margin, 4))
    assert len(margins) > 90, "every schedule computes something else"
    assert (runtime.process_id, runtime.weight_loads) == (process, loads), "no switch read the weights again"


@pytest.mark.model
def test_verdicts_are_those_of_the_library_in_process(
    runtime: ServerRuntime, in_process: LlamaRuntime, facts: ModelFacts
) -> None:
    probe_set = ProbeSet.load(demo.probes_path())
    probes = probe_set.split("gate")[::3]
    wrong = 0
    with Judge() as judge:
        for counts in ({}, {0: 1}, {3: 4, 4: 4, 5: 4}):
            outcomes = []
            for one in (runtime, in_process):
                one.apply(Schedule.from_counts("cut", counts) if counts else Schedule.baseline(facts))
                outcomes.append(run_probes(one, probe_set, probes, judge, stop_after_failures=None))
            for served, known in zip(*outcomes, strict=True):
                assert (served.status, served.text, served.tokens) == (known.status, known.text, known.tokens)
                assert served.prompt_tokens == known.prompt_tokens
                wrong += not served.correct
    assert 0 < wrong < 3 * len(probes), "the comparison saw right and wrong answers"


@pytest.mark.model
@pytest.mark.parametrize("stop", [(), ("Answer",), ("\n", "=")])
def test_tokens_reasons_and_margins_are_those_of_the_library_in_process(
    runtime: ServerRuntime, in_process: LlamaRuntime, mixed: Schedule, stop: tuple[str, ...]
) -> None:
    for one in (runtime, in_process):
        one.apply(mixed)
    for budget in (1, 5, 60):
        served, known = (
            one.generate(PROMPT, max_tokens=budget, stop=stop, margins=True) for one in (runtime, in_process)
        )
        assert (served.text, served.finish_reason) == (known.text, known.finish_reason)
        assert (served.tokens, served.prompt_tokens) == (known.tokens, known.prompt_tokens)
        assert served.smallest_margin == pytest.approx(known.smallest_margin, abs=1e-4)


@pytest.mark.model
def test_chat_prompts_are_those_of_the_library_in_process(runtime: ServerRuntime, in_process: LlamaRuntime) -> None:
    for words in ("how much is 2+3", "two\nlines", "<bos> é"):
        assert runtime.render_chat(words) == in_process.render_chat(words)


@pytest.mark.model
def test_a_prompt_of_one_token_after_a_switch_is_decoded_under_the_new_schedule(
    runtime: ServerRuntime, in_process: LlamaRuntime, facts: ModelFacts
) -> None:
    # The graph of its prompt has the shape of the decodes before the switch: the one that reuse would bring back.
    runtime.generate("7", max_tokens=8)
    for schedule in (Schedule.uniform(1, facts), Schedule.baseline(facts)):
        for one in (runtime, in_process):
            one.apply(schedule)
        assert runtime.generate("7", max_tokens=12).text == in_process.generate("7", max_tokens=12).text


@pytest.mark.model
def test_the_build_is_named(runtime: ServerRuntime, llama_server: Path) -> None:
    assert runtime.capability is Capability.PRELOAD
    assert runtime.build.name == "llama-server"
    assert (
        runtime.build.version
        in subprocess.run([llama_server, "--version"], capture_output=True, text=True, check=True).stderr
    )
    assert str(llama_server) in runtime.build.system_info
    mapped = Path(f"/proc/{runtime.process_id}/maps").read_text()
    assert str(Path(runtime.build.library).resolve()) in mapped, "the library that is really in use"


@pytest.mark.model
def test_the_time_of_a_prompt_is_told_and_grows_with_it(runtime: ServerRuntime) -> None:
    runtime.apply(Schedule.baseline(runtime.facts))
    short, long = (
        min(runtime.decode_timing(tokens=1, prompt_tokens=prompt).prompt_seconds for _ in range(3))
        for prompt in (8, 900)
    )
    assert 0 < short < long


# ---------------------------------------------------------------------------------------------------------------------
# What can go wrong with the process


@pytest.mark.model
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_server_that_ends_in_mid_request_is_one_failure_and_the_schedule_comes_back(
    own: ServerRuntime, mixed: Schedule, number: signal.Signals
) -> None:
    own.apply(mixed)
    before = own.generate(PROMPT, max_tokens=12)
    lost = own.process_id
    signal_soon(lost, number)
    with pytest.raises(RuntimeFailureError, match=f"ended by {number.name}.* while it was asked for /completion") as e:
        own.decode_timing(tokens=LONG)
    assert "listening on" in e.value.log_tail
    assert gone(lost)
    assert own.process_id is None
    assert own.generate(PROMPT, max_tokens=12).text == before.text
    assert own.process_id != lost
    assert own.weight_loads == 2


@pytest.mark.model
def test_a_server_that_hangs_is_given_up_after_the_timeout_and_killed_for_certain(own: ServerRuntime) -> None:
    own.apply(Schedule.baseline(own.facts))
    hung = own.process_id
    own._process._timeout_s = 2  # not an option, which would hurry the start of a server on a busy machine as well
    os.kill(hung, signal.SIGSTOP)
    with pytest.raises(RuntimeFailureError, match="did not answer /tokenize within 2 s"):
        own.generate("7", max_tokens=4)
    assert gone(hung)
    assert own.generate("7", max_tokens=4).tokens >= 1


@pytest.mark.model
def test_an_interrupt_ends_the_server_and_the_next_call_starts_another(own: ServerRuntime) -> None:
    own.apply(Schedule.baseline(own.facts))
    lost = own.process_id
    signal_soon(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        own.decode_timing(tokens=LONG)
    assert gone(lost)
    assert own.decode_timing(tokens=4).tokens == 4


@pytest.mark.model
def test_a_failed_switch_leaves_the_last_schedule_that_worked(own: ServerRuntime, mixed: Schedule) -> None:
    own.apply(Schedule.baseline(own.facts))
    before = own.generate(PROMPT, max_tokens=24).text
    os.kill(own.process_id, signal.SIGKILL)
    with pytest.raises(RuntimeFailureError):
        own.apply(mixed)
    assert own.generate(PROMPT, max_tokens=24).text == before


@pytest.mark.model
def test_a_server_that_nobody_closes_ends_with_its_runtime_and_leaves_no_file(model: Path, llama_server: Path) -> None:
    forgotten = ServerRuntime(model, OPTIONS, binary=llama_server)
    pid, folder = forgotten.process_id, forgotten._process._folder
    assert folder.is_dir()
    assert os.getsid(pid) == pid != os.getsid(0), "Ctrl-C in the terminal does not reach it"
    del forgotten
    assert wait_until(lambda: gone(pid))
    assert not folder.exists()


PARENT = """
import sys, time
from pathlib import Path
from routing_lab.runtime import RuntimeOptions
from routing_lab.runtime.server import ServerRuntime
runtime = ServerRuntime(Path(sys.argv[1]), RuntimeOptions(threads=1), binary=Path(sys.argv[2]))
print(runtime.process_id, flush=True)
if sys.argv[3] == "busy":
    runtime.decode_timing(tokens=4000)
time.sleep(600)
"""


@pytest.mark.model
@pytest.mark.parametrize("state", ["idle", "busy", "stopped"])
def test_the_server_does_not_outlive_a_killed_lab(model: Path, llama_server: Path, state: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(model), str(llama_server), state]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed lab leaves its control file
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as lab:
        server = int(lab.stdout.readline())
        if state == "busy":  # its schedule is read back first, and the decoding begins then
            assert wait_until(lambda: (report := read_report(server)) is not None and bool(report.decode))
            time.sleep(0.3)
        assert not gone(server)
        if state == "stopped":  # then nothing in it can watch the lab
            os.kill(server, signal.SIGSTOP)
        lab.kill()
        lab.wait()
        ended = wait_until(lambda: gone(server))
        if not ended:
            os.kill(server, signal.SIGKILL)
        assert ended


class Impostor(http.server.BaseHTTPRequestHandler):
    """Says that it is healthy, and nothing else that a llama-server would."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "ok"}')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def taken_port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Impostor) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        yield other.server_address[1]
        other.shutdown()


@pytest.mark.model
def test_a_port_that_another_program_took_is_left_to_it(
    model: Path, llama_server: Path, taken_port: int, mixed: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = server_process.free_port
    ports = iter([taken_port])
    monkeypatch.setattr(server_process, "free_port", lambda: next(ports, None) or free())
    with ServerRuntime(model, OPTIONS, binary=llama_server) as runtime:
        assert not runtime.url.endswith(f":{taken_port}")
        assert dict(runtime.apply(mixed).selected) == mixed.resolve(runtime.facts)


@pytest.mark.model
def test_where_every_port_is_taken_the_runtime_says_so(
    model: Path, llama_server: Path, taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "free_port", lambda: taken_port)
    with pytest.raises(RuntimeFailureError, match="5 ports in a row were taken"):
        ServerRuntime(model, OPTIONS, binary=llama_server)


@pytest.mark.model
def test_settings_for_other_servers_in_the_environment_change_nothing_here(
    model: Path, llama_server: Path, mixed: Schedule, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    another = shutil.copy(override_library(), tmp_path / "expert_override-of-last-month.so")
    for name, value in {
        "LD_PRELOAD": f"{another}:libm.so.6",  # two override libraries would each see half of what is built
        "LLAMA_SERVER_ROUTER_PORT": "8080",  # a server with this is a router's child, and ends with it
        "AIP_MODE": "PREDICTION",  # listens where another variable says
        "HTTP_PROXY": "http://127.0.0.1:9",
        "ROUTING_LAB_EXPERTS": "not even a schedule",
        "ROUTING_LAB_CONTROL": "/dev/zero",
        "ROUTING_LAB_WATCH": "77",
        "LLAMA_ARG_N_PREDICT": "1",
        "LLAMA_ARG_MODEL": "/no/such/model",
        "LLAMA_API_KEY": "secret",
    }.items():
        monkeypatch.setenv(name, value)
    with ServerRuntime(model, OPTIONS, binary=llama_server) as runtime:
        runtime.apply(mixed)
        assert runtime.generate(PROMPT, max_tokens=8).tokens == 8
        assert "libm.so.6" in Path(f"/proc/{runtime.process_id}/environ").read_text(), "the user's own is kept"


@pytest.mark.model
def test_an_answer_of_a_program_that_took_the_port_of_a_dead_server_is_no_answer(own: ServerRuntime) -> None:
    process = own._process
    os.kill(process.pid, signal.SIGKILL)
    assert wait_until(lambda: not sockets_listening_on(process.port))
    with http.server.ThreadingHTTPServer(("127.0.0.1", process.port), Impostor) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(RuntimeFailureError, match=r"ended by SIGKILL .* while it was asked for /props"):
            process.request("/props")
        other.shutdown()


@pytest.mark.parametrize("folder", ["with blank", "$LIB"])
def test_a_temporary_folder_that_the_loader_cannot_name_is_refused_in_words(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / folder).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))
    with pytest.raises(RuntimeUnsupportedError, match="set TMPDIR to a plain path"):
        ServerProcess(lambda _port: ["/bin/false"], override_library(), 5.0)


def test_every_signal_can_be_told() -> None:
    told = [ending(-number) for number in range(1, signal.SIGRTMAX + 1)]
    assert told[signal.SIGKILL - 1] == "was ended by SIGKILL (for instance out of memory)"
    assert told[39] == "was ended by signal 40"


# ---------------------------------------------------------------------------------------------------------------------
# What can be missing


@pytest.fixture
def fake_server(tmp_path: Path) -> Callable[[str], Path]:
    """A script that calls itself llama-server; its name says what it is."""

    def write(version: str) -> Path:
        path = tmp_path / "fake-llama-server"
        path.write_text(f"#!/bin/sh\necho 'version: {version}' >&2\n")
        path.chmod(0o755)
        return path

    return write


def test_a_fake_without_libllama_is_refused_with_the_version_it_tells(fake_server: Callable[[str], Path]) -> None:
    with pytest.raises(RuntimeUnsupportedError) as caught:
        find_server(fake_server("4567 (0a1b2c3)"))
    assert "fake-llama-server (4567 (0a1b2c3)) loads no shared libllama" in str(caught.value)
    assert "make llama-server" in str(caught.value)


def test_a_server_on_a_libllama_that_is_too_old_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    library, program = tmp_path / "libllama.so", tmp_path / "fake-old-server"
    compiler = ["gcc", "-w", "-x", "c", "-"]
    symbols = ["llama_decode", "_ZN17llm_graph_context3oldEv", "_ZNK17llm_graph_context13build_moe_ffnEv"]
    source = "".join(f"void {name}(void) {{}}\n" for name in symbols)
    subprocess.run([*compiler, "-shared", "-o", library], input=source, text=True, check=True)
    source = 'void llama_decode(void); int puts(const char *); int main(void) { llama_decode(); puts("version: 1"); }'
    linked = ["-x", "none", str(library), f"-Wl,-rpath,{tmp_path}", "-o", str(program)]
    subprocess.run([*compiler, *linked], input=source, text=True, check=True)
    with pytest.raises(RuntimeUnsupportedError) as caught:
        find_server(program)
    assert f"{program} (1) cannot run per-block counts: {library}: its build_moe_ffn has another signature" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda _path: None, "does not exist"),
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: path.write_text("no program"), "is not executable"),
    ],
    ids=["missing", "folder", "text"],
)
def test_a_named_server_that_is_no_program_is_refused_with_the_ways_out(
    tmp_path: Path, make: Callable[[Path], object], what: str
) -> None:
    path = tmp_path / "llama-server"
    make(path)
    with pytest.raises(RuntimeUnsupportedError, match=f"{what}.*--llama-server PATH.*make llama-server"):
        find_server(path)


def test_a_program_of_another_machine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "llama-server"
    path.write_bytes(b"\x7fELF and then nothing")
    path.chmod(0o755)
    with pytest.raises(RuntimeUnsupportedError, match="cannot be run"):
        find_server(path)


@pytest.mark.model
def test_a_program_in_this_folder_is_found_by_its_name(
    llama_server: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine").symlink_to(llama_server)
    monkeypatch.chdir(tmp_path)
    assert find_server(Path("./mine")).path == tmp_path / "mine"


@pytest.mark.model
def test_a_server_that_was_copied_without_its_libraries_is_told_what_it_lacks(
    llama_server: Path, tmp_path: Path
) -> None:
    alone = shutil.copy(llama_server, tmp_path)
    with pytest.raises(RuntimeUnsupportedError, match=r"the dynamic linker does not find libllama\S*\.so"):
        find_server(Path(alone))


def test_a_script_that_starts_a_server_is_called_a_script(fake_server: Callable[[str], Path]) -> None:
    with pytest.raises(RuntimeUnsupportedError, match=r"it is a script, .* so name that program itself"):
        find_server(fake_server("4567"))


def test_a_program_that_prints_for_ever_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script, child = tmp_path / "endless", tmp_path / "child"
    script.write_text(f"#!/bin/sh\nsleep 600 & echo $! > '{child}'\nwhile :; do echo {'no version ' * 20}; done\n")
    script.chmod(0o755)
    with pytest.raises(RuntimeUnsupportedError, match="it tells no version"):
        find_server(script)
    assert wait_until(lambda: gone(int(child.read_text())))


def test_without_any_server_the_ways_out_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("routing_lab.runtime.server_binary.BUILT_BY_MAKE", tmp_path / "nothing")
    with pytest.raises(RuntimeUnsupportedError, match=r"there is no llama-server here; name one .*make llama-server"):
        find_server()


@pytest.mark.model
def test_the_server_on_path_comes_before_the_one_that_make_built(
    llama_server: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_server().path == llama_server
    (tmp_path / "llama-server").symlink_to(llama_server)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server().path == tmp_path / "llama-server"


def test_the_server_that_make_builds_is_of_the_version_that_the_package_pins() -> None:
    root = Path(__file__).parents[2]
    (pinned,) = re.findall(r'"llama-cpp-python==([\d.]+)"', (root / "pyproject.toml").read_text())
    assert re.findall(r"^version=(.*)$", (root / "scripts" / "build_llama_server.sh").read_text(), re.MULTILINE) == [
        pinned
    ]
    assert root / ".cache" / f"llama.cpp-{pinned}" / "bin" / "llama-server" == BUILT_BY_MAKE


def test_a_model_that_is_missing_is_the_users_file_error(tmp_path: Path) -> None:
    with pytest.raises(UserFileError):
        ServerRuntime(tmp_path / "nothing.gguf")


@pytest.mark.model
def test_a_model_that_the_server_refuses_is_named_with_the_servers_own_reason(
    rewritten: Callable[..., Path], llama_server: Path
) -> None:
    refused = rewritten({"tokenizer.ggml.model": "telepathy"})
    with pytest.raises(RuntimeUnsupportedError, match=r"(?s)cannot serve .*rewritten\.gguf.*telepathy"):
        ServerRuntime(refused, OPTIONS, binary=llama_server)


@pytest.mark.model
def test_a_context_above_what_the_server_gives_is_refused(model: Path, facts: ModelFacts, llama_server: Path) -> None:
    with pytest.raises(RuntimeUnsupportedError, match=f"gives a slot {facts.context_length} tokens"):
        ServerRuntime(model, RuntimeOptions(context_tokens=2 * facts.context_length), binary=llama_server)


@pytest.mark.model
def test_a_graph_that_outgrows_llama_cpp_is_refused_in_words_and_the_runtime_goes_on(
    many_small_experts: Path, llama_server: Path
) -> None:
    with ServerRuntime(many_small_experts, RuntimeOptions(context_tokens=256), binary=llama_server) as runtime:
        with pytest.raises(RuntimeUnsupportedError, match="consults 1536 experts over all blocks"):
            runtime.apply(Schedule.uniform(64, runtime.facts))
        assert set(runtime.apply(Schedule.uniform(16, runtime.facts)).selected.values()) == {16}


@pytest.mark.model
def test_a_server_whose_libllama_binds_its_own_symbols_is_found_out(
    model: Path, llama_server: Path, mixed: Schedule, tmp_path: Path
) -> None:
    build = tmp_path / "bin"
    shutil.copytree(llama_server.parent, build, symlinks=True)
    bind_symbolically(build / "libllama.so.0")
    with ServerRuntime(model, OPTIONS, binary=build / "llama-server") as runtime:
        assert runtime.build.library.startswith(str(build))
        with pytest.raises(RuntimeUnsupportedError, match="-Bsymbolic"):
            runtime.apply(mixed)
        assert runtime.process_id is None, "nothing runs under counts that nobody asked for"


@pytest.mark.model
def test_a_control_file_that_cannot_be_written_is_one_failure(own: ServerRuntime, mixed: Schedule) -> None:
    own.apply(mixed)
    shutil.rmtree(own._process._folder)
    lost = own.process_id
    with pytest.raises(RuntimeFailureError, match="control file cannot be written"):
        own.apply(Schedule.baseline(own.facts))
    assert gone(lost)
    assert dict(own.apply(mixed).selected) == mixed.resolve(own.facts)


@pytest.mark.model
def test_placement_is_passed_on(model: Path, llama_server: Path, mixed: Schedule) -> None:
    placement = Placement(gpu_layers=99, host_experts=(1, 2))
    options = RuntimeOptions(threads=1, context_tokens=256, kv_type="f32", placement=placement)
    with ServerRuntime(model, options, binary=llama_server) as runtime:
        command = Path(f"/proc/{runtime.process_id}/cmdline").read_text().split("\0")
        assert dict(runtime.apply(mixed).selected) == mixed.resolve(runtime.facts)
    for flag, value in {
        "--n-gpu-layers": "99",
        "--override-tensor": r"blk\.(1|2)\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU",
        "--fit": "off",
        "--parallel": "1",
        "--cache-ram": "0",
        "--spec-type": "none",
        "--cache-type-k": "f32",
        "--threads": "1",
    }.items():
        assert command[command.index(flag) + 1] == value


@pytest.mark.parametrize(
    "options",
    [RuntimeOptions(override="off"), RuntimeOptions(library_dir=Path("/lib"))],
)
def test_options_of_the_library_in_process_are_the_callers_mistake(model: Path, options: RuntimeOptions) -> None:
    with pytest.raises(UsageError):
        ServerRuntime(model, options)


# ---------------------------------------------------------------------------------------------------------------------
# Devices of an RPC server, and weights that are read instead of mapped


@pytest.fixture(scope="module")
def device() -> Iterator[RpcServer]:
    with rpc_server(llama_bin()) as server:
        yield server


def loaded(runtime: ServerRuntime) -> dict[str, float]:
    """MiB of weights by where the server's log, asked for more of it, says that they went."""
    log = runtime._process._log
    assert wait_until(lambda: "listening on" in log.text(ended=False))
    sizes = re.findall(r"(\S+) model buffer size = +([\d.]+) MiB", log.text(ended=False))
    return {place: float(size) for place, size in sizes}


@pytest.mark.model
def test_weights_go_to_the_rpc_server_and_the_words_stay_those_of_the_library_in_process(
    model: Path, llama_server: Path, device: RpcServer, in_process: LlamaRuntime, mixed: Schedule
) -> None:
    options = replace(OPTIONS, rpc_servers=(device.endpoint,), placement=Placement(gpu_layers=99, host_experts=(2, 3)))
    with ServerRuntime(model, options, binary=llama_server) as placed:
        for schedule in (Schedule.baseline(placed.facts), mixed):
            assert placed.apply(schedule) == in_process.apply(schedule)
            one, other = (r.generate(PROMPT, max_tokens=24, margins=True) for r in (placed, in_process))
            assert one.text == other.text
            assert one.smallest_margin == pytest.approx(other.smallest_margin, abs=1e-3)
        words = Path(f"/proc/{placed.process_id}/cmdline").read_text().split("\0")[:-1]
        os.kill(placed.process_id, signal.SIGKILL)
        with pytest.raises(RuntimeFailureError):
            placed.generate(PROMPT, max_tokens=2)
        assert placed.generate(PROMPT, max_tokens=24).text == other.text, "and so they do on the next server"
    facts = ModelFacts.read(model)
    on_host = sum(facts.block_bytes[block].routed_experts for block in (2, 3)) / 2**20
    talkative = ServerCommand({}, (*words, "--log-verbosity", "4"))
    with ServerRuntime(model, OPTIONS, binary=llama_server, command=talkative) as placed:
        sizes = loaded(placed)
    on_device = sum(mebibytes for place, mebibytes in sizes.items() if place.startswith("RPC"))
    # What stays besides is the embedding and the metadata.
    assert on_device == pytest.approx(facts.size_bytes / 2**20 - on_host, abs=0.2), sizes


@pytest.mark.model
def test_without_mmap_the_file_is_not_mapped(model: Path, llama_server: Path, mixed: Schedule) -> None:
    mapped = []
    for mmap in (True, False):
        with ServerRuntime(model, replace(OPTIONS, mmap=mmap), binary=llama_server) as runtime:
            mapped.append(str(model.resolve()) in Path(f"/proc/{runtime.process_id}/maps").read_text())
            assert dict(runtime.apply(mixed).selected) == mixed.resolve(runtime.facts)
    assert mapped == [True, False]


@pytest.mark.model
def test_an_rpc_server_that_is_not_there_is_said_to_be_missing(model: Path, llama_server: Path) -> None:
    endpoint = f"127.0.0.1:{server_process.free_port()}"
    options = replace(OPTIONS, rpc_servers=(endpoint,), placement=Placement(gpu_layers=99))
    with pytest.raises(RuntimeUnsupportedError, match=f"no RPC server answers at {endpoint}"):
        ServerRuntime(model, options, binary=llama_server)


@pytest.mark.model
def test_an_rpc_server_that_is_busy_is_named_in_the_failure(model: Path, llama_server: Path, device: RpcServer) -> None:
    options = replace(OPTIONS, rpc_servers=(device.endpoint,), placement=Placement(gpu_layers=99))
    with (
        ServerRuntime(model, options, binary=llama_server),
        pytest.raises(RuntimeFailureError, match=f"{device.endpoint}; an RPC server serves one client at a time"),
    ):
        ServerRuntime(model, replace(options, request_timeout_s=3), binary=llama_server)


# ---------------------------------------------------------------------------------------------------------------------
# The control file


def control(
    generation: str = "900", experts: str = "0-5:2", head: str = "routing_lab control 1", end: str = "end\n"
) -> str:
    return f"{head}\ngeneration {generation}\nexperts {experts}\n{end}"


HOSTILE = {
    "empty": ("", "'routing_lab control ' is missing"),
    "cut before its end": (control(end=""), "'end' is missing"),
    "cut within a count": (control()[:45], "'experts ' is missing or not whole"),
    "something after the end": (control(end="end\nexperts 0:1\n"), "does not stop after"),
    "another version": (control(head="routing_lab control 2"), "not of version 1"),
    "no schedule": (control(experts="0-5:two"), "a number is expected at position 5"),
    "no counts": (control(experts=""), "a number is expected at position 1"),
    "more experts than there are": (control(experts="0-4:8,5:17"), "block 5 should consult 17 experts and has 16"),
    "no experts": (control(experts="0:0"), "cannot consult 0 experts"),
    "a generation that was": (control(generation="0"), "generation 0 is not above"),
    "no generation": (control(generation="-1"), "generation is no number"),
    "a huge generation": (control(generation="9" * 40), "generation is no number"),
    "zero bytes": (control(experts="0:\0"), "bad expert counts"),
    "escape sequences": (control(experts="\x1b[2J0:1"), "a number is expected"),
    "a large file": (control(experts="0:1," * 40_000), "has more than 65536 bytes"),
}


@pytest.mark.model
@pytest.mark.parametrize(("text", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_a_control_file_that_is_not_right_is_refused_and_the_schedule_stays(
    runtime: ServerRuntime, mixed: Schedule, text: str, reason: str
) -> None:
    runtime.apply(mixed)
    before = runtime.generate(PROMPT, max_tokens=16).text
    place(runtime, text)
    assert runtime.generate(PROMPT, max_tokens=16).text == before
    report = read_report(runtime.process_id)
    assert reason in report.refused
    assert {block: row.selected for block, row in report.decode.items()} == mixed.resolve(runtime.facts)
    said = runtime._process._log
    assert wait_until(lambda: "is refused, the schedule stays" in said.text(ended=False))
    assert "\x1b[2J" not in said.text(ended=False)
    assert dict(runtime.apply(mixed).selected) == mixed.resolve(runtime.facts), "the next good one is taken"
    assert read_report(runtime.process_id).refused is None


def place(runtime: ServerRuntime, text: str) -> None:
    """Put a control file where the server looks, whole, as the lab does."""
    path = runtime._process._control
    draft = path.with_suffix(".draft")
    draft.write_bytes(text.encode())
    draft.replace(path)


@pytest.mark.model
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_control_file_that_is_no_file_is_refused(runtime: ServerRuntime, mixed: Schedule, kind: str) -> None:
    runtime.apply(mixed)
    path = runtime._process._control
    path.unlink()
    {"link": lambda: path.symlink_to("/etc/passwd"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    runtime.generate(PROMPT, max_tokens=4)
    assert read_report(runtime.process_id).refused
    path.rmdir() if kind == "folder" else path.unlink()
    assert dict(runtime.apply(mixed).selected) == mixed.resolve(runtime.facts)


@pytest.mark.model
def test_no_graph_is_built_with_two_schedules_however_often_the_control_file_changes(own: ServerRuntime) -> None:
    own.apply(Schedule.baseline(own.facts))
    enough = threading.Event()

    def change() -> None:
        for generation in itertools.count(1000):
            place(own, control(generation=str(generation), experts=f"0-5:{1 + generation % own.facts.experts}"))
            if enough.wait(0.0002):
                return

    changing = threading.Thread(target=change)
    changing.start()
    generations = set()
    try:
        for _ in range(40):
            own.generate(PROMPT, max_tokens=2)
            report = read_report(own.process_id)
            for rows in (report.decode, report.batch):
                assert len({(row.selected, row.summed, row.generation) for row in rows.values()}) == 1
            generations.add(report.decode[0].generation)
    finally:
        enough.set()
        changing.join()
    assert len(generations) > 10, "it did change"


@pytest.mark.parametrize("logprobs", [[-0.1, None], [None, None]])
def test_logits_that_are_no_numbers_are_a_failure(logprobs: list[float | None]) -> None:
    reply = {"completion_probabilities": [{"top_logprobs": [{"logprob": value} for value in logprobs]}]}
    assert math.isnan(_smallest_margin(reply))


# ---------------------------------------------------------------------------------------------------------------------
# The report


def built(selected: int, summed: int, generation: int = 3) -> BuiltBlock:
    return BuiltBlock(8, selected, summed, generation)


def reported(decode: BuiltBlock | None, batch: BuiltBlock | None, generation: int = 3) -> ServerReport:
    rows = ({} if row is None else {4: row} for row in (decode, batch))
    return ServerReport(generation, "4:6", None, *rows)


def test_a_report_that_agrees_attests() -> None:
    for batch in (built(6, 6), None):
        assert dict(attest({4: 6}, reported(built(6, 6), batch), 3).selected) == {4: 6}


@pytest.mark.parametrize(
    ("report", "got", "why"),
    [
        (reported(built(8, 8), built(6, 6)), 8, "single tokens"),
        (reported(built(6, 6), built(8, 8)), 8, "a prompt"),
        (reported(built(6, 8), built(6, 6)), 8, "length of the sum"),
        (reported(built(6, -1), built(6, 6)), -1, "length of the sum"),
        (reported(built(6, 6, generation=2), built(6, 6)), 6, "single tokens was not built anew"),
        (reported(built(6, 6), built(6, 6, generation=2)), 6, "a prompt was not built anew"),
        (reported(None, built(6, 6)), None, "no routed experts"),
    ],
)
def test_any_row_of_a_report_alone_can_refute(report: ServerReport, got: int | None, why: str) -> None:
    with pytest.raises(AttestationError, match=why) as caught:
        attest({4: 6}, report, 3)
    assert (caught.value.block, caught.value.wanted, caught.value.got) == (4, 6, got)


def test_a_server_that_never_calls_the_library_is_found_out() -> None:
    with pytest.raises(RuntimeUnsupportedError, match="-Bsymbolic"):
        attest({4: 6}, None, 3)


def test_a_schedule_that_was_not_taken_is_found_out() -> None:
    with pytest.raises(RuntimeUnsupportedError, match="did not take the schedule"):
        attest({4: 6}, reported(built(6, 6), built(6, 6), generation=2), 3)


WHOLE = "routing_lab report 1\nsequence 7\ngeneration 2\nexperts 0:6\ndecode 0 8 6 6 2\nbatch 0 8 6 6 1\nend 7\n"


def test_a_whole_report_is_read() -> None:
    report = parse_report(WHOLE)
    assert (report.generation, report.experts, report.refused) == (2, "0:6", None)
    assert report.decode == {0: BuiltBlock(8, 6, 6, 2)}
    assert report.batch == {0: BuiltBlock(8, 6, 6, 1)}


@pytest.mark.parametrize("cut", range(len(WHOLE)))
def test_a_report_in_the_middle_of_its_renewal_is_no_report(cut: int) -> None:
    assert parse_report(WHOLE[:cut]) is None
    assert parse_report(WHOLE[:cut].replace("sequence 7", "sequence 8") + WHOLE[cut:]) is None or cut < 31


@pytest.mark.model
def test_the_process_that_listens_on_a_port_is_found(runtime: ServerRuntime) -> None:
    runtime.apply(Schedule.baseline(runtime.facts))
    assert listening_processes(int(runtime.url.rpartition(":")[2])) == [runtime.process_id]
    assert listening_processes(server_process.free_port()) == []
