"""Placements: files, flags, and the tensors that the override pattern really reaches."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from modelfiles import make_facts

from routing_lab.errors import UserFileError
from routing_lab.placement import Placement

placements = st.builds(
    Placement,
    st.integers(0, 200),
    st.lists(st.integers(0, 99)).map(tuple),
    st.from_regex(r"[a-z-]{0,8}", fullmatch=True),
)


@given(placements)
def test_a_placement_survives_the_round_trip_through_yaml(placement) -> None:
    assert Placement.from_yaml(placement.to_yaml()) == placement


def test_a_placement_survives_the_round_trip_through_a_file(tmp_path) -> None:
    Placement(99, (3, 1), "x").save(tmp_path / "p.yaml")
    assert Placement.load(tmp_path / "p.yaml") == Placement(99, (1, 3), "x")


def test_an_empty_placement_keeps_everything_on_the_host() -> None:
    assert Placement().to_flags() == ["--n-gpu-layers", "0"]
    assert Placement().override_patterns() == []
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


@pytest.mark.parametrize("make", [lambda: Placement(-1), lambda: Placement(0, (-1,))])
def test_a_negative_placement_cannot_be_made(make) -> None:
    with pytest.raises(ValueError):
        make()
