"""An evaluation of nine schedules against the script that everyone writes first, and a switch against a restart.

The script: for each schedule a new process that loads the model, decodes every gate probe, and times 128 tokens once.
It uses the same library and override as the lab, so that only the way of asking differs. The lab: ``evaluate``, which
times as many tokens in eight rounds of 16 (so that there is an interval, which the script cannot give) and asks the
gate by drafts. Both include the baseline. In turns; ratios of wall time.

The ceiling: all the lab can save is loading, and the difference between decoding an answer and checking it. What the
script spends on a schedule is split into the two, so that one can see what there was to save.

On the demo model the schedules are those of ``schedules/demo`` and the probes its own. On another model the schedules
are uniform ones and cuts of one half, and eight short raw prompts stand in for probes; random weights answer nothing
right, which changes nothing about what asking costs. The file is in the page cache, which flatters restarts.

    python benchmarks/evaluate_nine.py --repeats 3
    python benchmarks/evaluate_nine.py --model runs/figure-1-4gib.gguf
    python benchmarks/evaluate_nine.py --model runs/figure-1-4gib.gguf --switch --repeats 9
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
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

TOKENS, ROUNDS = 16, 8  # together the 128 of the script
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
else:
    engine.decode_timing(tokens=1, prompt_tokens=1)  # weights that are mapped are read when they are needed
"""

PROBES = """
probes: stand-in
prompt: raw
max_tokens: 32
items:
"""


def alone(model: Path, schedule: Schedule, facts: ModelFacts, probes: Path | None, threads: int | None = None) -> float:
    """Seconds of one process for one schedule."""
    began = time.perf_counter()
    words = [str(model), schedule.key(facts), str(probes or ""), str(threads or default_threads(facts))]
    subprocess.run([sys.executable, "-c", ALONE, *words], check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def schedules_of(facts: ModelFacts) -> list[Schedule]:
    """Nine schedules of any model: uniform ones, and each half of the blocks cut to half of its counts."""
    own = facts.experts_used
    half = len(own) // 2
    cuts = [dict(list(own.items())[part]) for part in (slice(half), slice(half, None))]
    halves = [{block: max(1, count // 2) for block, count in cut.items()} for cut in cuts]
    uniform = [Schedule.uniform(count, facts) for count in range(1, min(own.values()))]
    return [*uniform[:7], *(Schedule.from_counts(f"half-{which}", counts) for which, counts in enumerate(halves))]


def nine(model: Path, probes: Path, schedules: list[Schedule], repeats: int, threads: int | None) -> None:
    """Both ways of asking about the schedules."""
    facts, probe_set = ModelFacts.read(model), ProbeSet.load(probes)
    settings = EvaluateSettings(measure=MeasureSettings(tokens=TOKENS, rounds=ROUNDS, prompt_tokens=4))
    everything = [Schedule.baseline(facts), *schedules]
    script, loading, lab = [], [], []
    for _ in range(repeats):
        script.append(sum(alone(model, one, facts, probes, threads) for one in everything))
        loading.append(sum(alone(model, one, facts, None, threads) for one in everything))
        began = time.perf_counter()
        with LlamaRuntime(model, RuntimeOptions(threads=threads)) as runtime:
            evaluate(runtime, probe_set, schedules, settings)
        lab.append(time.perf_counter() - began)
    ratios = [a / b for a, b in zip(script, lab, strict=True)]
    middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
    print(f"{facts.name}, {len(schedules)} schedules and the baseline: ", end="")
    took, loads, ours = (statistics.median(seconds) for seconds in (script, loading, lab))
    print(f"script {took:.1f} s (loading {loads:.1f} s), lab {ours:.1f} s, ", end="")
    print(f"ratio {middle:.2f} ({low:.2f} to {high:.2f})")


def switch(model: Path, repeats: int, threads: int | None) -> None:
    """A switch on the loaded model against a restart up to its first token, without what a token takes."""
    facts = ModelFacts.read(model)
    half = {block: max(1, count // 2) for block, count in facts.experts_used.items()}
    pair = [Schedule.from_counts("half", half), Schedule.baseline(facts)]
    restarts, switches, decodes = [], [], []
    with LlamaRuntime(model, RuntimeOptions(threads=threads)) as runtime:
        for number in range(repeats + 1):
            schedule = pair[number % 2]
            restarts.append(alone(model, schedule, facts, None, threads))
            began = time.perf_counter()
            runtime.apply(schedule)
            switches.append(time.perf_counter() - began)
            runtime.decode_timing(tokens=1, prompt_tokens=1)
            decodes.append(time.perf_counter() - began - switches[-1])
    switched = statistics.median(switches[1:])
    restart = statistics.median(a - b for a, b in zip(restarts[1:], decodes[1:], strict=True))
    print(f"{facts.name}, {facts.size_bytes / 2**30:.2f} GiB: switch {1e3 * switched:.1f} ms, restart ", end="")
    print(f"{1e3 * restart:.0f} ms: {switched / restart:.2%} of a restart")


def main() -> None:
    """One of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: the demo model")
    parser.add_argument("--switch", action="store_true", help="a switch against a restart, instead of an evaluation")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="default: as the lab chooses")
    args = parser.parse_args()
    model = args.model or model_path()
    if args.switch:
        switch(model, args.repeats, args.threads)
    elif args.model:
        with tempfile.TemporaryDirectory() as folder:
            probes = Path(folder) / "probes.yaml"
            item = "  - {{id: p{0}, prompt: 'The {0} times table: ', answer: '1', type: integer}}".format
            probes.write_text("\n".join([PROBES.strip(), *map(item, range(1, 9))]) + "\n")
            nine(model, probes, schedules_of(ModelFacts.read(model)), args.repeats, args.threads)
    else:
        demo = [Schedule.load(file) for file in sorted(SCHEDULES.glob("*.yaml"))]
        nine(model, probes_path(), demo, args.repeats, args.threads)


if __name__ == "__main__":
    main()
