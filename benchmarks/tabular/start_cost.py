"""What a cut of the sensitivity pass costs beside a usual trial, in seconds of a study of the demo model.

What: a study that begins with the pass and goes on for 40 trials as by default, with the gate of the demo (60 probes)
and one thread. A cut is not timed; a trial that passes the gate is. All of them meet the same machine, so the shares
are what counts.

    python benchmarks/tabular/start_cost.py [--start map] [--trials 40]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from routing_lab.demo import model_path, probes_path
from routing_lab.gate import Result
from routing_lab.probes import ProbeSet
from routing_lab.runtime import RuntimeOptions
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.search import StudySettings, TrialRecord, run_study
from routing_lab.space import SearchSpace


def seconds(trials: list[TrialRecord]) -> list[float]:
    """Both parts of each trial."""
    return [trial.seconds.gate + trial.seconds.speed for trial in trials]


def main() -> None:
    """Run, and print the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--start", choices=("sensitivity", "map"), default="sensitivity")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, LlamaRuntime(model_path(), RuntimeOptions(threads=1)) as runtime:
        study = run_study(
            runtime,
            ProbeSet.load(probes_path()),
            SearchSpace.default(runtime.facts),
            study="cost",
            storage=Path(folder) / "cost.db",
            settings=StudySettings(trials=args.trials, start=args.start),
        ).study
    usual = statistics.mean(seconds(list(study.evaluated)))
    kinds = {
        "cuts of the pass": list(study.single_cuts),
        "trials": list(study.evaluated),
        "  that failed the gate": [one for one in study.evaluated if one.verdict.result is Result.FAIL],
        "  that passed it": [one for one in study.evaluated if one.verdict.result is Result.PASS],
    }
    for kind, trials in kinds.items():
        taken = seconds(trials)
        if taken:
            mean = statistics.mean(taken)
            print(f"{kind:24} {len(taken):3}  {mean:6.2f} s on average, {mean / usual:.2f} of a trial")


if __name__ == "__main__":
    main()
