"""The sizes are those of the published models, and stay a model at any scale."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TINY

from routing_lab.errors import UsageError
from routing_lab.synth import (
    DEEPSEEK_V2_LITE,
    NEMOTRON_3_NANO_30B_A3B,
    QWEN3_30B_A3B,
    QWEN35_35B_A3B,
    SHAPES,
    Qwen35Moe,
    Shape,
    TensorPlan,
    weight_bytes,
)


def named(shape: Shape) -> dict[str, TensorPlan]:
    tensors = list(shape.tensors())
    by_name = {tensor.name: tensor for tensor in tensors}
    assert len(by_name) == len(tensors), "no name twice"
    return by_name


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        (QWEN3_30B_A3B, 30.5e9),
        (QWEN35_35B_A3B, 35e9),
        (DEEPSEEK_V2_LITE, 15.7e9),
        (NEMOTRON_3_NANO_30B_A3B, 31.6e9),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_main_pass_has_the_published_number_of_parameters(shape: Shape, published: float) -> None:
    assert shape.parameters - shape.mtp_parameters == pytest.approx(published, rel=0.01)


def test_active_parameters_are_the_published_ones_as_far_as_those_are_told() -> None:
    """Model cards cut them off after two digits, and do not all count the input embedding: a token reads one row."""
    assert QWEN3_30B_A3B.active_parameters == pytest.approx(3.3e9, rel=0.02)
    embedding = DEEPSEEK_V2_LITE.vocabulary * DEEPSEEK_V2_LITE.embedding_length
    assert DEEPSEEK_V2_LITE.active_parameters - embedding == pytest.approx(2.4e9, rel=0.03)
    assert QWEN35_35B_A3B.active_parameters == pytest.approx(3.4e9, rel=0.03), "3 B and the vocabulary, twice"
    assert NEMOTRON_3_NANO_30B_A3B.active_parameters == pytest.approx(3.6e9, rel=0.02)


def test_consulting_every_expert_makes_all_parameters_of_the_main_pass_active() -> None:
    for shape in SHAPES.values():
        everything = replace(shape, experts_used=shape.experts)
        assert everything.active_parameters == shape.parameters - shape.mtp_parameters


def test_the_pattern_of_blocks_stays_at_every_number_of_blocks() -> None:
    for blocks in (2, 5, 9, 41, 50):
        tensors = named(QWEN35_35B_A3B.scaled(blocks=blocks))
        linear = [block for block in range(blocks) if f"blk.{block}.ssm_a" in tensors]
        full = [block for block in range(blocks) if f"blk.{block}.attn_q.weight" in tensors]
        drafting = [block for block in range(blocks) if f"blk.{block}.nextn.eh_proj.weight" in tensors]
        assert drafting == [blocks - 1]
        assert full == [block for block in range(blocks) if block % 4 == 3 or block == blocks - 1]
        assert sorted(linear + full) == list(range(blocks))
    for blocks in (2, 27):
        tensors = named(DEEPSEEK_V2_LITE.scaled(blocks=blocks))
        assert [block for block in range(blocks) if f"blk.{block}.ffn_gate.weight" in tensors] == [0]
    for blocks in (6, 52, 60):
        shape = NEMOTRON_3_NANO_30B_A3B.scaled(blocks=blocks)
        tensors = named(shape)
        parts = {"M": "ssm_a", "*": "attn_q.weight", "E": "ffn_up_exps.weight"}
        kinds = [[kind for kind in parts if f"blk.{block}.{parts[kind]}" in tensors] for block in range(blocks)]
        assert kinds == [[kind] for kind in (shape.pattern * 2)[:blocks]]
        assert shape.dense_blocks == sum(kind != ["E"] for kind in kinds)


def test_norms_and_routers_are_exact_and_matrices_are_not() -> None:
    for shape in TINY.values():
        for name, tensor in named(shape).items():
            small = any(part in name for part in ("ffn_gate_inp", "conv1d", ".ssm_d", ".ssm_norm"))
            assert tensor.exact == (len(tensor.shape) == 1 or small or name.endswith(".ssm_a")), name


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from(list(SHAPES.values())),
    blocks=st.integers(6, 60),
    width=st.floats(0.001, 2),
    experts=st.integers(1, 300),
    vocabulary=st.integers(259, 300_000),
)
def test_every_scale_is_a_shape_that_quantised_rows_and_heads_divide(
    shape: Shape, blocks: int, width: float, experts: int, vocabulary: int
) -> None:
    scaled = shape.scaled(blocks=blocks, width=width, experts=experts, vocabulary=vocabulary)
    assert (scaled.blocks, scaled.experts, scaled.vocabulary) == (blocks, experts, vocabulary)
    assert 1 <= scaled.experts_used <= experts
    for tensor in scaled.tensors():
        assert all(size > 0 for size in tensor.shape)
        assert tensor.exact or tensor.shape[-1] % 32 == 0, tensor
    for many, few in scaled.scaled_heads:
        assert getattr(scaled, many) % getattr(scaled, few) == 0
    assert scaled.active_parameters <= scaled.parameters


def test_full_scale_changes_nothing_and_half_the_width_a_quarter_of_the_experts() -> None:
    for shape in SHAPES.values():
        assert shape.scaled() == shape
        half, tensors = named(shape.scaled(width=0.5)), named(shape)
        block = f"blk.{shape.blocks - 1}.ffn_down_exps.weight"
        assert half[block].elements * 4 == tensors[block].elements
    half = QWEN35_35B_A3B.scaled(width=0.5)
    assert isinstance(half, Qwen35Moe)
    assert (half.heads, half.kv_heads, half.linear_key_heads, half.linear_value_heads) == (8, 1, 8, 16)
    assert (half.head_length, half.linear_head_length) == (256, 128)


def test_four_bits_take_four_and_a_half_bits_a_weight_and_eight_take_eight_and_a_half() -> None:
    shape = QWEN3_30B_A3B
    assert weight_bytes(shape, "q4_0") == pytest.approx(shape.parameters * 4.5 / 8, rel=0.01)
    assert weight_bytes(shape, "q8_0") == pytest.approx(shape.parameters * 8.5 / 8, rel=0.01)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"blocks": 1}, "2 to 512 blocks, not 1"),
        ({"blocks": 513}, "not 513"),
        ({"experts": 1025}, "1 to 1024 experts"),
        ({"vocabulary": 258}, "at least 259 tokens"),
        ({"width": 9.0}, "up to 8, not 9"),
        ({"width": float("nan")}, "not nan"),
    ],
)
def test_sizes_that_make_no_model_are_a_usage_error(sizes: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        QWEN35_35B_A3B.scaled(**sizes)
