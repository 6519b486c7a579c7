"""Compare ways to search: replay studies against the table of a whole space, with many seeds, in seconds each.

What: how many schedules a method has to evaluate until it has one that passes the gate and whose ratio is within 1 % of
the best that passes. The table (``make_table.py``) answers each question: the ratio, with the noise of a screening
measurement drawn anew (half width 2 %), and the gate, which stops at the batch of eight probes in which the first
failure is. Every method begins with the uniform schedules, as a study does, and never evaluates a schedule twice.

    random            chance
    tpe               Optuna's TPE; a failed gate is a failed trial
    tpe constrained   the same, told the expected number of failed probes
    nsga2             Optuna's NSGA-II, constrained
    gp                Optuna's Gaussian process sampler, constrained (needs PyTorch)
    lexi              no evaluations in the loop: evolution looks for the allocation with the least data-free loss
                      (``data_free.py``) at every number of experts, and they are tried from the smallest number on
    schedule          this project's sampler
    schedule none     the same without the uniform schedules
    schedule sensitivity
                      the same, and instead of the uniform schedules every block is cut alone first, as ``--start
                      sensitivity`` does; such a run measures no speed
    schedule map      the same as ``--start map`` does it: with whole gates, and gentler cuts where one failed
    schedule lexi     the same, and instead of each uniform schedule LExI's of the same number of experts

    python benchmarks/tabular/replay.py --seeds 50 [--only schedule random] [--figure docs/figures/search-methods.png]

Results are printed as medians with quartiles, and the curves of the best accepted ratio over the evaluations are drawn.
Cuts of a sensitivity pass count as evaluations, and in a second line as what they take of the time of a usual trial
(``start_cost.py`` measures it).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna
from data_free import COUNTS, sensitivities

from routing_lab.demo import model_path
from routing_lab.model import ModelFacts
from routing_lab.runtime.base import DRAFTS_TOGETHER
from routing_lab.search.dimensions import Dimensions, Point
from routing_lab.search.sampler import FreshSampler, make_sampler
from routing_lab.search.schedule_sampler import EVIDENCE, evidence_attribute
from routing_lab.search.sensitivity import SingleCuts
from routing_lab.search.surrogate import Evidence
from routing_lab.space import SearchSpace

TABLE = Path(__file__).with_name("demo-space.npz")
HALF_WIDTH = 0.02
WITHIN = 0.01
SHARES = {"schedule sensitivity": 0.67, "schedule map": 1.49}
"""Time of a cut of the pass over that of a usual trial on the demo model (``start_cost.py``)."""
PASSES = 5
"""How often evolution starts anew at every number of experts; by then it finds the same again."""
STARTS = ("none", "sensitivity", "map", "lexi")
METHODS = (
    *("random", "tpe", "tpe constrained", "nsga2", "gp", "lexi", "schedule"),
    *(f"schedule {start}" for start in STARTS),
)
DRAWN = (*METHODS[:7], "schedule sensitivity")
LABELS = {"schedule": "ours, after the uniform schedules", "schedule sensitivity": "ours, after the largest cuts"}


@dataclass(frozen=True)
class Asked:
    """An evaluation: the row of its schedule, and whether it was timed and not only put through the gate."""

    row: int
    timed: bool = True


class Table:
    """The whole space: what an evaluation of a schedule would have shown."""

    def __init__(self, file: Path) -> None:
        with np.load(file) as table:
            self.points = [tuple(map(int, point)) for point in table["points"]]
            self.ratio = table["ratio"].astype(float)
            correct = np.unpackbits(table["correct"], axis=1)
            self.probes = 60
            self.correct = correct[:, : self.probes].astype(bool)
        self.index = {point: row for row, point in enumerate(self.points)}
        self.passes = self.correct.all(axis=1)
        self.best = float(self.ratio[self.passes].max())

    def gate(self, row: int, *, whole: bool = False) -> Evidence:
        """A gate run in batches that stops after the first failure, or a ``whole`` one."""
        answers = self.correct[row]
        if whole or answers.all():
            return Evidence(int((~answers).sum()), self.probes, self.probes)
        run = min(self.probes, DRAFTS_TOGETHER * (int(np.argmin(answers)) // DRAFTS_TOGETHER + 1))
        return Evidence(int((~answers[:run]).sum()), run, self.probes)


def by_optuna(name: str, table: Table, dimensions: Dimensions, losses: np.ndarray, seed: int) -> Iterator[Asked]:
    """What an Optuna sampler asks for, in order."""
    noise = np.random.default_rng(seed)
    taken: set[Point] = set()
    plain, _, start = name.partition(" ")
    sampler = FreshSampler(make_sampler(plain, seed, dimensions, taken), dimensions, taken, seed=seed)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for point in _start(start, losses, noise):
        study.enqueue_trial(dimensions.params(point))
    cuts, passed = SingleCuts(dimensions, gentler=start == "map"), {}
    while not sampler.exhausted:
        ahead = cuts.ahead(passed) if start in {"sensitivity", "map"} else []
        if ahead:
            study.enqueue_trial(dimensions.params(ahead[0]))
        trial = study.ask(dimensions.distributions)
        point = dimensions.point(trial.params)
        row = table.index[tuple(COUNTS[rank] for rank in point)]
        yield Asked(row, timed=not ahead)
        seen = table.gate(row, whole=bool(ahead) and start == "map")
        if ahead:
            passed[point] = not seen.failed
        if seen.failed or not ahead:
            taken.add(point)
        measured = float(table.ratio[row] * np.exp(noise.normal(0, HALF_WIDTH / 2)))
        trial.set_user_attr(EVIDENCE, evidence_attribute(None if ahead else HALF_WIDTH, seen))
        if name != "tpe":
            trial.set_constraint("failed probes", seen.failed / seen.run * seen.total)
        if name == "tpe" and seen.failed:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        elif ahead:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, measured)


def _start(start: str, losses: np.ndarray, chance: np.random.Generator) -> Iterator[Point]:
    """The points that are asked before the sampler is: the uniform ones where nothing else is said."""
    if start in {"none", "sensitivity", "map"}:
        return
    blocks = losses.shape[0]
    for rank in reversed(range(len(COUNTS) - 1)):
        if start == "lexi":
            lost = {count: losses[:, column] for column, count in enumerate(COUNTS)}
            yield tuple(COUNTS.index(count) for count in _evolve(blocks * COUNTS[rank], blocks, lost, chance))
        else:
            yield (rank,) * blocks


def by_lexi(table: Table, losses: np.ndarray, seed: int) -> Iterator[Asked]:
    """Schedules by number of experts: for each number the allocation that evolution finds to lose least."""
    chance = np.random.default_rng(seed)
    blocks = losses.shape[0]
    lost = {count: losses[:, column] for column, count in enumerate(COUNTS)}
    asked: set[int] = set()
    totals = sorted({sum(point) for point in table.points})
    for _ in range(PASSES):
        for total in totals:
            row = table.index[_evolve(total, blocks, lost, chance)]
            if row not in asked:
                asked.add(row)
                yield Asked(row)


def _evolve(total: int, blocks: int, lost: dict[int, np.ndarray], chance: np.random.Generator) -> Point:
    """The allocation of least loss with at most ``total`` experts, of a small population."""

    def loss(one: Point) -> float:
        over = max(0, sum(one) - total)
        return sum(lost[count][block] for block, count in enumerate(one)) + 1e3 * over

    size, rounds = 20, 30
    population = [tuple(int(chance.choice(COUNTS)) for _ in range(blocks)) for _ in range(size)]
    for _ in range(rounds):
        population = sorted(population, key=loss)[: size // 2]
        children = []
        for _ in range(size - len(population)):
            a, b = (population[int(chance.integers(len(population)))] for _ in range(2))
            child = [x if chance.random() < 0.5 else y for x, y in zip(a, b, strict=True)]
            child[int(chance.integers(blocks))] = int(chance.choice(COUNTS))
            children.append(tuple(child))
        population += children
    return min(population, key=loss)


Run = tuple[int | None, list[float], int]
"""Evaluations until within 1 % of the best (``None``: more than were allowed), the best accepted after each of them,
and how many of them only asked the gate."""


def replay(order: Callable[[], Iterator[Asked]], table: Table, most: int) -> Run:
    """Run one study until it has found what it looks for, or has done ``most`` evaluations."""
    best, untimed, curve = 1.0, 0, []
    for done, asked in enumerate(order(), 1):
        untimed += not asked.timed
        if asked.timed and table.passes[asked.row]:
            best = max(best, float(table.ratio[asked.row]))
        curve.append(best)
        if best >= (1 - WITHIN) * table.best:
            return done, curve, untimed
        if done == most:
            break
    return None, curve, untimed


def main() -> None:
    """Replay, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--most", type=int, default=300, help="evaluations after which a study of Optuna's gives up")
    parser.add_argument("--only", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--results", type=Path, default=Path("runs/replay.json"), help="adds to it, method by method")
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    table = Table(TABLE)
    dimensions = Dimensions(SearchSpace(COUNTS), ModelFacts.read(model_path()))
    losses = sensitivities(model_path())
    passing = int(table.passes.sum())
    good = int((table.passes & (table.ratio >= (1 - WITHIN) * table.best)).sum())
    print(f"{len(table.points)} schedules, {passing} pass, {good} of them within 1 % of the best ({table.best:.3f})")
    args.results.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    for name in args.only:
        started = time.monotonic()
        runs = []
        for seed in range(args.seeds):

            def order(name: str = name, seed: int = seed) -> Iterator[Asked]:
                if name == "lexi":
                    return by_lexi(table, losses, seed)
                return by_optuna(name, table, dimensions, losses, seed)

            # Chance and evolution cost nothing, so they may take the whole table.
            most = len(table.points) if name in {"random", "lexi"} else args.most
            runs.append(replay(order, table, most))
        results[name] = runs
        args.results.write_text(json.dumps(results))
        print(f"{name:20} {_summary(runs)}  ({time.monotonic() - started:.0f} s)", flush=True)
        if name in SHARES:
            print(f"{f'  a cut as {SHARES[name]:.2f}':20} {_summary(runs, SHARES[name])}", flush=True)
    if args.figure:
        draw(results, table, args.figure)


def _summary(runs: list[Run], share: float = 1.0) -> str:
    # A study that gave up took more than any that did not: quartiles among them are infinite.
    whole = np.array([np.inf if needed is None else needed - (1 - share) * untimed for needed, _, untimed in runs])
    low, middle, high = np.quantile(whole, [0.25, 0.5, 0.75], method="lower")
    missed = int(np.isinf(whole).sum())
    return f"median {middle:6.1f} evaluations, quartiles {low:6.1f} to {high:6.1f}, {missed} of {len(runs)} gave up"


def draw(results: dict[str, list[Run]], table: Table, file: Path) -> None:
    """The best accepted ratio over the evaluations: median and quartiles over the seeds."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    colours = plt.get_cmap("tab10").colors
    for colour, name in zip(colours, [name for name in DRAWN if name in results], strict=False):
        length = 150
        curves = np.array([(curve + [curve[-1]] * length)[:length] for _, curve, *_ in results[name]])
        low, middle, high = np.quantile(curves, [0.25, 0.5, 0.75], axis=0)
        wide = 2.4 if name.startswith("schedule") else 1.2
        axes.plot(range(1, length + 1), middle, color=colour, linewidth=wide, label=LABELS.get(name, name))
        axes.fill_between(range(1, length + 1), low, high, color=colour, alpha=0.12, linewidth=0)
    axes.axhline((1 - WITHIN) * table.best, color="0.4", linestyle=":", linewidth=1)
    axes.text(1.1, (1 - WITHIN) * table.best, "within 1 % of the best", va="bottom", color="0.35", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(1, 150)
    axes.set_xlabel("schedules evaluated")
    axes.set_ylabel("best accepted speed ratio")
    axes.set_title("Searching the demo model's table of 4,096 schedules (median and quartiles over seeds)", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=160)
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
