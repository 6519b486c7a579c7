"""Search spaces: files, dimensions, and the way from a point to a schedule and back."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from modelfiles import counts_for, make_facts, moe_facts

from routing_lab.errors import UserFileError
from routing_lab.model import ModelFacts
from routing_lab.schedule import Schedule
from routing_lab.space import SearchSpace

FACTS = make_facts(dict.fromkeys(range(6), 8))


@st.composite
def spaces(draw: st.DrawFn, facts: ModelFacts) -> SearchSpace:
    """A space that fits the model and leaves something to search."""
    choices = draw(st.sets(st.integers(1, facts.experts), min_size=1, max_size=4))
    searched, *others = draw(st.permutations(facts.routed_blocks))
    fixed = {block: draw(st.integers(1, facts.experts)) for block in others if draw(st.booleans())}
    if draw(st.booleans()):
        return SearchSpace(tuple(choices), fixed=fixed, name=draw(st.sampled_from(["a", "b c"])))
    free = [searched, *(block for block in others if block not in fixed)]
    bands: dict[int, list[int]] = {0: [searched]}
    for block in free[1:]:
        bands.setdefault(draw(st.integers(0, 3)), []).append(block)
    return SearchSpace(tuple(choices), tuple(map(tuple, bands.values())), fixed)


def problems(text: str) -> list[str]:
    with pytest.raises(UserFileError) as caught:
        SearchSpace.from_yaml(text, "s.yaml")
    return [str(problem) for problem in caught.value.problems]


def misfit(space: SearchSpace, facts: ModelFacts = FACTS) -> str:
    with pytest.raises(UserFileError) as caught:
        space.check(facts)
    return str(caught.value)


@given(st.data())
def test_a_space_survives_the_round_trip_through_yaml(data) -> None:
    space = data.draw(spaces(data.draw(moe_facts())))
    assert SearchSpace.from_yaml(space.to_yaml()) == space


def test_a_space_survives_the_round_trip_through_a_file(tmp_path) -> None:
    space = SearchSpace((8, 4), ((0, 1), (5,)), {3: 2}, "x")
    space.save(tmp_path / "s.yaml")
    assert SearchSpace.load(tmp_path / "s.yaml") == space


@given(st.data())
def test_every_point_gives_a_schedule_that_fits_and_leads_back_to_the_point(data) -> None:
    facts = data.draw(moe_facts())
    space = data.draw(spaces(facts))
    dimensions = space.dimensions(facts)
    assert space.size(facts) == math.prod(len(choices) for _, choices in dimensions)
    point = {name: data.draw(st.sampled_from(choices)) for name, choices in dimensions}
    schedule = space.schedule(point, facts)
    resolved = schedule.resolve(facts)
    assert space.values(schedule, facts) == point
    assert space.values(schedule.completed(facts), facts) == point
    assert all(resolved[block] == count for block, count in space.fixed.items())


@given(st.data())
def test_a_schedule_lies_in_the_space_exactly_when_a_point_gives_it(data) -> None:
    facts = data.draw(moe_facts())
    space = data.draw(spaces(facts))
    schedule = Schedule.from_counts("s", data.draw(counts_for(facts)))
    point = space.values(schedule, facts)
    if point is not None:
        assert space.schedule(point, facts).key(facts) == schedule.key(facts)
    elif space.size(facts) <= 64:
        names, choices = zip(*space.dimensions(facts), strict=True)
        keys = {space.schedule(dict(zip(names, p, strict=True)), facts).key(facts) for p in itertools.product(*choices)}
        assert schedule.key(facts) not in keys


def test_the_same_computation_gets_the_same_name() -> None:
    whole = SearchSpace((4, 8), (tuple(range(6)),))
    single = SearchSpace((4, 8))
    one = whole.schedule({"blocks 0-5": 4}, FACTS)
    two = single.schedule({f"block {block}": 4 for block in range(6)}, FACTS)
    assert one == two
    assert one.name.startswith("searched-")


def test_dimensions_are_named_by_their_blocks() -> None:
    space = SearchSpace((8, 4), ((0, 1, 4), (2,)), {5: 3})
    assert space.dimensions(FACTS) == [("blocks 0-1,4", (4, 8)), ("block 2", (4, 8))]


def test_blocks_in_no_band_keep_the_models_own_count() -> None:
    schedule = SearchSpace((2,), ((0, 1),)).schedule({"blocks 0-1": 2}, FACTS)
    assert schedule.key(FACTS) == "0-1:2,2-5:8"


@pytest.mark.parametrize("point", [{}, {"block 0": 4}, {"blocks 0-5": 5}, {"blocks 0-5": 4, "block 9": 4}])
def test_what_is_no_point_of_the_space_is_refused(point) -> None:
    with pytest.raises(ValueError, match="no point of the space"):
        SearchSpace((4, 8), (tuple(range(6)),)).schedule(point, FACTS)


@given(moe_facts())
def test_the_default_space_holds_the_baseline_of_a_uniform_model_and_covers_all_routed_blocks(facts) -> None:
    space = SearchSpace.default(facts)
    space.check(facts)
    if facts.uniform_experts_used is not None:
        assert space.values(Schedule.baseline(facts), facts) is not None
    if len(facts.routed_blocks) > 12:
        assert tuple(itertools.chain(*space.bands)) == facts.routed_blocks
        assert all(3 <= len(band) <= 4 for band in space.bands)
    else:
        assert space.per_block


def test_the_default_counts_of_a_model_with_eight_are_few_and_useful() -> None:
    assert SearchSpace.default(FACTS).counts == (2, 3, 4, 5, 6, 8)


def test_a_dense_model_has_no_space() -> None:
    dense = make_facts({}, experts=0, blocks=2)
    with pytest.raises(UserFileError, match="nothing to search"):
        SearchSpace.default(dense)
    assert "nothing to search" in misfit(SearchSpace((1,)), dense)


def test_every_problem_of_a_file_is_listed_with_its_path() -> None:
    text = """
    space: x
    counts: [4, 0, 4, many]
    bands: ["0-6", "6-9", 12, "x", true]
    fixed: {"5": 8, 20: 0}
    band: 1
    """
    assert problems(text) == [
        "counts[3]: is the text 'many'; the list is of whole numbers",
        "counts[1]: is 0; a block consults at least 1 expert",
        "counts[2]: 4 is here twice",
        "bands[1]: overlaps with bands[0] (both name 6)",
        "bands[3]: 'x' is no block or range of blocks such as 7 or 0-6",
        'bands[4]: is true, not a range of blocks (write it as "0-6" or "0-6,22-32")',
        "fixed.20: is 0; a block consults at least 1 expert",
        "bands[0]: block 5 is fixed too (leave it in one of the two)",
        "band: is no key of this format (did you mean bands?)",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("space: x\ncounts: [4]\n", "bands: is missing"),
        ("space: x\ncounts: [4]\nbands: []\n", "bands: is empty"),
        ("space: x\ncounts: [4]\nbands: ['']\n", "bands[0]: names no block"),
        ("space: x\ncounts: [4]\nbands: ['0']\nper_block: true\n", "exclude each other"),
        ("space: x\ncounts: []\nper_block: true\n", "counts: is empty"),
        ("counts: [4]\nper_block: true\n", "space: is missing"),
    ],
)
def test_a_space_needs_a_name_counts_and_one_kind_of_dimension(text, expected) -> None:
    (only,) = problems(text)
    assert expected in only


def test_everything_that_does_not_fit_the_model_is_listed() -> None:
    facts = make_facts({1: 8, 2: 8}, blocks=4, mtp=(3,))
    message = misfit(SearchSpace((4, 17), ((0, 1), (3,)), {9: 20}), facts)
    assert "counts: 17 is more than the 16 experts there are" in message
    assert "bands[0]: block 0 of Testling has no routed experts" in message
    assert "bands[1]: runs only for multi-token prediction" in message
    assert "fixed.9: Testling has 4 blocks (0-3); 9 is none" in message
    assert "fixed.9: 20 is more than the 16 experts there are" in message


def test_a_band_may_run_into_the_block_for_multi_token_prediction() -> None:
    facts = make_facts({1: 8, 2: 8}, blocks=4, mtp=(3,))
    space = SearchSpace((4, 8), ((2, 3),))
    schedule = space.schedule({"blocks 2-3": 4}, facts)
    assert schedule.key(facts) == "1:8,2:4"
    assert space.values(schedule, facts) == {"blocks 2-3": 4}


def test_a_space_with_every_block_fixed_is_refused() -> None:
    assert "every block is fixed" in misfit(SearchSpace((4,), fixed=dict.fromkeys(range(6), 4)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: SearchSpace(()),
        lambda: SearchSpace((4, 4)),
        lambda: SearchSpace((0,)),
        lambda: SearchSpace((4,), ((0, 1), (1, 2))),
        lambda: SearchSpace((4,), ((),)),
        lambda: SearchSpace((4,), ((0,),), {0: 4}),
        lambda: SearchSpace((4,), fixed={0: 0}),
    ],
)
def test_a_space_that_means_nothing_cannot_be_made(make) -> None:
    with pytest.raises(ValueError):
        make()
