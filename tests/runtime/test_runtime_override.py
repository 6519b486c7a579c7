"""The expert override on an unmodified libllama, checked against what the stock library does by itself."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from routing_lab.errors import AttestationError, RuntimeUnsupportedError
from routing_lab.model import ModelFacts
from routing_lab.runtime import Capability, RuntimeOptions
from routing_lab.runtime.engine import Switched
from routing_lab.runtime.llama import LlamaRuntime, _attest, libllama_path
from routing_lab.schedule import Schedule

PROMPTS = (
    "7",
    "Q: 347+86=?\n",
    "Q: sort the digits of 5203918476 and count the letter e in every one of these words\n",
)


@pytest.mark.model
def test_every_uniform_count_has_the_very_logits_of_the_stock_scalar_override(
    runtime: LlamaRuntime, stock: LlamaRuntime, facts: ModelFacts
) -> None:
    different = set()
    for count in range(1, facts.experts + 1):
        schedule = Schedule.uniform(count, facts)
        runtime.apply(schedule)
        stock.apply(schedule)
        for prompt in PROMPTS:
            logits = runtime.logits(prompt)
            assert logits == stock.logits(prompt), f"{count} experts, prompt {prompt!r}"
            different.add(logits)
    assert len(different) == facts.experts * len(PROMPTS), "every count computes something else"


@pytest.mark.model
def test_a_mixed_schedule_is_attested_and_computes_something_of_its_own(
    runtime: LlamaRuntime, facts: ModelFacts, mixed: Schedule
) -> None:
    runtime.apply(Schedule.baseline(facts))
    own = runtime.logits(PROMPTS[1])
    attestation = runtime.apply(mixed)
    assert runtime.capability is Capability.PRELOAD
    assert dict(attestation.selected) == dict(attestation.summed) == mixed.resolve(facts)
    assert runtime.logits(PROMPTS[1]) != own


@pytest.mark.model
def test_each_single_block_matters_to_the_logits(runtime: LlamaRuntime, facts: ModelFacts) -> None:
    results = set()
    for block in facts.routed_blocks:
        runtime.apply(Schedule.from_counts("one", {block: 1}))
        results.add(runtime.logits(PROMPTS[1]))
    assert len(results) == len(facts.routed_blocks)


@pytest.mark.model
def test_a_switch_does_not_read_the_weights_again(model: Path, facts: ModelFacts, mixed: Schedule) -> None:
    with LlamaRuntime(model, RuntimeOptions(context_tokens=256)) as runtime:
        for schedule in (mixed, Schedule.uniform(1, facts), Schedule.baseline(facts), mixed):
            runtime.apply(schedule)
            runtime.generate("7", max_tokens=1)
        assert runtime.weight_loads == 1


@pytest.mark.model
def test_without_the_override_a_uniform_schedule_runs_and_a_mixed_one_is_refused(
    stock: LlamaRuntime, facts: ModelFacts, mixed: Schedule
) -> None:
    assert stock.capability is Capability.UNIFORM_ONLY
    uniform = Schedule.uniform(2, facts)
    assert dict(stock.apply(uniform).selected) == uniform.resolve(facts)
    with pytest.raises(RuntimeUnsupportedError, match=r"per block.*uniform schedule works.*switched off"):
        stock.apply(mixed)


@pytest.mark.model
def test_the_array_in_a_gguf_is_ignored_by_the_graph_and_attestation_says_so(
    rewritten: Callable[..., Path], facts: ModelFacts
) -> None:
    own = facts.uniform_experts_used
    assert own is not None
    counts = [own] * facts.blocks
    counts[-1] = own - 1
    trap = rewritten({"qwen3moe.expert_used_count": counts})
    with LlamaRuntime(trap, RuntimeOptions(context_tokens=256, override="off")) as runtime:
        assert runtime.capability is Capability.UNIFORM_ONLY
        with pytest.raises(AttestationError) as caught:
            runtime.apply(Schedule.baseline(runtime.facts))
    error = caught.value
    assert (error.block, error.wanted, error.got) == (facts.blocks - 1, own - 1, own)
    assert f"block {facts.blocks - 1} should consult {own - 1} experts, the graph consults {own}" in str(error)


@pytest.mark.model
@pytest.mark.parametrize("override", ["auto", "off"])
def test_a_graph_that_outgrows_llama_cpp_is_refused_in_words_and_the_runtime_goes_on(
    many_small_experts: Path, override: Literal["auto", "off"]
) -> None:
    with LlamaRuntime(many_small_experts, RuntimeOptions(context_tokens=256, override=override)) as runtime:
        runtime.apply(Schedule.uniform(24, runtime.facts))
        with pytest.raises(RuntimeUnsupportedError, match="consults 1536 experts over all blocks"):
            runtime.apply(Schedule.uniform(64, runtime.facts))
        assert set(runtime.apply(Schedule.uniform(16, runtime.facts)).selected.values()) == {16}


@pytest.mark.model
def test_one_block_may_consult_all_of_its_experts(many_small_experts: Path) -> None:
    with LlamaRuntime(many_small_experts, RuntimeOptions(context_tokens=256)) as runtime:
        selected = runtime.apply(Schedule.from_counts("one", {11: 64})).selected
    assert [selected[block] for block in (10, 11, 12)] == [8, 64, 8]


@pytest.mark.model
def test_the_override_makes_the_array_in_a_gguf_true(rewritten: Callable[..., Path], facts: ModelFacts) -> None:
    own = facts.uniform_experts_used
    assert own is not None
    counts = [own - index % 3 for index in range(facts.blocks)]
    with LlamaRuntime(rewritten({"qwen3moe.expert_used_count": counts}), RuntimeOptions(context_tokens=256)) as runtime:
        attestation = runtime.apply(Schedule.baseline(runtime.facts))
    assert dict(attestation.selected) == dict(enumerate(counts))


@pytest.mark.model
def test_a_library_that_binds_its_own_symbols_is_found_out_and_still_runs_uniform_schedules(
    model: Path, facts: ModelFacts, mixed: Schedule, tmp_path: Path
) -> None:
    build = tmp_path / "lib"
    shutil.copytree(libllama_path().parent, build, symlinks=True)
    bind_symbolically(build / "libllama.so")
    with LlamaRuntime(model, RuntimeOptions(context_tokens=256, library_dir=build)) as runtime:
        assert runtime.build.library.startswith(str(build))
        assert runtime.capability is Capability.UNIFORM_ONLY
        with pytest.raises(RuntimeUnsupportedError, match="-Bsymbolic"):
            runtime.apply(mixed)
        uniform = Schedule.uniform(2, facts)
        assert dict(runtime.apply(uniform).selected) == uniform.resolve(facts)


def bind_symbolically(library: Path) -> None:
    """Make ``library`` what ``ld -Bsymbolic`` would have made of it, by a DT_SYMBOLIC entry in a spare place."""
    data = bytearray(library.resolve().read_bytes())
    table, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    for index in range(count):
        kind, _flags, offset, _address, _physical, length = struct.unpack_from("<IIQQQQ", data, table + index * size)
        if kind != 2:  # PT_DYNAMIC
            continue
        entries = [struct.unpack_from("<QQ", data, offset + at) for at in range(0, length, 16)]
        spare = entries.index((0, 0))
        assert entries[spare + 1] == (0, 0), "two null entries: one can go"
        struct.pack_into("<QQ", data, offset + 16 * spare, 16, 0)  # DT_SYMBOLIC
    library.unlink()
    library.write_bytes(data)


def switched(selected: int, summed: int, built: tuple[int, int] | None) -> Switched:
    record = [] if built is None else [(3, *built)]
    return Switched(selected=[(3, selected)], summed=[(3, summed)], built=record, loads=1)


def test_agreeing_witnesses_attest() -> None:
    for built in (None, (6, 6)):
        assert dict(_attest({3: 6}, switched(6, 6, built)).selected) == {3: 6}


@pytest.mark.parametrize(
    ("seen", "got"),
    [
        (switched(8, 8, (8, 8)), 8),
        (switched(6, 8, (6, 8)), 8),
        (switched(6, 6, (8, 8)), 8),
        (switched(6, 6, (6, -1)), 6),
    ],
    ids=["selection", "sum", "working context", "sum not asked for"],
)
def test_any_witness_alone_can_refute(seen: Switched, got: int) -> None:
    with pytest.raises(AttestationError) as caught:
        _attest({3: 6}, seen)
    assert (caught.value.block, caught.value.wanted, caught.value.got) == (3, 6, got)


def test_a_block_that_the_graph_does_not_route_refutes() -> None:
    with pytest.raises(AttestationError, match="no routed experts at all"):
        _attest({4: 6}, switched(6, 6, None))
