"""A copy of a model with a schedule in it: the same bytes but for that, and kept only where llama.cpp honours it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from fakelab import make_probes, make_runtime
from modelfiles import COUNTS, WIDTH, moe_block, nextn, write_gguf, write_moe

from routing_lab import demo
from routing_lab.cli import main
from routing_lab.errors import RuntimeUnsupportedError, UsageError, UserFileError
from routing_lab.export import Export, export, gguf_copy
from routing_lab.export.gguf_copy import LABEL_KEY, check_targets, entries, read_copy, write_copy
from routing_lab.model import ModelFacts, model_digest
from routing_lab.model.rewrite import copy_model, stored_counts
from routing_lab.runtime.base import RuntimeOptions
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.schedule import Schedule
from routing_lab.synth import DEEPSEEK_V2_LITE, NEMOTRON_3_NANO_30B_A3B, QWEN3_30B_A3B, QWEN35_35B_A3B, write_model
from routing_lab.validate import validate

LIBRARY = Path("/opt/lab/override.so")
KEY = "qwen3moe.expert_used_count"
ROOT = Path(__file__).parent.parent.parent
SIZES = {"width": 1 / 32, "experts": 8, "vocabulary": 512}


def made_from(facts: ModelFacts, counts: Mapping[int, int], name: str = "cut") -> Export:
    schedule = Schedule.from_counts(name, counts)
    return export(facts, schedule=schedule, unvalidated=True, library=LIBRARY)


def read_metadata(path: Path) -> dict[str, object]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items() if "GGUF." not in name}


def tensors(path: Path) -> dict[str, bytes]:
    return {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(path).tensors}


def rewritten(facts: ModelFacts, folder: Path, changes: Mapping[str, object]) -> Path:
    target = folder / "rewritten.gguf"
    copy_model(facts, [target], changes)
    return target


# ---------------------------------------------------------------------------------------------------------------------
# The bytes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {KEY: [1, 2, 4]},
        {KEY: 3},
        {"general.name": "another, longer name", KEY: [4] * 3},
        {"routing_lab.new": "ü" * 1000, KEY: [1, 1, 2], "qwen3moe.new": 7},
    ],
)
def test_what_is_not_changed_stays_byte_for_byte(changes: dict[str, object], tmp_path: Path) -> None:
    facts = ModelFacts.read(write_moe(tmp_path / "model.gguf", {"general.name": "short", "zz.last": [0.5, 1.5]}))
    copy = rewritten(facts, tmp_path, changes)
    assert read_metadata(copy) == read_metadata(facts.files[0]) | changes
    assert list(read_metadata(copy))[: len(read_metadata(facts.files[0]))] == list(read_metadata(facts.files[0]))
    assert tensors(copy) == tensors(facts.files[0])
    if not changes:
        assert copy.read_bytes() == facts.files[0].read_bytes()
    again = ModelFacts.read(copy)
    assert (again.blocks, again.block_bytes, again.parameters) == (facts.blocks, facts.block_bytes, facts.parameters)


def test_the_whole_vocabulary_of_a_real_model_is_copied(tmp_path: Path) -> None:
    facts = ModelFacts.read(demo.model_path())
    copy = rewritten(facts, tmp_path, {KEY: [1, 2, 3, 4, 5, 6]})
    before, after = read_metadata(facts.files[0]), read_metadata(copy)
    assert {key for key in after if after[key] != before[key]} == {KEY}
    assert tensors(copy) == tensors(facts.files[0])
    assert dict(ModelFacts.read(copy).experts_used) == {0: 1, 1: 2, 2: 3, 3: 4, 4: 5, 5: 6}


def test_the_digest_is_that_of_the_written_files_and_progress_counts_every_byte(tmp_path: Path) -> None:
    facts = ModelFacts.read(write_moe(tmp_path / "model.gguf"))
    counted: list[int] = []
    target = tmp_path / "copy.gguf"
    digest = copy_model(facts, [target], {KEY: 1}, on_progress=counted.append)
    assert digest == model_digest(ModelFacts.read(target))
    assert sum(counted) == target.stat().st_size


def test_a_copy_without_weights_has_their_size_and_no_bytes_of_them(tmp_path: Path) -> None:
    facts = ModelFacts.read(demo.model_path())
    target = tmp_path / "hollow.gguf"
    copy_model(facts, [target], {KEY: [1] * 6}, weights=False)
    assert abs(target.stat().st_size - facts.size_bytes) < 4096
    assert target.stat().st_blocks * 512 < facts.size_bytes / 10
    assert ModelFacts.read(target).parameters == facts.parameters
    assert not any(any(data) for data in tensors(target).values())


def test_a_source_that_shrinks_meanwhile_is_the_users_file_error(tmp_path: Path) -> None:
    facts = ModelFacts.read(write_moe(tmp_path / "model.gguf"))
    with pytest.raises(UserFileError, match="changed while it was copied"):
        copy_model(facts, [tmp_path / "copy.gguf"], {}, on_progress=lambda _count: os.truncate(facts.files[0], 1000))


BOUNDED = """
import resource, sys
from pathlib import Path
from routing_lab.model import ModelFacts
from routing_lab.model.rewrite import copy_model

source, target = map(Path, sys.argv[1:])
facts = ModelFacts.read(source)
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 40 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
copy_model(facts, [target], {"qwen3moe.expert_used_count": [1, 2]})
assert target.stat().st_size > 80 * 2**20
try:
    bytearray(50 * 2**20)
except MemoryError:
    print("the limit holds")
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    source, target = tmp_path / "model.gguf", tmp_path / "copy.gguf"
    write_model(source, QWEN3_30B_A3B.scaled(blocks=2, width=0.5, experts=64, vocabulary=8192))
    done = subprocess.run([sys.executable, "-c", BOUNDED, source, target], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "the limit holds\n"), done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# What is written


def test_every_stored_block_has_an_entry_and_what_no_schedule_reaches_keeps_its_own(tmp_path: Path) -> None:
    sizes = {**COUNTS, "block_count": 4, "nextn_predict_layers": 1}
    shapes = {"token_embd.weight": (10, WIDTH), "blk.0.attn_q.weight": (WIDTH, WIDTH)}
    for block in (1, 2, 3):
        shapes |= moe_block(block, 4)
    facts = ModelFacts.read(write_gguf(tmp_path / "model.gguf", {**shapes, **nextn(3)}, sizes))
    assert (facts.routed_blocks, facts.mtp_blocks) == ((1, 2), (3,))
    assert entries(made_from(facts, {2: 4}), facts)[KEY] == [2, 2, 4, 2]
    assert entries(made_from(facts, {1: 4, 2: 4}), facts)[KEY] == 4, "a uniform schedule stays one number"
    array = ModelFacts.read(rewritten(facts, tmp_path, {KEY: [0, 1, 3, 2]}))
    assert stored_counts(array) == (0, 1, 3, 2)
    assert entries(made_from(array, {2: 4}), array)[KEY] == [0, 1, 4, 2]


def test_a_copy_carries_who_says_that_it_may_be_used(tmp_path: Path) -> None:
    facts = ModelFacts.read(write_moe(tmp_path / "model.gguf"))
    label = entries(made_from(facts, {1: 1}), facts)[LABEL_KEY]
    assert label == "cut (0:2,1:1,2:2), UNVALIDATED: no certificate covers this schedule on this model"
    wanted = Schedule.from_counts("cut", {1: 1})
    certificate = validate(make_runtime(facts, needs={}), make_probes(), [wanted]).require_certificate()
    made = export(facts, certificate=certificate, certificate_file=Path("c.yaml"), library=LIBRARY)
    label = str(entries(made, facts)[LABEL_KEY])
    assert label.startswith(f"cut (0:2,1:1,2:2), validated by c.yaml of {certificate.created}: certificate sha256:")
    assert label.endswith(f"on the original, {model_digest(facts)}")


# ---------------------------------------------------------------------------------------------------------------------
# Where it is written


def test_nothing_is_replaced_not_even_a_dangling_link(tmp_path: Path) -> None:
    facts = ModelFacts.read(write_moe(tmp_path / "model.gguf"))
    (tmp_path / "link.gguf").symlink_to(tmp_path / "nowhere")
    for name in ("model.gguf", "link.gguf", "."):
        with pytest.raises(UsageError, match="is there already"):
            check_targets(tmp_path / name, facts)


def test_a_disk_without_room_is_found_before_the_work(tmp_path: Path) -> None:
    facts = replace(ModelFacts.read(write_moe(tmp_path / "model.gguf")), size_bytes=1 << 60)
    with pytest.raises(UsageError, match=r"needs 1073741824\.0 GiB and its disk has"):
        check_targets(tmp_path / "copy.gguf", facts)


def test_sizes_of_small_models_are_told_in_figures_that_differ(tmp_path: Path) -> None:
    facts = ModelFacts.read(write_moe(tmp_path / "model.gguf"))
    sizes = (replace(facts, size_bytes=size) for size in (10**15, 0))
    with pytest.raises(UsageError, match=r"needs 931322\.6 GiB"):
        check_targets(tmp_path / "copy.gguf", next(sizes))
    assert gguf_copy._size(8 << 20) == "8.0 MiB"


@pytest.mark.parametrize("links", [True, False])
def test_a_name_that_was_taken_while_the_copy_was_written_is_left_alone(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "not on this disk")))
    targets = [tmp_path / f"copy-{number}" for number in (1, 2)]
    written = [tmp_path / f"written-{number}" for number in (1, 2)]
    for file in written:
        file.write_text("ours")
    targets[0].write_text("theirs")
    with pytest.raises(FileExistsError):
        gguf_copy._move(written, targets)
    assert targets[0].read_text() == "theirs"
    assert not targets[1].exists()
    targets[0].unlink()
    for file in written:
        file.write_text("ours")
    gguf_copy._move(written, targets)
    assert [target.read_text() for target in targets] == ["ours", "ours"]
    assert not any(file.exists() for file in written)


def test_a_model_that_changes_after_its_certificate_was_compared_is_not_copied_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_moe(tmp_path / "model.gguf")
    facts = ModelFacts.read(model)
    wanted = Schedule.uniform(1, facts)
    certificate = validate(make_runtime(facts, needs={}), make_probes(), [wanted]).require_certificate()
    made = export(facts, certificate=certificate, certificate_file=Path("c.yaml"))
    with model.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(model, (1, 1))
    monkeypatch.setattr(gguf_copy, "_attest", lambda *_: "a runtime")
    with pytest.raises(UserFileError, match="changed while it was copied"):
        write_copy(made, facts, tmp_path / "out" / "copy.gguf")
    assert list((tmp_path / "out").iterdir()) == []


def split(source: Path, folder: Path) -> ModelFacts:
    """The model as two shards, all metadata in the first."""
    folder.mkdir()
    reader = gguf.GGUFReader(source)
    half = len(reader.tensors) // 2
    for number, part in enumerate((reader.tensors[:half], reader.tensors[half:])):
        path = folder / f"split-{number + 1:05}-of-00002.gguf"
        writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
        for name, field in reader.fields.items() if number == 0 else ():
            if "GGUF." not in name and name != "general.architecture":
                inner = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(name, field.contents(), field.types[0], inner)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in part:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return ModelFacts.read(folder / "split-00001-of-00002.gguf")


def test_the_copy_of_a_split_model_wants_the_name_of_a_first_shard(tmp_path: Path) -> None:
    facts = split(write_moe(tmp_path / "model.gguf"), tmp_path / "split")
    for name in ("copy.gguf", "copy-00001-of-00003.gguf", "copy-00002-of-00002.gguf"):
        with pytest.raises(UsageError, match=r"split into 2 files.*copy-00001-of-00002\.gguf"):
            check_targets(tmp_path / name, facts)
    names = [path.name for path in check_targets(tmp_path / "copy-00001-of-00002.gguf", facts)]
    assert names == ["copy-00001-of-00002.gguf", "copy-00002-of-00002.gguf"]
    (tmp_path / names[1]).touch()
    with pytest.raises(UsageError, match=r"copy-00002-of-00002\.gguf is there already"):
        check_targets(tmp_path / names[0], facts)


# ---------------------------------------------------------------------------------------------------------------------
# With real llama.cpp


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    """The one architecture whose graph asks for the count of each block."""
    path = tmp_path_factory.mktemp("nemotron") / "model.gguf"
    write_model(path, NEMOTRON_3_NANO_30B_A3B.scaled(blocks=9, **SIZES))
    return ModelFacts.read(path)


MIXED = {1: 2, 3: 8, 6: 1}
"""Block 8 keeps its own count."""


@pytest.mark.model
def test_a_copy_that_llama_cpp_honours_is_kept_and_is_the_schedule(nemotron: ModelFacts, tmp_path: Path) -> None:
    made = made_from(nemotron, MIXED)
    copy = write_copy(made, nemotron, tmp_path / "copy.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["copy.gguf"]
    facts = ModelFacts.read(tmp_path / "copy.gguf")
    wanted = {1: 2, 3: 8, 6: 1, 8: 6}
    assert dict(facts.experts_used) == dict(copy.attested) == wanted
    assert read_copy(tmp_path / "copy.gguf", nemotron).resolve(nemotron) == wanted
    assert copy.digest == model_digest(facts)
    assert tensors(tmp_path / "copy.gguf") == tensors(nemotron.files[0])
    text = copy.made.text()
    assert f"\nllama-server --model {tmp_path / 'copy.gguf'} " in text
    assert "LD_PRELOAD" not in text
    assert "read back without the override library on" in text
    assert text.count("UNVALIDATED") >= 2
    assert subprocess.run(["/bin/sh", "-n"], input=text, text=True, check=False).returncode == 0
    computes_what_the_override_computes(tmp_path / "copy.gguf", nemotron)


def computes_what_the_override_computes(copy: Path, nemotron: ModelFacts) -> None:
    options = RuntimeOptions(threads=1, context_tokens=256)
    with (
        LlamaRuntime(nemotron.files[0], options) as override,
        LlamaRuntime(copy, replace(options, override="off")) as plain,
    ):
        plain.apply(Schedule.baseline(plain.facts))
        override.apply(Schedule.baseline(nemotron))
        assert plain.logits("7+5") != override.logits("7+5")
        override.apply(Schedule.from_counts("cut", MIXED))
        assert plain.logits("7+5") == override.logits("7+5")


@pytest.mark.model
def test_a_split_model_becomes_a_split_copy(nemotron: ModelFacts, tmp_path: Path) -> None:
    facts = split(nemotron.files[0], tmp_path / "split")
    folder = tmp_path / "out"
    copy = write_copy(made_from(facts, MIXED), facts, folder / "copy-00001-of-00002.gguf")
    assert sorted(folder.iterdir()) == list(copy.files)
    again = ModelFacts.read(copy.files[0])
    assert dict(again.experts_used) == {1: 2, 3: 8, 6: 1, 8: 6}
    assert copy.digest == model_digest(again)
    assert copy.files[1].read_bytes() == facts.files[1].read_bytes()


@pytest.mark.model
@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({3: 4, 4: 4, 5: 4}, "block 3 should consult 4 experts, the graph consults 8"),
        ({0: 4}, "sums more experts than its router selects"),
    ],
    ids=["less than in block 0", "more than in block 0"],
)
def test_where_the_graph_selects_otherwise_no_copy_is_kept(counts: dict[int, int], said: str, tmp_path: Path) -> None:
    facts = ModelFacts.read(demo.model_path())
    done: list[str] = []
    made = made_from(facts, counts)
    with pytest.raises(RuntimeUnsupportedError, match=f"no copy was kept.* qwen3moe model: .*{said}"):
        write_copy(made, facts, tmp_path / "copy.gguf", on_progress=lambda doing, _count: done.append(doing))
    assert list(tmp_path.iterdir()) == []
    assert done == ["trying the counts on a copy without weights"], "and nothing was copied to find that out"


SHAPES = {
    "qwen3moe": QWEN3_30B_A3B.scaled(blocks=3, **SIZES),
    "qwen35moe": QWEN35_35B_A3B.scaled(blocks=5, **SIZES),
    "deepseek2": DEEPSEEK_V2_LITE.scaled(blocks=3, **SIZES),
    "nemotron_h_moe": NEMOTRON_3_NANO_30B_A3B.scaled(blocks=9, **SIZES),
}


@pytest.mark.model
@pytest.mark.parametrize("architecture", SHAPES)
def test_a_uniform_schedule_is_honoured_everywhere_as_a_number_and_as_equal_entries(
    architecture: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "model.gguf", SHAPES[architecture])
    facts = ModelFacts.read(tmp_path / "model.gguf")
    schedule = Schedule.uniform(3, facts)
    copy = write_copy(made_from(facts, schedule.resolve(facts)), facts, tmp_path / "copy.gguf")
    assert read_metadata(copy.files[0])[f"{architecture}.expert_used_count"] == 3
    assert "--override-kv" not in copy.made.command.argv
    array = rewritten(facts, tmp_path, {f"{architecture}.expert_used_count": [3] * facts.blocks})
    with LlamaRuntime(array, RuntimeOptions(threads=1, context_tokens=256, override="off")) as runtime:
        found = runtime.apply(Schedule.baseline(runtime.facts))
        assert dict(found.selected) == dict(found.summed) == dict(copy.attested) == schedule.resolve(facts)


# ---------------------------------------------------------------------------------------------------------------------
# The command


def run(*words: object) -> int:
    return main(["export", *map(str, words)])


@pytest.fixture
def cut(tmp_path: Path) -> Callable[[str], Path]:
    def write(counts: str) -> Path:
        path = tmp_path / "cut.yaml"
        path.write_text(f"schedule: cut\nexperts_used: {{{counts}}}\n", encoding="utf-8")
        return path

    return write


@pytest.mark.model
def test_the_command_needs_no_override_library_and_says_what_it_wrote_and_how_to_serve_it(
    nemotron: ModelFacts,
    cut: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> Path:
        raise RuntimeUnsupportedError("not built")

    monkeypatch.setattr("routing_lab.runtime.native.override_library", missing)
    words = ("--schedule", cut("1: 2, 3: 8"), "--unvalidated", "--model", nemotron.files[0], "--format", "gguf")
    assert run(*words, "-o", tmp_path / "copy.gguf", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["copy"]["attested"] == "1:2,3:8,6:6,8:6"
    assert document["copy"]["files"] == [str(tmp_path / "copy.gguf")]
    assert document["command"]["env"] == document["environment"] == {}


@pytest.mark.model
def test_the_command_ends_with_4_and_leaves_nothing_where_the_counts_are_not_honoured(
    cut: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run("--schedule", cut("3-5: 4"), "--unvalidated", "--format", "gguf", "-o", out / "copy.gguf") == 4
    error = capsys.readouterr().err
    assert "block 3 should consult 4 experts, the graph consults 8" in error
    assert error.count("error: ") == 1
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--format", "gguf"], "needs -o FILE"),
        (["-o", "serve.sh"], "every other form is printed"),
        (["--format", "gguf", "-o", "x.gguf", "--run"], "--run proves a printed command"),
    ],
)
def test_options_that_do_not_go_together_are_a_usage_error(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--schedule", ROOT / "schedules" / "demo" / "late-half.yaml", "--unvalidated", *words) == 2
    assert said in capsys.readouterr().err


def test_the_model_itself_and_what_is_there_are_not_written_over(
    cut: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_moe(tmp_path / "model.gguf")
    before = model.read_bytes()
    words = ("--schedule", cut("1: 1"), "--unvalidated", "--model", model, "--format", "gguf", "-o")
    assert run(*words, model) == 2
    assert "would write over a file" in capsys.readouterr().err
    (tmp_path / "old.gguf").write_text("old")
    assert run(*words, tmp_path / "old.gguf") == 2
    assert "is there already" in capsys.readouterr().err
    assert (model.read_bytes(), (tmp_path / "old.gguf").read_text()) == (before, "old")


INTERRUPTED = """
import sys, time
from routing_lab import interrupts
from routing_lab.export import gguf_copy
interrupts.end_at_once()
from routing_lab.cli import main
copy_model = gguf_copy.copy_model
def slow(*args, on_progress=lambda count: None, **more):
    def tell(count):
        on_progress(count)
        print("under way", flush=True)
        time.sleep(60)
    return copy_model(*args, on_progress=tell, **more)
gguf_copy.copy_model = slow
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.model
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_the_middle_leaves_nothing_behind(
    number: signal.Signals, cut: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["export", "--schedule", cut("0-5: 4"), "--unvalidated", "--format", "gguf", "-o", out / "copy.gguf"]
    command = [sys.executable, "-c", INTERRUPTED, *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "under way\n"
        assert any(out.iterdir()), "it is under way"
        process.send_signal(number)
        _, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert list(out.iterdir()) == []
