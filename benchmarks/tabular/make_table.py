"""Evaluate every schedule of a space of the demo model, so that search methods can be compared in seconds.

What: all schedules of the demo model with 2, 3, 5 or 8 experts in each of its 6 blocks (4,096). For each: which of the
60 gate probes it answers, how many tokens of the baseline's completions it keeps, its smallest margin along them, and
its decode rate against the baseline. Answers come from checked drafts (``probes.verify``), which give what decoding
gives; ``benchmarks/verification.py`` shows that. Two passes, each with a checkpoint after every schedule:

    python benchmarks/tabular/make_table.py answers --work runs/table     (half an hour on one core)
    python benchmarks/tabular/make_table.py speeds  --work runs/table     (ten minutes; wants a quiet machine)
    python benchmarks/tabular/make_table.py write   --work runs/table     (writes demo-space.npz beside this file)

Rates are taken in stretches of 64 tokens, the baseline's right before and after each schedule's two, so that each ratio
is one of neighbours in time. One such ratio is noisy. ``write`` therefore stores the raw ratios and, beside them, those
of an additive model of the time per token fitted to all of them; the benchmark takes the latter for the truth and the
scatter of the former about it for the noise of a measurement.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from routing_lab.answers import Judge
from routing_lab.demo import model_path, probes_path
from routing_lab.probes import ProbeSet
from routing_lab.probes.verify import Transcripts, Verification, calibrate, verify_probes
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.schedule import Schedule

COUNTS = (2, 3, 5, 8)
TOKENS = 64
TABLE = Path(__file__).with_name("demo-space.npz")

Point = tuple[int, ...]


def points(blocks: int) -> list[Point]:
    """Every point of the space, in a random order that is always the same: a checkpoint is a sample at any time."""
    whole = list(itertools.product(COUNTS, repeat=blocks))
    random.Random(1).shuffle(whole)
    return whole


def schedule(point: Point) -> Schedule:
    """The schedule at a point."""
    return Schedule.from_counts("point", dict(enumerate(point)))


def checkpointed(file: Path, wanted: list[Point], row: Callable[[Point], dict[str, Any]]) -> None:
    """Compute the rows that a file does not have yet, and add each to it as soon as it is there."""
    have = {tuple(known["point"]) for known in read(file)}
    left = [point for point in wanted if point not in have]
    started = time.monotonic()
    with file.open("a") as out:
        for done, point in enumerate(left, 1):
            out.write(json.dumps({"point": point, **row(point)}) + "\n")
            out.flush()
            if done % 100 == 0 or done == len(left):
                hours = (time.monotonic() - started) / done * (len(left) - done) / 3600
                print(f"{len(have) + done} of {len(wanted)}, {60 * hours:.0f} minutes left", file=sys.stderr)


def read(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a checkpoint; one that was being written when the process ended is left out."""
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            print(f"left out a broken line of {file}", file=sys.stderr)


def answers(work: Path) -> None:
    """First pass: every gate probe under every schedule."""
    probe_set = ProbeSet.load(probes_path())
    gate = probe_set.split("gate")
    with LlamaRuntime(model_path()) as runtime, Judge() as judge:
        transcripts = Transcripts.of_baseline(runtime, probe_set, gate, judge)
        calibration = calibrate(runtime, probe_set, gate, transcripts)
        print(calibration.describe(), calibration.to_dict(), file=sys.stderr)
        verification = Verification(transcripts, calibration)

        def row(point: Point) -> dict[str, Any]:
            runtime.apply(schedule(point))
            outcomes = verify_probes(runtime, probe_set, gate, judge, verification, stop_after_failures=None)
            by_probe = {outcome.probe: outcome for outcome in outcomes}
            correct = "".join(str(int(by_probe[probe.id].correct)) for probe in gate)
            margins = [outcome.smallest_margin for outcome in outcomes if outcome.smallest_margin is not None]
            return {
                "correct": correct,
                "kept": [by_probe[probe.id].kept or 0 for probe in gate],
                "smallest_margin": min(margins),
            }

        checkpointed(work / "answers.jsonl", points(len(runtime.facts.routed_blocks)), row)


def speeds(work: Path) -> None:
    """Second pass: two stretches of every schedule between two of the baseline."""
    with LlamaRuntime(model_path()) as runtime:
        baseline = Schedule.baseline(runtime.facts)

        def rate(of: Schedule) -> float:
            runtime.apply(of)
            return runtime.decode_timing(tokens=TOKENS).tokens_per_s

        def row(point: Point) -> dict[str, Any]:
            before, first, second, after = (rate(of) for of in (baseline, schedule(point), schedule(point), baseline))
            return {"candidate": [first, second], "baseline": [before, after]}

        for _ in range(20):
            rate(baseline)
        checkpointed(work / "speeds.jsonl", points(len(runtime.facts.routed_blocks)), row)


def write(work: Path) -> None:
    """Put both passes into one file."""
    by_point = {tuple(row["point"]): row for row in read(work / "answers.jsonl")}
    rates = {tuple(row["point"]): row for row in read(work / "speeds.jsonl")}
    whole = sorted(by_point.keys() & rates.keys())
    measured = np.array(
        [np.sqrt(np.prod(rates[p]["candidate"])) / np.sqrt(np.prod(rates[p]["baseline"])) for p in whole]
    )
    grid = np.array(whole)
    fitted = 1 / _additive(grid, 1 / measured)
    scatter = np.log(measured / fitted)
    print(f"{len(whole)} schedules, {sum('0' not in by_point[p]['correct'] for p in whole)} pass the gate")
    print(f"scatter of a ratio about the additive model (log): {np.std(scatter):.4f}, quartiles {_quartiles(scatter)}")
    np.savez_compressed(
        TABLE,
        points=grid.astype(np.int8),
        correct=np.packbits(np.array([[int(c) for c in by_point[p]["correct"]] for p in whole], np.uint8), axis=1),
        kept=np.array([by_point[p]["kept"] for p in whole], np.uint8),
        smallest_margin=np.array([by_point[p]["smallest_margin"] for p in whole], np.float32),
        measured=measured.astype(np.float32),
        ratio=fitted.astype(np.float32),
    )
    print(f"wrote {TABLE.name}: {TABLE.stat().st_size:,} bytes")


def _additive(grid: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Least absolute deviations of a time per token that has a part for every (block, count), by reweighting."""
    columns = [np.ones(len(grid))]
    columns += [(grid[:, block] == count).astype(float) for block in range(grid.shape[1]) for count in COUNTS[:-1]]
    design = np.stack(columns, axis=1)
    weights = np.ones(len(grid))
    fitted = times
    for _ in range(50):
        solution, *_ = np.linalg.lstsq(design * weights[:, None], times * weights, rcond=None)
        fitted = design @ solution
        weights = 1 / np.sqrt(np.maximum(np.abs(times - fitted), 1e-4))
    # The point of the model's own counts is the baseline: its ratio is 1 by definition.
    own = fitted[(grid == max(COUNTS)).all(axis=1)]
    return fitted / own[0] if len(own) else fitted


def _quartiles(values: np.ndarray) -> str:
    return " ".join(f"{value:+.4f}" for value in np.quantile(values, [0.25, 0.5, 0.75]))


def main() -> None:
    """Run one of the three steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["answers", "speeds", "write"])
    parser.add_argument("--work", type=Path, default=Path("runs/table"), help="folder of the checkpoints")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    {"answers": answers, "speeds": speeds, "write": write}[args.step](args.work)


if __name__ == "__main__":
    main()
