"""What a running study has found so far, summed up as it goes: no question gets dearer as the study gets longer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter

from routing_lab.gate import Result
from routing_lab.measure import Ended, SpeedRatio
from routing_lab.search.dimensions import Dimensions, Point
from routing_lab.search.records import Ending, TrialRecord
from routing_lab.search.settings import StudySettings

__all__ = ["ATTEMPTS", "History"]

ATTEMPTS = 2
"""Trials of one schedule that may end in a runtime error; one that kills the model every time is then left alone."""


class History:
    """The trials of a study, of earlier sessions and of this one.

    Args:
        dimensions: The space.
        settings: Of this session: how many runners-up are wanted, and which test comes first.
    """

    def __init__(self, dimensions: Dimensions, settings: StudySettings) -> None:
        self._dimensions, self._settings = dimensions, settings
        self.trials = 0
        self.evaluated = 0
        """Results, without the sensitivity pass."""
        self.best: TrialRecord | None = None
        """The fastest accepted one, the first of equals."""
        self.taken: set[Point] = set()
        """Points that need not be proposed again."""
        self.cuts: dict[Point, bool] = {}
        """Points of the sensitivity pass that were asked or given up, and whether they passed the gate."""
        self.failures: Counter[str] = Counter()
        """How often each probe failed."""
        self._lost: Counter[Point] = Counter()
        self._lows: list[float] = []  # lower ends of the accepted ratios, sorted
        self._highs: list[float] = []  # upper ends of the ratios that were measured to the end, sorted
        self._decided = self._passed = 0
        self._speed, self._gate = _Test(), _Test()

    def add(self, record: TrialRecord) -> None:
        """Take in a trial that ended."""
        self.trials += 1
        self.failures.update(record.verdict.failures)
        evaluated = record.ending is Ending.EVALUATED
        if evaluated and not record.is_single_cut:
            self._add_result(record)
        point = self._dimensions.point_of(record.schedule)
        if point is None:
            return
        self._lost[point] += record.ending is Ending.RUNTIME_ERROR
        given_up = self._lost[point] >= ATTEMPTS
        passed = record.verdict.result is Result.PASS
        if given_up or (evaluated and not (record.is_single_cut and passed)):
            # A single cut that passed was not timed, so that it is still a schedule to propose.
            self.taken.add(point)
        if record.is_single_cut and (given_up or (evaluated and not self._is_cut_short(record))):
            self.cuts[point] = passed

    def _is_cut_short(self, record: TrialRecord) -> bool:
        """Whether a map wants more than this run, which an earlier session ended at its first failure."""
        verdict = record.verdict
        return self._settings.start == "map" and verdict.run < verdict.total and not verdict.errors

    def _add_result(self, record: TrialRecord) -> None:
        self.evaluated += 1
        speed, result = record.speed, record.verdict.result
        if record.gate_skipped is None:
            self._decided += 1
            self._passed += result is Result.PASS
        if record.accepted and speed:
            insort(self._lows, speed.low)
            if self.best is None or self.best.speed is None or speed.ratio > self.best.speed.ratio:
                self.best = record
        if record.seconds.gate:
            self._gate.add(record.seconds.gate, rejected=result is Result.FAIL)
        if record.seconds.speed and speed:
            beaten = speed.ended is Ended.BEATEN
            self._speed.add(record.seconds.speed, rejected=beaten)
            if not beaten:
                insort(self._highs, speed.high)

    # ---- questions -------------------------------------------------------------------------------------------------

    @property
    def pass_rate(self) -> float | None:
        """Share that passed among the results whose gate was decided; ``None`` before there is one."""
        return self._passed / self._decided if self._decided else None

    def rival(self) -> float | None:
        """The ratio that a schedule has to reach to be wanted: of enough accepted ones, the slowest's lower end."""
        enough = self._settings.runners_up
        return self._lows[-enough] if enough is not None and len(self._lows) >= enough else None

    def too_slow(self, speed: SpeedRatio | None) -> str | None:
        """Why the verdict on a schedule that is so fast would change nothing; ``None`` where it would."""
        if speed is None:
            return None
        if speed.high <= 1:
            return "surely no faster than the baseline"
        rival = self.rival()
        if rival is not None and (speed.high < rival or speed.ended is Ended.BEATEN):
            return f"surely slower than {self._settings.runners_up} accepted schedules"
        return None

    def gate_comes_first(self) -> bool:
        """Whether the gate costs less time than the speed for each schedule it rejects."""
        if self._settings.order != "auto":
            return self._settings.order == "gate"
        if not (self._speed.times and self._gate.times):
            return False
        rival = self.rival()
        slow = max(bisect_right(self._highs, 1.0), 0 if rival is None else bisect_left(self._highs, rival))
        of_speed = self._speed.seconds / (self._speed.rejected + slow + 1)
        of_gate = self._gate.seconds / (self._gate.rejected + 1)
        return of_gate < of_speed


class _Test:
    """What one of the two tests of a trial has cost and done."""

    def __init__(self) -> None:
        self.times, self.seconds, self.rejected = 0, 0.0, 0

    def add(self, seconds: float, *, rejected: bool) -> None:
        self.times += 1
        self.seconds += seconds
        self.rejected += rejected
