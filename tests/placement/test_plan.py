"""Memory plans: caches by the rules of llama.cpp, sums over tensors, and the suggestion that is no larger than needed.

That llama.cpp really takes what is planned is tested on a second device, in ``tests/runtime/test_runtime_rpc.py``.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modelfiles import COUNTS, INNER, WIDTH, dense_block, make_facts, moe_block, nextn, write_gguf, write_moe

from routing_lab.errors import UserFileError
from routing_lab.model import BlockCache, ModelMemory, TensorInfo
from routing_lab.placement import HostTensors, Placement, TensorKind
from routing_lab.placement import plan as planning
from routing_lab.placement.plan import GIB, Limits, kinds_of_blocks, plan, suggest, trade
from routing_lab.placement.published import PublishedTable

MIB = 2**20
PUBLISHED = Path(__file__).parent.parent.parent / "placements" / "published"


def tensor(name: str, size_bytes: int, shape: tuple[int, ...] = (1,)) -> TensorInfo:
    return TensorInfo(name, shape, "Q8_0", size_bytes, size_bytes)


def make_memory(blocks: int = 6, *, expert_mib: int = 100, tied: bool = False) -> ModelMemory:
    """Blocks of three expert tensors, ten MiB of attention and two KiB of cache per token."""
    tensors = [tensor("token_embd.weight", 50 * MIB, (64, 1000)), tensor("output_norm.weight", 1000)]
    if not tied:
        tensors.append(tensor("output.weight", 50 * MIB))
    for block in range(blocks):
        tensors += [tensor(f"blk.{block}.ffn_{part}_exps.weight", expert_mib * MIB) for part in ("up", "gate", "down")]
        tensors += [tensor(f"blk.{block}.attn_q.weight", 10 * MIB), tensor(f"blk.{block}.ffn_gate_inp.weight", MIB)]
    caches = dict.fromkeys(range(blocks), BlockCache(512, 512))
    return ModelMemory(make_facts(dict.fromkeys(range(blocks), 8)), tuple(tensors), caches, 0, 1000, 0)


MEMORY = make_memory()
placements = st.builds(
    Placement,
    gpu_layers=st.integers(0, 9),
    host_experts=st.sets(st.integers(0, 5)).map(tuple),
    host_tensors=st.dictionaries(
        st.sampled_from(sorted(set(TensorKind) - {TensorKind.SHARED_EXPERTS})),
        st.sets(st.integers(0, 5), min_size=1).map(tuple),
    ).map(lambda parts: tuple(HostTensors(kind, blocks) for kind, blocks in parts.items())),
    host_output=st.booleans(),
    host_kv=st.booleans(),
)


# ---------------------------------------------------------------------------------------------------------------------
# What a block caches

ATTENTION = {"attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": 16}
ATTENTION |= {"attention.value_length": 12}


def read(tmp_path: Path, metadata: dict[str, object], architecture: str = "qwen3moe", **more: object) -> ModelMemory:
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (10, WIDTH)}
    for block in range(4):
        tensors |= moe_block(block, 4)
    keys = {f"{architecture}.{name}": value for name, value in {**COUNTS, "block_count": 4, **metadata}.items()}
    return ModelMemory.read(write_gguf(tmp_path / "m.gguf", tensors | more, keys, architecture=architecture))


def test_grouped_queries_cache_the_heads_of_keys_and_values_only(tmp_path) -> None:
    memory = read(tmp_path, ATTENTION)
    assert memory.caches == dict.fromkeys(range(4), BlockCache(32, 24))
    assert memory.cache_bytes(0, 1024, 512) == 1024 * (32 + 24) * 2
    assert memory.cache_bytes(0, 1024, 512, element_bytes=4) == 1024 * (32 + 24) * 4
    # llama.cpp rounds a context up to a multiple of 256.
    assert memory.cache_bytes(0, 1000, 512) == memory.cache_bytes(0, 1024, 512)


def test_head_lengths_that_are_not_given_follow_from_the_width(tmp_path) -> None:
    memory = read(tmp_path, {"attention.head_count": 8})
    assert memory.caches[0] == BlockCache(WIDTH, WIDTH)


def test_heads_may_differ_between_blocks(tmp_path) -> None:
    memory = read(tmp_path, {**ATTENTION, "attention.head_count_kv": [1, 2, 3, 4]})
    assert [memory.caches[block].key_elements for block in range(4)] == [16, 32, 48, 64]


@pytest.mark.parametrize(
    ("architecture", "metadata", "windowed"),
    [
        ("gpt-oss", {}, [0, 2]),
        ("afmoe", {}, [0, 1, 2]),
        ("laguna", {}, [1, 2, 3]),
        ("mimo2", {"attention.sliding_window_pattern": [False, True, True, False]}, [1, 2]),
        ("gpt-oss", {"attention.sliding_window_pattern": 4}, [0, 1, 2]),
        ("muse-glimmer", {}, [0, 1, 2]),
        ("olmo2", {}, [0, 1, 2]),
        ("gemma3n", {}, [0, 1, 2, 3]),
        ("plamo3", {}, [0, 1, 2, 3]),
    ],
)
def test_blocks_with_a_sliding_window_cache_the_window_and_a_batch(tmp_path, architecture, metadata, windowed) -> None:
    memory = read(tmp_path, {**ATTENTION, "attention.sliding_window": 128, **metadata}, architecture)
    assert [block for block, cache in memory.caches.items() if cache.windowed] == windowed
    for block in range(4):
        # (128 + 512) rounded up to a multiple of 256
        assert memory.cached_tokens(block, 8192, 512) == (768 if block in windowed else 8192)
        assert memory.cached_tokens(block, 256, 512) == 256


def test_a_window_that_cannot_be_assigned_is_counted_in_full_and_said(tmp_path) -> None:
    memory = read(tmp_path, {**ATTENTION, "attention.sliding_window": 128}, "qwen3moe")
    assert memory.cached_tokens(0, 8192, 512) == 8192
    assert "sliding window is unknown" in " ".join(memory.notes)


@pytest.mark.parametrize(
    ("architecture", "given", "window"),
    [
        ("llama4", None, 8192),
        ("llama4", 16, 8192),
        ("llama4", 0, 0),
        ("smallthinker", None, 0),
        ("smallthinker", 16, 4096),
        ("smallthinker", 0, 0),
        ("gemma2", None, 4096),
        ("gemma2", 16, 16),
        ("exaone4", 16, 0),
        ("olmo2", None, 0),
    ],
)
def test_a_window_is_as_large_as_llama_cpp_makes_it(tmp_path, architecture, given, window) -> None:
    metadata = {} if given is None else {"attention.sliding_window": given}
    memory = read(tmp_path, {**ATTENTION, **metadata}, architecture)
    assert memory.window_tokens == window
    assert any(cache.windowed for cache in memory.caches.values()) == bool(window)
    assert memory.notes == ()


def test_the_large_exaone4_has_a_window_and_a_large_gemma3n_shares_caches(tmp_path) -> None:
    def read_blocks(architecture: str, blocks: int) -> ModelMemory:
        more = {name: shape for block in range(4, blocks) for name, shape in moe_block(block, 4).items()}
        return read(tmp_path, {**ATTENTION, "block_count": blocks}, architecture, **more)

    large = read_blocks("exaone4", 64)
    assert large.window_tokens == 4096
    assert [block for block, cache in large.caches.items() if not cache.windowed] == list(range(3, 64, 4))
    shared = read_blocks("gemma3n", 22)
    assert [block for block, cache in shared.caches.items() if not cache.key_elements] == [20, 21]


def test_lightning_attention_keeps_a_matrix_per_head(tmp_path) -> None:
    linear = {f"blk.{block}.attn_norm_2.weight": (WIDTH,) for block in (0, 1, 2)}
    memory = read(tmp_path, ATTENTION, "minimax-01", **linear)
    assert memory.caches[0] == BlockCache(state_bytes=4 * 16 * 16 * 8)
    assert memory.caches[3] == BlockCache(32, 24)
    assert memory.notes == ()


def test_compressed_attention_caches_one_row_for_keys_and_values(tmp_path) -> None:
    latent = {"attention.head_count": 8, "attention.head_count_kv": 1, "attention.key_length": 576}
    latent |= {"attention.value_length": 512, "attention.key_length_mla": 192, "attention.value_length_mla": 128}
    assert read(tmp_path, latent, "deepseek2").caches[0] == BlockCache(576, 0)


STATE = {"ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 16, "ssm.group_count": 2}


def test_linear_attention_keeps_one_state_whatever_the_context(tmp_path) -> None:
    linear = {f"blk.{block}.ssm_conv1d.weight": (4, 8) for block in (0, 1, 2)}
    memory = read(tmp_path, {**ATTENTION, **STATE}, "qwen35moe", **linear)
    state_bytes = 4 * (3 * (64 + 2 * 2 * 16) + 16 * 64)
    assert memory.caches[0] == BlockCache(state_bytes=state_bytes)
    assert memory.caches[3] == BlockCache(32, 24)
    assert memory.cache_bytes(0, 256, 512) == memory.cache_bytes(0, 1 << 20, 512) == state_bytes


def test_a_block_without_attention_caches_nothing(tmp_path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        {**moe_block(0, 4), "blk.1.attn_norm.weight": (WIDTH,), "blk.1.ffn_up.weight": (INNER, WIDTH)},
        {**COUNTS, **{f"qwen3moe.{name}": value for name, value in ATTENTION.items()}, "block_count": 2},
    )
    assert ModelMemory.read(path).caches[1] == BlockCache()


def test_blocks_that_share_the_cache_of_another_have_none(tmp_path) -> None:
    memory = read(tmp_path, {**ATTENTION, "attention.shared_kv_layers": 2}, "gemma4")
    assert [bool(cache.key_elements) for cache in memory.caches.values()] == [True, True, False, False]


def test_a_block_for_multi_token_prediction_is_not_loaded(tmp_path) -> None:
    tensors = {"token_embd.weight": (10, WIDTH), **moe_block(0, 4), **moe_block(1, 4), **moe_block(2, 4), **nextn(2)}
    memory = ModelMemory.read(write_gguf(tmp_path / "m.gguf", tensors, COUNTS))
    assert set(memory.caches) == {0, 1}
    assert not any(memory.block_of(tensor) == 2 for tensor in memory.tensors)
    # It still counts where layers are counted: with the output, the last two blocks are three layers.
    assert plan(memory, Placement(3)).device.weights["up_experts"] == kinds_of_blocks(memory)[1]["up_experts"]


def test_all_shards_of_a_split_model_are_added_up(tmp_path) -> None:
    for index in range(2):
        metadata = {"split.no": index, "split.count": 2} | ({**COUNTS, "block_count": 2} if index == 0 else {})
        write_gguf(tmp_path / f"m-{index + 1:05}-of-00002.gguf", moe_block(index, 4), metadata)
    memory = ModelMemory.read(tmp_path / "m-00002-of-00002.gguf")
    assert {memory.block_of(tensor) for tensor in memory.tensors} == {0, 1}


KEYS = ("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length")
KEYS += ("attention.sliding_window", "attention.sliding_window_pattern", "attention.shared_kv_layers")
KEYS += ("attention.key_length_mla", "attention.value_length_mla", "ssm.inner_size", "ssm.conv_kernel", "kda.head_dim")
VALUES = st.one_of(
    st.integers(0, (1 << 32) - 1),
    st.booleans(),
    st.floats(allow_nan=False, width=32),
    st.text(st.characters(codec="ascii"), max_size=3),
    st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=6),
)


@given(
    st.dictionaries(st.sampled_from(KEYS), VALUES),
    st.sampled_from(["gpt-oss", "qwen35moe", "falcon-h1", "x"]),
    st.booleans(),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_metadata_whatever_gives_a_plan_or_one_clear_error(tmp_path, metadata, architecture, recurrent) -> None:
    more = {"blk.0.ssm_conv1d.weight": (4, 8)} if recurrent else {}
    try:
        memory = read(tmp_path, metadata, architecture, **more)
    except UserFileError as error:
        assert error.problems  # noqa: PT017 - either outcome is right
        return
    found = suggest(memory, Limits(device_bytes=GIB, host_bytes=GIB), context_tokens=1 << 20)
    assert min(found.device.total_bytes, found.host.total_bytes) >= 0
    assert found.fits_device


# ---------------------------------------------------------------------------------------------------------------------
# Both sides


@given(placements)
def test_every_tensor_and_every_cache_is_on_exactly_one_side(placement) -> None:
    planned = plan(MEMORY, placement, context_tokens=4096)
    weights = sum(tensor.size_bytes for tensor in MEMORY.tensors)
    assert planned.device.weight_bytes + planned.host.weight_bytes == weights
    assert planned.device.cache_bytes + planned.host.cache_bytes == 6 * 4096 * 1024 * 2


def test_an_output_that_is_the_embedding_is_needed_on_both_sides() -> None:
    planned = plan(make_memory(tied=True), Placement(99))
    assert planned.device.weights["output"] == 50 * MIB + 1000
    assert planned.host.weights == {"embedding": 50 * MIB}


def test_layers_count_from_the_output_down() -> None:
    assert plan(MEMORY, Placement(1)).device.weights == {"output": 50 * MIB + 1000}
    assert plan(MEMORY, Placement(2)).device.weights["up_experts"] == 100 * MIB
    assert plan(MEMORY, Placement(7)).device == plan(MEMORY, Placement(99)).device
    assert plan(MEMORY, Placement(0)).device.total_bytes == 0


def test_kinds_of_a_block_add_up_to_its_bytes(tmp_path) -> None:
    memory = ModelMemory.read(write_moe(tmp_path / "m.gguf", shared=True))
    assert set(kinds_of_blocks(memory)[1]) == {
        "up_experts",
        "gate_experts",
        "down_experts",
        "shared_experts",
        "attention",
        "other",
    }
    assert sum(kinds_of_blocks(memory)[1].values()) == memory.facts.block_bytes[1].total
    path = write_gguf(tmp_path / "d.gguf", {**dense_block(0), **moe_block(1, 4)}, {**COUNTS, "block_count": 2})
    assert set(kinds_of_blocks(ModelMemory.read(path))[0]) == {"attention", "dense_ffn"}


def test_a_cache_kept_on_the_host_is_counted_there() -> None:
    planned = plan(MEMORY, Placement(99, host_kv=True), context_tokens=4096)
    assert (planned.device.cache_bytes, planned.host.cache_bytes) == (0, 6 * 4096 * 2048)


# ---------------------------------------------------------------------------------------------------------------------
# Suggestions


@given(st.integers(0, 4000), st.sampled_from([512, 4096, 32768]))
def test_a_suggestion_fits_and_the_next_larger_one_does_not(device_mib, context) -> None:
    limits = Limits(device_bytes=device_mib * MIB, device_spare_bytes=64 * MIB)
    found = suggest(MEMORY, limits, context_tokens=context)
    assert found.fits_device
    assert found.placement.context_tokens == context
    experts = found.placement.host_experts
    if found.placement.gpu_layers == 7 and experts:
        assert experts == tuple(range(len(experts)))
        larger = replace(found.placement, host_experts=experts[:-1])
        assert not plan(MEMORY, larger, limits, context_tokens=context).fits_device
    elif 0 < found.placement.gpu_layers < 7:
        larger = replace(found.placement, gpu_layers=found.placement.gpu_layers + 1)
        assert not plan(MEMORY, larger, limits, context_tokens=context).fits_device


def test_a_suggestion_survives_as_a_file_for_its_own_model_only() -> None:
    found = suggest(MEMORY, Limits(device_bytes=GIB, device_spare_bytes=0)).placement
    assert Placement.from_yaml(found.to_yaml()) == found
    found.check(MEMORY.facts)


def test_longer_contexts_never_leave_fewer_blocks_on_the_host() -> None:
    limits = Limits(device_bytes=1500 * MIB, device_spare_bytes=0)
    rows = trade(MEMORY, limits, [512, 4096, 16384, 65536, 1 << 20])
    blocks = [7 if row.host_blocks is None else row.host_blocks for row in rows]
    assert blocks == sorted(blocks)
    assert blocks[0] < blocks[2]
    assert rows[-1].host_blocks is None


def test_a_host_that_would_swap_is_warned_about() -> None:
    limits = Limits(device_bytes=300 * MIB, host_bytes=3 * GIB, device_spare_bytes=0)
    found = suggest(MEMORY, limits)
    assert not found.fits_host
    assert any("would swap" in warning for warning in found.warnings)
    roomy = suggest(MEMORY, replace(limits, host_bytes=8 * GIB))
    assert roomy.fits_host
    assert roomy.warnings == ()


def test_a_placement_that_does_not_fit_the_device_is_warned_about() -> None:
    limits = Limits(device_bytes=GIB)
    assert "loading would fail" in plan(MEMORY, Placement(99), limits).warnings[0]


# ---------------------------------------------------------------------------------------------------------------------
# Published figures


def published(table: str) -> list[dict[str, object]]:
    return [dict(row) for row in PublishedTable.load(PUBLISHED / f"{table}.yaml").rows]


def test_the_published_cost_of_context_is_what_a_plan_says_for_that_shape() -> None:
    """What a longer context cost on the 16 GB laptop, in MiB of the device.

    The study's text at hand names no model. The steps tell its shape: 128 KiB for a token, which is what 32 blocks with
    8 heads of 128 for keys and for values cache (Mixtral's), and 1 KiB more, which is the attention mask of a batch of
    512. Absolute sizes cannot be planned without the model's file.
    """
    blocks = dict.fromkeys(range(32), BlockCache(8 * 128, 8 * 128))
    facts = replace(make_facts(dict.fromkeys(range(32), 2), 8), embedding_length=4096, expert_feed_forward_length=14336)
    memory = ModelMemory(facts, (), blocks, 0, 32000, 0)
    rows = {row["context"]: row["device_mib"] for row in published("laptop-16-gb-context")}
    sizes = {context: plan(memory, Placement(99), context_tokens=context).device.total_bytes / MIB for context in rows}
    for short, long in ((4096, 8192), (8192, 16384)):
        assert sizes[long] - sizes[short] == pytest.approx(rows[long] - rows[short], abs=1)


def test_the_published_cost_of_a_blocks_experts_is_the_same_for_every_block_as_a_plan_assumes() -> None:
    rows = {row["host_blocks"]: row["device_mib"] for row in published("laptop-16-gb-expert-layers")}
    steps = [(rows[few] - rows[many]) / (many - few) for few, many in ((13, 16), (16, 20))]
    assert steps[0] == pytest.approx(steps[1], rel=0.002)
    memory = make_memory(expert_mib=100)
    sizes = [plan(memory, Placement(99, tuple(range(count)))).device.weight_bytes for count in range(7)]
    assert {before - after for before, after in itertools.pairwise(sizes)} == {300 * MIB}


# ---------------------------------------------------------------------------------------------------------------------
# What should be said


def test_kinds_of_tensors_that_a_block_does_not_have_are_said_to_move_nothing() -> None:
    moved = (HostTensors(TensorKind.DENSE_FFN, (0, 1)), HostTensors(TensorKind.ATTENTION, (0,)))
    (note,) = plan(MEMORY, Placement(9, host_tensors=moved), context_tokens=512).notes
    assert note == "host_tensors.dense_ffn moves nothing of blocks without any: 0-1"


def test_a_tied_output_cannot_be_kept_on_the_host_and_works_on_the_device() -> None:
    tied = make_memory(tied=True)
    kept = plan(tied, Placement(7, host_output=True), context_tokens=512)
    assert kept.notes == ("host_output moves nothing: the output matrix is the token embedding, under that name",)
    bare = plan(tied, Placement(7), context_tokens=512)
    assert (kept.device, kept.host) == (bare.device, bare.host)
    assert plan(MEMORY, Placement(7, host_output=True), context_tokens=512).notes == ()


def test_a_context_that_the_model_was_not_made_for_is_said() -> None:
    assert plan(MEMORY, Placement(7), context_tokens=512).notes == ()
    assert plan(MEMORY, Placement(7), context_tokens=513).notes == ("the model was made for at most 512 tokens",)


def test_a_plan_of_hundreds_of_blocks_lays_out_a_few_placements(monkeypatch) -> None:
    """Laying out each of a thousand placements, of thousands of tensors, took half a minute."""
    laid_out = []
    layout = planning._Layout
    monkeypatch.setattr(planning, "_Layout", lambda *args: (laid_out.append(args[2]), layout(*args))[1])
    memory = make_memory(94)
    rows = trade(memory, Limits(device_bytes=GIB), [1 << n for n in range(8, 17)])
    assert len(rows) == 9
    assert 0 < len(laid_out) <= 9 * 9
    assert len(set(laid_out)) == len(laid_out)
    assert rows[3] == trade(memory, Limits(device_bytes=GIB), [1 << 11])[0]


@given(
    st.lists(st.tuples(st.booleans(), *[st.integers(1, 200)] * 3, st.integers(0, 90)), min_size=1, max_size=6),
    st.integers(0, 3000),
)
def test_halving_finds_the_first_suggestion_that_fits_whatever_the_sizes(blocks, device_mib) -> None:
    tensors = [tensor("token_embd.weight", 50 * MIB, (64, 1000)), tensor("output.weight", 50 * MIB)]
    for block, (routed, up, gate, down, attention) in enumerate(blocks):
        rest = "_exps.weight" if routed else ".weight"
        for part, mib in (("up", up), ("gate", gate), ("down", down)):
            tensors.append(tensor(f"blk.{block}.ffn_{part}{rest}", mib * MIB))
        tensors.append(tensor(f"blk.{block}.attn_q.weight", attention * MIB))
    counts = {block: 8 for block, (routed, *_) in enumerate(blocks) if routed}
    caches = dict.fromkeys(range(len(blocks)), BlockCache(512, 512))
    memory = ModelMemory(make_facts(counts, blocks=len(blocks)), tuple(tensors), caches, 0, 1000, 0)
    limits = Limits(device_bytes=device_mib * MIB)
    every = planning._candidates(len(blocks), sorted(counts))
    first = next(one for one in every if plan(memory, one, limits).fits_device)
    assert suggest(memory, limits).placement.same_place(first)


@given(placements)
def test_what_a_plan_moves_is_what_the_override_patterns_match(placement) -> None:
    moved = planning._Moved.by(placement)
    for part in planning._parts(MEMORY):
        matched = any(re.search(pattern, part.name) for pattern in placement.override_patterns())
        assert moved.takes(part) == matched, part.name


def test_what_is_kept_free_is_said_where_nothing_is_left() -> None:
    limits = Limits(device_bytes=100 * MIB, host_bytes=GIB)
    found = suggest(MEMORY, limits)
    assert found.placement.gpu_layers == 0
    assert found.notes[-1] == "nothing is put on the device: it has 100.0 MiB, and 512.0 MiB are kept free on it"
    assert found.warnings[0].startswith("nothing is usable on the host (2.0 GiB kept free of 1.0 GiB), and ")
    assert (found.limits.device_usable_bytes, found.limits.host_usable_bytes) == (0, 0)
    assert Limits().device_usable_bytes is None


def test_why_no_more_layers_are_on_the_device_is_said() -> None:
    found = suggest(MEMORY, Limits(device_bytes=640 * MIB), context_tokens=512)
    assert 0 < found.placement.gpu_layers < 7
    layers = found.placement.gpu_layers + 1
    assert found.notes[-1].startswith(f"the last {layers} layers on the device, routed experts of blocks 0-5 in host")
    assert found.notes[-1].endswith("128.0 MiB of 640.0 MiB are usable, 512.0 MiB are kept free")
    assert suggest(MEMORY, Limits(device_bytes=8 * GIB), context_tokens=512).notes == ()
