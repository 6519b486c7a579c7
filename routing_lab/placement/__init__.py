"""The first lever: where weights and caches live. Other speed, same answers.

``value`` is a placement and its file, ``plan`` what one takes of both memories, ``sweep`` several measured beside each
other, ``published`` what others measured.
"""

from __future__ import annotations

from routing_lab.placement.value import (
    EXPERTS_PATTERN,
    MAX_CONTEXT,
    MAX_GPU_LAYERS,
    OUTPUT_PATTERN,
    HostTensors,
    Placement,
    TensorKind,
)

__all__ = [
    "EXPERTS_PATTERN",
    "MAX_CONTEXT",
    "MAX_GPU_LAYERS",
    "OUTPUT_PATTERN",
    "HostTensors",
    "Placement",
    "TensorKind",
]
