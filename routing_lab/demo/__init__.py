"""The demo model: a small MoE network that really answers, shipped as package data.

Importing this package loads neither torch nor gguf nor llama_cpp.
"""

from pathlib import Path

__all__ = ["model_path", "probes_path"]


def model_path() -> Path:
    """Return the path of the shipped GGUF file (Q8_0, architecture ``qwen3moe``)."""
    return Path(__file__).parent / "demo-moe.gguf"


def probes_path() -> Path:
    """Return the path of the demo model's probe set: a gate and a holdout of questions that training never saw."""
    return Path(__file__).parent / "probes.yaml"
