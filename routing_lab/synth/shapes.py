"""Hyperparameters of published mixture-of-experts models, and the tensors and metadata that llama.cpp expects of them.

The numbers are those of each model's ``config.json``; names and layouts of tensors and metadata are those that
llama.cpp's loaders ask for (``src/models/qwen3moe.cpp``, ``qwen35moe.cpp``, ``deepseek2.cpp``, ``nemotron-h.cpp``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self, TypeAlias

from routing_lab.errors import UsageError
from routing_lab.synth.tokenizer import FEWEST_TOKENS

__all__ = [
    "DEEPSEEK_V2_LITE",
    "NEMOTRON_3_NANO_30B_A3B",
    "QWEN3_30B_A3B",
    "QWEN35_35B_A3B",
    "SHAPES",
    "Deepseek2",
    "Metadata",
    "NemotronHMoe",
    "Qwen3Moe",
    "Qwen35Moe",
    "Shape",
    "TensorPlan",
]

Metadata: TypeAlias = Mapping[str, int | float | str | bool | list[int]]

ROW_STEP: Final = 32
"""A row of a quantised matrix is a whole number of blocks of 32 weights, so every scaled length is a multiple."""

MOST_BLOCKS: Final = 512
"""LLAMA_MAX_LAYERS of llama.cpp."""

MOST_EXPERTS: Final = 1024
"""LLAMA_MAX_EXPERTS of llama.cpp."""

MOST_WIDTH: Final = 8
"""Wider than any published model of these families."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor: its name, its shape with the longest stride first, and the range its random values fill evenly.

    An ``exact`` tensor (a norm, a router, a bias) is stored as F32. Any other is a matrix ``[..., out, in]`` in the
    type of the file, and its range is symmetric.
    """

    name: str
    shape: tuple[int, ...]
    low: float
    high: float
    exact: bool

    @property
    def elements(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


def _matrix(name: str, *shape: int) -> TensorPlan:
    """A matrix that keeps the size of what it is multiplied with: values of deviation ``1 / sqrt(in)``."""
    reach = math.sqrt(3 / shape[-1])
    return TensorPlan(f"{name}.weight", shape, -reach, reach, exact=False)


def _router(name: str, *shape: int) -> TensorPlan:
    return replace(_matrix(name, *shape), exact=True)


def _norm(name: str, length: int) -> TensorPlan:
    return TensorPlan(f"{name}.weight", (length,), 0.9, 1.1, exact=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(ABC):
    """What all models have in common. ``blocks`` counts stored blocks, those for multi-token prediction included.

    Lengths are numbers of values.
    """

    architecture: ClassVar[str]
    scaled_lengths: ClassVar[tuple[str, ...]]
    """Fields that grow with the width of a model. Head sizes, ranks and kernels are the same at every width."""
    scaled_heads: ClassVar[tuple[tuple[str, str], ...]]
    """Pairs of fields that grow with the width, the first a multiple of the second."""
    expert_matrices: ClassVar[int] = 3
    """Of one expert: gate, up and down, or up and down alone."""

    name: str
    source: str
    blocks: int
    embedding_length: int
    heads: int
    experts: int
    experts_used: int
    expert_length: int
    vocabulary: int
    context_length: int
    rope_base: float
    norm_epsilon: float

    def tensors(self) -> Iterator[TensorPlan]:
        """Every tensor, in the order of the file."""
        yield TensorPlan("token_embd.weight", (self.vocabulary, self.embedding_length), -1.0, 1.0, exact=False)
        for block in range(self.blocks):
            for tensor in self._block(block):
                yield replace(tensor, name=f"blk.{block}.{tensor.name}")
        yield _norm("output_norm", self.embedding_length)
        yield _matrix("output", self.vocabulary, self.embedding_length)

    def metadata(self) -> Metadata:
        """Metadata without that of the tokenizer, keys without the architecture in front."""
        return {
            "block_count": self.blocks,
            "context_length": self.context_length,
            "embedding_length": self.embedding_length,
            "attention.head_count": self.heads,
            "attention.layer_norm_rms_epsilon": self.norm_epsilon,
            "rope.freq_base": self.rope_base,
            "expert_count": self.experts,
            "expert_used_count": self.experts_used,
            "expert_feed_forward_length": self.expert_length,
            "vocab_size": self.vocabulary,
            **self._own_metadata(),
        }

    @property
    def mtp_blocks(self) -> int:
        """Blocks at the end that only drafting runs."""
        return 0

    @property
    def dense_blocks(self) -> int:
        """Blocks of the main pass without routed experts."""
        return 0

    @property
    def fewest_blocks(self) -> int:
        """Blocks of the smallest model with this pattern."""
        return self.dense_blocks + 1 + self.mtp_blocks

    @property
    def parameters(self) -> int:
        """All stored parameters."""
        return sum(tensor.elements for tensor in self.tensors())

    @property
    def mtp_parameters(self) -> int:
        """Parameters of the blocks that only drafting runs."""
        first = self.blocks - self.mtp_blocks
        return sum(tensor.elements for block in range(first, self.blocks) for tensor in self._block(block))

    @property
    def active_parameters(self) -> int:
        """Parameters behind one token of the main pass: without experts that it does not consult, and without MTP."""
        idle = self.experts - self.experts_used
        per_block = self.expert_matrices * self.embedding_length * self.expert_length * idle
        routed = self.blocks - self.mtp_blocks - self.dense_blocks
        return self.parameters - self.mtp_parameters - routed * per_block

    def scaled(
        self,
        *,
        blocks: int | None = None,
        width: float = 1.0,
        experts: int | None = None,
        vocabulary: int | None = None,
    ) -> Self:
        """The same pattern with other sizes; what is not given stays.

        ``width`` multiplies lengths and numbers of heads. Fewer experts than ``experts_used`` lower that, too.

        Raises:
            UsageError: The sizes make no model, or one that llama.cpp cannot hold.
        """
        blocks, experts = blocks or self.blocks, experts or self.experts
        vocabulary = vocabulary or self.vocabulary
        if not self.fewest_blocks <= blocks <= MOST_BLOCKS:
            raise UsageError(f"{self.name} can have {self.fewest_blocks} to {MOST_BLOCKS} blocks, not {blocks}")
        if not 1 <= experts <= MOST_EXPERTS:
            raise UsageError(f"a model can have 1 to {MOST_EXPERTS} experts, not {experts}")
        if vocabulary < FEWEST_TOKENS:
            raise UsageError(
                f"the vocabulary needs at least {FEWEST_TOKENS} tokens (every byte, and three to mark turns)"
            )
        if not 0 < width <= MOST_WIDTH:
            raise UsageError(f"the width is a factor above 0 and up to {MOST_WIDTH}, not {width:g}")
        sizes: dict[str, Any] = {name: _length(getattr(self, name), width) for name in self.scaled_lengths}
        for many, few in self.scaled_heads:
            sizes[many], sizes[few] = _heads(getattr(self, many), getattr(self, few), width)
        used = min(self.experts_used, experts)
        return replace(self, blocks=blocks, experts=experts, experts_used=used, vocabulary=vocabulary, **sizes)

    @abstractmethod
    def _block(self, block: int) -> Iterator[TensorPlan]:
        """Tensors of one block, names without the block in front."""

    @abstractmethod
    def _own_metadata(self) -> Metadata:
        """What only this architecture says."""

    def _routed_experts(self) -> Iterator[TensorPlan]:
        inner, outer = self.expert_length, self.embedding_length
        yield _router("ffn_gate_inp", self.experts, outer)
        yield _matrix("ffn_gate_exps", self.experts, inner, outer)
        yield _matrix("ffn_up_exps", self.experts, inner, outer)
        yield _matrix("ffn_down_exps", self.experts, outer, inner)

    def _feed_forward(self, suffix: str, inner: int) -> Iterator[TensorPlan]:
        """A feed-forward network that every token passes."""
        yield _matrix(f"ffn_gate{suffix}", inner, self.embedding_length)
        yield _matrix(f"ffn_up{suffix}", inner, self.embedding_length)
        yield _matrix(f"ffn_down{suffix}", self.embedding_length, inner)


def _length(full: int, width: float) -> int:
    return max(ROW_STEP, int(full * width / ROW_STEP + 0.5) * ROW_STEP)


def _heads(many: int, few: int, width: float) -> tuple[int, int]:
    """Both numbers scaled; the second is lowered until it divides the first."""
    scaled = max(1, int(many * width + 0.5))
    wanted = max(1, int(few * width + 0.5))
    return scaled, next(count for count in range(min(wanted, scaled), 0, -1) if scaled % count == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Moe(Shape):
    """``qwen3moe``: full attention and routed experts in every block."""

    architecture: ClassVar[str] = "qwen3moe"
    scaled_lengths: ClassVar[tuple[str, ...]] = ("embedding_length", "expert_length", "feed_forward_length")
    scaled_heads: ClassVar[tuple[tuple[str, str], ...]] = (("heads", "kv_heads"),)

    kv_heads: int
    head_length: int
    feed_forward_length: int
    """Named in the metadata; no block is dense."""

    def _own_metadata(self) -> Metadata:
        return {
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_length,
            "attention.value_length": self.head_length,
            "feed_forward_length": self.feed_forward_length,
        }

    def _block(self, block: int) -> Iterator[TensorPlan]:  # noqa: ARG002 - all blocks are alike
        yield _norm("attn_norm", self.embedding_length)
        yield _matrix("attn_q", self.heads * self.head_length, self.embedding_length)
        yield _matrix("attn_k", self.kv_heads * self.head_length, self.embedding_length)
        yield _matrix("attn_v", self.kv_heads * self.head_length, self.embedding_length)
        yield _matrix("attn_output", self.embedding_length, self.heads * self.head_length)
        yield _norm("attn_q_norm", self.head_length)
        yield _norm("attn_k_norm", self.head_length)
        yield _norm("ffn_norm", self.embedding_length)
        yield from self._routed_experts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Moe(Shape):
    """``qwen35moe``: gated-delta-net blocks, full attention in every ``full_attention_interval``-th, MTP at the end.

    Every block has routed experts and a shared one.
    """

    architecture: ClassVar[str] = "qwen35moe"
    scaled_lengths: ClassVar[tuple[str, ...]] = ("embedding_length", "expert_length", "shared_length")
    scaled_heads: ClassVar[tuple[tuple[str, str], ...]] = (
        ("heads", "kv_heads"),
        ("linear_value_heads", "linear_key_heads"),
    )

    kv_heads: int
    head_length: int
    rope_length: int
    rope_sections: tuple[int, int, int, int]
    shared_length: int
    linear_key_heads: int
    linear_value_heads: int
    linear_head_length: int
    linear_kernel: int
    full_attention_interval: int
    nextn_blocks: int

    @property
    def mtp_blocks(self) -> int:
        """Blocks at the end that only drafting runs."""
        return self.nextn_blocks

    def _own_metadata(self) -> Metadata:
        return {
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_length,
            "attention.value_length": self.head_length,
            "rope.dimension_count": self.rope_length,
            "rope.dimension_sections": list(self.rope_sections),
            "expert_shared_feed_forward_length": self.shared_length,
            "ssm.conv_kernel": self.linear_kernel,
            "ssm.state_size": self.linear_head_length,
            "ssm.group_count": self.linear_key_heads,
            "ssm.time_step_rank": self.linear_value_heads,
            "ssm.inner_size": self.linear_value_heads * self.linear_head_length,
            "full_attention_interval": self.full_attention_interval,
            "nextn_predict_layers": self.nextn_blocks,
        }

    def _block(self, block: int) -> Iterator[TensorPlan]:
        predicts = block >= self.blocks - self.nextn_blocks
        yield _norm("attn_norm", self.embedding_length)
        yield _norm("post_attention_norm", self.embedding_length)
        if predicts or (block + 1) % self.full_attention_interval == 0:
            yield from self._full_attention()
        else:
            yield from self._linear_attention()
        yield from self._routed_experts()
        yield _router("ffn_gate_inp_shexp", self.embedding_length)
        yield from self._feed_forward("_shexp", self.shared_length)
        if predicts:
            yield _matrix("nextn.eh_proj", self.embedding_length, 2 * self.embedding_length)
            for name in ("enorm", "hnorm", "shared_head_norm"):
                yield _norm(f"nextn.{name}", self.embedding_length)

    def _full_attention(self) -> Iterator[TensorPlan]:
        # Each query head brings a gate of its own size.
        yield _matrix("attn_q", 2 * self.heads * self.head_length, self.embedding_length)
        yield _matrix("attn_k", self.kv_heads * self.head_length, self.embedding_length)
        yield _matrix("attn_v", self.kv_heads * self.head_length, self.embedding_length)
        yield _matrix("attn_output", self.embedding_length, self.heads * self.head_length)
        yield _norm("attn_q_norm", self.head_length)
        yield _norm("attn_k_norm", self.head_length)

    def _linear_attention(self) -> Iterator[TensorPlan]:
        values = self.linear_value_heads * self.linear_head_length
        mixed = values + 2 * self.linear_key_heads * self.linear_head_length
        decays = (self.linear_value_heads,)
        yield _matrix("attn_qkv", mixed, self.embedding_length)
        yield _matrix("attn_gate", values, self.embedding_length)
        yield _router("ssm_conv1d", mixed, self.linear_kernel)
        # The state is multiplied by exp(a * softplus(x + dt)) per token: with these ranges it forgets within some ten
        # to some thousand tokens, and can never grow.
        yield TensorPlan("ssm_a", decays, -4.0, -0.25, exact=True)
        yield TensorPlan("ssm_dt.bias", decays, -5.0, -3.0, exact=True)
        yield _matrix("ssm_beta", self.linear_value_heads, self.embedding_length)
        yield _matrix("ssm_alpha", self.linear_value_heads, self.embedding_length)
        yield _norm("ssm_norm", self.linear_head_length)
        yield _matrix("ssm_out", self.embedding_length, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deepseek2(Shape):
    """``deepseek2``: attention over a latent vector (MLA), leading dense blocks, several shared experts."""

    architecture: ClassVar[str] = "deepseek2"
    scaled_lengths: ClassVar[tuple[str, ...]] = ("embedding_length", "expert_length", "feed_forward_length")
    scaled_heads: ClassVar[tuple[tuple[str, str], ...]] = (("heads", "heads"),)

    leading_dense: int
    feed_forward_length: int
    """Of the dense blocks."""
    shared_experts: int
    latent_length: int
    plain_length: int
    """Part of a query or key head without a position (``qk_nope_head_dim``)."""
    rope_length: int
    """Part with one (``qk_rope_head_dim``)."""
    value_length: int
    experts_scale: float
    yarn_factor: float
    yarn_context: int
    yarn_scale: float

    @property
    def dense_blocks(self) -> int:
        """Blocks of the main pass without routed experts: the first ones."""
        return self.leading_dense

    def _own_metadata(self) -> Metadata:
        return {
            # llama.cpp runs MLA as attention with one wide key head, the latent vector.
            "attention.head_count_kv": 1,
            "attention.key_length": self.latent_length + self.rope_length,
            "attention.value_length": self.latent_length,
            "attention.key_length_mla": self.plain_length + self.rope_length,
            "attention.value_length_mla": self.value_length,
            "attention.kv_lora_rank": self.latent_length,
            # llama.cpp knows by the number of blocks that the published model has no such rank, and asks any other
            # number of blocks for it; 0 says the same.
            "attention.q_lora_rank": 0,
            "feed_forward_length": self.feed_forward_length,
            "leading_dense_block_count": self.leading_dense,
            "expert_shared_count": self.shared_experts,
            "expert_weights_scale": self.experts_scale,
            "rope.dimension_count": self.rope_length,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": self.yarn_factor,
            "rope.scaling.original_context_length": self.yarn_context,
            "rope.scaling.yarn_log_multiplier": 0.1 * self.yarn_scale,
        }

    def _block(self, block: int) -> Iterator[TensorPlan]:
        yield _norm("attn_norm", self.embedding_length)
        yield _matrix("attn_q", self.heads * (self.plain_length + self.rope_length), self.embedding_length)
        yield _matrix("attn_kv_a_mqa", self.latent_length + self.rope_length, self.embedding_length)
        yield _norm("attn_kv_a_norm", self.latent_length)
        yield _matrix("attn_k_b", self.heads, self.latent_length, self.plain_length)
        yield _matrix("attn_v_b", self.heads, self.value_length, self.latent_length)
        yield _matrix("attn_output", self.embedding_length, self.heads * self.value_length)
        yield _norm("ffn_norm", self.embedding_length)
        if block < self.leading_dense:
            yield from self._feed_forward("", self.feed_forward_length)
        else:
            yield from self._routed_experts()
            yield from self._feed_forward("_shexp", self.shared_experts * self.expert_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHMoe(Shape):
    """``nemotron_h_moe``: every block is one thing alone, a Mamba-2 mixer, full attention, or routed experts.

    Experts have no gate, and a shared one stands beside them. No position is encoded.
    """

    architecture: ClassVar[str] = "nemotron_h_moe"
    scaled_lengths: ClassVar[tuple[str, ...]] = ("embedding_length", "expert_length", "shared_length")
    scaled_heads: ClassVar[tuple[tuple[str, str], ...]] = (("heads", "kv_heads"), ("state_heads", "state_groups"))
    expert_matrices: ClassVar[int] = 2

    pattern: str
    """``M`` for a mixer, ``*`` for attention, ``E`` for experts; fewer blocks are its beginning, more begin it anew."""
    kv_heads: int
    head_length: int
    shared_length: int
    experts_scale: float
    state_heads: int
    state_groups: int
    state_head_length: int
    state_length: int
    state_kernel: int

    @property
    def dense_blocks(self) -> int:
        """Blocks of the main pass without routed experts, spread over all of it."""
        return sum(self._kind(block) != "E" for block in range(self.blocks))

    @property
    def fewest_blocks(self) -> int:
        """Blocks of the smallest model that has all three kinds."""
        return max(self.pattern.index(kind) for kind in "M*E") + 1

    def _kind(self, block: int) -> str:
        return self.pattern[block % len(self.pattern)]

    def _own_metadata(self) -> Metadata:
        kinds = [self._kind(block) for block in range(self.blocks)]
        return {
            # Which of the three a block is, llama.cpp knows by where these two are zero.
            "attention.head_count_kv": [self.kv_heads if kind == "*" else 0 for kind in kinds],
            "feed_forward_length": [self.expert_length if kind == "E" else 0 for kind in kinds],
            "attention.key_length": self.head_length,
            "attention.value_length": self.head_length,
            "attention.layer_norm_epsilon": self.norm_epsilon,
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": self.shared_length,
            "expert_group_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": self.experts_scale,
            "ssm.conv_kernel": self.state_kernel,
            "ssm.inner_size": self._inner,
            "ssm.state_size": self.state_length,
            "ssm.time_step_rank": self.state_heads,
            "ssm.group_count": self.state_groups,
        }

    @property
    def _inner(self) -> int:
        return self.state_heads * self.state_head_length

    def _block(self, block: int) -> Iterator[TensorPlan]:
        yield _norm("attn_norm", self.embedding_length)
        kind = self._kind(block)
        if kind == "M":
            yield from self._mixer()
        elif kind == "*":
            yield _matrix("attn_q", self.heads * self.head_length, self.embedding_length)
            yield _matrix("attn_k", self.kv_heads * self.head_length, self.embedding_length)
            yield _matrix("attn_v", self.kv_heads * self.head_length, self.embedding_length)
            yield _matrix("attn_output", self.embedding_length, self.heads * self.head_length)
        else:
            yield _router("ffn_gate_inp", self.experts, self.embedding_length)
            yield TensorPlan("exp_probs_b.bias", (self.experts,), -0.1, 0.1, exact=True)
            yield _matrix("ffn_up_exps", self.experts, self.expert_length, self.embedding_length)
            yield _matrix("ffn_down_exps", self.experts, self.embedding_length, self.expert_length)
            yield _matrix("ffn_up_shexp", self.shared_length, self.embedding_length)
            yield _matrix("ffn_down_shexp", self.embedding_length, self.shared_length)

    def _mixer(self) -> Iterator[TensorPlan]:
        inner, heads = self._inner, self.state_heads
        mixed = inner + 2 * self.state_groups * self.state_length
        yield _matrix("ssm_in", inner + mixed + heads, self.embedding_length)
        yield _router("ssm_conv1d", mixed, self.state_kernel)
        yield TensorPlan("ssm_conv1d.bias", (mixed,), -0.1, 0.1, exact=True)
        # The ranges of the linear attention above: a state that forgets and never grows.
        yield TensorPlan("ssm_dt.bias", (heads,), -5.0, -3.0, exact=True)
        yield TensorPlan("ssm_a", (heads, 1), -4.0, -0.25, exact=True)
        yield TensorPlan("ssm_d", (heads, 1), 0.9, 1.1, exact=True)
        yield TensorPlan("ssm_norm.weight", (self.state_groups, inner // self.state_groups), 0.9, 1.1, exact=True)
        yield _matrix("ssm_out", self.embedding_length, inner)


QWEN3_30B_A3B: Final = Qwen3Moe(
    name="qwen3moe-30b-a3b",
    source="config.json of Qwen/Qwen3-30B-A3B",
    blocks=48,
    embedding_length=2048,
    heads=32,
    kv_heads=4,
    head_length=128,
    experts=128,
    experts_used=8,
    expert_length=768,
    feed_forward_length=6144,
    vocabulary=151936,
    context_length=40960,
    rope_base=1e6,
    norm_epsilon=1e-6,
)

QWEN35_35B_A3B: Final = Qwen35Moe(
    name="qwen35moe-35b-a3b",
    source="text_config in the config.json of Qwen/Qwen3.5-35B-A3B; Qwen/Qwen3.6-35B-A3B has the same",
    blocks=41,
    nextn_blocks=1,
    full_attention_interval=4,
    embedding_length=2048,
    heads=16,
    kv_heads=2,
    head_length=256,
    rope_length=64,
    rope_sections=(11, 11, 10, 0),
    linear_key_heads=16,
    linear_value_heads=32,
    linear_head_length=128,
    linear_kernel=4,
    experts=256,
    experts_used=8,
    expert_length=512,
    shared_length=512,
    vocabulary=248320,
    context_length=262144,
    rope_base=1e7,
    norm_epsilon=1e-6,
)

DEEPSEEK_V2_LITE: Final = Deepseek2(
    name="deepseek2-v2-lite",
    source="config.json of deepseek-ai/DeepSeek-V2-Lite",
    blocks=27,
    leading_dense=1,
    embedding_length=2048,
    feed_forward_length=10944,
    heads=16,
    latent_length=512,
    plain_length=128,
    rope_length=64,
    value_length=128,
    experts=64,
    experts_used=6,
    shared_experts=2,
    expert_length=1408,
    experts_scale=1.0,
    vocabulary=102400,
    context_length=163840,
    rope_base=1e4,
    yarn_factor=40.0,
    yarn_context=4096,
    yarn_scale=0.707,
    norm_epsilon=1e-6,
)

NEMOTRON_3_NANO_30B_A3B: Final = NemotronHMoe(
    name="nemotron-h-moe-30b-a3b",
    source="config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    blocks=52,
    pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    embedding_length=2688,
    heads=32,
    kv_heads=2,
    head_length=128,
    experts=128,
    experts_used=6,
    expert_length=1856,
    shared_length=3712,
    experts_scale=2.5,
    state_heads=64,
    state_groups=8,
    state_head_length=64,
    state_length=128,
    state_kernel=4,
    vocabulary=131072,
    context_length=262144,
    rope_base=1e4,
    norm_epsilon=1e-5,
)

SHAPES: Final[Mapping[str, Shape]] = {
    shape.name: shape for shape in (QWEN3_30B_A3B, QWEN35_35B_A3B, DEEPSEEK_V2_LITE, NEMOTRON_3_NANO_30B_A3B)
}
"""Every shape by its name."""
