"""Small GGUF files of any shape, and facts without a file, for the tests of what is said about models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import gguf
import numpy as np
from hypothesis import strategies as st

from routing_lab.model import BlockBytes, ModelFacts

WIDTH, INNER = 32, 64


def moe_block(
    block: int, experts: int, *, fused: bool = False, shared: bool = False, router: bool = True
) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape in numpy's order for one routed block."""
    up = ("gate_up", 2 * INNER) if fused else ("up", INNER)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q.weight": (WIDTH, WIDTH),
        f"ffn_{up[0]}_exps.weight": (experts, up[1], WIDTH),
        "ffn_down_exps.weight": (experts, WIDTH, INNER),
    }
    if not fused:
        shapes["ffn_gate_exps.weight"] = (experts, INNER, WIDTH)
    if router:
        shapes["ffn_gate_inp.weight"] = (experts, WIDTH)
    if shared:
        shapes |= {"ffn_up_shexp.weight": (INNER, WIDTH), "ffn_gate_inp_shexp.weight": (1, WIDTH)}
    return {f"blk.{block}.{name}": shape for name, shape in shapes.items()}


def dense_block(block: int) -> dict[str, tuple[int, ...]]:
    return {f"blk.{block}.attn_q.weight": (WIDTH, WIDTH), f"blk.{block}.ffn_up.weight": (INNER, WIDTH)}


def nextn(block: int) -> dict[str, tuple[int, ...]]:
    return {f"blk.{block}.nextn.eh_proj.weight": (WIDTH, 2 * WIDTH)}


def write_gguf(
    path: Path,
    tensors: Mapping[str, tuple[int, ...]],
    metadata: Mapping[str, object] = {},
    *,
    architecture: str | None = "qwen3moe",
    quantized: Iterable[str] = ("_exps",),
    endian: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """Keys without a dot get the architecture's prefix; tensors whose name holds a word of ``quantized`` become Q8_0."""
    writer = gguf.GGUFWriter(path, architecture or "none", endianess=endian)
    if architecture is None:
        writer.kv_data[0].clear()
    for key, value in metadata.items():
        full = key if "." in key else f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            writer.add_array(full, value)
    for name, shape in tensors.items():
        data = np.zeros(shape, dtype=np.float32)
        if any(word in name for word in quantized):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


COUNTS = {"block_count": 3, "expert_count": 4, "expert_used_count": 2, "embedding_length": WIDTH, "context_length": 512}


def write_moe(path: Path, metadata: Mapping[str, object] = {}, blocks: int = 3, **options: bool) -> Path:
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (10, WIDTH)}
    for block in range(blocks):
        tensors |= moe_block(block, 4, **options)
    return write_gguf(path, tensors, {**COUNTS, "block_count": blocks, **metadata})


def make_facts(
    routed: Mapping[int, int],
    experts: int = 16,
    *,
    blocks: int | None = None,
    mtp: tuple[int, ...] = (),
    architecture: str = "qwen3moe",
) -> ModelFacts:
    """Facts of a model whose routed blocks and own counts are given; the other blocks are dense."""
    blocks = blocks if blocks is not None else max([*routed, *mtp], default=0) + 1
    part = BlockBytes(routed_experts=1000, router=10, other=100)
    return ModelFacts(
        files=(Path("model.gguf"),),
        name="Testling",
        architecture=architecture,
        blocks=blocks,
        mtp_blocks=mtp,
        routed_blocks=tuple(sorted(routed)),
        dense_blocks=tuple(block for block in range(blocks) if block not in routed and block not in mtp),
        experts=experts,
        experts_used=dict(sorted(routed.items())),
        shared_experts=0,
        embedding_length=WIDTH,
        expert_feed_forward_length=INNER,
        context_length=512,
        has_chat_template=False,
        quantization="Q8_0",
        parameters=1,
        size_bytes=1,
        block_bytes={
            block: part if block in routed or block in mtp else BlockBytes(other=100) for block in range(blocks)
        },
        other_bytes=50,
    )


@st.composite
def moe_facts(draw: st.DrawFn) -> ModelFacts:
    """A model with routed blocks, gaps of dense ones, and perhaps a block for multi-token prediction at its end."""
    experts = draw(st.integers(1, 64))
    routed = draw(st.dictionaries(st.integers(0, 30), st.integers(1, experts), min_size=1))
    last = max(routed)
    mtp = draw(st.sampled_from([(), (last + 1,)]))
    return make_facts(routed, experts, mtp=mtp, blocks=last + 1 + len(mtp))


@st.composite
def counts_for(draw: st.DrawFn, facts: ModelFacts) -> dict[int, int]:
    """Counts for some of the model's routed blocks."""
    return draw(st.dictionaries(st.sampled_from(facts.routed_blocks), st.integers(1, facts.experts)))
