"""Does the measurement find differences where there are none, and does it find the ones that are there?

What: a screening measurement as ``search`` makes it (adaptive, 95 % intervals) on the demo model, many times: the
baseline against itself (A/A), and against itself with every time of the candidate made 3 % shorter before it is seen.
So the noise is this machine's own and the effect is exact. An A/A run is a false positive where its interval leaves 1
out; the true difference is found where the interval lies above 1.

Counts have exact 95 % intervals (Clopper and Pearson). Targets: at most 5 % false positives, at least 90 % found.

    python benchmarks/aa_measurement.py --runs 200
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from scipy import stats

from routing_lab.demo import model_path
from routing_lab.measure import MeasureSettings, measure_ratio
from routing_lab.runtime.base import Attestation, DecodeTiming
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.schedule import Schedule


class Shortened(LlamaRuntime):
    """Takes a share off the time of every decode under the schedule with the name that is marked."""

    gain = 1.0
    _name = ""

    def apply(self, schedule: Schedule) -> Attestation:
        """Remember the name."""
        self._name = schedule.name
        return super().apply(schedule)

    def decode_timing(self, *, tokens: int, prompt_tokens: int = 16) -> DecodeTiming:
        """The real time, or a shorter one."""
        timing = super().decode_timing(tokens=tokens, prompt_tokens=prompt_tokens)
        if self._name != "marked":
            return timing
        return replace(timing, seconds=timing.seconds / self.gain)


def main() -> None:
    """Measure and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--most-rounds", type=int, default=96)
    parser.add_argument("--half-width", type=float, default=0.015)
    args = parser.parse_args()
    settings = MeasureSettings(
        tokens=args.tokens, rounds=args.rounds, most_rounds=args.most_rounds, half_width=args.half_width
    )
    found = dict.fromkeys((1.0, 1.03), 0)
    rounds, warned, widths = 0, 0, []
    with Shortened(model_path()) as runtime:
        baseline = Schedule.baseline(runtime.facts)
        marked = replace(baseline, name="marked")
        for done in range(args.runs):
            if done and done % 20 == 0:
                print(f"{done} of {args.runs}: {found[1.0]} false, {found[1.03]} found", file=sys.stderr)
            for gain in found:
                runtime.gain = gain
                measured = measure_ratio(runtime, marked, baseline, settings)
                found[gain] += measured.low > 1 or (gain == 1.0 and measured.high < 1)
                rounds += measured.rounds
                warned += bool(measured.warnings())
                widths.append(measured.half_width)
    print(f"{args.runs} runs of each, {rounds / (2 * args.runs):.1f} rounds of {args.tokens} tokens on average")
    print(f"median half width {sorted(widths)[len(widths) // 2]:.4f}; {warned} of {2 * args.runs} runs had a warning")
    for gain, times in found.items():
        low, high = stats.binomtest(times, args.runs).proportion_ci(method="exact")
        what = "A/A, interval leaves 1 out" if gain == 1.0 else f"true ratio {gain}, interval above 1"
        print(f"{what}: {times} of {args.runs} = {times / args.runs:.1%} [{low:.1%}, {high:.1%}]")


if __name__ == "__main__":
    main()
