"""Facts of a model: decided from tensors, cross-checked with the gguf package, and safe on any bytes whatever."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import resource
import struct
import time
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modelfiles import COUNTS, INNER, WIDTH, dense_block, make_facts, moe_block, nextn, write_gguf, write_moe

from routing_lab.errors import UserFileError
from routing_lab.model import FrozenMap, ModelFacts, block_runs, format_blocks, model_digest, parse_blocks


def said(path: Path) -> str:
    with pytest.raises(UserFileError) as caught:
        ModelFacts.read(path)
    message = str(caught.value)
    assert str(path.parent) in message
    return message


def test_a_plain_moe_model_is_described_in_full(tmp_path) -> None:
    path = write_moe(tmp_path / "m.gguf", {"general.name": "Plain", "tokenizer.chat_template": "{{ x }}"})
    facts = ModelFacts.read(path)
    assert facts.files == (path,)
    assert (facts.name, facts.architecture, facts.blocks, facts.experts) == ("Plain", "qwen3moe", 3, 4)
    assert facts.routed_blocks == (0, 1, 2)
    assert facts.experts_used == {0: 2, 1: 2, 2: 2}
    assert facts.uniform_experts_used == 2
    assert facts.mtp_blocks == facts.dense_blocks == ()
    assert facts.shared_experts == 0
    assert facts.embedding_length == WIDTH
    assert facts.expert_feed_forward_length == INNER
    assert facts.context_length == 512
    assert facts.has_chat_template
    assert facts.quantization == "Q8_0"
    assert facts.size_bytes == path.stat().st_size


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"shared": True}], ids=["plain", "fused", "shared"])
def test_bytes_and_parameters_agree_with_the_gguf_package(tmp_path, options) -> None:
    path = write_moe(tmp_path / "m.gguf", **options)
    facts = ModelFacts.read(path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert facts.parameters == sum(int(tensor.n_elements) for tensor in tensors.values())
    assert facts.other_bytes == tensors["token_embd.weight"].n_bytes
    for block, part in facts.block_bytes.items():
        own = {name: int(tensor.n_bytes) for name, tensor in tensors.items() if name.startswith(f"blk.{block}.")}
        assert part.total == sum(own.values())
        assert part.routed_experts == sum(size for name, size in own.items() if "_exps." in name)
        assert part.shared_experts == sum(size for name, size in own.items() if "_shexp." in name)
        assert part.router == own[f"blk.{block}.ffn_gate_inp.weight"]
    assert facts.routed_expert_bytes == sum(part.routed_experts for part in facts.block_bytes.values())
    assert 0 < facts.expert_fraction < 1
    assert facts.shared_experts == (1 if options.get("shared") else 0)


def test_leading_dense_blocks_are_told_from_routed_ones(tmp_path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {**dense_block(0), **moe_block(1, 4), **moe_block(2, 4)}, COUNTS)
    facts = ModelFacts.read(path)
    assert facts.dense_blocks == (0,)
    assert facts.routed_blocks == (1, 2)


@pytest.mark.parametrize("key", [{"nextn_predict_layers": 1}, {}], ids=["key", "tensors only"])
def test_a_block_for_multi_token_prediction_is_stored_and_not_routed(tmp_path, key) -> None:
    tensors = {**moe_block(0, 4), **moe_block(1, 4), **moe_block(2, 4), **nextn(2)}
    facts = ModelFacts.read(write_gguf(tmp_path / "m.gguf", tensors, {**COUNTS, **key}))
    assert facts.blocks == 3
    assert facts.mtp_blocks == (2,)
    assert facts.routed_blocks == (0, 1)
    assert facts.blocks_with_experts == (0, 1, 2)


def test_a_trailing_block_that_is_counted_but_stores_nothing_predicts_nothing(tmp_path) -> None:
    """A prediction block that was cut off, or the cache of a granite-switch model's router."""
    tensors = {**moe_block(0, 4), **moe_block(1, 4)}
    facts = ModelFacts.read(write_gguf(tmp_path / "m.gguf", tensors, {**COUNTS, "nextn_predict_layers": 1}))
    assert (facts.blocks, facts.mtp_blocks, facts.routed_blocks, facts.dense_blocks) == (3, (), (0, 1), ())
    dense = {**dense_block(0), **dense_block(1)}
    counts = {"block_count": 3, "nextn_predict_layers": 1}
    switch = write_gguf(tmp_path / "s.gguf", dense, counts, architecture="graniteswitch")
    facts = ModelFacts.read(switch)
    assert (facts.blocks, facts.mtp_blocks, facts.routed_blocks, facts.dense_blocks) == (3, (), (), (0, 1))


def test_a_count_per_block_is_read_from_an_array(tmp_path) -> None:
    facts = ModelFacts.read(write_moe(tmp_path / "m.gguf", {"expert_used_count": [1, 4, 3]}))
    assert facts.experts_used == {0: 1, 1: 4, 2: 3}
    assert facts.uniform_experts_used is None


def test_missing_keys_are_filled_from_tensors_or_left_open(tmp_path) -> None:
    tensors = {**moe_block(0, 4), **moe_block(1, 4)}
    facts = ModelFacts.read(write_gguf(tmp_path / "bare.gguf", tensors, {"expert_used_count": 2}))
    assert (facts.name, facts.blocks, facts.experts, facts.expert_feed_forward_length) == ("bare", 2, 4, INNER)
    assert facts.context_length is None
    assert not facts.has_chat_template


def test_a_dense_model_has_nothing_to_schedule(tmp_path) -> None:
    facts = ModelFacts.read(write_gguf(tmp_path / "m.gguf", dense_block(0), {"block_count": 1}, architecture="llama"))
    assert not facts.is_moe
    assert (facts.experts, facts.experts_used, facts.dense_blocks) == (0, {}, (0,))
    assert facts.expert_fraction == 0


def test_a_block_whose_experts_stand_in_a_table_is_not_routed(tmp_path) -> None:
    tensors = {**moe_block(0, 4), "blk.0.ffn_gate_tid2eid.weight": (10, WIDTH), **moe_block(1, 4)}
    facts = ModelFacts.read(write_gguf(tmp_path / "m.gguf", tensors, {**COUNTS, "block_count": 2}))
    assert facts.routed_blocks == (1,)
    assert facts.dense_blocks == ()


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"expert_used_count": 5}, "qwen3moe.expert_used_count: is 5; the model has 4 experts"),
        ({"expert_used_count": 0}, "qwen3moe.expert_used_count: is 0"),
        ({"expert_used_count": [2, 2]}, "has 2 counts for 3 blocks"),
        ({"expert_used_count": "two"}, "is 'two'"),
        ({"expert_count": 8}, "is 8, and the tensors hold 4 experts"),
        ({"block_count": 2}, "is 2, and there are tensors of block 2"),
        ({"block_count": 4_000_000_000}, "more than any model has"),
        ({"block_count": 1.5}, "not a count"),
        ({"embedding_length": "wide"}, "not a count"),
        ({"split.count": "many"}, "split.count"),
        ({"split.count": 2}, "its name should end in -00001-of-00002.gguf"),
    ],
)
def test_a_header_that_contradicts_itself_is_one_clear_error(tmp_path, metadata, expected) -> None:
    assert expected in said(write_moe(tmp_path / "m.gguf", metadata))


def test_a_moe_model_without_its_own_count_is_refused(tmp_path) -> None:
    assert "expert_used_count: is missing" in said(write_gguf(tmp_path / "m.gguf", moe_block(0, 4), {"block_count": 1}))


def test_blocks_with_different_numbers_of_experts_are_refused(tmp_path) -> None:
    tensors = {**moe_block(0, 4), **moe_block(1, 8)}
    assert "different numbers of experts (4, 8)" in said(
        write_gguf(tmp_path / "m.gguf", tensors, {"expert_used_count": 2})
    )


def test_a_file_without_a_model_is_refused(tmp_path) -> None:
    assert "general.architecture: is missing" in said(
        write_gguf(tmp_path / "m.gguf", moe_block(0, 4), architecture=None)
    )
    assert "holds no blocks" in said(write_gguf(tmp_path / "n.gguf", {"x": (4,)}))


# ---------------------------------------------------------------------------------------------------------------------
# Split models


def write_shards(folder: Path, count: int = 3) -> list[Path]:
    paths = []
    for index in range(count):
        tensors = {"token_embd.weight": (10, WIDTH)} if index == 0 else {}
        tensors |= moe_block(index, 4)
        path = folder / f"m-{index + 1:05}-of-{count:05}.gguf"
        metadata = {"split.no": index, "split.count": count} | (COUNTS if index == 0 else {})
        paths.append(write_gguf(path, tensors, metadata))
    return paths


@pytest.mark.parametrize("given_shard", [0, 1, 2])
def test_a_split_model_is_read_from_any_of_its_shards(tmp_path, given_shard) -> None:
    shards = write_shards(tmp_path)
    facts = ModelFacts.read(shards[given_shard])
    assert facts.files == tuple(shards)
    assert facts.routed_blocks == (0, 1, 2)
    assert facts.size_bytes == sum(path.stat().st_size for path in shards)


def test_missing_shards_are_named(tmp_path) -> None:
    shards = write_shards(tmp_path)
    shards[0].unlink()
    shards[2].unlink()
    message = said(shards[1])
    assert "m-00001-of-00003.gguf is missing" in message
    assert "m-00003-of-00003.gguf is missing" in message


def test_a_shard_under_the_name_of_another_is_refused(tmp_path) -> None:
    shards = write_shards(tmp_path)
    shards[2].write_bytes(shards[1].read_bytes())
    assert "is not shard 3 of 3" in said(shards[0])


def test_a_damaged_shard_is_named(tmp_path) -> None:
    shards = write_shards(tmp_path)
    shards[1].write_bytes(shards[1].read_bytes()[:100])
    assert "m-00002-of-00003.gguf" in said(shards[0])


# ---------------------------------------------------------------------------------------------------------------------
# Damaged files


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"GG", "is no GGUF file"),
        (b"#!/bin/sh\necho", "is no GGUF file"),
        (b"GGUF", "ends within the version"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "claims"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "claims a length"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "unknown value type 99"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 1 << 40),
            "more than any vocabulary",
        ),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 40), "ends within"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1), "unknown value type 9"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IQ", 8, 1 << 40), "ends within"),
    ],
)
def test_a_damaged_beginning_is_one_clear_error(tmp_path, content, expected) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert expected in said(path)


def test_a_big_endian_file_is_recognised(tmp_path) -> None:
    path = write_gguf(tmp_path / "m.gguf", moe_block(0, 4), COUNTS, quantized=(), endian=gguf.GGUFEndian.BIG)
    assert "big-endian" in said(path)


def test_a_download_that_stopped_within_the_tensor_data_is_an_error(tmp_path) -> None:
    path = write_moe(tmp_path / "m.gguf")
    os.truncate(path, path.stat().st_size - 5000)
    assert "is cut off (an unfinished download?)" in said(path)


def test_every_truncation_of_the_header_is_an_error(tmp_path) -> None:
    whole = write_moe(tmp_path / "m.gguf", blocks=1).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in range(0, 900, 7):
        path.write_bytes(whole[:size])
        said(path)


@pytest.mark.parametrize("name", ["absent.gguf", ".", "a\0b.gguf"])
def test_what_is_no_readable_file_is_said_to_be_none(tmp_path, name) -> None:
    with pytest.raises(UserFileError, match="cannot be read"):
        ModelFacts.read(tmp_path / name)


@pytest.fixture(scope="module")
def victim(tmp_path_factory) -> tuple[bytes, Path]:
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    metadata = {"tokenizer.ggml.tokens": ["a", "b", "c"], "expert_used_count": [1, 2, 3], "general.name": "x"}
    return write_moe(path, metadata).read_bytes(), path


def reads_or_refuses(path: Path) -> None:
    start = time.monotonic()
    try:
        facts = ModelFacts.read(path)
    except UserFileError as error:
        assert error.problems  # noqa: PT017 - either outcome is right
    else:
        assert set(facts.experts_used) == set(facts.routed_blocks)
    assert time.monotonic() - start < 5


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_header_with_any_bytes_changed_is_read_or_refused(victim, data) -> None:
    whole, path = victim
    damaged = bytearray(whole)
    header_bytes = 2000
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, header_bytes))
        patch = data.draw(st.binary(min_size=1, max_size=8))
        damaged[position : position + len(patch)] = patch
    path.write_bytes(damaged)
    reads_or_refuses(path)


def test_no_single_flipped_bit_of_the_header_causes_anything_else(victim) -> None:
    whole, path = victim
    chooser = random.Random(7)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[chooser.randrange(2000)] ^= 1 << chooser.randrange(8)
        path.write_bytes(damaged)
        reads_or_refuses(path)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 100 * 1024


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_after_the_magic_are_read_or_refused(tmp_path, tail) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + tail)
    reads_or_refuses(path)


def test_a_large_vocabulary_costs_little_time_and_memory(tmp_path) -> None:
    vocabulary = [f"token{i}" for i in range(100_000)]
    path = write_moe(tmp_path / "m.gguf", {"tokenizer.ggml.tokens": vocabulary})
    start = time.process_time()
    ModelFacts.read(path)
    assert time.process_time() - start < 2


# ---------------------------------------------------------------------------------------------------------------------
# Values


def test_facts_are_values_that_hash_and_travel_to_a_child_process(tmp_path) -> None:
    facts = ModelFacts.read(write_moe(tmp_path / "m.gguf"))
    assert pickle.loads(pickle.dumps(facts)) == facts  # noqa: S301 - our own bytes
    assert hash(facts) == hash(ModelFacts.read(tmp_path / "m.gguf"))


def test_facts_that_contradict_themselves_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="within 1 and 4"):
        make_facts({0: 5}, experts=4)


def test_a_frozen_map_is_a_copy_that_equals_a_dict_and_cannot_change() -> None:
    original = {1: 2}
    frozen = FrozenMap(original)
    original[1] = 3
    assert frozen == {1: 2}
    assert pickle.loads(pickle.dumps(frozen)) == frozen  # noqa: S301 - our own bytes
    with pytest.raises(AttributeError):
        frozen._items = {}
    with pytest.raises(TypeError):
        frozen[1] = 5  # type: ignore[index]


def test_the_digest_of_one_file_is_what_sha256sum_prints(tmp_path) -> None:
    path = write_moe(tmp_path / "m.gguf")
    assert model_digest(ModelFacts.read(path)) == "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_digest_covers_every_shard_in_order_and_notices_a_change(tmp_path) -> None:
    shards = write_shards(tmp_path)
    facts = ModelFacts.read(shards[0])
    first = model_digest(facts)
    assert first == "sha256:" + hashlib.sha256(b"".join(path.read_bytes() for path in shards)).hexdigest()
    changed = bytearray(shards[2].read_bytes())
    changed[-1] ^= 1
    shards[2].write_bytes(changed)
    os.utime(shards[2], ns=(1, 1))
    assert model_digest(facts) != first
    shards[1].unlink()
    with pytest.raises(UserFileError, match="cannot be read"):
        model_digest(facts)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks as text


@given(st.sets(st.integers(0, 300)))
def test_blocks_survive_the_round_trip_through_text(blocks) -> None:
    text = format_blocks(blocks)
    assert parse_blocks(text) == tuple(sorted(blocks))
    assert text.count(",") == max(len(block_runs(blocks)) - 1, 0)


@pytest.mark.parametrize("text", ["x", "3-1", "1,1", "0-3,2", "1,,2", "-1", "99999", "1-", "٣", ","])
def test_what_is_no_list_of_blocks_is_refused(text) -> None:
    with pytest.raises(ValueError, match=r"block|range"):
        parse_blocks(text)


# --- what is no file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "device"])
def test_what_is_no_file_is_refused_at_once_also_as_another_shard(tmp_path, nonfile, kind: str) -> None:
    assert "not a file" in said(nonfile(kind))
    shards = [tmp_path / f"m-{index:05}-of-00002.gguf" for index in (1, 2)]
    write_moe(shards[0], {"split.count": 2, "split.no": 0})
    shards[1].symlink_to(nonfile(kind, "second"))
    assert "not a file" in said(shards[0])


def test_a_sparse_file_of_a_terabyte_costs_no_more_than_its_header(tmp_path) -> None:
    path = write_moe(tmp_path / "m.gguf")
    facts = ModelFacts.read(path)
    os.truncate(path, 1 << 40)
    assert ModelFacts.read(path).routed_blocks == facts.routed_blocks
    hollow = tmp_path / "hollow.gguf"
    with hollow.open("wb") as file:
        # Every entry is a text of a megabyte that is a hole in the file.
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 16))
        for index in range(100):
            key = f"k{index}".encode()
            file.write(struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, 1 << 20))
            file.seek(1 << 20, os.SEEK_CUR)
        file.truncate(1 << 40)
    assert "bytes of metadata" in said(hollow)


def test_a_file_that_shrinks_while_it_is_read_has_no_digest(tmp_path, monkeypatch) -> None:
    facts = ModelFacts.read(write_moe(tmp_path / "m.gguf"))
    before = model_digest(facts)
    os.utime(facts.files[0], ns=(1, 1))  # so that it is read again
    size = facts.files[0].stat().st_size
    opened = Path.open

    def shrinking(path: Path, *args, **options):
        os.truncate(path, size - 1)
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", shrinking)
    with pytest.raises(UserFileError, match=f"changed while it was read: {size - 1} bytes instead of {size}"):
        model_digest(facts)
    assert before.startswith("sha256:")


def test_control_characters_in_texts_are_kept_as_they_are(tmp_path) -> None:
    name = "two\nlines \x1b[31m\u202e"
    assert ModelFacts.read(write_moe(tmp_path / "m.gguf", {"general.name": name})).name == name
