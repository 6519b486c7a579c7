"""A sampler made for schedules: it proposes what is probably faster than the best accepted one and probably passes.

Two models of ``surrogate`` learn from every trial: the time of a token, and the odds that a probe fails. The worth of a
point is its probability of passing the whole gate times what it is expected to gain over the best accepted ratio. What
is surely slower than that, by the time model and its uncertainty, is proposed when nothing else is left. No rule of
thumb is in it: which blocks matter is what the trials say.

A trial tells what it found in the user attribute ``EVIDENCE``, beside its value and its constraint, which is all that
Optuna's own samplers read. A space of up to ``ENUMERABLE`` points is looked at whole. In a larger one the points are
drawn at random and around the best, and the most promising of them are improved one dimension at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from threadpoolctl import ThreadpoolController

from routing_lab.search.dimensions import Dimensions, Point
from routing_lab.search.surrogate import Evidence, FailureModel, TimeModel, expected_gain

__all__ = ["EVIDENCE", "ScheduleSampler", "evidence_attribute"]

EVIDENCE: Final = "routing_lab.evidence"

_FINISHED: Final = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
_USUAL_HALF_WIDTH: Final = 0.03
SURELY: Final = 3.0
"""Deviations of the time model within which a schedule might still be as fast as the best accepted one."""
_LAST: Final = 1e9
"""Taken from the worth (a logarithm) of what is surely slower: it is proposed when nothing else is left."""


def evidence_attribute(half_width: float | None, seen: Evidence | None) -> dict[str, Any]:
    """The attribute of a trial: how sure its ratio is, and what its gate run showed; ``None`` for what was skipped."""
    gate = None if seen is None else [seen.failed, seen.run, seen.total]
    return {"half_width": half_width, "gate": gate}


class ScheduleSampler(BaseSampler):
    """See the head of this module.

    Args:
        dimensions: The space.
        taken: Points not to propose; the study adds to it as it goes.
        seed: Of what is left to chance.
    """

    ENUMERABLE: Final = 5_000
    POOL: Final = 400
    CLIMBERS: Final = 8
    MOST_EVIDENCE: Final = 240
    """Gate runs that the failure model is fitted to: those whose speed is nearest to the best."""
    REFIT: Final = 10
    """Gate runs between two choices of the kernel's scales."""

    def __init__(self, dimensions: Dimensions, taken: set[Point], *, seed: int) -> None:
        self._dimensions, self._taken = dimensions, taken
        self._chance = np.random.default_rng(seed)
        self._independent = RandomSampler(seed=seed)
        self._threads = ThreadpoolController()
        self._choices = [np.array(counts, float) for counts in dimensions.choices.values()]
        self._own = np.array(dimensions.own, float)
        self._weights = np.array(dimensions.blocks, float)
        self._time = TimeModel(self._own, self._weights)
        self._read = 0
        self._gated = _Points(len(self._choices))
        self._evidence: list[Evidence] = []
        self._accepted = _Points(len(self._choices))
        self._fastest: list[Point] = []
        self._best = 1.0
        self._scales: tuple[float, float, float] | None = None
        self._fitted = 0
        self._whole: list[Point] | None = None
        if dimensions.size <= self.ENUMERABLE:
            self._whole = list(itertools.product(*(range(len(counts)) for counts in self._choices)))

    # ---- Optuna's interface ----------------------------------------------------------------------------------------

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All dimensions."""
        del study, trial
        return dict(self._dimensions.distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The most promising point that is not taken."""
        del trial, search_space
        # On matrices this small a second thread gains nothing, and on busy cores the two wait for each other for ever.
        with self._threads.limit(limits=1):
            self._learn(study)
            return dict(self._dimensions.params(self._proposal()))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:  # noqa: ANN401 - Optuna's signature
        """Never needed for a dimension of the space; left to chance."""
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        """Take another seed."""
        self._chance = np.random.default_rng()
        self._independent.reseed_rng()

    # ---- learning --------------------------------------------------------------------------------------------------

    def _learn(self, study: Study) -> None:
        """Read the trials that ended since the last call."""
        trials = study.get_trials(deepcopy=False)
        while self._read < len(trials) and trials[self._read].state in _FINISHED:
            self._learn_from(trials[self._read])
            self._read += 1

    def _learn_from(self, trial: FrozenTrial) -> None:
        if trial.state is TrialState.FAIL or trial.params.keys() < self._dimensions.choices.keys():
            return
        point = self._dimensions.point(trial.params)
        told = trial.user_attrs.get(EVIDENCE, {})
        ratio = trial.values[0] if trial.values else trial.intermediate_values.get(0)
        if ratio is not None and ratio > 0:
            self._time.add(self._counts([point])[0], ratio, told.get("half_width") or _USUAL_HALF_WIDTH)
        gate = told.get("gate")
        if gate is not None:
            self._gated.add(point, self._counts([point])[0])
            self._evidence.append(Evidence(*gate))
            if gate[0] == 0 and ratio is not None:  # what was not timed is nothing to beat
                self._accepted.add(point, self._counts([point])[0])

    def _counts(self, points: Sequence[Point]) -> Any:  # noqa: ANN401 - a numpy array
        ranks = np.array(points)
        return np.stack([counts[ranks[:, column]] for column, counts in enumerate(self._choices)], axis=1)

    # ---- proposing -------------------------------------------------------------------------------------------------

    def _proposal(self) -> Point:
        if self._accepted.points:
            # By the model and not as measured: the largest of many noisy ratios is too good.
            ratios, _ = self._time.predict(self._accepted.counts)
            order = np.argsort(-ratios, kind="stable")[: self.CLIMBERS]
            self._fastest = [self._accepted.points[which] for which in order]
            self._best = max(1.0, float(ratios.max()))
        pool = self._pool()
        if not pool or not self._evidence:
            return self._any()
        failures = self._failure_model()
        worth = self._worth(pool, failures)
        if self._whole is None:
            pool, worth = self._climb(pool, worth, failures)
        return pool[int(np.argmax(worth))]

    def _failure_model(self) -> FailureModel:
        counts = self._gated.counts
        keep = np.arange(len(counts))
        if len(counts) > self.MOST_EVIDENCE:
            ratios, _ = self._time.predict(counts)
            keep = np.argsort(np.abs(ratios - self._best), kind="stable")[: self.MOST_EVIDENCE]
        if len(self._evidence) >= self._fitted + self.REFIT:
            self._scales = None
        evidence = [self._evidence[which] for which in keep]
        model = FailureModel(self._own, self._weights, counts[keep], evidence, self._scales)
        if self._scales is None:
            self._scales, self._fitted = model.scales, len(self._evidence)
        return model

    def _worth(self, points: Sequence[Point], failures: FailureModel) -> Any:  # noqa: ANN401 - a numpy array
        counts = self._counts(points)
        ratios, deviations = self._time.predict(counts)
        gain = expected_gain(ratios, deviations, self._best)
        # As logarithms: while nothing passes, all probabilities are small, and the least small one shows the way.
        worth = np.log(np.maximum(gain, 1e-300)) + failures.log_passing(counts, self._evidence[-1].total)
        # However sure it is to pass: what is surely slower than the best would be measured for nothing.
        return np.where(ratios + SURELY * deviations < self._best, worth - _LAST, worth)

    def _pool(self) -> list[Point]:
        """Points to choose from, none of them taken."""
        if self._whole is not None:
            return [point for point in self._whole if point not in self._taken]
        drawn = {self._any() for _ in range(self.POOL // 2)}
        parents = [*self._fastest, *self._gated.points[-self.CLIMBERS :]]
        drawn |= {self._changed(parents[index % len(parents)]) for index in range(self.POOL // 2) if parents}
        return sorted(drawn - self._taken)

    def _any(self) -> Point:
        return tuple(int(self._chance.integers(len(counts))) for counts in self._choices)

    def _changed(self, point: Point) -> Point:
        """``point`` with one to three dimensions drawn anew."""
        changed = list(point)
        for column in self._chance.integers(len(changed), size=self._chance.integers(1, 4)):
            changed[column] = int(self._chance.integers(len(self._choices[column])))
        return tuple(changed)

    def _climb(self, pool: list[Point], worth: Any, failures: FailureModel) -> tuple[list[Point], Any]:  # noqa: ANN401
        """Improve the best few, a step in one dimension at a time, as long as that helps."""
        for _ in range(len(self._choices)):
            top = [pool[which] for which in np.argsort(worth)[-self.CLIMBERS :]]
            known = set(pool)
            steps = sorted({step for point in top for step in self._neighbours(point)} - self._taken - known)
            if not steps:
                break
            gained = self._worth(steps, failures)
            better = gained.max() > worth.max()
            pool, worth = [*pool, *steps], np.concatenate([worth, gained])
            if not better:
                break
        return pool, worth

    def _neighbours(self, point: Point) -> list[Point]:
        return [
            (*point[:column], rank + step, *point[column + 1 :])
            for column, rank in enumerate(point)
            for step in (-1, 1)
            if 0 <= rank + step < len(self._choices[column])
        ]


class _Points:
    """Points in the order in which they came, and their counts as the rows of a matrix that grows in place."""

    def __init__(self, columns: int) -> None:
        self.points: list[Point] = []
        self._rows = np.empty((64, columns))

    def add(self, point: Point, counts: Any) -> None:  # noqa: ANN401 - a numpy array
        """Take one more."""
        if len(self.points) == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[len(self.points)] = counts
        self.points.append(point)

    @property
    def counts(self) -> Any:  # noqa: ANN401 - a numpy array
        """A row for each point."""
        return self._rows[: len(self.points)]
