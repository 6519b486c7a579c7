"""The runtime on llama-server: an unmodified server in a process of its own, its schedule switched while it runs."""

from __future__ import annotations

import itertools
import math
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from routing_lab.errors import AttestationError, RuntimeFailureError, RuntimeUnsupportedError, UsageError
from routing_lab.model import ModelFacts
from routing_lab.overrides import ServerCommand, server_command
from routing_lab.runtime.base import (
    Attestation,
    Capability,
    DecodeTiming,
    FinishReason,
    Generation,
    RuntimeBuild,
    RuntimeOptions,
)
from routing_lab.runtime.libllama import Device
from routing_lab.runtime.llama import default_threads, file_digest, graph_too_large
from routing_lab.runtime.native import override_library
from routing_lab.runtime.report import ServerReport
from routing_lab.runtime.server_binary import find_server
from routing_lab.runtime.server_process import HOST, ServerProcess
from routing_lab.schedule import Schedule

__all__ = ["ServerRuntime"]

# Greedy: the temperature leaves the best token alone, of equal ones the first, and the cut keeps the last step short.
_GREEDY: Final = {"temperature": 0.0, "top_k": 1, "samplers": ["temperature", "top_k"]}
_ALONE: Final = {"cache_prompt": False, "stream": False}
_STREAM_TEXT = "0 1 2 3 4 5 6 7 8 9 + - = the of and to in"
"""Any fixed text: its tokens, over and over, are the prompt of every timing and of every attestation."""
_PRELOADED: Final = Path("named-by-the-process")
"""Keeps the counts out of the argument list; ``ServerProcess`` makes the environment."""
_WITNESS_PROMPT, _WITNESS_TOKENS = 4, 2
_RPC_TIMEOUT_S = 10.0


class ServerRuntime:
    """A model in llama-server whose schedule can be switched; see ``base.Runtime`` for the contract.

    One slot, no prompt cache, no drafting, every placement flag explicit. The server is started by the constructor
    and again after it was lost. Before the first ``apply`` the model's own counts are applied, attested like any
    schedule. Calls from several threads wait for each other.

    Where it differs from ``LlamaRuntime``: ``decode_timing`` feeds what the model itself picks after a fixed prompt
    instead of a fixed stream, and counts the server's own loop; ``thinking`` of ``None`` is the server's default,
    which defines the template's variable; a margin is missing where a token ends within a character.

    Args:
        model: A GGUF file; of a split one, the first shard.
        options: As for ``LlamaRuntime``; ``library_dir`` and ``override="off"`` cannot be honoured.
        binary: The llama-server (default: the one on PATH, else the one that ``make llama-server`` built).
        command: Start the server by this, as it was exported for this model, instead of by the lab's own command. Its
            program stands for ``binary``; ``options`` should say what it says.

    Raises:
        UserFileError: The model file is bad, or the placement does not fit it.
        UsageError: An option that only the in-process runtime has.
        RuntimeUnsupportedError: There is no llama-server that the override fits, or it cannot load the model.
        RuntimeFailureError: The server died while it loaded the model.
    """

    def __init__(
        self,
        model: Path,
        options: RuntimeOptions | None = None,
        *,
        binary: Path | None = None,
        command: ServerCommand | None = None,
    ) -> None:
        self._facts = ModelFacts.read(model)
        given = options or RuntimeOptions()
        if given.library_dir is not None:
            raise UsageError("a llama-server loads its own libllama; name the server instead of a library folder")
        if given.override == "off":
            raise UsageError("a llama-server cannot be attested without the override; leave it on")
        self._options = replace(given, threads=given.threads or default_threads(self._facts))
        self._options.placement.check(self._facts)
        self._binary = find_server(binary)
        self._library = override_library()
        self._given = command
        self._lock = threading.RLock()
        self._process: ServerProcess | None = None
        self._applied: Schedule | None = None
        self._starts = 0
        self._stream: list[int] = []
        self._start()

    # ---- what it is ------------------------------------------------------------------------------------------------

    @property
    def facts(self) -> ModelFacts:
        """Facts of the loaded model."""
        return self._facts

    @property
    def options(self) -> RuntimeOptions:
        """The options the model was loaded with."""
        return self._options

    @property
    def capability(self) -> Capability:
        """Always a count per block: without the override there is no attestation, and so no server runtime."""
        return Capability.PRELOAD

    @property
    def no_override_reason(self) -> str | None:
        """Always ``None``, as in ``LlamaRuntime`` where a count per block can be set."""
        return None

    @property
    def override(self) -> Path:
        """The override library in use."""
        return self._library

    @property
    def devices(self) -> tuple[Device, ...]:
        """Always empty: a server does not list its devices."""
        return ()

    @property
    def build(self) -> RuntimeBuild:
        """The server, and the library that runs the model in it."""
        return RuntimeBuild(
            name="llama-server",
            version=self._binary.version,
            library=str(self._binary.libllama),
            library_digest=file_digest(self._binary.libllama.resolve()),
            system_info=f"{self._binary.path}, {self._binary.built or 'it does not say how it was built'}",
        )

    @property
    def weight_loads(self) -> int:
        """How often the weights were read so far."""
        return self._starts

    @property
    def process_id(self) -> int | None:
        """Id of the server's process; ``None`` while there is none."""
        return self._process.pid if self._process else None

    @property
    def url(self) -> str | None:
        """Where the server listens; ``None`` while there is none."""
        return f"http://{HOST}:{self._process.port}" if self._process else None

    # ---- what it does ----------------------------------------------------------------------------------------------

    def apply(self, schedule: Schedule) -> Attestation:
        """Switch to ``schedule`` and read the counts back; see ``base.Runtime.apply``."""
        counts = schedule.resolve(self._facts)
        with self._lock:
            if self._process is None:
                self._start()
            attestation = self._switch(schedule.key(self._facts) if counts else "", counts)
            self._applied = schedule
        return attestation

    def attest_as_started(self, schedule: Schedule) -> Attestation:
        """Read back ``schedule`` from a server whose own command set it, without a switch; raises as ``apply``."""
        counts = schedule.resolve(self._facts)
        with self._lock:
            if self._process is None:
                self._start()
            attestation = self._witness(counts, generation=0)
            self._applied = schedule
        return attestation

    def render_chat(self, user: str, *, thinking: bool | None = None) -> str:
        """The prompt of the model's own chat template; see ``base.Runtime.render_chat``."""
        if not self._facts.has_chat_template:  # the server would take another model's
            raise RuntimeUnsupportedError(f"{self._facts.files[0]} has no chat template; use a raw prompt")
        body: dict[str, Any] = {"messages": [{"role": "user", "content": _text(user)}]}
        if thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
        prompt: str = self._ask("/apply-template", body)["prompt"]
        return prompt

    def generate(self, prompt: str, *, max_tokens: int, stop: Sequence[str] = (), margins: bool = False) -> Generation:
        """Greedy completion; see ``base.Runtime.generate``."""
        if max_tokens < 1 or "" in stop:
            raise UsageError("max_tokens must be at least 1 and no stop string empty")
        with self._lock:
            started = time.perf_counter()
            tokens = self._prompt_tokens(prompt)
            limit = min(max_tokens, self._options.context_tokens - len(tokens))
            reply = self._complete(tokens, limit, stop=[_text(one) for one in stop], n_probs=2 * margins)
            produced = reply["tokens_predicted"]
            ended = time.perf_counter()
            # The server leaves the tokens of a stop string out of the probabilities; the same again without it has all.
            shown = self._complete(tokens, produced, n_probs=2) if margins and stop else reply
            margin = _smallest_margin(shown) if margins else None
            if margin is not None and math.isnan(margin):
                raise self._failure("the logits are not numbers (NaN)")
        return Generation(
            text=reply["content"],
            finish_reason=_FINISH[reply["stop_type"]],
            prompt_tokens=len(tokens),
            tokens=produced,
            seconds=ended - started,
            llama_seconds=(reply["timings"]["prompt_ms"] + reply["timings"]["predicted_ms"]) / 1000,
            smallest_margin=margin,
        )

    def decode_timing(self, *, tokens: int, prompt_tokens: int = 16) -> DecodeTiming:
        """Time the server's decoding of what the model picks after a fixed prompt; see ``base.Runtime.decode_timing``.

        The end of generation is ignored. The time is the server's own, from the first token, which comes with the
        prompt and is not counted, to the last: ``tokens`` decodes, with one more token than that in the context.
        ``prompt_seconds`` is the server's own, too.
        """
        if tokens < 1 or prompt_tokens < 1 or prompt_tokens + tokens >= self._options.context_tokens:
            raise UsageError(
                f"{prompt_tokens} prompt tokens and {tokens} timed ones do not fit: both at least 1, "
                f"together below the context of {self._options.context_tokens}"
            )
        with self._lock:
            self._ready()
            timings = self._complete(self._stream_of(prompt_tokens), tokens + 1, ignore_eos=True)["timings"]
            if timings["predicted_n"] != tokens + 1:
                raise self._failure(f"llama-server decoded {timings['predicted_n'] - 1} of {tokens} tokens to time")
        return DecodeTiming(
            tokens=tokens, seconds=timings["predicted_ms"] / 1000, prompt_seconds=timings["prompt_ms"] / 1000
        )

    def close(self) -> None:
        """End the server; safe to call twice. A later call starts it again."""
        with self._lock:
            self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the server ------------------------------------------------------------------------------------------------

    def _command(self, port: int) -> Sequence[str]:
        if self._given is not None:
            return (str(self._binary.path), *self._given.argv[1:])
        options = self._options
        size = min(options.batch_tokens, options.context_tokens)
        extra = ["--threads-batch", str(options.threads), "--batch-size", str(size), "--ubatch-size", str(size)]
        extra += ["--cache-type-k", options.kv_type, "--cache-type-v", options.kv_type]
        extra += ["--cache-ram", "0", "--ctx-checkpoints", "0", "--no-context-shift", "--spec-type", "none"]
        extra += ["--no-warmup", "--offline"]
        if options.rpc_servers:
            extra += ["--rpc", ",".join(options.rpc_servers)]
        if not options.mmap:
            extra += ["--load-mode", "none"]
        return server_command(
            self._facts.files[0],
            Schedule.baseline(self._facts),
            self._facts,
            library=_PRELOADED,
            placement=options.placement,
            context_tokens=options.context_tokens,
            threads=options.threads,
            host=HOST,
            port=port,
            extra=extra,
            program=str(self._binary.path),
        ).argv

    def _start(self) -> None:
        for endpoint in self._options.rpc_servers:
            _require_rpc_server(endpoint)
        try:
            self._process = ServerProcess(
                self._command,
                self._library,
                self._options.request_timeout_s,
                environment={} if self._given is None else self._given.env,
                port=None if self._given is None else self._given.port,
            )
        except RuntimeUnsupportedError as error:
            raise RuntimeUnsupportedError(f"llama-server cannot serve {self._facts.files[0]}: {error}") from None
        except RuntimeFailureError as error:
            if not self._options.rpc_servers:
                raise
            served = ", ".join(self._options.rpc_servers)
            message = f"{error} (with devices of {served}; an RPC server serves one client at a time)"
            raise RuntimeFailureError(message, error.log_tail) from None
        self._starts += 1
        room = self._request("/props")["default_generation_settings"]["n_ctx"]
        if room < self._options.context_tokens:
            self._discard()
            raise RuntimeUnsupportedError(
                f"llama-server gives a slot {room} tokens, what the model was trained on, and the context is to be "
                f"{self._options.context_tokens}: lower it"
            )
        self._stream = self._tokenize(_STREAM_TEXT)
        if not self._stream:
            self._discard()
            raise RuntimeUnsupportedError(f"{self._facts.files[0]} has no tokens for {_STREAM_TEXT!r}")

    def _failure(self, message: str) -> RuntimeFailureError:
        """What to raise where the server's answer cannot be trusted; the server is given up."""
        log = self._process.log_tail() if self._process else ""
        self._discard()
        return RuntimeFailureError(message, log)

    def _discard(self) -> None:
        if self._process:
            self._process.close()
            self._process = None

    def _forget_closed(self) -> None:
        if self._process is not None and self._process.closed:
            self._process = None

    def _request(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        assert self._process is not None, "started by the caller"  # noqa: S101
        try:
            return self._process.request(path, body)
        finally:
            self._forget_closed()

    def _ready(self) -> None:
        """Have a server under the applied schedule, or under the model's own counts before the first one."""
        if self._process is None or self._applied is None:
            self.apply(self._applied or Schedule.baseline(self._facts))

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self._ready()
            return self._request(path, body)

    # ---- requests --------------------------------------------------------------------------------------------------

    def _tokenize(self, text: str) -> list[int]:
        body = {"content": _text(text), "add_special": True, "parse_special": True}
        tokens: list[int] = self._request("/tokenize", body)["tokens"]
        return tokens

    def _prompt_tokens(self, prompt: str) -> list[int]:
        self._ready()
        tokens = self._tokenize(prompt)
        if not tokens:
            raise UsageError("the prompt is empty and the model adds no BOS token")
        room = self._options.context_tokens
        if len(tokens) >= room:
            raise UsageError(f"the prompt has {len(tokens)} tokens and leaves no room in a context of {room}")
        return tokens

    def _stream_of(self, tokens: int) -> list[int]:
        return list(itertools.islice(itertools.cycle(self._stream), tokens))

    def _complete(self, tokens: list[int], limit: int, **more: Any) -> dict[str, Any]:  # noqa: ANN401
        return self._request("/completion", {"prompt": tokens, "n_predict": limit, **_GREEDY, **_ALONE, **more})

    # ---- switching -------------------------------------------------------------------------------------------------

    def _switch(self, experts: str, counts: Mapping[int, int]) -> Attestation:
        assert self._process is not None, "started by the caller"  # noqa: S101
        try:
            generation = self._process.switch(experts)
        finally:
            self._forget_closed()
        return self._witness(counts, generation)

    def _witness(self, counts: Mapping[int, int], generation: int) -> Attestation:
        """Have both graphs built anew, and compare what they were built with."""
        process = self._process
        assert process is not None, "started by the caller"  # noqa: S101
        try:
            # llama.cpp keeps one graph for reuse, the last one. A prompt of several tokens needs another one than any
            # decode before it, and the decode after it another one than the prompt: both are built anew.
            self._complete(self._stream_of(_WITNESS_PROMPT), _WITNESS_TOKENS, ignore_eos=True)
            return attest(counts, process.report(), generation)
        except (AttestationError, RuntimeUnsupportedError):
            self._discard()  # nothing may run under counts that nobody asked for
            raise
        except RuntimeFailureError as error:
            if refusal := graph_too_large(error, counts):
                raise refusal from error
            raise


_FINISH: Final[Mapping[str, FinishReason]] = {"eos": "stop", "word": "stop", "limit": "length"}


def _require_rpc_server(endpoint: str) -> None:
    """Refuse a server that is not there: llama-server ends with a failed assertion then, and says too little."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_RPC_TIMEOUT_S).close()
    except OSError as error:
        raise RuntimeUnsupportedError(f"no RPC server answers at {endpoint}: {error.strerror or error}") from None


def _text(text: str) -> str:
    """``text`` as UTF-8 can hold it: a lone surrogate becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _smallest_margin(reply: Mapping[str, Any]) -> float | None:
    """The smallest gap between the two best tokens (NaN where a logit is none).

    A gap in log-probabilities is the gap in logits.
    """
    pairs = [[one["logprob"] for one in shown["top_logprobs"]] for shown in reply["completion_probabilities"]]
    if any(None in pair for pair in pairs):  # how JSON writes what is no number
        return math.nan
    return min((best - second for best, second in pairs), default=None)


def attest(counts: Mapping[int, int], report: ServerReport | None, generation: int) -> Attestation:
    """Compare what the server's graphs were built with since ``generation`` with the counts that were wanted.

    Raises:
        AttestationError: A block was built with another count, or not built anew.
        RuntimeUnsupportedError: There is no report, or the library refused the control file.
    """
    if not counts:
        return Attestation(selected={}, summed={})
    if report is None:
        raise RuntimeUnsupportedError(
            "the server's libllama does not call build_moe_ffn through its symbol table (linked with -Bsymbolic?), "
            "so the expert override cannot reach it"
        )
    if report.generation != generation:
        raise RuntimeUnsupportedError(f"the server did not take the schedule: {report.refused or 'no graph was built'}")
    for block, wanted in counts.items():
        decode = report.decode.get(block)
        if decode is None:
            raise AttestationError(block, wanted, None, "that is the graph of single tokens")
        for row, kind in ((decode, "single tokens"), (report.batch.get(block, decode), "a prompt")):
            if row.generation != generation:
                raise AttestationError(block, wanted, row.selected, f"the graph of {kind} was not built anew")
            if row.selected != wanted:
                raise AttestationError(block, wanted, row.selected, f"that is the graph of {kind}")
            if row.summed != wanted:
                raise AttestationError(block, wanted, row.summed, "that is the length of the sum over its experts")
    return Attestation(
        selected={block: report.decode[block].selected for block in counts},
        summed={block: report.decode[block].summed for block in counts},
    )
