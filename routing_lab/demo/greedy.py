"""Greedy answers of a demo model from llama.cpp, many sequences at a time.

For checking the demo model itself: tests and benchmarks put thousands of problems through it. It
knows only uniform counts, by llama.cpp's own scalar metadata override; the rest of the package
runs models through ``routing_lab.runtime``.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import llama_cpp
import numpy as np
import numpy.typing as npt

from routing_lab.demo import tasks, vocabulary
from routing_lab.errors import RuntimeFailureError

__all__ = ["GreedyModel", "share_correct"]

SEQUENCES = 64
LONGEST_TOKENS = 96
_KV_OVERRIDE_INT = 0

# llama_cpp types its pointers as Optional[int] here and as ctypes structures there.
_Handle: TypeAlias = Any
Logits: TypeAlias = npt.NDArray[np.float32]


def _discard(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
    """Swallow a line of llama.cpp's log."""


# As long-lived as the process, because llama.cpp keeps the pointer.
_SILENT: _Handle = llama_cpp.llama_log_callback(_discard)


@dataclass(slots=True)
class _Sequence:
    tokens: list[int]
    prompt_length: int
    finished: bool = False

    @property
    def text(self) -> str:
        return vocabulary.decode(self.tokens[self.prompt_length :])


class GreedyModel:
    """A loaded demo model, optionally with another expert count everywhere; a context manager.

    Args:
        path: The GGUF file.
        experts_used: Uniform expert count, or None for the model's own.
        threads: For prompts and decoding; more than one mostly wait for each other in a model so small.
    """

    def __init__(self, path: Path, experts_used: int | None = None, threads: int = 1) -> None:
        llama_cpp.llama_backend_init()
        # Kept alive: llama.cpp reads the array while it loads.
        self._overrides = (llama_cpp.llama_model_kv_override * 2)()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        if experts_used is not None:
            count: _Handle = self._overrides[0]
            count.tag = _KV_OVERRIDE_INT
            count.key = b"qwen3moe.expert_used_count"
            count.value.val_i64 = experts_used
            params.kv_overrides = self._overrides
        llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
        self._model: _Handle = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RuntimeFailureError(f"llama.cpp cannot load {path}")
        self._threads = threads
        self._vocabulary: _Handle = llama_cpp.llama_model_get_vocab(self._model)

    def __enter__(self) -> Self:
        """Return the model itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Free the model."""
        llama_cpp.llama_model_free(self._model)
        self._model = None

    def tokenize(self, text: str) -> list[int]:
        """Return llama.cpp's tokens of `text`, with bos as the file asks."""
        raw = text.encode()
        room = (llama_cpp.llama_token * (len(raw) + 8))()
        count = llama_cpp.llama_tokenize(self._vocabulary, raw, len(raw), room, len(room), True, True)
        return list(room[:count])

    def text_of(self, token: int) -> str:
        """Return llama.cpp's text of one token; control tokens have none."""
        room = ctypes.create_string_buffer(32)
        length = llama_cpp.llama_token_to_piece(self._vocabulary, token, room, len(room), 0, False)
        return room.raw[:length].decode()

    def logits(self, tokens: Sequence[int], *, f32_cache: bool = True) -> Logits:
        """Return the logits ``[tokens, vocabulary]`` of one sequence (an F32 cache by default)."""
        with self._context(f32_cache=f32_cache) as (context, batch):
            for place, token in enumerate(tokens):
                _add(batch, token, place, 0, wanted=True)
            _decode(context, batch)
            return np.stack([self._logits_at(context, place) for place in range(len(tokens))])

    def answers(self, prompts: Sequence[str], max_tokens: int = 64) -> list[str]:
        """Return the greedy text after each prompt, up to eos or `max_tokens` tokens."""
        texts: list[str] = []
        with self._context() as (context, batch):
            for first in range(0, len(prompts), SEQUENCES):
                memory: _Handle = llama_cpp.llama_get_memory(context)
                llama_cpp.llama_memory_clear(memory, False)
                group = [self.tokenize(prompt) for prompt in prompts[first : first + SEQUENCES]]
                sequences = [_Sequence(tokens, len(tokens)) for tokens in group]
                self._finish(context, batch, sequences, max_tokens)
                texts += [sequence.text for sequence in sequences]
        return texts

    def _finish(self, context: _Handle, batch: _Handle, sequences: Sequence[_Sequence], max_tokens: int) -> None:
        starts = [0] * len(sequences)
        for _ in range(max_tokens):
            outputs: list[tuple[int, _Sequence]] = []
            batch.n_tokens = 0
            for index, sequence in enumerate(sequences):
                if sequence.finished:
                    continue
                last = len(sequence.tokens) - 1
                for place in range(starts[index], last + 1):
                    _add(batch, sequence.tokens[place], place, index, wanted=place == last)
                starts[index] = last + 1
                outputs.append((batch.n_tokens - 1, sequence))
            if not outputs:
                return
            _decode(context, batch)
            for row, sequence in outputs:
                token = int(self._logits_at(context, row).argmax())
                sequence.finished = token == vocabulary.EOS_ID
                sequence.tokens.append(token)

    @contextmanager
    def _context(self, *, f32_cache: bool = False) -> Iterator[tuple[_Handle, _Handle]]:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = SEQUENCES * LONGEST_TOKENS
        params.n_seq_max = SEQUENCES
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = True
        if f32_cache:
            # The fused attention kernel rounds to F16 on the way.
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context: _Handle = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeFailureError("llama.cpp cannot make a context")
        batch: _Handle = llama_cpp.llama_batch_init(SEQUENCES * LONGEST_TOKENS, 0, 1)
        batch.n_tokens = 0
        try:
            yield context, batch
        finally:
            llama_cpp.llama_batch_free(batch)
            llama_cpp.llama_free(context)

    @staticmethod
    def _logits_at(context: _Handle, row: int) -> Logits:
        pointer: _Handle = llama_cpp.llama_get_logits_ith(context, row)
        return np.ctypeslib.as_array(pointer, shape=(vocabulary.SIZE,)).copy()


def _add(batch: _Handle, token: int, place: int, sequence: int, *, wanted: bool) -> None:
    row = batch.n_tokens
    batch.token[row] = token
    batch.pos[row] = place
    batch.n_seq_id[row] = 1
    batch.seq_id[row][0] = sequence
    batch.logits[row] = wanted
    batch.n_tokens = row + 1


def _decode(context: _Handle, batch: _Handle) -> None:
    result = llama_cpp.llama_decode(context, batch)
    if result:
        raise RuntimeFailureError(f"llama_decode returned {result}")


def share_correct(model: GreedyModel, problems: Sequence[tasks.Problem]) -> float:
    """Return the share of `problems` whose greedy text ends in exactly ``Answer: <answer>``."""
    texts = model.answers([problem.prompt for problem in problems])
    right = [text.endswith(f"Answer: {p.answer}") for text, p in zip(texts, problems, strict=True)]
    return sum(right) / len(problems)
