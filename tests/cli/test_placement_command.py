"""``routing-lab placement`` as a user meets it."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakelab import make_facts, make_probes, make_runtime, make_space
from modelfiles import COUNTS, WIDTH, moe_block, write_gguf
from rpcserver import llama_bin, rpc_server

from routing_lab import demo
from routing_lab.cli import main
from routing_lab.cli import placement as placement_command
from routing_lab.errors import RuntimeUnsupportedError
from routing_lab.model import ModelFacts, ModelMemory
from routing_lab.overrides import parse_placement
from routing_lab.placement import HostTensors, Placement, TensorKind
from routing_lab.placement.plan import plan as plan_of
from routing_lab.runtime import RuntimeOptions
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.search import StudySettings, run_study

MIB_IN_GIB = 1 / 1024


def plan(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, dict[str, object]]:
    code = main(["placement", "plan", *map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_suggestion_is_written_as_a_file_that_gives_the_same_plan(capsys, tmp_path) -> None:
    file = tmp_path / "demo.yaml"
    device = ["--device-gib", 18 * MIB_IN_GIB, "--spare-gib", "0", "--context", "2048"]
    code, suggested = plan(capsys, *device, "-o", file)
    assert code == 0
    written = Placement.load(file)
    written.check(ModelFacts.read(demo.model_path()))
    assert 0 < len(written.host_experts) < 6
    code, again = plan(capsys, "--placement", file, *device[:4])
    assert again == suggested
    assert parse_placement(suggested["flags"]).same_place(written)


def test_a_table_says_what_fits_and_what_a_context_costs(capsys) -> None:
    assert main(["placement", "plan", "--device-gib", "12", "--host-gib", "32"]) == 0
    text = capsys.readouterr().out
    assert "compute (estimate)" in text
    assert "--n-gpu-layers 7" in text
    assert "context against blocks" in text


@pytest.mark.parametrize(("kv_type", "cache"), [("f16", "1.00"), ("f32", "2.00"), ("q8_0", "0.53")])
def test_the_cache_of_a_block_is_shown_in_the_type_that_was_asked_for(capsys, kv_type, cache) -> None:
    assert main(["placement", "plan", "--device-gib", "12", "--context", "4096", "--kv-type", kv_type]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("0-5"))
    assert row.split()[-1] == cache
    code, fields = plan(capsys, "--device-gib", "12", "--context", "4096", "--kv-type", kv_type)
    assert code == 0
    assert fields["device"]["cache_bytes"] / 6 / 2**20 == pytest.approx(float(cache), abs=0.005)


def test_swap_is_warned_about(capsys) -> None:
    assert main(["placement", "plan", "--device-gib", "0.001", "--spare-gib", "0", "--host-gib", "2"]) == 0
    assert "warning: nothing is usable on the host (2.0 GiB kept free of 2.0 GiB)" in capsys.readouterr().out


def test_what_is_kept_free_and_what_is_usable_stand_in_the_table(capsys) -> None:
    assert main(["placement", "plan", "--device-gib", "0.75", "--spare-gib", "0.5", "--host-gib", "32"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "there is 768.0 MiB 32.0 GiB" in lines
    assert "kept free 512.0 MiB 2.0 GiB" in lines
    assert "usable 256.0 MiB 30.0 GiB" in lines
    assert "context against blocks (256.0 MiB usable on the device)" in lines


def test_flags_can_be_pasted_and_blocks_are_all_there_on_a_narrow_terminal(capsys, tmp_path, monkeypatch) -> None:
    file = tmp_path / "p.yaml"
    Placement(99, (1, 3, 5), host_tensors=(HostTensors(TensorKind.ATTENTION, (0, 1, 2, 3, 4, 5)),)).save(file)
    monkeypatch.setattr("routing_lab.cli.output._PIPED_COLUMNS", 72)
    assert main(["placement", "plan", "--device-gib", "12", "--placement", str(file)]) == 0
    text = capsys.readouterr().out
    flags = next(line for line in text.splitlines() if line.startswith("flags: ")).removeprefix("flags: ")
    assert shlex.split(flags) == Placement.load(file).to_flags(short=True)
    assert "'blk" in flags
    assert "placement: all 7 layers on the device" in text
    assert "not the placement above, but those that would be suggested" in text


def test_a_long_list_of_blocks_is_not_cut(tmp_path) -> None:
    from rich.console import Console

    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (10, WIDTH)}
    for block in range(40):
        tensors |= moe_block(block, 4, shared=block % 3 == 0)
    path = write_gguf(tmp_path / "m.gguf", tensors, {**COUNTS, "block_count": 40})
    memory = ModelMemory.read(path)
    out = Console(width=72, record=True, file=io.StringIO())
    out.print(placement_command._block_table(memory, plan_of(memory, Placement())))
    text = out.export_text()
    assert "…" not in text
    assert {str(block) for block in range(0, 40, 3)} <= set(re.findall(r"\d+", text))


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--device-gib", "0"], 2, "needs a number above 0"),
        (["--device-gib", "12", "--spare-gib", "-1"], 2, "needs a number"),
        ([], 2, "--device-gib"),
        (["--device-gib", "1", "--model", "/nowhere.gguf"], 3, "cannot be read"),
        (["--device-gib", "1", "--placement", "/nowhere.yaml"], 3, "cannot be read"),
        (["--device-gib", "1", "--context", "0"], 2, "at least 1"),
        (["--device-gib", "1", "--context", "99999999999"], 2, "must be at most"),
        (["--device-gib", "1e308"], 2, "cannot be planned"),
        (["--device-gib", "1", "--batch", "99999999999"], 2, "must be at most"),
    ],
)
def test_mistakes_get_one_message(capsys, argv, code, said) -> None:
    try:
        got = main(["placement", "plan", *argv])
    except SystemExit as stop:
        got = stop.code
    error = capsys.readouterr().err
    assert got == code
    assert said in error
    assert "Traceback" not in error


def test_a_placement_for_another_model_is_refused(capsys, tmp_path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("model: {architecture: qwen35moe, blocks: 41, experts: 256}\ngpu_layers: 99\n")
    assert main(["placement", "plan", "--device-gib", "1", "--placement", str(file)]) == 3
    error = capsys.readouterr().err
    assert f"error: {file}: 3 problems" in error
    assert "this placement is for another model" in error


def test_the_name_of_a_placement_cannot_forge_a_line(capsys, tmp_path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(r'placement: "x\e[2J\nwarning: y"')
    assert main(["placement", "plan", "--device-gib", "1", "--placement", str(file)]) == 0
    assert "\nx\\x1b[2J\\nwarning: y: everything in host memory\n" in capsys.readouterr().out


@pytest.mark.parametrize("endpoint", ["localhost", ":5", "h:0", "h:99999", "h:x"])
def test_an_endpoint_must_name_host_and_port(capsys, endpoint) -> None:
    assert main(["evaluate", "x.yaml", "--rpc", endpoint]) == 2
    assert "needs HOST:PORT" in capsys.readouterr().err


def test_a_context_in_a_placement_is_used_and_one_on_the_command_line_wins(tmp_path) -> None:
    from routing_lab.cli import app, options

    file = tmp_path / "p.yaml"
    file.write_text("context: 2048\n")
    for argv, tokens in (([], 2048), (["--context", "1024"], 1024)):
        args = app._parser().parse_args(["evaluate", "x.yaml", "--placement", str(file), *argv])
        assert options.runtime_options(args).context_tokens == tokens
    bare = app._parser().parse_args(["evaluate", "x.yaml"])
    assert options.runtime_options(bare).context_tokens == options.CONTEXT


# ---------------------------------------------------------------------------------------------------------------------
# sweep


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--rounds", "2"], "at least 6"),
        (["--blocks", "x"], "blocks: 'x'"),
        (["--blocks", "99"], "the model has 6"),
        (["--layers", "-1"], "--layers needs a whole number"),
        (["--layers", "8"], "layers: "),
        (["--rounds", "1000000"], "at most 300"),
        (["--runtime", "server"], "unrecognized arguments: --runtime"),
        (["--llama-server", "/nowhere"], "unrecognized arguments: --llama-server"),
        (["--context", "4097"], "at most 4096 tokens"),
        (["--tokens", "4081"], "4097 tokens of a turn"),
        (["--tokens", "1", "--context", "31"], "32 tokens of a turn"),
        (["--figure", "x.doc"], "must end in .png"),
        (["--keep-loaded", "--rpc", "127.0.0.1:9"], "does not work with --rpc"),
    ],
)
def test_a_sweep_refuses_mistakes_before_it_loads_anything(capsys, argv, said) -> None:
    try:
        got = main(["placement", "sweep", *argv])
    except SystemExit as stop:
        got = stop.code
    assert got == 2
    assert said in capsys.readouterr().err


def test_a_sweep_whose_table_cannot_be_written_does_not_begin(capsys) -> None:
    assert main(["placement", "sweep", "--csv", "/"]) == 3
    assert "/" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_message(capsys) -> None:
    assert main(["placement", "plan", "--device-gib", "1", "-o", "/dev/full"]) == 3
    assert "/dev/full" in capsys.readouterr().err


@pytest.mark.model
def test_a_sweep_writes_its_table_and_the_chosen_placement_and_says_so(capsys, tmp_path) -> None:
    table, best = tmp_path / "s.csv", tmp_path / "best.yaml"
    table.write_text("what an earlier sweep left\n")
    argv = ["--blocks", "0", "--layers", "0,7", "--tokens", "4", "--context", "256"]
    with rpc_server(llama_bin()) as server:
        argv += ["--rpc", server.endpoint, "--library", str(server.library_dir)]
        code = main(["placement", "sweep", *argv, "--csv", str(table), "-o", str(best)])
    said = capsys.readouterr()
    assert code == 0
    assert f"{table} is replaced after the first round" in said.err
    assert f"written: {table}, {best} (the chosen placement)" in said.out
    chosen = Placement.load(best).name
    assert f"chosen: {chosen}: " in said.out
    assert "note: '7 of 7 layers on the device' is the same placement as 'all on the device'" in said.out
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["placement"] for row in rows] == ["all on the device", "0 of 7 layers on the device"]
    assert all(float(row["tokens_per_s"]) > 0 and int(row["resident_bytes"]) > 1 << 20 for row in rows)
    for row in rows:
        parts = [int(row[f"host_{part}_bytes"]) for part in ("weight", "cache", "compute")]
        assert sum(parts) == int(row["host_bytes"])
    assert chosen in {row["placement"] for row in rows}


@pytest.mark.model
def test_a_sweep_measures_nothing_on_the_host_that_is_named_after_a_device(capsys) -> None:
    argv = ["placement", "sweep", "--blocks", "0", "--layers", "0", "--tokens", "1", "--context", "64", "--keep-loaded"]
    assert main([*argv, "--json"]) == 0
    sweep = json.loads(capsys.readouterr().out)
    device, host = sweep["placements"]
    assert "puts 7 layers on a device" in device["error"]
    assert device["tokens_per_s"] is None
    assert host["tokens_per_s"] > 0
    assert sweep["chosen"] == host["placement"]


def test_a_sweep_of_which_nothing_ran_is_shown_and_a_failure(capsys, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeUnsupportedError("no memory for it")

    monkeypatch.setattr(LlamaRuntime, "__init__", refuse)
    assert main(["placement", "sweep", "--blocks", "0", "--layers", "0", "--json"]) == 4
    said = capsys.readouterr()
    assert [row["error"] for row in json.loads(said.out)["placements"]] == ["no memory for it"] * 2
    assert said.err == "routing-lab: error: no placement ran; the first one: no memory for it\n"


@pytest.mark.model
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_that_is_ended_leaves_the_rounds_that_were_done(tmp_path, number) -> None:
    table = tmp_path / "s.csv"
    argv = ["--blocks", "0,2", "--tokens", "1", "--rounds", "300", "--context", "64", "--csv", str(table)]
    with rpc_server(llama_bin()) as server:
        argv += ["--rpc", server.endpoint, "--library", str(server.library_dir)]
        process = subprocess.Popen(
            [sys.executable, "-m", "routing_lab", "placement", "sweep", *argv], stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 120
        while not table.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["tokens_per_s"]) > 0 for row in rows] == [True, True]
    if number is signal.SIGTERM:
        assert process.returncode == 130, error
        assert re.search(r"interrupted after \d+ of 300 rounds; .*s.csv holds them", error)


@pytest.mark.model
def test_a_sweep_sees_what_a_device_holds(capsys) -> None:
    with rpc_server(llama_bin()) as server:
        argv = ["--rpc", server.endpoint, "--library", str(server.library_dir), "--context", "256", "--tokens", "4"]
        assert main(["placement", "sweep", *argv, "--blocks", "0,3-4", "--layers", "3", "--json"]) == 0
    everything, without, layers = json.loads(capsys.readouterr().out)["placements"]
    assert everything["device_bytes"] - without["device_bytes"] > 2 * 1_200_000  # the experts of two blocks
    assert everything["device_bytes"] > layers["device_bytes"] > 0


@pytest.mark.model
@pytest.mark.parametrize("command", ["evaluate", "validate", "search"])
def test_layers_on_a_device_that_is_not_there_are_refused(command, capsys, tmp_path) -> None:
    schedule = Path(__file__).parent.parent.parent / "schedules" / "demo" / "late-half.yaml"
    words = {
        "evaluate": [str(schedule)],
        "validate": ["--schedule", str(schedule), "--output", str(tmp_path / "c.yaml")],
        "search": ["--storage", str(tmp_path / "s.db"), "--trials", "1"],
    }
    with LlamaRuntime(demo.model_path(), RuntimeOptions(threads=1, context_tokens=64)) as runtime:
        if any("gpu" in device.kind for device in runtime.devices):
            pytest.skip("this machine has a GPU")
    assert main([command, *words[command], "--threads", "1", "--gpu-layers", "99"]) == 4
    error = capsys.readouterr().err
    assert "puts 99 layers on a device" in error
    assert "libllama.so lists none" in error
    assert not (tmp_path / "c.yaml").exists()


@pytest.mark.parametrize(
    ("placement", "words", "answer"),
    [
        ("context: 20", [], (2, "p.yaml: context 20")),
        ("context: 16777216", [], (2, "p.yaml: context 16777216: routing-lab demo MoE was made for at most")),
        ("context: 20", ["--context", "400", "--tokens", "400"], (2, "--context 400")),
        ("host_experts: 7-9", [], (3, "p.yaml: host_experts")),
    ],
)
def test_a_placement_files_context_and_blocks_are_checked_before_loading(
    placement, words, answer, capsys, tmp_path
) -> None:
    code, said = answer
    (tmp_path / "p.yaml").write_text(placement + "\n")
    schedule = Path(__file__).parent.parent.parent / "schedules" / "demo" / "late-half.yaml"
    assert main(["evaluate", str(schedule), "--placement", str(tmp_path / "p.yaml"), "--prefill", "0", *words]) == code
    assert said in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# report --beside


def test_a_report_shows_studies_of_two_placements_in_columns_of_their_own(capsys, tmp_path) -> None:
    facts, storage = make_facts(tmp_path), tmp_path / "s.db"
    for name, placement in (("here", Placement()), ("there", Placement(99, (0,)))):
        runtime = make_runtime(facts, options=RuntimeOptions(placement=placement))
        settings = StudySettings(trials=4)
        run_study(runtime, make_probes(), make_space(), study=name, storage=storage, settings=settings)
    both = ["report", "--storage", str(storage), "--study", "here", "--beside", "there"]
    assert main(both) == 0
    assert "there: the last 99 layers on the device, routed experts of blocks 0" in capsys.readouterr().out
    assert main([*both, "--json"]) == 0
    assert [study["study"] for study in json.loads(capsys.readouterr().out)["studies"]] == ["here", "there"]
    assert main([*both, "--csv", str(tmp_path / "x.csv")]) == 2
    assert "do not rank" in capsys.readouterr().err
