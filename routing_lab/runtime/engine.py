"""One model in libllama, driven through llama-cpp-python's low-level functions; lives in the model's own process.

Importing this module loads nothing. Creating an ``Engine`` loads the override library first, where one is given, and
``llama_cpp`` second: the dynamic linker gives a symbol to whoever is first in its search.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from routing_lab.errors import RuntimeFailureError, RuntimeUnsupportedError, UsageError
from routing_lab.runtime.completion import Completion, best_two
from routing_lab.runtime.drafts import DraftBatches
from routing_lab.runtime.interposed import Override, PlainKernels
from routing_lab.runtime.libllama import (
    LOG_INFO,
    LOG_WARN,
    Buffer,
    Device,
    Log,
    add_rpc_server,
    devices,
    import_api,
)
from routing_lab.runtime.witness import Witness

__all__ = ["Engine", "LoadSpec", "Loaded", "Switched"]

# enum values of llama.h
_KV_TYPES = {"f32": 0, "f16": 1}
_TOKEN_NORMAL, _TOKEN_BYTE = 1 << 2, 1 << 5
_KV_OVERRIDE_INT = 0
_LOAD_MODE_NONE = 0
_DECODED, _ABORTED = 0, 2  # of llama_decode

_WITNESS_TOKENS = 32  # the smallest context does: one token is decoded in it
_DRAWS = 1000  # a vocabulary without plain tokens (none is known) is fed whatever was drawn last
_STREAM_SEED = 20260  # any fixed number: every schedule is timed on the same tokens


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """All that loading needs, in JSON's types.

    ``host_tensors`` are regular expressions of tensor names. ``rpc`` are servers (``host:port``) that lend devices.
    """

    model: str
    architecture: str
    override_library: str | None
    threads: int
    context_tokens: int
    batch_tokens: int
    kv_type: Literal["f16", "f32"]
    gpu_layers: int
    host_tensors: list[str] = field(default_factory=list)
    plain_library: str | None = None
    host_kv: bool = False
    mmap: bool = True
    rpc: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Switched:
    """What the graphs built after a switch consult, as pairs of block and count.

    ``selected`` and ``summed`` are read from the nodes of a graph that was about to run. ``built`` is the override
    library's own record, for the context that will do the work, of the count given and the length of the sum (-1: not
    seen), as triples; it is empty without the library. ``loads`` counts how often this process has read the weights.
    """

    selected: list[tuple[int, int]]
    summed: list[tuple[int, int]]
    built: list[tuple[int, int, int]]
    loads: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The library in use and the counts of a graph under the model's own schedule.

    ``override_reached`` tells whether libllama calls the override library at all (false too without one).
    """

    library: str
    version: str
    system_info: str
    devices: list[Device]
    buffers: list[Buffer]
    override_reached: bool
    switched: Switched


class Engine:
    """A loaded model with one working context.

    Every method that computes raises ``RuntimeFailureError`` when libllama reports an error, and ``UsageError`` for
    arguments that cannot work. An assertion inside libllama ends the process.
    """

    def __init__(self, spec: LoadSpec) -> None:
        self.spec = spec
        self.override = Override(spec.override_library) if spec.override_library else None
        self.plain_kernels = PlainKernels(spec.plain_library)
        self.api = import_api()
        self.plain_kernels.bind()
        self._log = Log(self.api)
        if self.override:
            self.override.bind(self.library)
        for endpoint in spec.rpc:
            add_rpc_server(self.api, endpoint)
        self._sampler = self.api.llama_sampler_chain_init(self.api.llama_sampler_chain_default_params())
        self.api.llama_sampler_chain_add(self._sampler, self.api.llama_sampler_init_greedy())
        self._context: int | None = None
        self._batches: DraftBatches | None = None
        self._model: int | None = None
        self._pieces: dict[int, bytes] = {}
        self._loads = 0
        self._load(None)
        self._at_once = self.api.ggml_abort_callback(lambda _data: True)
        self._token = (self.api.llama_token * 1)()
        self._step = self.api.llama_batch_get_one(self._token, 1)

    # ---- loading and switching -------------------------------------------------------------------------------------

    @property
    def library(self) -> str:
        """Path of the libllama in use."""
        return str(self.api._lib._name)  # noqa: SLF001

    def loaded(self) -> Loaded:
        """Describe the library, and attest the model's own counts."""
        switched = self.switch(experts="", uniform=None)
        versions = [importlib.import_module("llama_cpp").__version__, self.api.llama_version().decode()]
        return Loaded(
            library=self.library,
            version="llama-cpp-python {}, libllama {}".format(*versions),
            system_info=self.api.llama_print_system_info().decode("utf-8", "replace"),
            devices=devices(self.api),
            buffers=self._log.buffers(),
            override_reached=bool(switched.built),
            switched=switched,
        )

    def _load(self, uniform: int | None) -> None:
        """Read the weights; with ``uniform`` under the stock scalar override of the count of all blocks."""
        self.close()
        self._log.forget_all_buffers()
        params = self.api.llama_model_default_params()
        params.n_gpu_layers = self.spec.gpu_layers
        if not self.spec.mmap:
            params.load_mode = _LOAD_MODE_NONE
        host = self._host_overrides()
        params.tensor_buft_overrides = ctypes.cast(host, ctypes.c_void_p) if host is not None else None
        scalar = self._scalar_override(uniform)
        if scalar is not None:
            params.kv_overrides = scalar
        # What is said while loading may explain a failure; the chatter of every new context would drown it, and costs.
        self._log.lowest = LOG_INFO
        model = self.api.llama_model_load_from_file(os.fsencode(self.spec.model), params)
        self._log.lowest = LOG_WARN
        if not model:
            raise RuntimeUnsupportedError(f"libllama cannot load {self.spec.model}")
        self._model, self._uniform = model, uniform
        self.vocab = self.api.llama_model_get_vocab(model)
        self._loads += 1

    def _scalar_override(self, uniform: int | None) -> Any:  # noqa: ANN401
        if uniform is None:
            return None
        overrides = (self.api.llama_model_kv_override * 2)()  # the empty key of the second one ends the list
        overrides[0].tag = _KV_OVERRIDE_INT
        overrides[0].key = f"{self.spec.architecture}.expert_used_count".encode()
        overrides[0].value.val_i64 = uniform
        return overrides

    def _host_overrides(self) -> Any:  # noqa: ANN401
        """Tensors that stay in host memory, as ``llama_model_tensor_buft_override`` rows ended by a null one."""
        patterns = self.spec.host_tensors
        if not patterns:
            return None
        host = self.api._lib.ggml_backend_cpu_buffer_type  # noqa: SLF001
        host.restype = ctypes.c_void_p

        class Row(ctypes.Structure):
            _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))

        rows = [Row(pattern.encode(), host()) for pattern in patterns]
        return (Row * (len(rows) + 1))(*rows)

    def switch(self, *, experts: str, uniform: int | None) -> Switched:
        """Use other counts, attest them in a context of their own and leave a working context without old graphs.

        ``experts`` goes to the override library and costs milliseconds. ``uniform`` is one count for all blocks by
        the stock override (``None``: the model's own); another one than before reads the weights again.
        """
        self._free_batches()
        if self.override:
            self.override.set(experts)
        elif experts:
            raise RuntimeUnsupportedError("per-block counts need the override library")
        if uniform != self._uniform:
            self._load(uniform)
        witness = self._attest()
        if self.override:
            self.override.reset_report()
        self._renew_context()
        return Switched(
            selected=sorted(witness.selected.items()),
            summed=sorted(witness.summed.items()),
            built=self.override.report() if self.override else [],
            loads=self._loads,
        )

    def _attest(self) -> Witness:
        witness = Witness(self.api)
        context = self.new_context(_WITNESS_TOKENS, witness=witness)
        try:
            self._build(context, 1)
        finally:
            self.api.llama_free(context)
        return witness

    def _renew_context(self) -> None:
        """See that no graph of the working context outlives a switch.

        libllama keeps the last graph for another batch of its shape. Two batches of different shapes leave the second
        one's graph, built anew. That spares making a context, whose cache alone may be gigabytes to clear.
        """
        if self._context and self.spec.batch_tokens > 1:
            self.api.llama_set_abort_callback(self._context, self._at_once, None)
            try:
                self._build(self._context, 2)
                self._build(self._context, 1)
            finally:
                self.api.llama_set_abort_callback(self._context, self.api.ggml_abort_callback(), None)
            return
        self._free_context()
        self._log.forget_buffers()
        self._context = self.new_context(self.spec.context_tokens)

    def _build(self, context: int, tokens: int) -> None:
        """Let a context build the graph of so many tokens; its abort callback may end the computation."""
        token = self._legal_token(random.Random(_STREAM_SEED))  # noqa: S311
        buffer = (self.api.llama_token * tokens)(*[token] * tokens)
        self.api.llama_memory_clear(self.api.llama_get_memory(context), False)
        with self._log.held():  # libllama warns of what was aborted
            status = self.api.llama_decode(context, self.api.llama_batch_get_one(buffer, tokens))
            self.api.llama_synchronize(context)
            if status not in (_DECODED, _ABORTED):
                raise RuntimeFailureError(f"llama_decode failed with status {status} under the new counts")

    def new_context(self, tokens: int, *, sequences: int = 1, witness: Witness | None = None) -> int:
        """A context with room for ``tokens`` in each of ``sequences`` sequences, each in a cache of its own."""
        params = self.api.llama_context_default_params()
        params.n_ctx = tokens * sequences
        params.n_batch = params.n_ubatch = min(self.spec.batch_tokens, tokens * sequences)
        params.n_seq_max = sequences
        params.kv_unified = False
        params.n_threads = params.n_threads_batch = self.spec.threads
        params.type_k = params.type_v = _KV_TYPES[self.spec.kv_type]
        params.no_perf = True
        params.offload_kqv = not self.spec.host_kv
        # As a server does, the cache of a sliding window holds the window. Drafts are taken back behind it.
        params.swa_full = sequences > 1
        if witness:
            params.cb_eval = witness.callback
            params.abort_callback = witness.stop
        context: int | None = self.api.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeUnsupportedError(
                f"libllama cannot create a context of {tokens * sequences} tokens (out of memory?)"
            )
        return context

    @property
    def model(self) -> int:
        """Libllama's handle of the loaded model."""
        assert self._model is not None, "loaded since the engine was made"  # noqa: S101
        return self._model

    def _free_batches(self) -> None:
        if self._batches:
            self._batches.close()

    def _free_context(self) -> None:
        self._free_batches()
        if self._context:
            self.api.llama_free(self._context)
            self._context = None

    def close(self) -> None:
        """Free context and weights; safe to call twice."""
        self._free_context()
        if self._model:
            self.api.llama_model_free(self._model)
            self._model = None

    # ---- text ------------------------------------------------------------------------------------------------------

    def tokenize(self, text: str) -> list[int]:
        """Tokens of ``text``, special tokens recognised, BOS in front where the model wants it."""
        data = text.encode("utf-8", "replace")
        room = len(data) + 8
        while True:
            buffer = (self.api.llama_token * room)()
            count: int = self.api.llama_tokenize(self.vocab, data, len(data), buffer, room, True, True)
            if count >= 0:
                return list(buffer[:count])
            room = -count

    def piece(self, token: int) -> bytes:
        """The bytes that ``token`` adds to a text; they need not be whole UTF-8 characters."""
        known = self._pieces.get(token)
        if known is None:
            size = 64
            buffer = ctypes.create_string_buffer(size)
            length = self.api.llama_token_to_piece(self.vocab, token, buffer, size, 0, False)
            if length < 0:
                buffer = ctypes.create_string_buffer(size := -length)
                length = self.api.llama_token_to_piece(self.vocab, token, buffer, size, 0, False)
            known = self._pieces[token] = buffer.raw[: max(0, length)]
        return known

    def render_chat(self, *, user: str, thinking: bool | None) -> str:
        """Prompt that the model's chat template makes of one user message, the generation prompt added.

        The template runs in llama-cpp-python's sandboxed Jinja environment. A BOS that the template writes is taken
        off where tokenising adds one, as llama-server does.
        """
        template = self.api.llama_model_chat_template(self._model, None)
        if not template:
            raise RuntimeUnsupportedError(f"{self.spec.model} has no chat template; use a raw prompt")
        begin, end = (self._special_text(name) for name in ("bos", "eos"))
        formatter = importlib.import_module("llama_cpp.llama_chat_format").Jinja2ChatFormatter
        variables = {} if thinking is None else {"enable_thinking": thinking}
        try:
            render = formatter(template=template.decode(), eos_token=end, bos_token=begin)
            text: str = render(messages=[{"role": "user", "content": user}], **variables).prompt
        except Exception as error:  # a template is a program of the model's, which may fail in any way
            said = str(error) or type(error).__name__
            raise RuntimeUnsupportedError(f"the chat template of {self.spec.model} fails: {said:.300}") from error
        if begin and self.api.llama_vocab_get_add_bos(self.vocab):
            text = text.removeprefix(begin)
        return text

    def _special_text(self, name: str) -> str:
        token = getattr(self.api, f"llama_vocab_{name}")(self.vocab)
        return "" if token < 0 else self.api.llama_vocab_get_text(self.vocab, token).decode("utf-8", "replace")

    # ---- decoding --------------------------------------------------------------------------------------------------

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeFailureError(f"llama_decode failed with status {status}")

    def _prefill(self, tokens: Sequence[int]) -> None:
        """Decode ``tokens`` from an empty cache; the logits of the last one stay readable."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self._context), False)
        size = min(self.spec.batch_tokens, self.spec.context_tokens)
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            buffer = (self.api.llama_token * len(part))(*part)
            self._check(self.api.llama_decode(self._context, self.api.llama_batch_get_one(buffer, len(part))))

    def _prompt_tokens(self, prompt: str) -> list[int]:
        tokens = self.tokenize(prompt)
        if not tokens:
            raise UsageError("the prompt is empty and the model adds no BOS token")
        if len(tokens) >= self.spec.context_tokens:
            raise UsageError(
                f"the prompt has {len(tokens)} tokens and leaves no room in a context of {self.spec.context_tokens}"
            )
        return tokens

    def generate(self, *, prompt: str, max_tokens: int, stop: Sequence[str], margins: bool) -> dict[str, Any]:
        """Greedy completion; the fields of ``base.Generation``."""
        if max_tokens < 1 or "" in stop:
            raise UsageError("max_tokens must be at least 1 and no stop string empty")
        started = time.perf_counter()
        tokens = self._prompt_tokens(prompt)
        self._spent = 0.0
        self._margins: list[float] = []
        completion = Completion(self, stop)
        limit = min(max_tokens, self.spec.context_tokens - len(tokens))
        for token in self._greedy(tokens, limit, margins=margins):
            if completion.add(token):
                break
        return completion.fields() | {
            "prompt_tokens": len(tokens),
            "seconds": time.perf_counter() - started,
            "llama_seconds": self._spent,
            "smallest_margin": min(self._margins) if margins else None,
            "margins": self._margins if margins else None,
        }

    def verify(self, *, drafts: Sequence[Mapping[str, Any]], stop: Sequence[str], tie_margin: float) -> list[Any]:
        """What greedy decoding makes of each prompt, with a guess of it at hand; see ``base.Verifier.verify``."""
        if not drafts or "" in stop or not tie_margin >= 0 or any(draft["max_tokens"] < 1 for draft in drafts):
            raise UsageError("drafts, max_tokens of at least 1, stop strings with text and a margin from 0 are needed")
        given = [(self._prompt_tokens(draft["prompt"]), draft["tokens"], draft["max_tokens"]) for draft in drafts]
        if self._batches is None:
            self._batches = DraftBatches(self)
        return self._batches.verify(given, stop, tie_margin)

    def _greedy(self, tokens: Sequence[int], limit: int, *, margins: bool) -> Iterator[int]:
        """Yield at most ``limit`` best next tokens; adds up the time spent inside libllama in ``self._spent``."""
        # Everything the loop touches is a local name: at a millisecond a token the loop itself would be seen.
        decode, sample, clock = self.api.llama_decode, self.api.llama_sampler_sample, time.perf_counter
        context, sampler, step, slot = self._context, self._sampler, self._step, self._token
        entered = clock()
        self._prefill(tokens)
        for left in range(limit, 0, -1):
            slot[0] = sample(sampler, context, -1)
            self._spent += clock() - entered
            if margins:
                self._margins.append(self._margin())
            yield slot[0]
            entered = clock()
            if left > 1 and decode(context, step) != 0:
                raise RuntimeFailureError(f"llama_decode failed with {left - 1} tokens left to generate")

    def _last_logits(self) -> Any:  # noqa: ANN401 (a numpy array)
        numpy = importlib.import_module("numpy")
        row = self.api.llama_get_logits_ith(self._context, -1)
        return numpy.ctypeslib.as_array(row, shape=(self.api.llama_vocab_n_tokens(self.vocab),))

    def _margin(self) -> float:
        """How far the best logit lies above the second best."""
        return float(best_two(self._last_logits()[None, :])[1][0])

    def logits(self, *, prompt: str) -> bytes:
        """Logits after the last token of ``prompt``: ``n_vocab`` float32 in native byte order."""
        self._prefill(self._prompt_tokens(prompt))
        return bytes(self._last_logits().tobytes())

    # ---- timing ----------------------------------------------------------------------------------------------------

    def _legal_token(self, dice: random.Random) -> int:
        size = self.api.llama_vocab_n_tokens(self.vocab)
        token = 0
        for _ in range(_DRAWS):
            token = dice.randrange(size)
            if self.api.llama_vocab_get_attr(self.vocab, token) & (_TOKEN_NORMAL | _TOKEN_BYTE):
                break
        return token

    def decode_timing(self, *, tokens: int, prompt_tokens: int) -> dict[str, Any]:
        """Time ``tokens`` single-token decodes, each with its greedy pick; the fields of ``base.DecodeTiming``.

        One more decode between the prompt and the first that counts builds the graph that all of them use.
        """
        if tokens < 1 or prompt_tokens < 1 or prompt_tokens + tokens >= self.spec.context_tokens:
            raise UsageError(
                f"{prompt_tokens} prompt tokens and {tokens} timed ones do not fit: both at least 1, "
                f"together less than the context of {self.spec.context_tokens}"
            )
        dice = random.Random(_STREAM_SEED)  # noqa: S311 (a fixed stream is the point)
        stream = [self._legal_token(dice) for _ in range(prompt_tokens + 1 + tokens)]
        decode, sample, slot = self.api.llama_decode, self.api.llama_sampler_sample, self._token
        context, sampler, step = self._context, self._sampler, self._step

        def feed(token: int) -> None:
            slot[0] = token
            if decode(context, step) != 0:
                raise RuntimeFailureError("llama_decode failed while it was timed")
            sample(sampler, context, -1)

        begun = time.perf_counter()
        self._prefill(stream[:prompt_tokens])
        sample(sampler, context, -1)  # waits until the prompt is done, where the device works on its own
        prompted = time.perf_counter()
        feed(stream[prompt_tokens])
        started = time.perf_counter()
        for token in stream[prompt_tokens + 1 :]:
            feed(token)
        return {
            "tokens": tokens,
            "seconds": time.perf_counter() - started,
            "prompt_seconds": prompted - begun,
        }
