"""Write the demo model's probe set: gate and holdout problems that training never saw, from a recorded seed.

    python -m routing_lab.demo.make_probes            # writes routing_lab/demo/probes.yaml

The gate is screened: a problem that the model fails with all its experts is replaced by the next one of its kind, and
the file says how many were (a gate that the baseline cannot pass decides nothing). The holdout is never screened; what
the model fails there, it fails on both sides of the comparison.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from routing_lab import demo
from routing_lab.answers import AnswerType, Judge
from routing_lab.demo.tasks import KINDS, fresh_problems
from routing_lab.errors import NothingAcceptedError
from routing_lab.model import model_digest
from routing_lab.probes import Probe, ProbeSet, run_probes
from routing_lab.runtime.base import Runtime, RuntimeOptions
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.schedule import Schedule

SEED = 12
GATE_PER_KIND = 10
HOLDOUT_PER_KIND = 40
SPARE_PER_KIND = 10
MAX_TOKENS = 64


def drawn(seed: int) -> ProbeSet:
    """Every problem that may be asked: for each kind the holdout first, then the gate and its spares."""
    items = [probe for kind in KINDS for probe in _of_kind(kind, seed)]
    return ProbeSet(name="demo", items=tuple(items), prompt="raw", max_tokens=MAX_TOKENS)


def _of_kind(kind: str, seed: int) -> Iterator[Probe]:
    problems = fresh_problems(kind, HOLDOUT_PER_KIND + GATE_PER_KIND + SPARE_PER_KIND, seed)
    for number, problem in enumerate(problems):
        holdout = number < HOLDOUT_PER_KIND
        yield Probe(
            id=f"{kind}-{'h' if holdout else 'g'}{number if holdout else number - HOLDOUT_PER_KIND:02}",
            prompt=problem.prompt,
            answer=problem.answer,
            type=cast("AnswerType", problem.answer_type),  # a plain word there; Probe refuses one that is no type
            split="holdout" if holdout else "gate",
            tags=(kind,),
        )


def screened(probes: ProbeSet, runtime: Runtime, seed: int) -> ProbeSet:
    """The set with the first ``GATE_PER_KIND`` gate problems of each kind that the full model answers.

    Raises:
        NothingAcceptedError: The model answers too few problems of a kind to fill its gate.
    """
    runtime.apply(Schedule.baseline(runtime.facts))
    with Judge() as judge:
        outcomes = run_probes(runtime, probes, probes.split("gate"), judge, stop_after_failures=None)
    correct = {outcome.probe for outcome in outcomes if outcome.correct}
    kept: list[Probe] = []
    replaced = 0
    for kind in KINDS:
        candidates = [probe for probe in probes.split("gate") if kind in probe.tags]
        passing = [probe for probe in candidates if probe.id in correct][:GATE_PER_KIND]
        if len(passing) < GATE_PER_KIND:
            raise NothingAcceptedError(f"the model answers {len(passing)} of {len(candidates)} problems of {kind}")
        kept += passing
        replaced += sum(probe.id not in correct for probe in candidates[: candidates.index(passing[-1])])
    return ProbeSet(
        name=probes.name,
        items=(*kept, *probes.split("holdout")),
        prompt=probes.prompt,
        max_tokens=probes.max_tokens,
        source={
            "script": "python -m routing_lab.demo.make_probes",
            "seed": seed,
            "screened_with": model_digest(runtime.facts),
            "gate_problems_replaced": replaced,
            "holdout_problems_replaced": 0,
        },
    )


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Write the demo model's probe set.")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--output", type=Path, default=demo.probes_path())
    args = parser.parse_args()
    with LlamaRuntime(demo.model_path(), RuntimeOptions(context_tokens=512)) as runtime:
        screened(drawn(args.seed), runtime, args.seed).save(args.output)


if __name__ == "__main__":
    main()
