"""Checks guessed completions in batches: several sequences at once, many positions of each in one pass.

A draft is the completion of a prompt under other counts. One pass over prompt and draft gives the best token after each
of its tokens. As long as that is the draft's own next token, greedy decoding would have written the draft, and nothing
needs to be decoded. From the first other token on the sequences are decoded one token at a time, side by side.

**The same bits as decoding alone.** Every sequence has a cache of its own, and what decoding computes with one token at
a time is computed by the same kernels here: the products by those for single columns (``PlainKernels``), attention in
pieces of fewer than 64 tokens, since from there on ggml's CPU back end takes another kernel. Prompts are computed as
``generate`` computes them. On a CPU this gives bit-identical logits as long as attention spans fewer than 512 positions
or one thread computes it. Elsewhere (a GPU, hybrid models whose recurrent blocks have a kernel for pieces) the last
bits differ; then ``tie_margin`` says below which distance of the two best tokens this pass is no evidence.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from routing_lab.errors import RuntimeFailureError, RuntimeUnsupportedError
from routing_lab.runtime.base import DRAFTS_TOGETHER
from routing_lab.runtime.completion import Completion, best_two

if TYPE_CHECKING:
    from routing_lab.runtime.engine import Engine

__all__ = ["DraftBatches"]

PIECE: Final = 63
"""Tokens of one sequence in a pass; from 64 on ggml's CPU back end computes attention by another kernel."""

FIRST_PIECE: Final = 16
"""Tokens of the first pass, doubled from pass to pass: where a draft is left, what lies behind was for nothing."""

_LOGITS_BYTES: Final = 256 * 2**20  # bound on the logits of one pass, which large vocabularies reach
_CELLS: Final = 256  # llama.cpp rounds the size of a cache up to this

Given = tuple[Sequence[int], Sequence[int], int]  # prompt, draft, most tokens


@dataclass(slots=True)
class _Sequence:
    """One prompt and how far its completion is."""

    index: int
    prompt: Sequence[int]
    draft: Sequence[int]
    limit: int
    completion: Completion
    kept: int = 0
    margins: list[float] = field(default_factory=list)
    doubtful: bool = False
    cached: int = 0
    ended: bool = False
    following: list[int] = field(default_factory=list)
    """The token to decode next, where the draft was left or has ended."""

    @property
    def open(self) -> bool:
        """Whether something is left to compute."""
        return not (self.ended or self.doubtful)

    @property
    def on_draft(self) -> bool:
        """Whether everything so far is the draft's."""
        return self.open and not self.following

    def see(self, best: int, margin: float, tie_margin: float) -> None:
        """Take the best token after what is known, and how far it lies above the second best."""
        if margin < tie_margin:
            self.doubtful = True
            return
        self.margins.append(margin)
        at = len(self.completion.tokens)
        self.ended = self.completion.add(best) or at + 1 == self.limit
        if not self.following and at < len(self.draft) and self.draft[at] == best:
            self.kept += 1
        if self.open and (self.following or self.kept in (at, len(self.draft))):
            self.following = [best]


class DraftBatches:
    """The context in which drafts are checked under one schedule; made for the longest one so far.

    It holds as many sequences as there is memory for, which is found out once.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._api = engine, engine.api
        self._numpy = importlib.import_module("numpy")
        self._context: int | None = None
        self._room = 0
        self._vocabulary = int(self._api.llama_vocab_n_tokens(engine.vocab))
        hybrid = (self._api.llama_model_is_recurrent, self._api.llama_model_is_hybrid)
        # A recurrent state can neither be taken back nor can a prompt be filled up to a common length.
        self._recurrent = any(bool(is_so(engine.model)) for is_so in hybrid)
        self._batch = _Batch(self._api, self._numpy, engine.spec.batch_tokens)
        self._sequences = min(DRAFTS_TOGETHER, engine.spec.batch_tokens)
        self._spent = 0.0

    def close(self) -> None:
        """Free the context; safe to call twice."""
        if self._context:
            self._api.llama_free(self._context)
            self._context = None

    def verify(self, given: Sequence[Given], stop: Sequence[str], tie_margin: float) -> list[dict[str, Any]]:
        """Check drafts of any number and length; the fields of ``base.Verified``, in the order given."""
        most = self._engine.spec.context_tokens
        sequences = [
            _Sequence(index, prompt, draft, min(limit, most - len(prompt)), Completion(self._engine, stop))
            for index, (prompt, draft, limit) in enumerate(given)
        ]
        # Neighbours of a batch should be of one length, and llama.cpp wants those still at work to be neighbours.
        sequences.sort(key=lambda one: (min(len(one.draft), one.limit), len(one.prompt)))
        results: dict[int, dict[str, Any]] = {}
        self._make_room(max(len(one.prompt) + one.limit for one in sequences) + PIECE)
        for start in range(0, len(sequences), self._sequences):
            group = sequences[start : start + self._sequences]
            started, self._spent = time.perf_counter(), 0.0
            self._group(group, tie_margin)
            seconds = time.perf_counter() - started
            work = sum(len(one.prompt) + len(one.completion.tokens) for one in group)
            for one in group:
                share = (len(one.prompt) + len(one.completion.tokens)) / work
                results[one.index] = _fields(one, seconds * share, self._spent * share)
        return [results[index] for index in range(len(sequences))]

    def _group(self, group: Sequence[_Sequence], tie_margin: float) -> None:
        self._api.llama_memory_clear(self._memory, False)
        self._prompts(group, tie_margin)
        with self._engine.plain_kernels.only():
            width = FIRST_PIECE
            while any(one.on_draft for one in group):
                self._piece(group, min(width, PIECE), tie_margin)
                width *= 2
            self._leave_drafts(group)
            while any(one.open for one in group):
                self._step(group, tie_margin)

    @property
    def _memory(self) -> Any:  # noqa: ANN401
        return self._api.llama_get_memory(self._context)

    def _make_room(self, tokens: int) -> None:
        wanted = math.ceil(tokens / _CELLS) * _CELLS
        if self._context and wanted <= self._room:
            return
        self.close()
        while self._context is None:
            try:
                self._context = self._engine.new_context(wanted, sequences=self._sequences)
            except RuntimeUnsupportedError:
                # A device that the weights nearly fill has no room for eight caches, and fewer still save decoding.
                if self._sequences == 1:
                    raise
                self._sequences //= 2
        self._room = wanted

    # ---- prompts ---------------------------------------------------------------------------------------------------

    def _prompts(self, group: Sequence[_Sequence], tie_margin: float) -> None:
        """Compute the prompts, short ones together and long ones as ``generate`` does, and take the first token."""
        short = [] if self._recurrent else [which for which, one in enumerate(group) if len(one.prompt) <= PIECE]
        self._short_prompts(group, short, tie_margin)
        for which, one in enumerate(group):
            if which not in short:
                self._long_prompt(which, one, tie_margin)

    def _short_prompts(self, group: Sequence[_Sequence], short: Sequence[int], tie_margin: float) -> None:
        width = max((len(group[which].prompt) for which in short), default=0)
        together = max(1, self._engine.spec.batch_tokens // max(1, width))
        for start in range(0, len(short), together):
            part = short[start : start + together]
            rows = [
                (which, 0, [*group[which].prompt, *[group[which].prompt[-1]] * (width - len(group[which].prompt))])
                for which in part
            ]
            wanted = [len(group[which].prompt) - 1 for which in part]
            best, margins = self._decode(rows, [range(at, at + 1) for at in wanted])
            for row, which in enumerate(part):
                self._forget(which, len(group[which].prompt))
                group[which].cached = len(group[which].prompt)
                group[which].see(int(best[row]), float(margins[row]), tie_margin)

    def _long_prompt(self, which: int, one: _Sequence, tie_margin: float) -> None:
        size = min(self._engine.spec.batch_tokens, self._engine.spec.context_tokens)
        for start in range(0, len(one.prompt), size):
            part = one.prompt[start : start + size]
            last = start + size >= len(one.prompt)
            best, margins = self._decode([(which, start, part)], [range(len(part) - last, len(part))])
            if last:
                one.see(int(best[0]), float(margins[0]), tie_margin)
        one.cached = len(one.prompt)

    # ---- drafts ----------------------------------------------------------------------------------------------------

    def _piece(self, group: Sequence[_Sequence], width: int, tie_margin: float) -> None:
        """One pass over the next ``width`` tokens of every draft that was kept so far."""
        active = [which for which, one in enumerate(group) if one.on_draft]
        logits = max(1, _LOGITS_BYTES // (4 * self._vocabulary))
        most = min(width, max(1, min(self._engine.spec.batch_tokens, logits) // len(active)))
        # The last token of a draft says nothing about the draft; it is decoded where the completion goes on behind it.
        width = min(most, max(len(one.prompt) + len(one.draft) - 1 - one.cached for one in group if one.on_draft))
        rows, wanted = [], []
        for which in active:
            one = group[which]
            at = one.cached - len(one.prompt)
            part = list(one.draft[at : min(at + width, len(one.draft) - 1)])
            rows.append((which, one.cached, part))
            wanted.append(range(len(part)))
        best, margins = self._decode(rows, wanted)
        row = 0
        for which, positions in zip(active, wanted, strict=True):
            one = group[which]
            for offset in positions:
                if one.on_draft:
                    one.see(int(best[row + offset]), float(margins[row + offset]), tie_margin)
            one.cached += len(positions)
            row += len(positions)

    def _leave_drafts(self, group: Sequence[_Sequence]) -> None:
        """Take back what was computed behind the known tokens of the sequences that go on by themselves."""
        for which, one in enumerate(group):
            known = len(one.prompt) + len(one.completion.tokens) - 1
            if one.open and one.cached != known:
                if not self._forget(which, known):
                    self._again(which, [*one.prompt, *one.completion.tokens[:-1]])
                one.cached = known

    def _again(self, which: int, known: Sequence[int]) -> None:
        """Compute a sequence anew: a recurrent state cannot be taken back."""
        self._api.llama_memory_seq_rm(self._memory, which, -1, -1)
        size = self._engine.spec.batch_tokens
        for start in range(0, len(known), size):
            self._decode([(which, start, known[start : start + size])], [range(0)])

    def _step(self, group: Sequence[_Sequence], tie_margin: float) -> None:
        """One token of every sequence that has left its draft."""
        active = [which for which, one in enumerate(group) if one.open]
        best, margins = self._decode(
            [(which, group[which].cached, group[which].following) for which in active], [range(1)] * len(active)
        )
        for row, which in enumerate(active):
            group[which].cached += 1
            group[which].see(int(best[row]), float(margins[row]), tie_margin)

    # ---- libllama --------------------------------------------------------------------------------------------------

    def _forget(self, which: int, beyond: int) -> bool:
        return bool(self._api.llama_memory_seq_rm(self._memory, which, beyond, -1))

    def _decode(self, rows: Sequence[tuple[int, int, Sequence[int]]], wanted: Sequence[range]) -> tuple[Any, Any]:
        """Decode ``(sequence, first position, tokens)`` rows; best token and margin at the offsets wanted of each."""
        batch, outputs = self._batch.fill(rows, wanted)
        started = time.perf_counter()
        status = self._api.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeFailureError(f"llama_decode failed with status {status} on a batch of {len(rows)} drafts")
        if not outputs:
            self._spent += time.perf_counter() - started
            return (), ()
        logits = self._api.llama_get_logits(self._context)  # waits for the device
        self._spent += time.perf_counter() - started
        return best_two(self._numpy.ctypeslib.as_array(logits, shape=(outputs, self._vocabulary)))


class _Batch:
    """A ``llama_batch`` whose arrays are numpy's: filled cell by cell it would cost as much as a small model."""

    def __init__(self, api: Any, numpy: Any, size: int) -> None:  # noqa: ANN401
        self._numpy = numpy
        self._token = numpy.zeros(size, numpy.int32)
        self._position = numpy.zeros(size, numpy.int32)
        self._count = numpy.ones(size, numpy.int32)
        self._sequence = numpy.zeros((size, 1), numpy.int32)
        start, step = self._sequence.ctypes.data, self._sequence.itemsize
        self._sequences = start + step * numpy.arange(size, dtype=numpy.uintp)
        self._output = numpy.zeros(size, numpy.int8)
        self._batch = api.llama_batch()
        for name, array in (
            ("token", self._token),
            ("pos", self._position),
            ("n_seq_id", self._count),
            ("seq_id", self._sequences),
            ("logits", self._output),
        ):
            kind = dict(api.llama_batch._fields_)[name]
            setattr(self._batch, name, ctypes.cast(array.ctypes.data, kind))

    def fill(self, rows: Sequence[tuple[int, int, Sequence[int]]], wanted: Sequence[range]) -> tuple[Any, int]:
        """The batch of these rows, and how many rows of logits it will give."""
        end = outputs = 0
        for (sequence, first, tokens), offsets in zip(rows, wanted, strict=True):
            begin, end = end, end + len(tokens)
            self._token[begin:end] = tokens
            self._position[begin:end] = self._numpy.arange(first, first + len(tokens))
            self._sequence[begin:end] = sequence
            self._output[begin:end] = 0
            self._output[begin + offsets.start : begin + offsets.stop] = 1
            outputs += len(offsets)
        self._batch.n_tokens = end
        return self._batch, outputs


def _fields(one: _Sequence, seconds: float, llama_seconds: float) -> dict[str, Any]:
    completion = one.completion.fields()
    generation = completion | {
        "prompt_tokens": len(one.prompt),
        "seconds": seconds,
        "llama_seconds": llama_seconds,
        "smallest_margin": min(one.margins, default=None),
        "margins": one.margins,
    }
    return {"generation": generation, "kept": one.kept, "drafted": len(one.draft), "doubtful": one.doubtful}
