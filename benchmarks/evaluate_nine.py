"""An evaluation of nine schedules against the script that everyone writes first, and a switch against a restart.

The script: for each schedule a new process that loads the model, decodes every gate probe, and times 128 tokens once.
It uses the same library and override as the lab, so that only the way of asking differs. The lab: ``evaluate`` with the
same 128 tokens a round, in its least number of rounds (six, which is five more than the script has, and gives the
interval that the script cannot give), and the gate by drafts. Both include the baseline. In turns; ratios of wall time.

With ``--model`` only the switch is measured: applying a schedule on the loaded model (context, attestation, working
context) against a new process that loads it and applies the same. The file is in the page cache for both, which
flatters the restart.

    python benchmarks/evaluate_nine.py --repeats 3
    python benchmarks/evaluate_nine.py --model runs/random-4gib.gguf --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from routing_lab.demo import model_path, probes_path
from routing_lab.evaluate import EvaluateSettings, evaluate
from routing_lab.measure import MeasureSettings
from routing_lab.model import ModelFacts
from routing_lab.probes import ProbeSet
from routing_lab.runtime.base import RuntimeOptions
from routing_lab.runtime.llama import LlamaRuntime, default_threads
from routing_lab.schedule import Schedule

TOKENS = 128
SCHEDULES = Path(__file__).parent.parent / "schedules" / "demo"

ALONE = """
import sys
from pathlib import Path
from routing_lab.answers import Judge
from routing_lab.model import ModelFacts
from routing_lab.probes import ProbeSet
from routing_lab.runtime.engine import Engine, LoadSpec
from routing_lab.runtime.native import override_library
model, experts, probes, threads = sys.argv[1:]
architecture = ModelFacts.read(Path(model)).architecture
engine = Engine(LoadSpec(model=model, architecture=architecture, override_library=str(override_library()),
                         threads=int(threads), context_tokens=4096, batch_tokens=512, kv_type="f16", gpu_layers=0))
engine.switch(experts=experts, uniform=None)
if probes:
    probe_set = ProbeSet.load(Path(probes))
    with Judge() as judge:
        for probe in probe_set.split("gate"):
            made = engine.generate(prompt=probe.prompt, max_tokens=probe_set.budget(probe), stop=[], margins=False)
            judge.judge(made["text"], expected=probe.answer, answer_type=probe.type,
                        finish_reason=made["finish_reason"])
    engine.decode_timing(tokens=128, prompt_tokens=16)
"""


def alone(model: Path, schedule: Schedule, facts: ModelFacts, probes: Path | None, threads: int | None = None) -> float:
    """Seconds of one process for one schedule."""
    began = time.perf_counter()
    words = [str(model), schedule.key(facts), str(probes or ""), str(threads or default_threads(facts))]
    subprocess.run([sys.executable, "-c", ALONE, *words], check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def nine(repeats: int) -> None:
    """The demo model's schedules, both ways."""
    model, probe_set = model_path(), ProbeSet.load(probes_path())
    facts = ModelFacts.read(model)
    schedules = [Schedule.load(file) for file in sorted(SCHEDULES.glob("*.yaml"))]
    settings = EvaluateSettings(measure=MeasureSettings(tokens=TOKENS, rounds=6))
    script, lab = [], []
    for _ in range(repeats):
        everything = [Schedule.baseline(facts), *schedules]
        script.append(sum(alone(model, one, facts, probes_path()) for one in everything))
        began = time.perf_counter()
        with LlamaRuntime(model) as runtime:
            evaluate(runtime, probe_set, schedules, settings)
        lab.append(time.perf_counter() - began)
    ratios = [a / b for a, b in zip(script, lab, strict=True)]
    middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
    print(f"{len(schedules)} schedules and the baseline: script {statistics.median(script):.1f} s, ", end="")
    print(f"lab {statistics.median(lab):.1f} s, ratio {middle:.2f} ({low:.2f} to {high:.2f})")


def switch(model: Path, repeats: int, threads: int | None) -> None:
    """A switch on the loaded model against a restart."""
    facts = ModelFacts.read(model)
    half = {block: max(1, count // 2) for block, count in facts.experts_used.items()}
    pair = [Schedule.from_counts("half", half), Schedule.baseline(facts)]
    restarts, switches = [], []
    with LlamaRuntime(model, RuntimeOptions(threads=threads)) as runtime:
        for number in range(repeats + 1):
            schedule = pair[number % 2]
            restarts.append(alone(model, schedule, facts, None, threads))
            began = time.perf_counter()
            runtime.apply(schedule)
            switches.append(time.perf_counter() - began)
    restart, switched = statistics.median(restarts[1:]), statistics.median(switches[1:])
    print(f"{facts.name}, {facts.size_bytes / 2**30:.2f} GiB: switch {1e3 * switched:.1f} ms, restart ", end="")
    print(f"{1e3 * restart:.0f} ms: {switched / restart:.2%} of a restart")


def main() -> None:
    """One of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of the switch (default: as the lab chooses)")
    args = parser.parse_args()
    if args.model:
        switch(args.model, args.repeats, args.threads)
    else:
        nine(args.repeats)


if __name__ == "__main__":
    main()
