from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from fakelab import make_facts, make_space, schedule
from optuna.samplers import RandomSampler
from optuna.trial import TrialState

from routing_lab.schedule import Schedule
from routing_lab.search import SAMPLER_NAMES
from routing_lab.search.dimensions import Dimensions, Point
from routing_lab.search.sampler import FreshSampler, make_sampler
from routing_lab.search.schedule_sampler import EVIDENCE, ScheduleSampler, evidence_attribute
from routing_lab.search.surrogate import Evidence


@pytest.fixture
def dimensions(tmp_path: Path) -> Dimensions:
    return Dimensions(make_space((2, 4, 8)), make_facts(tmp_path))


class Stubborn(RandomSampler):
    """Always proposes the same point."""

    def sample_independent(self, *_args: Any) -> int:
        return 1


def ask(study: optuna.Study, dimensions: Dimensions) -> tuple[optuna.Trial, Point]:
    trial = study.ask(dimensions.distributions)
    return trial, dimensions.point(trial.params)


def test_a_point_a_schedule_and_parameters_are_three_names_of_one_thing(dimensions: Dimensions, tmp_path: Path) -> None:
    point = (0, 1, 2, 0)
    found = dimensions.schedule(dimensions.params(point))
    assert found.experts_used == ((0, 2), (1, 4), (2, 8), (3, 2))
    assert dimensions.point_of(found) == point
    assert dimensions.point(dimensions.params(point)) == point


def test_a_schedule_outside_the_space_has_no_point(dimensions: Dimensions) -> None:
    assert dimensions.point_of(schedule(2, 2, 2, 3)) is None


def test_the_size_is_the_number_of_points(dimensions: Dimensions) -> None:
    assert dimensions.size == 3**4


def needs_torch(name: str) -> None:
    if name == "gp":
        pytest.importorskip("torch", reason="Optuna's GP sampler needs PyTorch")


@pytest.mark.parametrize("name", SAMPLER_NAMES)
def test_no_sampler_repeats_a_point_until_all_are_taken(dimensions: Dimensions, name: Any) -> None:
    needs_torch(name)
    taken: set[Point] = set()
    sampler = FreshSampler(make_sampler(name, 3, dimensions, taken), dimensions, taken, seed=3, tries=2)
    study = optuna.create_study(sampler=sampler, direction="maximize")
    while not sampler.exhausted:
        trial, point = ask(study, dimensions)
        assert point not in taken
        taken.add(point)
        study.tell(trial, sum(point))
    assert len(taken) == dimensions.size


@pytest.mark.parametrize("listed", [True, False])
def test_a_sampler_that_insists_on_one_point_cannot_stall_a_study(
    dimensions: Dimensions, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not listed:
        monkeypatch.setattr(FreshSampler, "ENUMERABLE", 0)
    taken: set[Point] = {(1, 1, 1, 1)}
    study = optuna.create_study(sampler=FreshSampler(Stubborn(), dimensions, taken, seed=0))
    for _ in range(40):
        trial, point = ask(study, dimensions)
        assert point not in taken
        taken.add(point)
        study.tell(trial, state=TrialState.FAIL)


def test_asking_for_a_point_of_an_exhausted_space_is_a_bug(dimensions: Dimensions) -> None:
    taken = {(a, b, c, d) for a in range(3) for b in range(3) for c in range(3) for d in range(3)}
    study = optuna.create_study(sampler=FreshSampler(Stubborn(), dimensions, taken, seed=0))
    with pytest.raises(RuntimeError, match="every point is taken"):
        ask(study, dimensions)


def test_a_space_with_a_single_choice_in_a_dimension_can_be_sampled(tmp_path: Path) -> None:
    one = Dimensions(make_space((4,)), make_facts(tmp_path))
    study = optuna.create_study(sampler=FreshSampler(make_sampler("tpe", 0, one, set()), one, set(), seed=0))
    assert ask(study, one)[1] == (0, 0, 0, 0)


def test_samplers_learn_what_fails_the_gate_and_chance_does_not(tmp_path: Path) -> None:
    """Fewer experts are faster, and block 0 fails below 7."""
    facts = make_facts(tmp_path)
    space = Dimensions(make_space((1, 2, 3, 4, 5, 6, 7, 8)), facts)
    passed, fastest = {}, {}
    for name in ("tpe", "schedule", "random"):
        taken: set[Point] = set()
        study = optuna.create_study(
            sampler=FreshSampler(make_sampler(name, 1, space, taken), space, taken, seed=1), direction="maximize"
        )
        for _ in range(80):
            trial, point = ask(study, space)
            counts = space.schedule(trial.params).resolve(facts)
            taken.add(point)
            failed = float(counts[0] < 7)
            trial.set_constraint("failed probes", failed)
            trial.set_user_attr(EVIDENCE, evidence_attribute(0.01, Evidence(20 * failed, 20, 20)))
            study.tell(trial, 1000 / (8 + sum(counts.values())) / 25)
        accepted = [trial.value for trial in study.get_trials() if not trial.user_attrs[EVIDENCE]["gate"][0]]
        fastest[name] = max(accepted, default=0.0)
        late = study.get_trials()[40:]
        passed[name] = sum(space.schedule(trial.params).resolve(facts)[0] >= 7 for trial in late)
    assert passed["tpe"] > passed["random"] + 5
    # Ours looks for faster ones than it has, which all fail here, once it has found the best there is.
    assert fastest["schedule"] == pytest.approx(1000 / (8 + 7 + 3) / 25)
    assert fastest["schedule"] >= fastest["tpe"] > fastest["random"]


def test_the_baseline_is_a_point_where_its_counts_are_choices(dimensions: Dimensions, tmp_path: Path) -> None:
    assert dimensions.point_of(Schedule.baseline(make_facts(tmp_path))) == (2, 2, 2, 2)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("probes", [20, 5000])
def test_what_is_surely_slower_than_the_best_accepted_is_not_proposed_while_anything_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: bool, probes: int
) -> None:
    """Four experts everywhere pass; whatever is faster fails nearly every probe, so that all hope is small."""
    if not listed:
        monkeypatch.setattr(ScheduleSampler, "ENUMERABLE", 0)
    facts = make_facts(tmp_path)
    space = Dimensions(make_space((2, 3, 4, 6, 8)), facts)
    taken: set[Point] = set()
    study = optuna.create_study(sampler=ScheduleSampler(space, taken, seed=0), direction="maximize")
    study.enqueue_trial(space.params((2, 2, 2, 2)))
    for number in range(25):
        trial, point = ask(study, space)
        counts = space.schedule(trial.params).resolve(facts).values()
        taken.add(point)
        if number > 8:  # by then the time model knows what an expert costs
            assert sum(counts) <= 16
        failed = 0 if min(counts) >= 4 else probes - 1
        trial.set_user_attr(EVIDENCE, evidence_attribute(0.01, Evidence(failed, probes, probes)))
        study.tell(trial, 40 / (8 + sum(counts)))
