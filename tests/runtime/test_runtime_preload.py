"""The override library without this package: by LD_PRELOAD, and with several contexts in one process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_overrides import BAD_ARGUMENTS

from routing_lab.model import ModelFacts
from routing_lab.overrides import EXPERTS_ENV, KvOverride, argument_overrides, render_override_kv
from routing_lab.runtime import RuntimeOptions
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.runtime.native import override_library
from routing_lab.schedule import Schedule, format_counts

BARE = Path(__file__).parent / "bare_llama.py"
PROMPT = "Q: 347+86=?\n"


def run_preloaded(command: list[str], experts: str | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LD_PRELOAD": str(override_library())}
    environment.pop(EXPERTS_ENV, None)
    if experts is not None:
        environment[EXPERTS_ENV] = experts
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def bare(model: Path, task: str, *arguments: str, experts: str | None = None, preload: bool = True) -> dict:
    command = [sys.executable, str(BARE), task, str(model), *arguments]
    if preload:
        done = run_preloaded(command, experts)
    else:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "stderr": done.stderr}


@pytest.fixture(scope="module")
def runtime(model: Path) -> Iterator[LlamaRuntime]:
    with LlamaRuntime(model, RuntimeOptions(context_tokens=256)) as one:
        yield one


@pytest.mark.model
def test_a_bare_llama_process_under_preload_has_the_very_logits_of_the_runtime(
    model: Path, facts: ModelFacts, runtime: LlamaRuntime, mixed: Schedule
) -> None:
    for schedule in (mixed, Schedule.baseline(facts)):
        runtime.apply(schedule)
        seen = bare(model, "logits", PROMPT, experts=schedule.key(facts))
        assert seen["logits"] == runtime.logits(PROMPT).hex()
        assert f"routing_lab: experts per block {schedule.key(facts)}\n" in seen["stderr"]


@pytest.mark.model
def test_preload_without_a_schedule_changes_nothing(model: Path, facts: ModelFacts, runtime: LlamaRuntime) -> None:
    runtime.apply(Schedule.baseline(facts))
    seen = bare(model, "logits", PROMPT)
    assert seen["logits"] == runtime.logits(PROMPT).hex()
    assert "routing_lab" not in seen["stderr"]


@pytest.mark.model
def test_a_count_above_what_the_block_has_stops_the_program(model: Path, facts: ModelFacts) -> None:
    command = [sys.executable, str(BARE), "logits", str(model), PROMPT]
    done = run_preloaded(command, f"2:{facts.experts + 1}")
    assert done.returncode == 4
    assert f"block 2 should consult {facts.experts + 1} experts and has {facts.experts}" in done.stderr


@pytest.mark.model
def test_a_warm_up_passes_untouched(model: Path, facts: ModelFacts, mixed: Schedule) -> None:
    seen = bare(model, "warm-up", experts=mixed.key(facts))
    assert seen["warm-up"] == [facts.experts] * len(facts.routed_blocks)
    assert seen["after"] == list(mixed.resolve(facts).values())


@pytest.mark.model
def test_live_contexts_keep_their_schedules_while_their_graphs_are_reused(
    model: Path, facts: ModelFacts, runtime: LlamaRuntime, mixed: Schedule
) -> None:
    one = Schedule.uniform(1, facts)
    keys = [schedule.key(facts) for schedule in (mixed, one)]
    seen = bare(model, "two-contexts", str(override_library()), PROMPT, *keys, preload=False)
    alone = []
    for schedule in (mixed, one):
        runtime.apply(schedule)
        alone.append(runtime.logits(PROMPT).hex())
    assert seen["first"] == alone
    assert seen["again"] == alone, "set before each build"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "a number is expected at position 1"),
        ("eight", "a number is expected at position 1"),
        ("0-6", "':' is expected at position 4"),
        ("0-6:", "a number is expected at position 5"),
        ("0-6:6,", "an entry is expected after the last ','"),
        ("0-6:6;7:5", "',' is expected at position 6"),
        ("6-0:6", "block range 6-0 is impossible"),
        ("0-99999999:6", "block range 0-99999999 is impossible"),
        ("0:99999999999", "',' is expected"),
        ("3:0", "block 3 cannot consult 0 experts"),
        ("0-6:6,6:5", "block 6 is given twice"),
        (" 0:6", "a number is expected at position 1"),
        ("0:-6", "a number is expected at position 3"),
    ],
)
def test_a_program_with_a_bad_schedule_in_its_environment_does_not_start(text: str, problem: str) -> None:
    done = run_preloaded(["/bin/echo", "started"], text)
    assert done.returncode == 4
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert EXPERTS_ENV in done.stderr
    assert problem in done.stderr
    assert 'the form is "0-6:6,7-32:5"' in done.stderr


def echo(*arguments: str, experts: str | None = None) -> subprocess.CompletedProcess[str]:
    """A program without libllama under the library, with a command line of its own."""
    return run_preloaded(["/bin/echo", "started", *arguments], experts)


@given(
    st.dictionaries(st.integers(0, 4095), st.integers(1, 4096), min_size=2, max_size=200),
    st.sampled_from(["--override-kv", "--override_kv"]),
)
@settings(max_examples=10)
def test_the_library_reads_from_the_command_line_what_was_rendered_for_it(counts: dict[int, int], option: str) -> None:
    # The environment is the witness: what contradicts it does not start.
    experts = format_counts(counts)
    others = [KvOverride("tokenizer.x", "str", 'a "quoted", text'), KvOverride("a.b", "int", "7")]
    ours = argument_overrides(experts)
    whole = render_override_kv([others[0], *reversed(ours), others[1]])
    apart = [word for override in ours for word in (option, str(override))]
    single = ",".join(f"{block}:{count}" for block, count in sorted(counts.items()))
    for arguments in ([option, whole], apart):
        for same in (experts, single):
            assert echo(*arguments, experts=same).returncode == 0
        for other in (counts | {min(counts): counts[min(counts)] + 1}, dict(list(counts.items())[1:])):
            done = echo(*arguments, experts=format_counts(other))
            assert (done.returncode, done.stdout) == (4, "")
            assert f"the command line asks for {experts} and {EXPERTS_ENV} for {format_counts(other)}" in done.stderr
            assert done.stderr.count("\n") == 1


def test_a_baseline_that_says_so_does_not_start_under_a_schedule_of_the_environment() -> None:
    own = ("--override-kv", "routing_lab.experts_used=str:own")
    assert echo(*own).returncode == 0
    done = echo(*own, experts="0-6:6")
    assert done.returncode == 4
    assert "the command line asks for own and ROUTING_LAB_EXPERTS for 0-6:6: take one of them away" in done.stderr


@pytest.mark.parametrize(("text", "problem"), BAD_ARGUMENTS.items())
def test_a_program_with_a_bad_schedule_on_its_command_line_does_not_start(text: str, problem: str) -> None:
    done = echo("--override-kv", text)
    assert (done.returncode, done.stdout) == (4, "")
    assert re.search(rf"^routing_lab: --override-kv: .*({problem})", done.stderr)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--override-kv", "qwen3moe.expert_used_count=int:6"),
        ("--override-kv", '"a=str:x,routing_lab.nonsense=str:y"'),
        ("--prompt", "routing_lab.experts_used=str:nonsense"),
        ("--override-kv",),
    ],
)
def test_a_command_line_without_a_schedule_is_left_alone(arguments: tuple[str, ...]) -> None:
    done = echo(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert echo(*arguments, experts="0:6").returncode == 0


def test_a_program_that_has_no_libllama_runs_under_a_good_schedule() -> None:
    done = run_preloaded(["/bin/echo", "started"], "0-6:6,7-32:5")
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")


def test_a_server_on_a_libllama_without_the_functions_does_not_start(tmp_path: Path) -> None:
    library, program = tmp_path / "libllama.so", tmp_path / "server"
    compiler = ["gcc", "-x", "c", "-"]
    subprocess.run([*compiler, "-shared", "-o", library], input="void llama_decode(void) {}", text=True, check=True)
    source = "void llama_decode(void); int main(void) { llama_decode(); return 0; }"
    linked = ["-x", "none", str(library), f"-Wl,-rpath,{tmp_path}", "-o", str(program)]
    subprocess.run([*compiler, *linked], input=source, text=True, check=True)
    done = run_preloaded([str(program)], "0:6")
    assert done.returncode == 4
    assert "does not have both functions that the expert override replaces" in done.stderr
    assert run_preloaded([str(program)], None).returncode == 0
    argued = run_preloaded([str(program), "--override-kv", "routing_lab.experts_used=str:own"], None)
    assert (argued.returncode, "routing_lab.experts_used is set, but" in argued.stderr) == (4, True)


def preloaded_environment(**more: str) -> dict[str, str]:
    return {**os.environ, "LD_PRELOAD": str(override_library()), **more}


def test_a_program_under_watch_ends_when_the_other_end_closes_and_hands_the_watch_to_no_child() -> None:
    watched, ours = os.pipe()
    command = ["sh", "-c", "env | grep -c ROUTING_LAB_WATCH; read nothing"]
    environment = preloaded_environment(ROUTING_LAB_WATCH=str(watched))
    with subprocess.Popen(
        command, env=environment, pass_fds=[watched], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        os.close(watched)
        assert program.stdout.readline() == "0\n"
        assert program.poll() is None
        os.close(ours)
        assert program.wait(timeout=30) == 0


@pytest.mark.parametrize("number", ["", "two", "-1", "987654"])
def test_a_watch_on_no_descriptor_stops_the_program(number: str) -> None:
    environment = preloaded_environment(ROUTING_LAB_WATCH=number)
    done = subprocess.run(["/bin/echo", "started"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (4, "")
    assert "ROUTING_LAB_WATCH names no open descriptor" in done.stderr
