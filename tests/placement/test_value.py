"""Placements: files, flags, and the tensors that the override pattern really reaches."""

from __future__ import annotations

import re
from dataclasses import replace

import fakelab
import pytest
from hypothesis import given
from hypothesis import strategies as st
from modelfiles import make_facts

from routing_lab.certificate import Certificate
from routing_lab.errors import UserFileError
from routing_lab.model import BlockBytes
from routing_lab.overrides import parse_placement
from routing_lab.placement import HostTensors, Placement, TensorKind
from routing_lab.runtime.base import RuntimeOptions
from routing_lab.schedule import ScheduledModel
from routing_lab.validate import validate

blocks = st.sets(st.integers(0, 99), min_size=1).map(tuple)
host_tensors = st.dictionaries(st.sampled_from(TensorKind), blocks).map(
    lambda parts: tuple(HostTensors(kind, blocks) for kind, blocks in parts.items())
)
placements = st.builds(
    Placement,
    gpu_layers=st.integers(0, 200),
    host_experts=st.one_of(blocks, st.integers(0, 9).map(lambda n: tuple(range(n)))),
    name=st.from_regex(r"[a-z-]{0,8}", fullmatch=True),
    host_tensors=host_tensors,
    host_output=st.booleans(),
    host_kv=st.booleans(),
    context_tokens=st.none() | st.integers(1, 1 << 20),
    model=st.none() | st.just(ScheduledModel("qwen3moe", 100, 16, 8)),
)


@given(placements)
def test_a_placement_survives_the_round_trip_through_yaml(placement) -> None:
    assert Placement.from_yaml(placement.to_yaml()) == placement


def test_a_placement_survives_the_round_trip_through_a_file(tmp_path) -> None:
    Placement(99, (3, 1), "x").save(tmp_path / "p.yaml")
    assert Placement.load(tmp_path / "p.yaml") == Placement(99, (1, 3), "x")


@given(placements, st.booleans())
def test_a_placement_survives_the_round_trip_through_flags(placement, short) -> None:
    flags = placement.to_flags(short=short)
    assert parse_placement(["--model", "m.gguf", *flags, "--fit", "off"]) == replace(
        placement, name="", context_tokens=None, model=None
    )


@given(placements)
def test_every_pattern_is_one_that_the_flag_can_carry(placement) -> None:
    for pattern in placement.override_patterns():
        assert "," not in pattern
        assert "=" not in pattern
        re.compile(pattern)


@given(placements, placements)
def test_a_description_tells_placements_apart_unless_everything_is_on_the_host(one, two) -> None:
    bare = [replace(placement, name="", context_tokens=None, model=None) for placement in (one, two)]
    if one.gpu_layers and two.gpu_layers:
        assert one.same_place(two) == (bare[0] == bare[1])
    assert Placement(host_experts=(1,)).same_place(Placement())


def test_experts_of_the_first_blocks_are_said_in_short() -> None:
    assert Placement(99, (0, 1, 2)).to_flags(short=True) == ["--n-gpu-layers", "99", "--n-cpu-moe", "3"]
    assert "--n-cpu-moe" not in Placement(99, (1, 2)).to_flags(short=True)
    facts = make_facts({1: 8, 2: 8}, blocks=3)
    assert parse_placement(["-ngl", "all", "--cpu-moe"], facts) == Placement(4, (1, 2))


@pytest.mark.parametrize(
    "flags",
    [
        ["--cpu-moe"],
        ["-ngl", "all"],
        ["-ngl", "-1"],
        ["-ngl"],
        ["--n-cpu-moe", "x"],
        ["-ot", "exps=CPU"],
        ["-ot", r"blk\.(1)\.ffn_(up|down|gate|gate_up)_(ch|)exps=CUDA0"],
        ["-ot", r"blk\.(1)\.nothing=CPU"],
        ["-ot"],
    ],
)
def test_flags_that_no_placement_says_are_refused(flags) -> None:
    with pytest.raises(ValueError, match="--override-tensor" if flags[0] == "-ot" else flags[0]):
        parse_placement(flags)


def test_an_empty_placement_keeps_everything_on_the_host() -> None:
    assert Placement().to_flags() == ["--n-gpu-layers", "0"]
    assert Placement().override_patterns() == []
    assert Placement(1).describe() == "the last layer (the output) on the device"
    assert Placement(99).describe(7) == Placement(7).describe(7) == "all 7 layers on the device"
    assert Placement(6).describe(7) == "the last 6 layers on the device"
    assert Placement().describe() == "everything in host memory"


def test_flags_name_every_placement_choice() -> None:
    flags = Placement(99, (33, 34)).to_flags()
    assert flags == [
        "--n-gpu-layers",
        "99",
        "--override-tensor",
        r"blk\.(33|34)\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU",
    ]
    # llama.cpp splits the option at commas and at the first equals sign.
    assert "," not in flags[-1]
    assert flags[-1].count("=") == 1


@pytest.mark.parametrize(
    ("tensor", "reached"),
    [
        ("blk.3.ffn_up_exps.weight", True),
        ("blk.3.ffn_gate_up_exps.weight", True),
        ("blk.3.ffn_down_exps.scale", True),
        ("blk.3.ffn_gate_chexps.weight", True),
        ("blk.3.ffn_up_shexp.weight", False),
        ("blk.3.ffn_gate_inp.weight", False),
        ("blk.3.ffn_norm_exps.weight", False),
        ("blk.33.ffn_up_exps.weight", False),
        ("blk.13.ffn_up_exps.weight", False),
        ("blk.3.attn_q.weight", False),
    ],
)
def test_the_pattern_reaches_the_routed_experts_of_its_blocks_only(tensor, reached) -> None:
    (pattern,) = Placement(9, (3, 4)).override_patterns()
    assert (re.search(pattern, tensor) is not None) == reached


def test_every_problem_of_a_file_is_listed() -> None:
    with pytest.raises(UserFileError) as caught:
        Placement.from_yaml("gpu_layers: -1\nhost_experts: [1, 2]\ngpu_layer: 3\n", "p.yaml")
    assert [problem.where for problem in caught.value.problems] == ["gpu_layers", "host_experts", "gpu_layer"]


@pytest.mark.parametrize(("written", "blocks"), [("3", (3,)), ('"3"', (3,)), ("0-2,4", (0, 1, 2, 4)), ('""', ())])
def test_blocks_are_written_as_a_number_or_as_ranges(written, blocks) -> None:
    assert Placement.from_yaml(f"host_experts: {written}").host_experts == blocks


def test_a_backward_range_is_refused() -> None:
    with pytest.raises(UserFileError, match="runs backwards"):
        Placement.from_yaml("host_experts: 5-3")


def test_a_block_without_experts_cannot_leave_them_on_the_host() -> None:
    facts = make_facts({1: 8, 2: 8}, blocks=4, mtp=(3,))
    Placement(9, (1, 2, 3)).check(facts)
    with pytest.raises(UserFileError, match=r"blocks without routed experts: 0,7 \(Testling has them in 1-3\)"):
        Placement(9, (0, 1, 7)).check(facts)


def test_a_placement_for_another_model_is_refused() -> None:
    facts = make_facts({1: 8, 2: 8}, blocks=4)
    placement = Placement(9, (1,), model=ScheduledModel("qwen3moe", 41, 256))
    with pytest.raises(UserFileError, match="this placement is for another model"):
        placement.check(facts)


def test_single_kinds_of_tensors_must_name_blocks_that_are_there() -> None:
    facts = make_facts({1: 8, 2: 8}, blocks=4)
    placement = Placement(9, host_tensors=(HostTensors(TensorKind.UP_EXPERTS, (0,)), HostTensors("attention", (7,))))
    with pytest.raises(UserFileError) as caught:
        placement.check(facts)
    assert [problem.where for problem in caught.value.problems] == ["host_tensors.up_experts", "host_tensors.attention"]


def test_every_problem_of_host_tensors_is_listed() -> None:
    with pytest.raises(UserFileError) as caught:
        Placement.from_yaml(
            "model: {architecture: a, blocks: 4, experts: 8}\nhost_experts: 2-5\nhost_tensors: {up: 1, attention: []}"
        )
    assert [problem.where for problem in caught.value.problems] == [
        "host_tensors.attention",
        "host_experts",
        "host_tensors.up",
    ]


@pytest.mark.parametrize(
    ("kind", "reached"),
    [
        (TensorKind.UP_EXPERTS, {"ffn_up_exps.weight", "ffn_gate_up_exps.weight"}),
        (TensorKind.GATE_EXPERTS, {"ffn_gate_exps.weight"}),
        (TensorKind.DOWN_EXPERTS, {"ffn_down_exps.weight", "ffn_down_exps.scale"}),
        (TensorKind.SHARED_EXPERTS, {"ffn_up_shexp.weight", "ffn_down_shexp.weight"}),
        (TensorKind.DENSE_FFN, {"ffn_up.weight", "ffn_down.weight"}),
        (TensorKind.ATTENTION, {"attn_q.weight", "ssm_out.weight", "attn_norm.weight"}),
    ],
)
def test_a_kind_reaches_its_own_tensors_only(kind, reached) -> None:
    names = {"ffn_up_exps.weight", "ffn_gate_up_exps.weight", "ffn_gate_exps.weight", "ffn_down_exps.weight"}
    names |= {"ffn_down_exps.scale", "ffn_up_shexp.weight", "ffn_down_shexp.weight", "ffn_up.weight", "ffn_down.weight"}
    names |= {"attn_q.weight", "ssm_out.weight", "attn_norm.weight", "ffn_gate_inp.weight", "ffn_norm.weight"}
    (pattern,) = Placement(9, host_tensors=(HostTensors(kind, (3,)),)).override_patterns()
    assert {name for name in names if re.search(pattern, f"blk.3.{name}")} == reached
    assert not any(re.search(pattern, f"blk.{block}.{name}") for name in names for block in (13, 33, 4))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Placement(-1),
        lambda: Placement(0, (-1,)),
        lambda: Placement(0, (5000,)),
        lambda: Placement(context_tokens=0),
        lambda: HostTensors(TensorKind.ATTENTION, ()),
        lambda: Placement(1, host_tensors=(HostTensors(TensorKind.ATTENTION, (1,)),) * 2),
    ],
)
def test_a_negative_placement_cannot_be_made(make) -> None:
    with pytest.raises(ValueError):
        make()


def test_a_certificate_keeps_every_part_of_a_placement(tmp_path) -> None:
    facts = replace(
        fakelab.make_facts(tmp_path),
        block_bytes={block: BlockBytes(routed_experts=1000, other=10) for block in range(fakelab.BLOCKS)},
    )
    placement = Placement(
        99,
        (0, 1),
        "mine",
        (HostTensors(TensorKind.DOWN_EXPERTS, (2,)), HostTensors(TensorKind.ATTENTION, (0, 3))),
        host_output=True,
        host_kv=True,
        context_tokens=2048,
        model=ScheduledModel("qwen3moe", 4, 16, 8),
    )
    placement.check(facts)
    runtime = fakelab.make_runtime(facts, needs={}, options=RuntimeOptions(placement=placement))
    validation = validate(runtime, fakelab.make_probes(), [fakelab.schedule(4, 4, 4, 4)])
    certificate = validation.require_certificate()
    assert certificate.placement == placement
    assert Certificate.from_yaml(certificate.to_yaml()).placement == placement


def test_shared_experts_must_be_there_to_be_moved() -> None:
    facts = make_facts({1: 8, 2: 8}, blocks=4)
    some = replace(facts, block_bytes={**facts.block_bytes, 2: BlockBytes(routed_experts=9, shared_experts=9)})
    Placement(9, host_tensors=(HostTensors(TensorKind.SHARED_EXPERTS, (2,)),)).check(some)
    for model, where in ((facts, "it has none"), (some, "Testling has them in 2")):
        with pytest.raises(UserFileError, match=f"without shared experts: 1.*{where}"):
            Placement(9, host_tensors=(HostTensors(TensorKind.SHARED_EXPERTS, (1,)),)).check(model)
