"""What a study has learnt so far, as two small models: how long a token takes, and how likely a gate is to be passed.

**Time** per token is close to additive over blocks: every expert that a block consults costs about the same wherever it
is, and something else costs the rest. So the relative time ``1 / ratio`` is a linear function of the counts. It is
fitted by Bayesian regression whose prior says that all experts cost the same and lets each dimension differ from that.

**Failures** are not additive and no rule says which blocks matter. The log odds of a probe's failure are a Gaussian
process over the logarithms of the counts. Its kernel has a part for each dimension alone, one for all of them together,
and one for the sum of what was removed; nothing in it knows where a block lies. Evidence is the empirical logit
``log((f + 1/2) / (n - f + 1/2))`` of f failures among n probes with its usual variance ``1 / (f + 1/2) + 1 / (n - f +
1/2)`` (Gart and Zweifel, Biometrika 54, 1967), so that a run that stopped at its first failure counts for what it is
worth. The scales of the three parts are those of the largest marginal likelihood among a few.

Everything is numpy on matrices of points; a point is a row of counts, one for each dimension.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from scipy.linalg import cho_solve, solve_triangular
from scipy.special import logsumexp, ndtr

__all__ = ["Evidence", "FailureModel", "TimeModel", "expected_gain"]

Array = np.ndarray[Any, np.dtype[np.float64]]

_COST_DIFFERS: Final = 0.5
"""Prior deviation of what an expert costs in one dimension, where 1 is all the time spread evenly over the experts."""
_LEAST_NOISE: Final = 0.003

_SCALES: Final = tuple(itertools.product((0.5, 1.5), (0.5, 1.5), (1.2, 2.4)))
"""Deviations of the parts for single dimensions and for all together, and their length in doublings of a count."""
_TREND: Final = 6.0
"""Prior deviation of the log odds between nothing and everything removed."""
_LEVEL: Final = -6.0
"""Log odds of a failure before anything is known: one probe in 400."""
_LEVEL_DEVIATION: Final = 1.0

# Nodes and weights of the integral over a normal distribution.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(9)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one gate run showed: ``failed`` of ``run`` probes, weighted by how often each fails, of ``total``."""

    failed: float
    run: float
    total: int


class TimeModel:
    """Relative time per token, linear in the counts.

    Args:
        own: The model's own count in each dimension.
        weights: How many blocks each dimension stands for.
    """

    def __init__(self, own: Array, weights: Array) -> None:
        self._own, self._weights = own, weights
        size = len(own) + 1
        self._precision = np.eye(size) / _COST_DIFFERS**2
        self._precision[0, 0] = 1.0
        self._pull = np.zeros(size)
        self._pull[0] = 0.7  # experts are most of the time of a token, before anything was measured

    def _features(self, points: Array) -> Array:
        parts = self._weights * (points - self._own) / (self._weights * self._own).sum()
        return np.concatenate([parts.sum(axis=1, keepdims=True), parts], axis=1)

    def add(self, point: Array, ratio: float, half_width: float) -> None:
        """Learn the measured ``ratio`` of a point, and how far its interval reaches to each side, as a share of it."""
        row = self._features(point[None, :])[0]
        noise = max(_LEAST_NOISE, half_width / 2) / ratio
        self._precision += np.outer(row, row) / noise**2
        self._pull += row * (1 / ratio - 1) / noise**2

    def predict(self, points: Array) -> tuple[Array, Array]:
        """Ratio of each point and its standard deviation."""
        rows = self._features(points)
        covariance = np.linalg.inv(self._precision)
        time = np.maximum(1 + rows @ (covariance @ self._pull), 0.05)
        deviation = np.sqrt(np.maximum(((rows @ covariance) * rows).sum(axis=1), 0.0))
        return 1 / time, deviation / time**2


class FailureModel:
    """Log odds that a probe fails, as a Gaussian process over schedules.

    Args:
        own: The model's own count in each dimension.
        weights: How many blocks each dimension stands for.
        points: Where something is known, a row for each.
        evidence: What is known there.
        scales: Kernel scales of an earlier fit; ``None`` chooses them anew.
    """

    def __init__(
        self,
        own: Array,
        weights: Array,
        points: Array,
        evidence: list[Evidence],
        scales: tuple[float, float, float] | None = None,
    ) -> None:
        self._own, self._weights = own, weights
        self._points = points
        failed = np.array([one.failed for one in evidence])
        passed = np.array([one.run - one.failed for one in evidence])
        self._logits = np.log((failed + 0.5) / (passed + 0.5)) - _LEVEL
        self._noise = 1 / (failed + 0.5) + 1 / (passed + 0.5)
        self.scales = scales or max(_SCALES, key=self._likelihood)
        self._inverse = cho_solve((self._cholesky(self.scales), True), np.eye(len(points)))

    def _kernel(self, a: Array, b: Array, scales: tuple[float, float, float]) -> Array:
        alone, together, length = scales
        share = self._weights / self._weights.sum()
        removed_a, removed_b = (1 - points / self._own for points in (a, b))
        trend = np.outer(removed_a @ share, removed_b @ share)
        apart = np.zeros((len(a), len(b)))
        single = np.zeros((len(a), len(b)))
        for column in range(a.shape[1]):
            squared = (np.log2(a[:, column, None]) - np.log2(b[None, :, column])) ** 2 / length**2
            single += np.exp(-squared / 2)
            apart += squared
        single /= a.shape[1]
        kernel = _LEVEL_DEVIATION**2 + _TREND**2 * trend + alone**2 * single + together**2 * np.exp(-apart / 8)
        return np.asarray(kernel)

    def _cholesky(self, scales: tuple[float, float, float]) -> Array:
        kernel = self._kernel(self._points, self._points, scales)
        return np.asarray(np.linalg.cholesky(kernel + np.diag(self._noise + 1e-6)), float)

    def _likelihood(self, scales: tuple[float, float, float]) -> float:
        factor = self._cholesky(scales)
        white = solve_triangular(factor, self._logits, lower=True)
        return float(-white @ white / 2 - np.log(np.diag(factor)).sum())

    def predict(self, points: Array) -> tuple[Array, Array]:
        """Log odds that a probe fails at each point, and their standard deviation."""
        across = self._kernel(points, self._points, self.scales)
        weighed = across @ self._inverse
        variance = self._own_variance(points) - (weighed * across).sum(axis=1)
        return _LEVEL + weighed @ self._logits, np.sqrt(np.maximum(variance, 1e-9))

    def _own_variance(self, points: Array) -> Array:
        alone, together, _ = self.scales
        removed = (1 - points / self._own) @ (self._weights / self._weights.sum())
        return np.asarray(_LEVEL_DEVIATION**2 + _TREND**2 * removed**2 + alone**2 + together**2)

    def log_passing(self, points: Array, probes: int) -> Array:
        """Logarithm of the probability that all of so many probes are passed at each point."""
        centre, deviation = self.predict(points)
        odds = centre[:, None] + deviation[:, None] * _NODES[None, :]
        # log(1 - sigmoid(x)) = -log(1 + exp(x)), without overflow
        return np.asarray(logsumexp(-probes * np.logaddexp(0.0, odds), b=_WEIGHTS, axis=1))


def expected_gain(ratio: Array, deviation: Array, best: float) -> Array:
    """Mean of what a normal ratio has above ``best``."""
    spread = np.maximum(deviation, 1e-6)
    z = (ratio - best) / spread
    return np.asarray((ratio - best) * ndtr(z) + spread * np.exp(-z * z / 2) / math.sqrt(2 * math.pi))
