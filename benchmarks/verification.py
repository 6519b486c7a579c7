"""What checking drafts is worth: verdicts against plain decoding, tokens that were not decoded, and the time.

Part 1, ``--schedules N``: N random schedules (1 to all of the model's experts in every block), every gate probe of the
demo model decoded and checked. Every outcome must be the same: status, text, number of tokens.

Part 2: candidates that pass, all gate probes, decoded and checked in turns (A B, B A, ...), with the rates of a prompt
of 512 tokens and of decoding measured in every round. Checking cannot be faster than a prompt; two ceilings:

* decode time / prompt time per token: what drafts could gain if questions cost nothing;
* the gate's own: its decoding time over the time that all its tokens, those of the questions included, would take at
  the prompt's rate. Questions are prompts for both, so this is what could be reached.

Rounds give ratios; median and signed-rank interval as everywhere. On a model without probes (``--model``) the questions
are random letters, the completions what the model makes of them, and the candidate is the baseline itself: random
weights under other counts say something else at once. Memory: the caches of 8 sequences beside that of one.

    python benchmarks/verification.py --schedules 500 --rounds 8
    python benchmarks/verification.py --model runs/random-2gib.gguf --rounds 6
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

from routing_lab.answers import Judge
from routing_lab.demo import model_path, probes_path
from routing_lab.measure import SpeedRatio
from routing_lab.probes import Outcome, Probe, ProbeSet, run_probes
from routing_lab.probes.verify import Transcripts, Verification, calibrate, verify_probes
from routing_lab.runtime.base import RuntimeOptions
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.schedule import Schedule

PROMPT = 512
DECODED = 128


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--schedules", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--probes", type=int, default=16, help="questions to a model without probes")
    parser.add_argument("--tokens", type=int, default=64, help="and the length of its completions")
    args = parser.parse_args()
    probe_set = made_up(args.probes, args.tokens) if args.model else ProbeSet.load(probes_path())
    gate = probe_set.split("gate")
    options = RuntimeOptions(threads=args.threads, context_tokens=2048)
    with LlamaRuntime(args.model or model_path(), options) as runtime, Judge() as judge:
        size = runtime.facts.size_bytes / 2**30
        print(f"{runtime.facts.name}, {size:.2f} GiB, {runtime.options.threads} threads, {len(gate)} probes")
        transcripts = Transcripts.of_baseline(runtime, probe_set, gate, judge)
        calibration = calibrate(runtime, probe_set, gate, transcripts)
        print(calibration.describe(), calibration.to_dict())
        bench = Bench(runtime, probe_set, judge, Verification(transcripts, calibration))
        if args.schedules:
            bench.compare(args.schedules)
        for schedule in [Schedule.baseline(runtime.facts)] if args.model else bench.passing():
            bench.time(schedule, args.rounds)


def made_up(probes: int, tokens: int) -> ProbeSet:
    """Questions that mean nothing."""
    dice = random.Random(1)
    texts = ["".join(dice.choice("abcdefgh 0123456789") for _ in range(24)) for _ in range(probes)]
    items = [Probe(f"g{number}", text, "1", "integer", "gate") for number, text in enumerate(texts)]
    return ProbeSet("made up", tuple(items), max_tokens=tokens)


class Bench:
    """A model, its gate, and what checking it needs."""

    def __init__(self, runtime: LlamaRuntime, probe_set: ProbeSet, judge: Judge, verification: Verification) -> None:
        self._runtime, self._probe_set, self._judge, self._verification = runtime, probe_set, judge, verification
        self._gate = probe_set.split("gate")

    def decoded(self) -> list[Outcome]:
        """Every probe decoded."""
        return run_probes(self._runtime, self._probe_set, self._gate, self._judge, stop_after_failures=None)

    def checked(self) -> list[Outcome]:
        """Every probe checked."""
        return verify_probes(
            self._runtime, self._probe_set, self._gate, self._judge, self._verification, stop_after_failures=None
        )

    def compare(self, schedules: int) -> None:
        """Part 1."""
        dice = random.Random(20261130)
        facts = self._runtime.facts
        different = verdicts = kept = tokens = 0
        for _ in range(schedules):
            counts = {block: dice.randint(1, own) for block, own in facts.experts_used.items()}
            self._runtime.apply(Schedule.from_counts("random", counts))
            by_probe = {outcome.probe: outcome for outcome in self.checked()}
            for outcome in self.decoded():
                other = by_probe[outcome.probe]
                same = (outcome.status, outcome.text, outcome.tokens) == (other.status, other.text, other.tokens)
                different += not same
                verdicts += outcome.status is not other.status
                if outcome.correct and other.kept is not None:
                    kept += other.kept
                    tokens += outcome.tokens
        total = schedules * len(self._gate)
        print(
            f"{schedules} random schedules x {len(self._gate)} probes: {different} of {total} outcomes differ, ", end=""
        )
        print(f"{verdicts} in status; of the tokens of correct answers {kept / max(1, tokens):.2%} were kept")

    def passing(self) -> list[Schedule]:
        """Schedules of the demo model that pass."""
        facts = self._runtime.facts
        candidates = [Schedule.uniform(7, facts), Schedule.uniform(6, facts)]
        candidates.append(Schedule.from_counts("late-half", dict.fromkeys(facts.routed_blocks[3:], 4)))
        return candidates

    def time(self, schedule: Schedule, rounds: int) -> None:
        """Part 2 for one schedule."""
        rates: dict[str, list[float]] = {name: [] for name in ("decoded", "checked", "decode", "prompt")}
        asks: dict[str, Callable[[], object]] = {"decoded": self.decoded, "checked": self.checked}
        self._runtime.apply(schedule)
        outcomes = self.checked()
        if not all(outcome.correct for outcome in outcomes) and self._probe_set.name != "made up":
            print(f"{schedule.name} does not pass and is left out")
            return
        for number in range(rounds + 1):
            for name in sorted(asks, reverse=bool(number % 2)):
                begun = time.perf_counter()
                asks[name]()
                rates[name].append(1 / (time.perf_counter() - begun))
            timing = self._runtime.decode_timing(tokens=DECODED, prompt_tokens=PROMPT)
            rates["decode"].append(timing.tokens_per_s)
            rates["prompt"].append(PROMPT / (timing.prompt_seconds or math.nan))
        counted = {name: series[1:] for name, series in rates.items()}
        prompts = sum(outcome.prompt_tokens for outcome in outcomes)
        tokens = sum(outcome.tokens for outcome in outcomes)
        kept = sum(outcome.kept or 0 for outcome in outcomes)
        gain = SpeedRatio.from_rates(counted["checked"], counted["decoded"])
        ceiling = SpeedRatio.from_rates(counted["prompt"], counted["decode"])
        # Seconds of decoding the gate, over those of all its tokens at the prompt's rate.
        own = SpeedRatio.from_rates([rate / (prompts + tokens) for rate in counted["prompt"]], counted["decoded"])
        print(f"{schedule.name}: {prompts} tokens of questions, {tokens} of answers, {kept / tokens:.1%} of them kept")
        print(f"  checking over decoding     {_shown(gain)}")
        print(f"  prompt over decode rate    {_shown(ceiling)}: reached {gain.ratio / ceiling.ratio:.0%}")
        print(f"  the gate's own ceiling     {_shown(own)}: reached {gain.ratio / own.ratio:.0%}")


def _shown(ratio: SpeedRatio) -> str:
    return f"{ratio.ratio:5.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


if __name__ == "__main__":
    main()
