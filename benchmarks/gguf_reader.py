"""How fast the header of a GGUF is read, against ``GGUFReader`` of the gguf package, in alternating rounds.

What: ``ModelFacts.read`` (header, checks and facts) and ``GGUFReader(path)`` (header only) on one generated file: a
``qwen3moe`` of 48 blocks without weights worth naming, and a vocabulary of 300 000 tokens with as many merges, scores
and types, as large as published models have. Both run in this process, with everything imported and the file in the
page cache; the order turns around in every round. Warm-up: the first round is thrown away. Reported: the ratio of
reads per second with its 95 % signed-rank interval (see ``routing_lab.measure``), and what a process of its own needs
for one read in memory. The ceiling is what it takes to step over the texts once: the time for the same number of
``read`` and ``seek`` calls on the file is reported beside it.

    python benchmarks/gguf_reader.py --rounds 6
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGUFReader

from routing_lab.measure import SpeedRatio
from routing_lab.model import ModelFacts

BLOCKS, EXPERTS, WIDTH = 48, 8, 32


def write_model(path: Path, tokens: int) -> None:
    """A model whose header is large and whose weights are small."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    counts = {"block_count": BLOCKS, "expert_count": EXPERTS, "expert_used_count": 2, "embedding_length": WIDTH}
    for name, value in counts.items():
        writer.add_uint32(f"qwen3moe.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{i:06d}" for i in range(tokens)])
    writer.add_token_scores([0.0] * tokens)
    writer.add_token_types([1] * tokens)
    writer.add_token_merges([f"tok en{i:06d}" for i in range(tokens)])
    for block in range(BLOCKS):
        for name in ("gate", "up", "down"):
            writer.add_tensor(f"blk.{block}.ffn_{name}_exps.weight", np.zeros((EXPERTS, WIDTH, WIDTH), np.float32))
        writer.add_tensor(f"blk.{block}.ffn_gate_inp.weight", np.zeros((EXPERTS, WIDTH), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def seconds(call: Callable[[Path], object], path: Path) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    call(path)
    return time.perf_counter() - started


def step_over(path: Path, texts: int) -> None:
    """As many reads of a length and seeks over a text as the vocabulary has texts: nothing can do with less."""
    with path.open("rb") as file:
        for _ in range(texts):
            file.read(8)
            file.seek(11, 1)


def peak_mib(way: str, path: Path) -> float:
    """Most memory of a process that reads the file once in this way."""
    command = [sys.executable, __file__, "--peak-of", way, str(path)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


WAYS: dict[str, Callable[[Path], object]] = {"routing_lab": ModelFacts.read, "gguf": GGUFReader}


def compare(path: Path, tokens: int, rounds: int) -> dict[str, object]:
    """Run the rounds; the result as JSON can hold it."""
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    order = list(WAYS)
    for _ in range(rounds + 1):
        for name in order:
            rates[name].append(1 / seconds(WAYS[name], path))
        order.reverse()
    ratio = SpeedRatio.from_rates(rates["routing_lab"][1:], rates["gguf"][1:])
    return {
        "routing_lab_over_gguf": ratio.ratio,
        "interval_95": [ratio.low, ratio.high],
        "routing_lab_s": 1 / ratio.candidate_tokens_per_s,
        "gguf_s": 1 / ratio.baseline_tokens_per_s,
        "stepping_over_the_texts_s": min(seconds(lambda file: step_over(file, 2 * tokens), path) for _ in range(3)),
        "peak_mib": {name: round(peak_mib(name, path)) for name in ("nothing", *WAYS)},
        "rounds": rounds,
        "tokens": tokens,
        "file_mib": round(path.stat().st_size / 2**20, 1),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> None:
    """Print the comparison as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=300_000, help="of the vocabulary (default: 300000)")
    parser.add_argument("--rounds", type=int, default=6, help="that count (default: 6)")
    parser.add_argument("--peak-of", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        way, file = arguments.peak_of
        WAYS.get(way, Path.stat)(Path(file))
        # Not getrusage: its maximum begins with that of the process that forked this one.
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        print(int(status["VmHWM"].split()[0]) / 1024)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, arguments.tokens)
        print(json.dumps(compare(path, arguments.tokens, arguments.rounds), indent=1))


if __name__ == "__main__":
    main()
