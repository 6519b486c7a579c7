"""The demo network in PyTorch, computing exactly what llama.cpp's ``qwen3moe`` graph computes.

Shapes: ``N`` tokens of a batch laid end to end without padding, ``B`` sequences, ``S`` positions
of the longest one, ``D`` width, ``E`` experts, ``F`` expert width.
"""

# Torch is an extra: where it is not installed all of it is Any for the type checker.
# mypy: disable-error-code="no-any-return"
# mypy: allow-subclassing-any

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from routing_lab.demo.settings import NetworkConfig

__all__ = ["Layout", "Network", "NetworkConfig", "RouterLosses"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the ``N`` tokens of a batch sit: one row per sequence, padded only for attention."""

    places: Tensor  # [N] index of each token in the padded [B * S]
    positions: Tensor  # [N] position within its sequence
    sequence_count: int
    longest: int

    @staticmethod
    def of_lengths(lengths: Sequence[int]) -> "Layout":
        """Lay out sequences of the given lengths (tokens) end to end."""
        longest = max(lengths)
        rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        positions = torch.cat([torch.arange(length) for length in lengths])
        return Layout(rows * longest + positions, positions, len(lengths), longest)


@dataclass(frozen=True, slots=True)
class RouterLosses:
    """Auxiliary terms of the routers, each the mean over tokens and blocks (dimensionless)."""

    balance: Tensor
    spread: Tensor


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply rotary positions to ``[N, heads, head_length]``, pairing halves as NeoX does."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention with RMS-normalised queries and keys."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        width, head = config.embedding_length, config.head_length
        self.q = nn.Linear(width, config.head_count * head, bias=False)
        self.k = nn.Linear(width, config.head_count_kv * head, bias=False)
        self.v = nn.Linear(width, config.head_count_kv * head, bias=False)
        self.output = nn.Linear(config.head_count * head, width, bias=False)
        self.q_norm = nn.RMSNorm(head, eps=config.rms_epsilon)
        self.k_norm = nn.RMSNorm(head, eps=config.rms_epsilon)

    def forward(self, x: Tensor, layout: Layout, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Map ``[N, D]`` to ``[N, D]``; no token sees another sequence or a later token."""
        head = self.config.head_length
        q = _rotate(self.q_norm(self.q(x).unflatten(-1, (-1, head))), *rope)
        k = _rotate(self.k_norm(self.k(x).unflatten(-1, (-1, head))), *rope)
        v = self.v(x).unflatten(-1, (-1, head))
        group = self.config.head_count // self.config.head_count_kv
        q, k, v = (self._pad(part.float(), layout) for part in (q, k, v))
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        # Written out: at 60 positions this is many times faster on a CPU than the fused kernel.
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(head)
        hidden = torch.ones(layout.longest, layout.longest, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v
        flat = mixed.transpose(1, 2).reshape(layout.sequence_count * layout.longest, -1)
        return self.output(flat[layout.places])

    @staticmethod
    def _pad(x: Tensor, layout: Layout) -> Tensor:
        """Spread ``[N, heads, head_length]`` to ``[B, heads, S, head_length]``."""
        rows, longest = layout.sequence_count, layout.longest
        padded = x.new_zeros(rows * longest, *x.shape[1:]).index_copy(0, layout.places, x)
        return padded.unflatten(0, (rows, longest)).transpose(1, 2)


class Experts(nn.Module):
    """Softmax over all experts, the best `used` of them, weights renormalised, SwiGLU experts.

    The matrices of all experts are stacked along their expert-width axis, as in
    ``gate.weight`` ``[E * F, D]`` and ``down.weight`` ``[D, E * F]``.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.expert_count = config.expert_count
        hidden = self.expert_count * config.expert_feed_forward_length
        self.router = nn.Linear(config.embedding_length, config.expert_count, bias=False)
        self.gate = nn.Linear(config.embedding_length, hidden, bias=False)
        self.up = nn.Linear(config.embedding_length, hidden, bias=False)
        self.down = nn.Linear(hidden, config.embedding_length, bias=False)

    def forward(self, x: Tensor, used: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mix ``[N, D]``, the balance term and the spread term of this block."""
        with torch.autocast("cpu", enabled=False):
            probabilities = torch.softmax(self.router(x.float()), dim=-1)
            top, chosen = probabilities.topk(used, dim=-1)
            top = top / top.sum(dim=-1, keepdim=True)
            spread = math.log(used) + torch.special.xlogy(top, top).sum(dim=-1).mean()
            per_expert = torch.bincount(chosen.flatten(), minlength=self.expert_count)
            share = per_expert / chosen.numel()
            balance = self.expert_count * (share * probabilities.mean(dim=0)).sum()
        return self._mix(x, top, chosen, per_expert.tolist()), balance, spread

    def _mix(self, x: Tensor, top: Tensor, chosen: Tensor, per_expert: list[int]) -> Tensor:
        """Sort the ``N * used`` visits by expert, so that each expert is one matrix product."""
        order = chosen.flatten().argsort()
        tokens = order // chosen.shape[1]
        # unbind has one cheap backward; slicing a parameter in a loop would give E full gradients.
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        gates, ups, downs = (
            matrix.to(dtype).unflatten(axis, (self.expert_count, -1)).unbind(axis)
            for matrix, axis in (
                (self.gate.weight, 0),
                (self.up.weight, 0),
                (self.down.weight, 1),
            )
        )
        visits = x.to(dtype).index_select(0, tokens).split(per_expert)
        mixed = [
            functional.linear(functional.silu(functional.linear(part, gate)) * functional.linear(part, up), down)
            for part, gate, up, down in zip(visits, gates, ups, downs, strict=True)
        ]
        weighted = torch.cat(mixed).float() * top.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x, dtype=torch.float32).index_add(0, tokens, weighted)


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.embedding_length, eps=config.rms_epsilon)
        self.attention = Attention(config)
        self.experts_norm = nn.RMSNorm(config.embedding_length, eps=config.rms_epsilon)
        self.experts = Experts(config)

    def forward(
        self, x: Tensor, layout: Layout, rope: tuple[Tensor, Tensor], used: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the new residual stream ``[N, D]`` and the router's balance and spread terms."""
        x = x + self.attention(self.attention_norm(x), layout, rope)
        mix, balance, spread = self.experts(self.experts_norm(x), used)
        return x + mix, balance, spread


class Network(nn.Module):
    """The whole network: token ids to logits."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.embedding_length)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.block_count))
        self.output_norm = nn.RMSNorm(config.embedding_length, eps=config.rms_epsilon)
        self.output = nn.Linear(config.embedding_length, config.vocabulary_size, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # The two matrices that write to the residual stream start smaller (GPT-2).
                into_stream = name.endswith(("attention.output.weight", "down.weight"))
                shrink = math.sqrt(2 * self.config.block_count) if into_stream else 1.0
                nn.init.normal_(parameter, std=0.05 / shrink)

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        half = self.config.head_length // 2
        rates = self.config.rope_freq_base ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = (positions.float().unsqueeze(-1) * rates).unsqueeze(1)  # [N, 1, half]
        return angles.cos(), angles.sin()

    def forward(
        self, tokens: Tensor, layout: Layout, counts: Sequence[int] | None = None
    ) -> tuple[Tensor, RouterLosses]:
        """Compute logits ``[N, vocabulary]`` with `counts` experts per block (default: its own).

        Args:
            tokens: Token ids ``[N]`` of all sequences, end to end.
            layout: Where each token sits.
            counts: Experts consulted per token, one entry per block.
        """
        if counts is None:
            counts = [self.config.expert_used_count] * self.config.block_count
        rope = self._rope(layout.positions)
        x = self.embedding(tokens)
        balances, spreads = [], []
        for block, used in zip(self.blocks, counts, strict=True):
            x, balance, spread = block(x, layout, rope, used)
            balances.append(balance)
            spreads.append(spread)
        logits = self.output(self.output_norm(x))
        losses = RouterLosses(torch.stack(balances).mean(), torch.stack(spreads).mean())
        return logits.float(), losses
