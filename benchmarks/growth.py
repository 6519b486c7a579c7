"""What a candidate costs outside llama.cpp, as models get deeper and studies longer.

What: whole trials of a study (sampler, records, SQLite, judge, gate logic) on a runtime without a model, whose answers
and times are made up and take no time of their own. So all that is left is the lab. The sampler is the project's own.
Two series:

* 6 to 64 blocks, each a dimension of its own, at trials 100 to 150;
* 11 blocks, at trials 100 to 150, 300 to 350, 1,000 to 1,050, 2,500 to 2,550 and 5,000 to 5,050.

A study is brought to where its series begins, and copied there. Then the copies go on side by side: after each trial
the next one has its turn, so that what else the machine does meets all of them. A round gives the ratio of two medians
of 50 trials that took turns; the median of the rounds counts.

Targets: at most linear in the blocks, within twice the time from 100 to 5,000 trials.

    python benchmarks/growth.py [--most 5000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from routing_lab.demo import model_path
from routing_lab.measure import MeasureSettings
from routing_lab.model import ModelFacts
from routing_lab.probes import Probe, ProbeSet
from routing_lab.runtime.fake import FakeRuntime
from routing_lab.search import Progress, StudySettings, run_study
from routing_lab.space import SearchSpace

WINDOW = 50
PROBES = 20
BLOCKS = (6, 12, 24, 48, 64)
TRIALS = (100, 300, 1000, 2500, 5000)


class Turns:
    """Lets threads take turns, one trial at a time, and takes down how long each of them had the word."""

    def __init__(self, names: list[int]) -> None:
        self._may_go = threading.Condition()
        self._order, self._at = list(names), 0
        self._begun = 0.0
        self.seconds: dict[int, list[float]] = {name: [] for name in names}

    def wait(self, name: int) -> None:
        """Until it is the turn of ``name``."""
        with self._may_go:
            self._may_go.wait_for(lambda: self._order[self._at] == name)
        self._begun = time.perf_counter()

    def end(self, name: int) -> None:
        """The trial of ``name`` is done; the next one has the word."""
        self.seconds[name].append(time.perf_counter() - self._begun)
        with self._may_go:
            self._at = (self._at + 1) % len(self._order)
            self._may_go.notify_all()

    def leave(self, name: int) -> None:
        """Nothing more comes from ``name``."""
        with self._may_go:
            gone = self._order.index(name)
            self._order.remove(name)
            self._at = (self._at - (gone < self._at)) % max(len(self._order), 1)
            self._may_go.notify_all()


def deep(facts: ModelFacts, blocks: int) -> ModelFacts:
    """The demo model's facts with another number of blocks."""
    return replace(
        facts,
        blocks=blocks,
        routed_blocks=tuple(range(blocks)),
        experts_used=dict.fromkeys(range(blocks), 8),
        block_bytes={},
    )


def go_on(blocks: int, trials: int, storage: Path, turns: Turns | None = None, name: int = 0) -> None:
    """Bring the study of so many blocks to so many trials; the trials of this session take turns where asked."""

    def answer(prompt: str, counts: Mapping[int, int]) -> str:
        number = int(prompt)
        met = counts[number % blocks] >= 2 + number % 3 and sum(counts.values()) >= 3 * blocks
        return f"Answer: {number if met else -1}"

    def progress(now: Progress) -> None:
        if turns is None:
            return
        if now.last is not None:
            turns.end(name)
        if now.done < trials:
            turns.wait(name)

    facts = deep(ModelFacts.read(model_path()), blocks)
    runtime = FakeRuntime(facts, answer=answer, speed=lambda counts: 1000 / (2 * blocks + sum(counts.values())))
    items = tuple(Probe(f"g{number}", str(number), str(number), "integer", "gate") for number in range(PROBES))
    run_study(
        runtime,
        ProbeSet("made up", items, max_tokens=64),
        SearchSpace((1, 2, 3, 4, 6, 8)),
        study="growth",
        storage=storage,
        settings=StudySettings(trials=trials, measure=MeasureSettings(rounds=6, tokens=8), runners_up=None),
        on_progress=progress,
    )


def copied(source: Path, target: Path) -> Path:
    """A copy of a storage."""
    with sqlite3.connect(source) as old, sqlite3.connect(target) as new:
        old.backup(new)
    return target


def side_by_side(studies: dict[int, tuple[int, int, Path]], folder: Path) -> dict[int, float]:
    """Median seconds of ``WINDOW`` trials of each study in turns; a study is its blocks, its trials and its storage."""
    turns = Turns(list(studies))

    def one(name: int) -> None:
        blocks, done, storage = studies[name]
        try:
            # One trial more: the sampler reads the storage in the first of a session.
            go_on(blocks, done + WINDOW + 1, copied(storage, folder / f"copy-{name}.db"), turns, name)
        finally:
            turns.leave(name)

    threads = [threading.Thread(target=one, args=(name,)) for name in studies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in studies:
        (folder / f"copy-{name}.db").unlink()
    return {name: statistics.median(seconds[1:]) for name, seconds in turns.seconds.items()}


def measured(studies: dict[int, tuple[int, int, Path]], rounds: int, folder: Path) -> dict[int, tuple[float, float]]:
    """Seconds, and the ratio to the first study, of each: the medians of so many rounds."""
    seen = [side_by_side(studies, folder) for _ in range(rounds)]
    first = next(iter(studies))
    return {
        name: (statistics.median(one[name] for one in seen), statistics.median(one[name] / one[first] for one in seen))
        for name in studies
    }


def main() -> None:
    """Both series."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        deep_ones = {}
        for blocks in BLOCKS:
            go_on(blocks, 100, folder / f"{blocks}.db")
            deep_ones[blocks] = (blocks, 100, folder / f"{blocks}.db")
        print("blocks  ms per trial  of that at 6 blocks, per block")
        for blocks, (seconds, ratio) in measured(deep_ones, args.rounds, folder).items():
            each = BLOCKS[0] * ratio / blocks
            print(f"{blocks:6}  {1e3 * seconds:12.1f}  {ratio:.2f} times, {each:.2f} per block", flush=True)
        long_ones = {}
        for trials in (number for number in TRIALS if number <= args.most):
            go_on(11, trials, folder / "long.db")
            long_ones[trials] = (11, trials, copied(folder / "long.db", folder / f"long-{trials}.db"))
        print("trials  ms per trial  of that at 100")
        for trials, (seconds, ratio) in measured(long_ones, args.rounds, folder).items():
            print(f"{trials:6}  {1e3 * seconds:12.1f}  {ratio:.2f} times", flush=True)


if __name__ == "__main__":
    main()
