from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from routing_lab.demo import model_path
from routing_lab.model import ModelFacts
from routing_lab.runtime import RuntimeOptions
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.schedule import Schedule


@pytest.fixture(scope="session")
def model() -> Path:
    return model_path()


@pytest.fixture(scope="session")
def facts(model: Path) -> ModelFacts:
    return ModelFacts.read(model)


@pytest.fixture(scope="session")
def mixed(facts: ModelFacts) -> Schedule:
    """Below, at and above the model's own counts, no two neighbours alike."""
    steps = (1, facts.experts, 3, facts.experts - 1, 2)
    return Schedule.from_counts("mixed", {block: steps[i % len(steps)] for i, block in enumerate(facts.routed_blocks)})


@pytest.fixture(scope="module")
def runtime(model: Path) -> Iterator[LlamaRuntime]:
    # Small batches, so that prompts of a few dozen tokens take several. One thread, because several wait for each other
    # by spinning, which takes minutes on a busy machine; other tests use all cores.
    with LlamaRuntime(model, RuntimeOptions(threads=1, context_tokens=1024, batch_tokens=32)) as one:
        yield one


@pytest.fixture(scope="module")
def stock(model: Path) -> Iterator[LlamaRuntime]:
    """The same without the override library."""
    with LlamaRuntime(model, RuntimeOptions(threads=1, context_tokens=1024, batch_tokens=32, override="off")) as one:
        yield one


def metadata(source: gguf.GGUFReader, writer: gguf.GGUFWriter, replaced: dict[str, object]) -> None:
    """Write the metadata of ``source`` with the replacements, all of which must be keys of it."""
    for name, field in source.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = replaced.pop(name, field.contents())
        many = isinstance(value, list)
        kind = gguf.GGUFValueType.ARRAY if many else field.types[0]
        writer.add_key_value(name, value, kind, field.types[-1] if many else None)
    assert not replaced, f"not in the model: {replaced}"


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def rewritten(model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a copy of the model with some metadata replaced."""

    def write(replaced: dict[str, object]) -> Path:
        source = gguf.GGUFReader(model)
        target = tmp_path / "rewritten.gguf"
        writer = gguf.GGUFWriter(target, source.fields["general.architecture"].contents())
        metadata(source, writer, replaced)
        for tensor in source.tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        finish(writer)
        return target

    return write


@pytest.fixture
def many_small_experts(model: Path, tmp_path: Path) -> Path:
    """A model of random weights: 24 blocks with 64 experts each, of which it uses 8, and next to no width."""
    blocks, experts, width, vocabulary = 24, 64, 32, 98
    sizes = {"block_count": blocks, "expert_count": experts, "expert_used_count": 8, "embedding_length": width}
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 1}
    sizes |= {"attention.key_length": 16, "attention.value_length": 16}
    sizes |= {"expert_feed_forward_length": 16, "feed_forward_length": 16}
    target = tmp_path / "many-small-experts.gguf"
    writer = gguf.GGUFWriter(target, "qwen3moe")
    metadata(gguf.GGUFReader(model), writer, {f"qwen3moe.{name}": value for name, value in sizes.items()})
    dice = np.random.default_rng(0)
    shapes = {"token_embd": (vocabulary, width), "output": (vocabulary, width), "output_norm": (width,)}
    block = {"attn_norm": (width,), "ffn_norm": (width,), "attn_q_norm": (16,), "attn_k_norm": (16,)}
    block |= {"attn_q": (32, width), "attn_k": (16, width), "attn_v": (16, width), "attn_output": (width, 32)}
    block |= {"ffn_gate_inp": (experts, width), "ffn_down_exps": (experts, width, 16)}
    block |= {"ffn_gate_exps": (experts, 16, width), "ffn_up_exps": (experts, 16, width)}
    shapes |= {f"blk.{index}.{name}": shape for index in range(blocks) for name, shape in block.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", dice.standard_normal(shape).astype(np.float32))
    finish(writer)
    return target
