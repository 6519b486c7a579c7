"""What a candidate costs outside llama.cpp, as models get deeper and studies longer.

What: whole trials of a study (sampler, records, SQLite, judge, gate logic) on a runtime without a model, whose answers
and times are made up and take no time of their own. So all that is left is the lab. Per size the median time of the
last 50 trials; the sampler is the project's own. Two series:

* 6 to 64 blocks, each a dimension of its own, at trials 100 to 150;
* 100 to 5,000 trials of 11 blocks.

Targets: at most linear in the blocks, within twice the time from 100 to 5,000 trials.

    python benchmarks/growth.py [--most 5000]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from routing_lab.demo import model_path
from routing_lab.measure import MeasureSettings
from routing_lab.model import ModelFacts
from routing_lab.probes import Probe, ProbeSet
from routing_lab.runtime.fake import FakeRuntime
from routing_lab.search import StudySettings, run_study
from routing_lab.space import SearchSpace

WINDOW = 50
PROBES = 20


def deep(facts: ModelFacts, blocks: int) -> ModelFacts:
    """The demo model's facts with another number of blocks."""
    return replace(
        facts,
        blocks=blocks,
        routed_blocks=tuple(range(blocks)),
        experts_used=dict.fromkeys(range(blocks), 8),
        block_bytes={},
    )


def seconds_per_trial(blocks: int, trials: list[int], folder: Path) -> dict[int, float]:
    """Median seconds of the ``WINDOW`` trials up to each number of them."""

    def answer(prompt: str, counts: Mapping[int, int]) -> str:
        number = int(prompt)
        met = counts[number % blocks] >= 2 + number % 3 and sum(counts.values()) >= 3 * blocks
        return f"Answer: {number if met else -1}"

    facts = deep(ModelFacts.read(model_path()), blocks)
    runtime = FakeRuntime(facts, answer=answer, speed=lambda counts: 1000 / (2 * blocks + sum(counts.values())))
    items = tuple(Probe(f"g{number}", str(number), str(number), "integer", "gate") for number in range(PROBES))
    settings = StudySettings(trials=max(trials), measure=MeasureSettings(rounds=6, tokens=8), runners_up=None)
    ends: list[float] = []
    run_study(
        runtime,
        ProbeSet("made up", items, max_tokens=64),
        SearchSpace((1, 2, 3, 4, 6, 8)),
        study="growth",
        storage=folder / f"{blocks}.db",
        settings=settings,
        on_progress=lambda _progress: ends.append(time.perf_counter()),
    )
    taken = [after - before for before, after in itertools.pairwise(ends)]
    return {number: statistics.median(taken[number - WINDOW : number]) for number in trials}


def main() -> None:
    """Both series."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=5000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print("blocks  ms per trial  of that at 6 blocks, per block")
        first = None
        for blocks in (6, 12, 24, 48, 64):
            (taken,) = seconds_per_trial(blocks, [150], Path(folder)).values()
            first = first or taken
            each = 6 * taken / first / blocks
            print(f"{blocks:6}  {1e3 * taken:12.1f}  {taken / first:.2f} times, {each:.2f} per block")
        steps = [number for number in (100, 300, 1000, 2500, 5000) if number <= args.most]
        print("trials  ms per trial  of that at 100")
        rows = seconds_per_trial(11, steps, Path(folder))
        for number, taken in rows.items():
            print(f"{number:6}  {1e3 * taken:12.1f}  {taken / rows[100]:.2f} times")


if __name__ == "__main__":
    main()
