"""What it costs to switch the schedule of a running llama-server, beside starting it again.

What: ``ServerRuntime.apply``, which writes the control file, forces both graphs to be built anew by a request of four
prompt and two generated tokens, and reads the counts back; and a restart as one would need without it: the server is
ended, started on the same model, and attested. Both alternate, so that a slow minute hits both. A third column is the
smallest thing that a switch can cost, the same request without a switch (the ceiling for the ratio). With ``--ratio``
the speed ratio of a uniform schedule to the baseline is measured on the server and on the library in process as well.

Warm-up: one switch and one restart, not counted; the files are in the page cache afterwards, which flatters restarts.
Medians and quartiles over ``--rounds`` alternations.

    python benchmarks/server_switch.py --model big.gguf --rounds 9
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from routing_lab.demo import model_path
from routing_lab.measure import MeasureSettings, measure_ratio
from routing_lab.runtime.base import Runtime, RuntimeOptions
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.runtime.server import ServerRuntime
from routing_lab.schedule import Schedule


def clocked(do: Callable[[], object]) -> float:
    """Seconds that ``do`` takes."""
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


def quartiles(seconds: list[float]) -> str:
    """Median and quartiles in milliseconds."""
    low, middle, high = (1000 * value for value in statistics.quantiles(seconds, n=4))
    return f"{middle:9.1f} ms ({low:.1f} to {high:.1f})"


def restart(runtime: ServerRuntime, schedule: Schedule) -> None:
    """End the server, start it again, and attest the schedule."""
    runtime.close()
    runtime.apply(schedule)


def switches(runtime: ServerRuntime, rounds: int) -> None:
    """Time switches, restarts and bare requests in turns, and print them."""
    facts = runtime.facts
    schedules = [Schedule.uniform(max(1, facts.experts_used[facts.routed_blocks[0]] // 2), facts)]
    schedules.append(Schedule.baseline(facts))
    times: dict[str, list[float]] = {"switch": [], "restart": [], "request alone": []}
    for number in range(-1, rounds):
        one, other = schedules[number % 2], schedules[(number + 1) % 2]
        runtime.apply(one)
        timed = {
            "switch": clocked(lambda: runtime.apply(other)),  # noqa: B023 - called at once
            "request alone": clocked(lambda: runtime.decode_timing(tokens=1, prompt_tokens=4)),
            "restart": clocked(lambda: restart(runtime, one)),  # noqa: B023 - called at once
        }
        if number >= 0:
            for name, seconds in timed.items():
                times[name].append(seconds)
    for name, seconds in times.items():
        print(f"{name:14} {quartiles(seconds)}")
    ratio = statistics.median(b / a for a, b in zip(times["switch"], times["restart"], strict=True))
    print(f"a restart takes {ratio:.1f} times as long as a switch (median of {rounds} pairs)")


def ratios(runtimes: dict[str, Runtime], rounds: int) -> None:
    """The same speed ratio on each runtime."""
    for name, runtime in runtimes.items():
        half = Schedule.uniform(4, runtime.facts)
        speed = measure_ratio(
            runtime, half, Schedule.baseline(runtime.facts), MeasureSettings(tokens=128, rounds=rounds)
        )
        print(f"4 experts everywhere, {name:10} {speed.ratio:.3f} [{speed.low:.3f}, {speed.high:.3f}]")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=model_path(), help="default: the demo model")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ratio", action="store_true", help="compare the speed ratio of both runtimes as well")
    args = parser.parse_args()
    options = RuntimeOptions(threads=args.threads, context_tokens=512)
    with ServerRuntime(args.model, options, binary=args.llama_server) as server:
        print(f"{args.model.name}, {server.facts.size_bytes / 1e9:.2f} GB, {server.build.version}")
        switches(server, args.rounds)
        if args.ratio:
            with LlamaRuntime(args.model, options) as library:
                ratios({"server": server, "in process": library}, args.rounds)


if __name__ == "__main__":
    main()
