"""What a training run of the demo model is told: its shape, its course, its place. Needs no PyTorch."""

from dataclasses import dataclass
from pathlib import Path

from routing_lab.demo import vocabulary

__all__ = ["Job", "NetworkConfig", "TrainingConfig"]


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """The shape of the network; the field names follow GGUF's metadata keys where one exists."""

    block_count: int = 6
    embedding_length: int = 128
    head_count: int = 4
    head_count_kv: int = 2
    head_length: int = 32
    expert_count: int = 16
    expert_used_count: int = 8
    expert_feed_forward_length: int = 192
    rope_freq_base: float = 1e4
    rms_epsilon: float = 1e-6
    vocabulary_size: int = vocabulary.SIZE


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """Everything that decides the result besides the shape and the software's versions."""

    seed: int = 1
    steps: int = 3000
    problems_per_step: int = 48
    peak_rate: float = 2e-3
    final_rate: float = 2e-5
    warmup_steps: int = 100
    weight_decay: float = 0.05
    clip_norm: float = 1.0
    balance_weight: float = 0.01
    spread_weight: float = 0.5


@dataclass(frozen=True, slots=True)
class Job:
    """Where a run keeps its state, and how the work is shared; none of it decides the result."""

    directory: Path
    resume: bool = False
    save_every_steps: int = 500
    workers: int = 1
    threads: int = 2  # of each worker

    @property
    def checkpoint(self) -> Path:
        """The file with the newest weights and all that `resume` needs."""
        return self.directory / "checkpoint.pt"
