"""Models of random weights in the true shapes of published ones: for speed work, and for tests of each architecture.

A decode costs what the shape costs, whatever the weights say; only answers need the real ones.
"""

from routing_lab.synth.shapes import (
    DEEPSEEK_V2_LITE,
    NEMOTRON_3_NANO_30B_A3B,
    QWEN3_30B_A3B,
    QWEN35_35B_A3B,
    SHAPES,
    Deepseek2,
    NemotronHMoe,
    Qwen3Moe,
    Qwen35Moe,
    Shape,
    TensorPlan,
)
from routing_lab.synth.weights import WEIGHT_TYPES, WeightType
from routing_lab.synth.writer import check_room, model_name, weight_bytes, write_model

__all__ = [
    "DEEPSEEK_V2_LITE",
    "NEMOTRON_3_NANO_30B_A3B",
    "QWEN3_30B_A3B",
    "QWEN35_35B_A3B",
    "SHAPES",
    "WEIGHT_TYPES",
    "Deepseek2",
    "NemotronHMoe",
    "Qwen3Moe",
    "Qwen35Moe",
    "Shape",
    "TensorPlan",
    "WeightType",
    "check_room",
    "model_name",
    "weight_bytes",
    "write_model",
]
