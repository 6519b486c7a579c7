"""The probe sets that ship: up to date with their scripts, disjoint, never seen in training, and rightly answered."""

from __future__ import annotations

import itertools
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from routing_lab.answers import Judge, Status
from routing_lab.demo import probes_path
from routing_lab.demo.tasks import KINDS, is_held_out
from routing_lab.probes import ProbeSet

FOLDER = Path(__file__).parent.parent.parent / "probes"
SETS = [*sorted(FOLDER.glob("*.yaml")), probes_path()]


def test_the_sets_are_what_their_script_makes_and_a_difference_is_named(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, FOLDER / "make.py", "--check"], check=False).returncode == 0
    copy = shutil.copytree(FOLDER, tmp_path / "probes")
    with (copy / "hard-five.yaml").open("a", encoding="utf-8") as file:
        file.write("# by hand\n")
    done = subprocess.run([sys.executable, copy / "make.py", "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "hard-five.yaml is not what make_hard_five.py makes\n")
    assert subprocess.run([sys.executable, copy / "make.py"], check=False).returncode == 0
    assert (copy / "hard-five.yaml").read_bytes() == (FOLDER / "hard-five.yaml").read_bytes()


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
def test_an_answer_given_as_expected_is_correct(path: Path) -> None:
    probe_set = ProbeSet.load(path)
    with Judge() as judge:
        for probe in probe_set.items:
            judgement = judge.judge(
                f"So it is.\nAnswer: {probe.answer}", expected=probe.answer, answer_type=probe.type, places=probe.places
            )
            assert judgement.status is Status.CORRECT, probe


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
def test_a_prompt_asks_for_the_declared_form_or_is_raw(path: Path) -> None:
    probe_set = ProbeSet.load(path)
    assert probe_set.extract == "declared"
    assert probe_set.prompt == "raw" or all("`Answer: " in probe.prompt for probe in probe_set.items)


def test_the_everyday_set_spreads_every_kind_over_both_splits() -> None:
    everyday = ProbeSet.load(FOLDER / "everyday-exact.yaml")
    kinds = Counter((probe.tags[0], probe.split) for probe in everyday.items)
    assert len(everyday.items) >= 60
    assert len(kinds) == 16
    assert min(kinds.values()) >= 5


def test_the_demo_gate_and_holdout_are_large_spread_and_unseen() -> None:
    demo = ProbeSet.load(probes_path())
    gate, holdout = demo.split("gate"), demo.split("holdout")
    assert (len(gate), len(holdout)) == (60, 240)
    assert {kind: sum(kind in probe.tags for probe in gate) for kind in KINDS} == dict.fromkeys(KINDS, 10)
    assert {kind: sum(kind in probe.tags for probe in holdout) for kind in KINDS} == dict.fromkeys(KINDS, 40)
    assert all(is_held_out(probe.prompt) for probe in demo.items)
    assert demo.source["holdout_problems_replaced"] == 0


# --- the hard problems, counted a second time in another way

HARD = runpy.run_path(str(FOLDER / "make_hard_five.py"), run_name="make_hard_five")


def coverings(rows: int, columns: int) -> int:
    """Sets of pieces that use every cell once, by trying for each cell whether a piece starts there."""
    offsets = [((0, 0), (0, 1)), ((0, 0), (1, 0))]
    block = [(0, 0), (0, 1), (1, 0), (1, 1)]
    offsets += [tuple(cell for cell in block if cell != corner) for corner in block]
    cells = list(itertools.product(range(rows), range(columns)))
    bit = {cell: 1 << index for index, cell in enumerate(cells)}
    pieces = {
        sum(bit[row + r, column + c] for r, c in shape)
        for shape in offsets
        for row, column in cells
        if all((row + r, column + c) in bit for r, c in shape)
    }
    # Covers of growing size, keyed by the cells they use; every piece is considered once, in one order.
    covers = Counter({0: 1})
    for piece in sorted(pieces, key=lambda mask: mask & -mask):
        for used, ways in list(covers.items()):
            if not used & piece:
                covers[used | piece] += ways
    return covers[(1 << len(cells)) - 1]


@pytest.mark.parametrize("size", [(2, 3), (3, 2), (3, 4), (2, 5), (3, 6)])
def test_tilings_are_counted_alike_in_two_ways(size: tuple[int, int]) -> None:
    assert HARD["tilings"](*size) == coverings(*size)


def test_dice_products_are_squares_as_often_as_their_exponents_are_even() -> None:
    # Parities of the exponents of 2, 3 and 5 in one throw; six of them have to cancel.
    parity = {1: 0b000, 2: 0b001, 3: 0b010, 4: 0b000, 5: 0b100, 6: 0b011}
    spread = [1, 0, 0, 0, 0, 0, 0, 0]
    for _ in range(6):
        spread = [sum(spread[state ^ change] for change in parity.values()) for state in range(8)]
    assert HARD["square_product_chance"](6) == Fraction(spread[0], 6**6)


def test_the_kings_expected_walk_is_the_limit_of_its_finite_walks() -> None:
    cells = list(itertools.product(range(3), repeat=2))
    near = {a: [b for b in cells if b != a and max(abs(a[0] - b[0]), abs(a[1] - b[1])) == 1] for a in cells}
    chance = {(0, 0): 1.0}
    expected = 0.0
    for _ in range(2000):
        expected += sum(chance.values())
        following: dict[tuple[int, int], float] = {}
        for cell, share in chance.items():
            for other in near[cell]:
                if other != (2, 2):
                    following[other] = following.get(other, 0.0) + share / len(near[cell])
        chance = following
    assert float(HARD["king_steps"](3)) == pytest.approx(expected, rel=1e-12)


def test_roomy_orders_grow_one_number_at_a_time_to_the_same_count() -> None:
    def extend(last: int, left: frozenset[int]) -> int:
        return 1 if not left else sum(extend(n, left - {n}) for n in left if abs(n - last) >= 3)

    numbers = frozenset(range(1, 9))
    assert HARD["roomy_orders"](8, 3) == sum(extend(n, numbers - {n}) for n in numbers)
