"""Runtimes run a model under a schedule: ``base`` is the contract, ``llama`` and ``server`` are real, ``fake`` not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from routing_lab.runtime.base import (
    Attestation,
    Capability,
    DecodeTiming,
    FinishReason,
    Generation,
    Runtime,
    RuntimeBuild,
    RuntimeOptions,
)

if TYPE_CHECKING:
    from routing_lab.runtime.llama import LlamaRuntime

__all__ = [
    "Attestation",
    "Capability",
    "DecodeTiming",
    "FinishReason",
    "Generation",
    "Runtime",
    "RuntimeBuild",
    "RuntimeOptions",
    "open_runtime",
]


def open_runtime(model: Path, options: RuntimeOptions | None = None) -> LlamaRuntime:
    """Load ``model`` into llama.cpp in a process of its own; see ``LlamaRuntime`` for errors."""
    from routing_lab.runtime.llama import LlamaRuntime

    return LlamaRuntime(model, options)
