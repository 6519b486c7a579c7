"""Decode rate as routing_lab measures it, against a bare llama-cpp-python loop, in alternating rounds.

What: ``LlamaRuntime.decode_timing`` (the model in a supervised process, the override library preloaded, the baseline
applied) and a process that knows only ``llama_cpp``: load, decode a prompt, then decode one token after another and
pick the best next one. Same model, context, threads and number of tokens; the order turns around in every round.
Warm-up: the first round is thrown away. Reported: the ratio lab / bare with its 95 % signed-rank interval (see
``routing_lab.measure``). The ceiling is 1: the lab can add cost, not speed. The target is within 3 %.

    python benchmarks/decode_rate.py --rounds 40
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

PROMPT_TOKENS, CONTEXT_TOKENS = 16, 1024


def serve_bare(model_file: str, threads: int) -> None:
    """For each number of tokens on standard input, decode so many and print the seconds; nothing of routing_lab."""
    from llama_cpp import llama_cpp as api

    silent = api.llama_log_callback(lambda _level, _text, _data: None)
    api.llama_log_set(silent, None)
    api.llama_backend_init()
    model = api.llama_model_load_from_file(model_file.encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx = CONTEXT_TOKENS
    params.n_threads = params.n_threads_batch = threads
    context = api.llama_init_from_model(model, params)
    sampler = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    api.llama_sampler_chain_add(sampler, api.llama_sampler_init_greedy())
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    print("ready", flush=True)
    for line in sys.stdin:
        count = int(line)
        stream = [(7 + 31 * i) % vocabulary for i in range(PROMPT_TOKENS + count)]
        api.llama_memory_clear(api.llama_get_memory(context), False)
        prompt = (api.llama_token * PROMPT_TOKENS)(*stream[:PROMPT_TOKENS])
        assert api.llama_decode(context, api.llama_batch_get_one(prompt, PROMPT_TOKENS)) == 0
        api.llama_sampler_sample(sampler, context, -1)
        token = (api.llama_token * 1)()
        started = time.perf_counter()
        for token[0] in stream[PROMPT_TOKENS:]:
            assert api.llama_decode(context, api.llama_batch_get_one(token, 1)) == 0
            api.llama_sampler_sample(sampler, context, -1)
        print(time.perf_counter() - started, flush=True)


class Bare:
    """The process that runs ``serve_bare``."""

    def __init__(self, model: Path, threads: int) -> None:
        command = [sys.executable, __file__, "--model", str(model), "--threads", str(threads), "--serve-bare"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tokens_per_s(self, tokens: int) -> float:
        """Decode ``tokens`` tokens."""
        assert self._process.stdin is not None
        print(tokens, file=self._process.stdin, flush=True)
        return tokens / float(self._read())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def compare(model: Path, threads: int, rounds: int, tokens: int) -> dict[str, object]:
    """Run the rounds; the result as JSON can hold it."""
    from routing_lab.measure import SpeedRatio
    from routing_lab.runtime import RuntimeOptions
    from routing_lab.runtime.llama import LlamaRuntime
    from routing_lab.schedule import Schedule

    bare = Bare(model, threads)
    rates: dict[str, list[float]] = {"lab": [], "bare": []}
    with LlamaRuntime(model, RuntimeOptions(threads=threads, context_tokens=CONTEXT_TOKENS)) as runtime:
        runtime.apply(Schedule.baseline(runtime.facts))
        ways = [
            ("lab", lambda: runtime.decode_timing(tokens=tokens, prompt_tokens=PROMPT_TOKENS).tokens_per_s),
            ("bare", lambda: bare.tokens_per_s(tokens)),
        ]
        for _ in range(rounds + 1):
            for name, measure in ways:
                rates[name].append(measure())
            ways.reverse()
        build = runtime.build
    bare.close()
    ratio = SpeedRatio.from_rates(rates["lab"][1:], rates["bare"][1:])
    return {
        "lab_over_bare": ratio.ratio,
        "interval_95": [ratio.low, ratio.high],
        "lab_tokens_per_s": ratio.candidate_tokens_per_s,
        "bare_tokens_per_s": ratio.baseline_tokens_per_s,
        "rounds": ratio.rounds,
        "tokens_per_round": tokens,
        "threads": threads,
        "model": model.name,
        "library": build.version,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> None:
    """Print the comparison as JSON."""
    from routing_lab.demo import model_path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=model_path(), help="GGUF (default: the demo model)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=40, help="that count (default: 40)")
    parser.add_argument("--tokens", type=int, default=128, help="per round and side (default: 128)")
    parser.add_argument("--serve-bare", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_bare:
        serve_bare(str(arguments.model), arguments.threads)
    else:
        print(json.dumps(compare(arguments.model, arguments.threads, arguments.rounds, arguments.tokens), indent=1))


if __name__ == "__main__":
    main()
