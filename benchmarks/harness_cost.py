"""How much of a search's wall time is spent inside libllama.

What: a search as ``routing-lab search`` runs it (plain TPE, screening rounds, gate, SQLite storage) on the demo model,
which is the hardest case: a token takes a millisecond, so every millisecond of Python counts. Each request to the
model's process is clocked from outside; what passed inside libllama is known in three ways:

* completions and timed decodes say it themselves, with a clock around libllama's calls in the model's process;
* for switches (a context made, attested and made again) and for the prompt of a timing, which report nothing, the same
  calls are repeated on an engine in this process with a clock around every ``llama_*`` function, and the median counts;
* everything else is the lab: Optuna, SQLite, the judge, the line between the processes.

Warm-up: the search opens with the baseline, which counts as well, since every study pays it. One run; the share is
stable to about a point on a quiet machine. The ceiling is 100 %; the target is 90 %.

    python benchmarks/harness_cost.py --trials 40
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from routing_lab.demo import model_path, tasks
from routing_lab.measure import MeasureSettings
from routing_lab.probes import Probe, ProbeSet
from routing_lab.runtime.base import Attestation, DecodeTiming, Generation, RuntimeOptions
from routing_lab.runtime.engine import Engine, LoadSpec
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.runtime.native import override_library
from routing_lab.schedule import Schedule
from routing_lab.search import StudySettings, run_study
from routing_lab.space import SearchSpace

T = TypeVar("T")


class Clocked(LlamaRuntime):
    """Counts requests, their wall time, and the time inside libllama that the replies report."""

    def __init__(self, model: Path, options: RuntimeOptions) -> None:
        self.requests: Counter[str] = Counter()
        self.wall_s: Counter[str] = Counter()
        self.reported_s: Counter[str] = Counter()
        super().__init__(model, options)

    def _clocked(self, kind: str, ask: Callable[[], T]) -> T:
        started = time.perf_counter()
        reply = ask()
        self.wall_s[kind] += time.perf_counter() - started
        self.requests[kind] += 1
        return reply

    def apply(self, schedule: Schedule) -> Attestation:
        """Clocked from outside."""
        return self._clocked("switch", partial(super().apply, schedule))

    def generate(self, prompt: str, *, max_tokens: int, stop: Sequence[str] = (), margins: bool = False) -> Generation:
        """Clocked from outside and inside."""
        ask = partial(super().generate, prompt, max_tokens=max_tokens, stop=stop, margins=margins)
        reply = self._clocked("generate", ask)
        self.reported_s["generate"] += reply.llama_seconds
        return reply

    def decode_timing(self, *, tokens: int, prompt_tokens: int = 16) -> DecodeTiming:
        """Clocked from outside and inside."""
        reply = self._clocked("timing", partial(super().decode_timing, tokens=tokens, prompt_tokens=prompt_tokens))
        self.reported_s["timing"] += reply.seconds
        return reply


class ClockedApi:
    """The functions of libllama with a clock around each."""

    def __init__(self, api: object) -> None:
        self._api = api
        self.seconds = 0.0

    def __getattr__(self, name: str) -> object:
        value = getattr(self._api, name)
        if not (name.startswith("llama_") and callable(value)) or isinstance(value, type):
            return value

        def clocked(*arguments: object) -> object:
            started = time.perf_counter()
            try:
                return value(*arguments)
            finally:
                self.seconds += time.perf_counter() - started

        setattr(self, name, clocked)
        return clocked


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what libllama writes to standard error, past Python."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def unreported_s(runtime: LlamaRuntime, options: RuntimeOptions, measure: MeasureSettings) -> dict[str, float]:
    """Median seconds inside libllama of a switch and of the prompt of a timing, on an engine in this process."""
    facts = runtime.facts
    engine = Engine(
        LoadSpec(
            model=str(facts.files[0]),
            architecture=facts.architecture,
            override_library=str(override_library()),
            threads=options.threads or len(os.sched_getaffinity(0)),
            context_tokens=options.context_tokens,
            batch_tokens=options.batch_tokens,
            kv_type=options.kv_type,
            gpu_layers=0,
        )
    )
    engine.api = api = ClockedApi(engine.api)
    half = Schedule.uniform(max(1, max(facts.experts_used.values()) // 2), facts)
    seconds: dict[str, list[float]] = {"switch": [], "timing": []}
    for index in range(40):
        schedule = half if index % 2 else Schedule.baseline(facts)
        before = api.seconds
        engine.switch(experts=schedule.key(facts), uniform=None)
        seconds["switch"].append(api.seconds - before)
        before = api.seconds
        timed = engine.decode_timing(tokens=1, prompt_tokens=measure.prompt_tokens)
        seconds["timing"].append(max(0.0, api.seconds - before - timed["seconds"]))
    engine.close()
    return {kind: statistics.median(values) for kind, values in seconds.items()}


def demo_probes(gate: int) -> ProbeSet:
    """A gate of fresh problems of every kind."""
    per_kind = -(-gate // len(tasks.KINDS))
    problems = [problem for kind in tasks.KINDS for problem in tasks.fresh_problems(kind, per_kind, seed=5)]
    items = [Probe(f"p{i}", one.prompt, one.answer, "text") for i, one in enumerate(problems[:gate])]
    return ProbeSet("harness-cost", tuple(items), max_tokens=96)


def share(model: Path, threads: int | None, trials: int, gate: int) -> dict[str, Any]:
    """Run the search; the shares as JSON can hold them."""
    from routing_lab.gate import Policy, Rule

    options = RuntimeOptions(threads=threads)
    settings = StudySettings(trials=trials, policy=Policy(Rule.NO_WORSE_THAN_BASELINE))
    with tempfile.TemporaryDirectory() as folder, Clocked(model, options) as runtime:
        space, probes = SearchSpace.default(runtime.facts), demo_probes(gate)
        started = time.perf_counter()
        result = run_study(runtime, probes, space, study="cost", storage=Path(folder) / "s.db", settings=settings)
        wall_s = time.perf_counter() - started
        with quiet():
            unreported = unreported_s(runtime, options, settings.measure)
        inside = {
            "generate": runtime.reported_s["generate"],
            "timing": runtime.reported_s["timing"] + runtime.requests["timing"] * unreported["timing"],
            "switch": runtime.requests["switch"] * unreported["switch"],
        }
        # The medians come from another moment; on a busy machine they must not claim more than was waited for.
        inside = {kind: min(value, runtime.wall_s[kind]) for kind, value in inside.items()}
        return {
            "share_inside_libllama": sum(inside.values()) / wall_s,
            "wall_s": wall_s,
            "trials": len(result.study.evaluated),
            "lab_ms_per_trial": (wall_s - sum(runtime.wall_s.values())) / len(result.study.trials) * 1000,
            "requests": {
                kind: {
                    "count": runtime.requests[kind],
                    "wall_s": runtime.wall_s[kind],
                    "inside_libllama_s": inside[kind],
                }
                for kind in inside
            },
            "model": model.name,
            "library": runtime.build.version,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, threads {threads or 'all'}",
        }


def main() -> None:
    """Print the shares as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=model_path(), help="GGUF (default: the demo model)")
    parser.add_argument("--threads", type=int, help="default: all")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--gate", type=int, default=60, help="gate probes (default: 60)")
    arguments = parser.parse_args()
    print(json.dumps(share(arguments.model, arguments.threads, arguments.trials, arguments.gate), indent=1))


if __name__ == "__main__":
    main()
