"""Schedules as values, as files, and against a model; and the files that ship."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from modelfiles import counts_for, make_facts, moe_facts

from routing_lab.errors import UsageError, UserFileError
from routing_lab.model import ModelFacts
from routing_lab.overrides import parse_experts
from routing_lab.schedule import STATUSES, CountChange, Schedule, ScheduledModel, ScheduleSource, diff

ROOT = Path(__file__).parent.parent / "schedules"
FACTS = make_facts(dict.fromkeys(range(6), 8))

printable = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Zl", "Zp")), min_size=1, max_size=30)
names = printable.filter(lambda name: name.strip() and name.isprintable())
counts = st.dictionaries(st.integers(0, 60), st.integers(1, 300), max_size=20)
models = st.builds(ScheduledModel, names, st.integers(61, 100), st.integers(300, 512), st.none() | st.integers(1, 300))
sources = st.builds(
    ScheduleSource, names, st.none() | st.floats(0, 1e6, allow_nan=False), st.none() | st.sampled_from(STATUSES)
)
schedules = st.builds(
    lambda name, counts, *more: Schedule(name, tuple(sorted(counts.items())), *more),
    names,
    counts,
    st.none() | models,
    st.none() | sources,
    st.none() | st.integers(1, 300),
)


def problems(text: str) -> list[str]:
    with pytest.raises(UserFileError) as caught:
        Schedule.from_yaml(text, "s.yaml")
    return [str(problem) for problem in caught.value.problems]


def misfits(schedule: Schedule, facts: ModelFacts = FACTS) -> str:
    with pytest.raises(UserFileError) as caught:
        schedule.resolve(facts)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# Files


@given(schedules)
def test_a_schedule_survives_the_round_trip_through_yaml(schedule) -> None:
    assert Schedule.from_yaml(schedule.to_yaml()) == schedule


def test_a_schedule_survives_the_round_trip_through_a_file(tmp_path) -> None:
    schedule = Schedule("ä b", ((0, 1), (1, 1), (4, 3)))
    schedule.save(tmp_path / "s.yaml")
    assert Schedule.load(tmp_path / "s.yaml") == schedule


def test_every_way_to_write_a_range_is_read() -> None:
    text = 'schedule: x\nexperts_used: {0-2: 6, 7: 5, "9": 4, "11-12, 14": 3}\n'
    expected = {0: 6, 1: 6, 2: 6, 7: 5, 9: 4, 11: 3, 12: 3, 14: 3}
    assert dict(Schedule.from_yaml(text).experts_used) == expected


def test_every_problem_of_a_file_is_listed_with_its_path() -> None:
    text = """
    schedule: 7
    model: {architecture: a, blocks: 10, experts: 8, experts_usd: 4}
    experts_used:
      0-6: 6
      5-8: 5
      7: 5
      9-10: 4
      3-1: 4
      x: 4
      yes: 4
      8: 0
      9: many
      "": 1
      99999: 1
    source: {what: w, status: corect}
    extra: 1
    """
    assert problems(text) == [
        "schedule: is the number 7, not a text (put it in quotes)",
        "experts_used.5-8: overlaps with 0-6 (both name 5-6) (name every block once)",
        "experts_used.7: overlaps with 5-8 (both name 7) (name every block once)",
        "experts_used.3-1: the range 3-1 runs backwards",
        "experts_used.x: 'x' is no block or range of blocks such as 7 or 0-6",
        "experts_used.yes: 'yes' is no block or range of blocks such as 7 or 0-6",
        "experts_used.8: is 0; a block consults at least 1 expert",
        "experts_used.8: overlaps with 5-8 (both name 8) (name every block once)",
        "experts_used.9: is the text 'many', not a whole number of experts",
        "experts_used.9: overlaps with 9-10 (both name 9) (name every block once)",
        "experts_used: names no block",
        "experts_used.99999: block 99999 is beyond the last possible one, 4095",
        "experts_used.9-10: the model section says 10 blocks, so the last one is 9",
        (
            "source.status: is 'corect', not one of correct, wrong_answer, no_final_answer, runtime_error "
            "(did you mean correct?)"
        ),
        "extra: is no key of this format (known: experts_used, model, schedule, source)",
        "model.experts_usd: is no key of this format (did you mean experts_used?)",
    ]


def test_a_count_above_the_experts_that_the_file_itself_states_is_an_error() -> None:
    text = "schedule: x\nmodel: {architecture: a, blocks: 9, experts: 8}\nexperts_used: {3: 9}\n"
    assert problems(text) == ["experts_used.3: is 9; the model section says 8 experts"]


@pytest.mark.parametrize(
    "text", ["schedule: x\n", "schedule: x\nexperts_used: 6\n", "schedule: ' '\nexperts_used: {}\n"]
)
def test_a_schedule_needs_a_name_and_counts(text) -> None:
    assert len(problems(text)) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Against a model


@given(st.data())
def test_a_resolved_schedule_has_a_count_for_exactly_the_routed_blocks(data) -> None:
    facts = data.draw(moe_facts())
    listed = data.draw(counts_for(facts))
    schedule = Schedule.from_counts("s", listed)
    resolved = schedule.resolve(facts)
    assert tuple(resolved) == facts.routed_blocks
    assert all(resolved[block] == listed.get(block, facts.experts_used[block]) for block in resolved)
    assert schedule.total(facts) == sum(resolved.values())


@given(st.data())
def test_the_key_names_the_computation_and_nothing_else(data) -> None:
    facts = data.draw(moe_facts())
    schedule = Schedule.from_counts("s", data.draw(counts_for(facts)))
    other = Schedule.from_counts("another name", data.draw(counts_for(facts)))
    completed = schedule.completed(facts)
    assert completed.key(facts) == schedule.key(facts)
    assert completed.completed(facts) == completed
    assert parse_experts(schedule.key(facts)) == schedule.resolve(facts)
    assert (schedule.key(facts) == other.key(facts)) == (schedule.resolve(facts) == other.resolve(facts))


def test_a_listed_block_for_multi_token_prediction_changes_nothing() -> None:
    facts = make_facts(dict.fromkeys(range(5), 8), mtp=(5,))
    assert Schedule.from_counts("s", dict.fromkeys(range(6), 4)).key(facts) == "0-4:4"


def test_all_means_every_routed_block_that_is_not_listed() -> None:
    facts = make_facts({1: 8, 2: 8, 3: 8}, blocks=6, mtp=(5,))  # blocks 0 and 4 are dense
    schedule = Schedule.from_yaml("schedule: s\nexperts_used: {all: 4, 2: 6}\n")
    assert schedule.resolve(facts) == {1: 4, 2: 6, 3: 4}
    assert schedule.total(facts) == 14
    assert schedule.completed(facts) == Schedule("s", ((1, 4), (2, 6), (3, 4)), ScheduledModel.of(facts))
    assert Schedule.from_yaml("schedule: s\nexperts_used: {all: 4}\n").uniform_count(facts) == 4


def test_a_count_for_all_blocks_is_held_to_the_same_rules() -> None:
    assert problems("schedule: s\nexperts_used: {all: 0}\n") == [
        "experts_used.all: is 0; a block consults at least 1 expert"
    ]
    assert problems("schedule: s\nexperts_used: {all: x}\n") == [
        "experts_used.all: is the text 'x', not a whole number of experts"
    ]
    stated = "schedule: s\nmodel: {architecture: a, blocks: 9, experts: 8}\nexperts_used: {all: 9}\n"
    assert problems(stated) == ["experts_used.all: is 9; the model section says 8 experts"]
    assert "experts_used.all: is 17 (Testling has 16 experts: 1 to 16)" in misfits(Schedule("s", (), others=17))
    with pytest.raises(UserFileError, match=r"experts_used\.all: Testling is a dense model"):
        Schedule("s", (), others=1).resolve(make_facts({}, experts=0, blocks=2))


@pytest.mark.parametrize("counts", ["{0-32: 0}", "{0-5: 0, 6-32: 4}", "{0-32: x}"])
def test_an_impossible_range_and_an_impossible_count_are_said_at_once(counts: str) -> None:
    with pytest.raises(UserFileError) as caught:
        Schedule.from_yaml(f"schedule: s\nexperts_used: {counts}\n", "s.yaml", FACTS)
    assert len(caught.value.problems) == 2
    assert "6-32 are none" in str(caught.value)
    both = misfits(Schedule.from_yaml("schedule: s\nexperts_used: {0-32: 99}\n", "s.yaml", FACTS))
    assert "6-32 are none" in both
    assert "is 99" in both


def test_facts_from_the_numbers_of_a_model_section_give_the_same_counts() -> None:
    stated = ScheduledModel("qwen3moe", 6, 16, 8).facts()
    assert stated is not None
    schedule = Schedule.from_counts("s", {0: 4, 5: 2})
    assert schedule.resolve(stated) == schedule.resolve(FACTS)
    assert ScheduledModel.of(stated) == ScheduledModel.of(FACTS)
    assert ScheduledModel("qwen3moe", 6, 16).facts() is None
    assert ScheduledModel("qwen3moe", 6, 16, 17).facts() is None


def test_counts_above_the_models_own_are_legal_up_to_all_experts() -> None:
    assert Schedule.from_counts("s", {0: 16}).resolve(FACTS)[0] == 16
    assert "experts_used.0: is 17 (Testling has 16 experts: 1 to 16)" in misfits(Schedule.from_counts("s", {0: 17}))


def test_zero_experts_are_refused() -> None:
    assert "is 0" in misfits(Schedule.from_counts("s", {0: 0}))


def test_blocks_without_experts_are_refused_by_name() -> None:
    facts = make_facts({1: 8, 2: 8}, blocks=4)
    message = misfits(Schedule.from_counts("s", {0: 4, 1: 4, 9: 4}), facts)
    assert "block 0 of Testling has no routed experts to choose from" in message
    assert "Testling has 4 blocks (0-3); 9 is none (experts to choose from are in 1-2)" in message
    assert "6-32 are none" in misfits(Schedule.from_counts("s", dict.fromkeys(range(33), 4)))


def test_a_dense_model_takes_no_schedule_but_the_empty_one() -> None:
    facts = make_facts({}, experts=0, blocks=2)
    assert "it is a dense model" in misfits(Schedule.from_counts("s", {0: 1}), facts)
    assert Schedule.baseline(facts).key(facts) == ""


def test_a_schedule_for_another_model_says_so() -> None:
    schedule = Schedule("s", ((0, 4),), ScheduledModel("qwen35moe", 41, 256, 6))
    message = misfits(schedule)
    for part in (
        "model.architecture: is qwen35moe, Testling has qwen3moe",
        "model.blocks: is 41, Testling has 6",
        "model.experts: is 256, Testling has 16",
        "model.experts_used: is 6, Testling has 8",
        "this schedule is for another model",
    ):
        assert part in message


@given(moe_facts())
def test_baseline_is_the_models_own_counts(facts) -> None:
    baseline = Schedule.baseline(facts)
    assert baseline.resolve(facts) == facts.experts_used
    assert baseline.uniform_count(facts) == facts.uniform_experts_used
    assert diff(baseline, Schedule.from_counts("nothing listed", {}), facts) == []


@given(st.data())
def test_even_spread_keeps_the_total_and_differs_by_at_most_one(data) -> None:
    facts = data.draw(moe_facts())
    blocks = len(facts.routed_blocks)
    total = data.draw(st.integers(blocks, blocks * facts.experts))
    spread = Schedule.even_spread(total, facts)
    given_counts = list(spread.resolve(facts).values())
    assert spread.total(facts) == total
    assert max(given_counts) - min(given_counts) <= 1
    # Evenly: any stretch from the start has its share, to within one expert.
    for length in range(blocks + 1):
        assert abs(sum(given_counts[:length]) - total * length / blocks) < 1


@pytest.mark.parametrize("total", [5, 97, 0, -1])
def test_an_impossible_total_cannot_be_spread(total) -> None:
    with pytest.raises(UsageError):
        Schedule.even_spread(total, FACTS)


@given(st.data())
def test_a_uniform_schedule_is_recognised(data) -> None:
    facts = data.draw(moe_facts())
    count = data.draw(st.integers(1, facts.experts))
    assert Schedule.uniform(count, facts).uniform_count(facts) == count
    other = Schedule.from_counts("s", data.draw(counts_for(facts)))
    assume(len(set(other.resolve(facts).values())) > 1)
    assert other.uniform_count(facts) is None


@given(st.data())
def test_a_diff_names_exactly_the_blocks_that_compute_differently(data) -> None:
    facts = data.draw(moe_facts())
    one = Schedule.from_counts("one", data.draw(counts_for(facts)))
    two = Schedule.from_counts("two", data.draw(counts_for(facts)))
    old, new = one.resolve(facts), two.resolve(facts)
    changes = diff(one, two, facts)
    seen = {block: (c.before, c.after) for c in changes for block in range(c.first, c.last + 1)}
    assert seen == {block: (old[block], new[block]) for block in old if old[block] != new[block]}
    for left, right in itertools.pairwise(changes):
        assert left.last < right.first
        assert left.last + 1 < right.first or (left.before, left.after) != (right.before, right.after)


def test_a_diff_joins_neighbouring_blocks_that_change_alike() -> None:
    changes = diff(Schedule.baseline(FACTS), Schedule.from_counts("s", {0: 4, 1: 4, 2: 3, 5: 3}), FACTS)
    assert changes == [CountChange(0, 1, 8, 4), CountChange(2, 2, 8, 3), CountChange(5, 5, 8, 3)]


@pytest.mark.parametrize(
    ("name", "listed"), [("", ()), ("a\nb", ()), ("s", ((1, 2), (0, 2))), ("s", ((0, 2), (0, 3))), ("s", ((-1, 2),))]
)
def test_a_schedule_that_means_nothing_cannot_be_made(name, listed) -> None:
    with pytest.raises(ValueError):
        Schedule(name, listed)


# ---------------------------------------------------------------------------------------------------------------------
# The files that ship

FIGURE_1 = [
    ("1-uniform-8", "0-40:8", 93.6, "correct"),
    ("2-uniform-6", "0-40:6", 100.1, "correct"),
    ("3-late-4", "0-32:8,33-40:4", 108.6, "correct"),
    ("4-outer-6-late-4", "0-6:6,7-21:8,22-32:6,33-40:4", 109.4, "correct"),
    ("5-late-4-early-6", "0-32:6,33-40:4", 111.1, "correct"),
    ("6-middle-6-late-4", "0-6:8,7-32:6,33-40:4", 111.5, "wrong_answer"),
    ("7-uniform-5", "0-40:5", 111.5, "correct"),
    ("8-early-5-middle-6-late-4", "0-6:5,7-32:6,33-40:4", 112.2, "no_final_answer"),
    ("9-uniform-4", "0-40:4", 117.0, "no_final_answer"),
]


@pytest.mark.parametrize(("file", "key", "rate", "status"), FIGURE_1)
def test_the_schedules_of_figure_1_say_what_was_published(file, key, rate, status) -> None:
    schedule = Schedule.load(ROOT / "figure-1" / f"{file}.yaml")
    studied = make_facts(dict.fromkeys(range(41), 8), experts=256, architecture="qwen35moe")
    assert schedule.key(studied) == key
    assert schedule.name == file.partition("-")[2]
    assert schedule.source is not None
    assert (schedule.source.decode_tokens_per_s, schedule.source.status) == (rate, status)


def test_figure_1_is_complete() -> None:
    assert sorted(path.stem for path in (ROOT / "figure-1").glob("*.yaml")) == [row[0] for row in FIGURE_1]


@pytest.mark.parametrize("path", sorted((ROOT / "demo").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_demo_schedules_are_named_like_their_files_and_fit_a_model_of_the_demo_models_shape(path) -> None:
    schedule = Schedule.load(path)
    assert schedule.name == path.stem
    assert schedule.total(FACTS) < 6 * 8


@pytest.mark.parametrize("key", ["010", "1:30", "0x10", "1_0", "yes", "true", "~", "1.0", "1e1", "00-06", "0-06"])
def test_a_block_key_names_the_block_it_shows_or_is_refused_as_written(key: str) -> None:
    (problem,) = problems(f"schedule: x\nexperts_used: {{{key}: 4}}")
    assert problem.startswith(f"experts_used.{key}: '{key}' is no block")


@pytest.mark.parametrize("count", ["010", "1:30", "0x8", "1_0", "'8'", "8.0", "yes"])
def test_a_count_is_a_plain_whole_number(count: str) -> None:
    (problem,) = problems(f"schedule: x\nexperts_used: {{7: {count}}}")
    assert count.strip("'") in problem
    assert "not a whole number of experts" in problem
