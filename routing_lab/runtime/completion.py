"""A greedy completion that grows token by token, and the two best of a row of logits."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from routing_lab.errors import RuntimeFailureError

if TYPE_CHECKING:
    from routing_lab.runtime.engine import Engine

__all__ = ["Completion", "best_two"]


class Completion:
    """A completion that grows token by token until it ends."""

    def __init__(self, engine: Engine, stop: Sequence[str]) -> None:
        self._engine = engine
        self._stops = [text.encode("utf-8", "surrogatepass") for text in stop]  # half a character matches nothing
        self._text = bytearray()
        self.tokens: list[int] = []
        self.stopped = False

    def add(self, token: int) -> bool:
        """Take the next token; tells whether the completion ends with it."""
        self.tokens.append(token)
        if self._engine.api.llama_vocab_is_eog(self._engine.vocab, token):
            self.stopped = True
            return True
        piece = self._engine.piece(token)
        self._text += piece
        if self._stops and (cut := _earliest_stop(self._text, self._stops, len(piece))) is not None:
            del self._text[cut:]
            self.stopped = True
        return self.stopped

    def fields(self) -> dict[str, Any]:
        """What it contributes to a ``base.Generation``."""
        return {
            "text": self._text.decode("utf-8", "replace"),
            "finish_reason": "stop" if self.stopped else "length",
            "tokens": len(self.tokens),
            "token_ids": list(self.tokens),
        }


def best_two(logits: Any) -> tuple[Any, Any]:  # noqa: ANN401 (numpy arrays)
    """Index of the best logit of each row, and how far it lies above the second best; ``logits`` is overwritten.

    Raises ``RuntimeFailureError`` for logits that are not numbers. Of equal logits the first counts, as for
    llama.cpp's greedy sampler.
    """
    numpy = importlib.import_module("numpy")
    rows = numpy.arange(len(logits))
    best = logits.argmax(axis=1)
    heights = logits[rows, best].copy()
    logits[rows, best] = -numpy.inf
    margins = heights - logits.max(axis=1)
    if numpy.isnan(margins).any():
        raise RuntimeFailureError("the logits are not numbers (NaN)")
    return best, margins


def _earliest_stop(text: bytearray, stops: Sequence[bytes], new: int) -> int | None:
    """Where the first stop string begins in ``text``, of which only the last ``new`` bytes are unseen."""
    found = (text.find(stop, max(0, len(text) - new - len(stop))) for stop in stops)
    return min((at for at in found if at >= 0), default=None)
