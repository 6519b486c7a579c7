"""The file: its facts, its values, its reproducibility, and the memory it takes to write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
from tiny import TINY

from routing_lab.errors import UserFileError
from routing_lab.model import ModelFacts
from routing_lab.synth import (
    WEIGHT_TYPES,
    TensorPlan,
    WeightType,
    model_name,
    weight_bytes,
    write_model,
)
from routing_lab.synth.weights import tensor_bytes, tensor_chunks


class Expected(NamedTuple):
    blocks: int
    routed: tuple[int, ...]
    mtp: tuple[int, ...]
    dense: tuple[int, ...]
    experts: int
    used: int
    shared: int


EXPECTED = {
    "qwen3moe": Expected(4, (0, 1, 2, 3), (), (), 16, 8, 0),
    "qwen35moe": Expected(9, tuple(range(8)), (8,), (), 16, 8, 1),
    "deepseek2": Expected(4, (1, 2, 3), (), (0,), 16, 6, 2),
    "nemotron_h_moe": Expected(9, (1, 3, 6, 8), (), (0, 2, 4, 5, 7), 16, 6, 1),
    "deepseek2-27": Expected(27, tuple(range(1, 27)), (), (0,), 8, 6, 2),
}


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
@pytest.mark.parametrize("name", TINY)
def test_the_facts_of_the_file_are_those_of_the_shape(name: str, kind: WeightType, tmp_path: Path) -> None:
    shape, path = TINY[name], tmp_path / "model.gguf"
    write_model(path, shape, kind)
    facts = ModelFacts.read(path)
    assert (
        Expected(
            facts.blocks,
            facts.routed_blocks,
            facts.mtp_blocks,
            facts.dense_blocks,
            facts.experts,
            facts.uniform_experts_used or 0,
            facts.shared_experts,
        )
        == EXPECTED[name]
    )
    assert facts.architecture == shape.architecture
    assert facts.name == model_name(shape, kind, 1)
    assert facts.parameters == shape.parameters
    assert facts.quantization == kind.upper()
    assert facts.has_chat_template
    assert facts.expert_feed_forward_length == shape.expert_length
    stored = facts.other_bytes + sum(part.total for part in facts.block_bytes.values())
    assert stored <= weight_bytes(shape, kind) <= facts.size_bytes


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
@pytest.mark.parametrize("name", ["qwen3moe", "qwen35moe", "deepseek2", "nemotron_h_moe"])
def test_every_tensor_has_the_planned_range_centre_and_deviation(name: str, kind: WeightType, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, TINY[name], kind)
    planned = {tensor.name: tensor for tensor in TINY[name].tensors()}
    read = gguf.GGUFReader(path).tensors
    assert [tensor.name for tensor in read] == list(planned)
    for tensor in read:
        plan = planned[tensor.name]
        values = gguf.quants.dequantize(np.array(tensor.data), tensor.tensor_type).astype(np.float64)
        assert values.shape == plan.shape
        slack = 0 if plan.exact else 0.04 * plan.high  # a scale is known to 3 %, and four bits are not symmetric
        assert values.min() >= plan.low - slack - 1e-6, tensor.name
        assert values.max() <= plan.high + slack + 1e-6, tensor.name
        deviation = (plan.high - plan.low) / 12**0.5
        chance = 5 / values.size**0.5  # five standard errors
        assert abs(values.mean() - (plan.low + plan.high) / 2) < deviation * chance, tensor.name
        assert values.std() == pytest.approx(deviation, rel=0.03 + chance), tensor.name


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_all_experts_of_all_blocks_differ(kind: WeightType, tmp_path: Path) -> None:
    path, shape = tmp_path / "model.gguf", TINY["qwen3moe"]
    write_model(path, shape, kind)
    experts = [
        expert.tobytes() for tensor in gguf.GGUFReader(path).tensors if "_exps" in tensor.name for expert in tensor.data
    ]
    assert len(set(experts)) == len(experts) == 3 * shape.blocks * shape.experts


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_a_tensor_of_many_chunks_repeats_none(kind: WeightType) -> None:
    plan = TensorPlan("large", (8 * 1024, 1024), -0.1, 0.1, exact=False)
    chunks = [chunk.tobytes() for chunk in tensor_chunks(plan, kind, 1)]
    assert len(set(chunks)) == len(chunks) > 1
    assert sum(map(len, chunks)) == tensor_bytes(plan, kind)


def test_the_same_seed_gives_the_same_bytes_and_another_one_other_weights(tmp_path: Path) -> None:
    shape, paths = TINY["qwen35moe"], [tmp_path / f"{index}.gguf" for index in range(3)]
    for path, seed in zip(paths, (7, 7, 8), strict=True):
        write_model(path, shape, "q4_0", seed)
    one, again, other = (path.read_bytes() for path in paths)
    assert one == again
    assert len(one) == len(other)
    tail = [np.frombuffer(data[-weight_bytes(shape, "q4_0") :], np.uint8) for data in (one, other)]
    assert np.mean(tail[0] == tail[1]) < 0.1


GOLDEN = [
    "73227c6aadcf53706fd940195d38802961b1",
    "73127c6aadcf53706fd940195d38812961b1f7cacfb8da6f06173a971cfc98263869",
]
GOLDEN_FLOATS = [0.9780123233795166, 1.0058928728103638]


def test_the_stream_of_a_seed_is_the_one_it_always_was() -> None:
    """Seeds are quoted beside measurements, so what they stand for may not change with numpy or with a new version."""
    plan = TensorPlan("blk.0.attn_q.weight", (1, 32), -0.1, 0.1, exact=False)
    exact = TensorPlan("blk.0.attn_norm.weight", (2,), 0.9, 1.1, exact=True)
    drawn = [b"".join(map(bytes, tensor_chunks(plan, kind, 1))).hex() for kind in WEIGHT_TYPES]
    assert drawn == GOLDEN
    (floats,) = (np.frombuffer(bytes(chunk), "<f4") for chunk in tensor_chunks(exact, "q4_0", 1))
    assert floats.tolist() == GOLDEN_FLOATS


def test_progress_counts_every_byte_of_the_weights(tmp_path: Path) -> None:
    shape, counts = TINY["deepseek2"], []
    write_model(tmp_path / "model.gguf", shape, "q4_0", on_progress=counts.append)
    assert sum(counts) == sum(tensor_bytes(tensor, "q4_0") for tensor in shape.tensors())


@pytest.mark.parametrize("stop", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_stops_half_way_leaves_the_old_file_and_nothing_else(stop: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("old")

    def fail(_count: int) -> None:
        raise stop

    with pytest.raises((UserFileError, KeyboardInterrupt)) as caught:
        write_model(path, TINY["qwen3moe"], on_progress=fail)
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]
    assert path.read_text() == "old"
    if isinstance(stop, OSError):
        assert "cannot be written: No space left on device" in str(caught.value)


def test_a_folder_that_is_not_there_is_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserFileError, match="cannot be written"):
        write_model(tmp_path / "nowhere" / "model.gguf", TINY["qwen3moe"])


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserFileError, match="no regular file"):
        write_model(pipe, TINY["qwen3moe"])
    assert pipe.is_fifo()


BOUNDED = """
import resource, sys
from pathlib import Path
from routing_lab.synth import QWEN3_30B_A3B, weight_bytes, write_model

path = Path(sys.argv[1])
write_model(path, QWEN3_30B_A3B.scaled(blocks=1, width=1 / 16, experts=2))  # all imports, the whole vocabulary
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 100 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
shape = QWEN3_30B_A3B.scaled(blocks=1, vocabulary=40_000)
write_model(path, shape)
assert path.stat().st_size >= weight_bytes(shape, "q4_0") >= 400 * 2**20
try:
    bytearray(110 * 2**20)
except MemoryError:
    print("the limit holds")
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """A file of 400 MiB with tensors of 108, under a limit of 100 MiB above what a process with all imports has."""
    path = tmp_path / "model.gguf"
    done = subprocess.run([sys.executable, "-c", BOUNDED, path], capture_output=True, text=True, check=False)
    path.unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the limit holds\n"


def test_a_link_goes_on_leading_to_the_file_that_is_written(tmp_path: Path) -> None:
    """``-o /dev/stdout > model.gguf``: the link belongs to the system, and its folder is no place to write to."""
    (tmp_path / "links").mkdir()
    link, file = tmp_path / "links" / "stdout", tmp_path / "model.gguf"
    file.write_text("old")
    link.symlink_to(file)
    write_model(link, TINY["qwen3moe"])
    assert link.is_symlink()
    assert ModelFacts.read(file).architecture == "qwen3moe"
    assert [entry.name for entry in link.parent.iterdir()] == ["stdout"]


@pytest.mark.parametrize("name", ["a" * 250 + ".gguf", "ä" * 120 + ".gguf"])
def test_a_name_as_long_as_names_get_is_written(tmp_path: Path, name: str) -> None:
    write_model(tmp_path / name, TINY["qwen3moe"])
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_links_in_a_circle_are_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(UserFileError, match="cannot be written"):
        write_model(tmp_path / "a", TINY["qwen3moe"])
