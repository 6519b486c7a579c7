"""``ModelMemory``: every tensor with its bytes, and what each block caches, from the header of a GGUF.

What a block caches follows llama.cpp (``src/llama-kv-cache*.cpp``, ``src/llama-memory-recurrent.cpp``,
``src/llama-hparams.cpp``): attention keeps a key and a value row per cached token, the compressed attention of DeepSeek
(MLA) a key row only, attention with a sliding window only as many rows as the window needs, and a recurrent block
(linear attention, state space, short convolution) one state of fixed size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from routing_lab.model.facts import ModelFacts, read_shards
from routing_lab.model.frozen import FrozenMap
from routing_lab.model.gguf_header import TensorInfo

__all__ = ["BlockCache", "ModelMemory"]

_PADDING_TOKENS: Final = 256  # llama.cpp rounds the context, and the cache of a window, up to multiples of it
_STATE_BYTES: Final = 4  # recurrent states are F32

_LIGHTNING: Final = "minimax-01"

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)", re.ASCII)
_RECURRENT = re.compile(r"(ssm|shortconv|time_mix)_?")
_ATTENTION = re.compile(r"attn_(q|k|v|qkv|output|kv_a_mqa|q_a|q_b|kv_b|k_b)\.")

# Blocks with a sliding window where the file does not say which (the defaults in llama.cpp's ``src/models``): period,
# and whether the full attention comes first in it.
_WINDOW_PERIODS: Final[Mapping[str, tuple[int, bool]]] = {
    "afmoe": (4, False),
    "cohere2": (4, False),
    "cohere2moe": (4, True),
    "exaone-moe": (4, False),
    "exaone4": (4, False),
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "gpt-oss": (2, False),
    "laguna": (4, True),
    "llama4": (4, False),
    "mellum": (4, False),
    "muse-glimmer": (4, False),
    "olmo2": (4, False),
    "plamo3": (8, False),
    "smallthinker": (4, True),
}
_FIXED_WINDOWS: Final[Mapping[str, int]] = {"llama4": 8192, "smallthinker": 4096}  # whatever size the file says
_DEFAULT_WINDOWS: Final[Mapping[str, int]] = {"llama4": 8192, "exaone-moe": 128, "exaone4": 4096, "gemma2": 4096}
_EXAONE4_WINDOWED_BLOCKS: Final = 64  # only the 32B of this architecture has a window
_GEMMA3N_CACHING_BLOCKS: Final = 20  # the rest share their caches, whatever the file says


@dataclass(frozen=True, slots=True)
class BlockCache:
    """What one block remembers: elements per cached token of its keys and values, and bytes of a state of fixed size.

    ``windowed`` blocks cache no more tokens than their window needs.
    """

    key_elements: int = 0
    value_elements: int = 0
    windowed: bool = False
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What placing a model in memory takes. Blocks for multi-token prediction are left out: llama.cpp skips them.

    ``window_tokens`` is the size of the sliding window, 0 without one. ``widest_ffn`` is the widest inner layer of a
    dense feed-forward part, 0 where there is none. ``notes`` say what could not be counted.
    """

    facts: ModelFacts
    tensors: tuple[TensorInfo, ...]
    caches: Mapping[int, BlockCache]
    window_tokens: int
    vocabulary: int
    widest_ffn: int
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> ModelMemory:
        """Read the header of a GGUF; of a split model give any shard. Raises ``UserFileError`` as ``ModelFacts``."""
        facts = ModelFacts.read(path)
        shards = [header for _, header in read_shards(path)]
        tensors = [tensor for header in shards for tensor in header.tensors]
        return _Reading(facts, shards[0].metadata, tensors).memory()

    @property
    def tied_output(self) -> bool:
        """Whether the output matrix is the token embedding, which then is needed on both sides."""
        return not any(tensor.name == "output.weight" for tensor in self.tensors)

    def block_of(self, tensor: TensorInfo) -> int | None:
        """The block that a tensor belongs to, ``None`` for one outside of all blocks."""
        match = _BLOCK.fullmatch(tensor.name)
        return int(match[1]) if match else None

    def cached_tokens(self, block: int, context_tokens: int, batch_tokens: int) -> int:
        """Tokens for which ``block`` has room in a context: all, or a window and a batch. Both rounded up to 256."""
        tokens = _padded(context_tokens)
        if self.caches[block].windowed:
            return _padded(min(tokens, self.window_tokens + batch_tokens))
        return tokens

    def cache_bytes(self, block: int, context_tokens: int, batch_tokens: int, element_bytes: float = 2) -> int:
        """Bytes that ``block`` caches for a context; ``element_bytes`` is the size of a cached element (2: F16)."""
        cache = self.caches.get(block)
        if cache is None:
            return 0
        elements = cache.key_elements + cache.value_elements
        rows = self.cached_tokens(block, context_tokens, batch_tokens) if elements else 0
        return round(rows * elements * element_bytes) + cache.state_bytes


class _Reading:
    """Turns metadata and tensors into caches, by the rules of llama.cpp."""

    def __init__(self, facts: ModelFacts, metadata: Mapping[str, object], tensors: list[TensorInfo]) -> None:
        self.facts, self.metadata = facts, metadata
        skipped = set(facts.mtp_blocks)
        named = [(tensor, _BLOCK.fullmatch(tensor.name)) for tensor in tensors]
        self.tensors = tuple(tensor for tensor, match in named if match is None or int(match[1]) not in skipped)
        self.parts: dict[int, list[str]] = {block: [] for block in range(facts.blocks) if block not in skipped}
        for _, match in named:
            if match and int(match[1]) in self.parts:
                self.parts[int(match[1])].append(match[2])
        self.notes: list[str] = []

    def memory(self) -> ModelMemory:
        window = self._window()
        windowed = self._windowed() if window else frozenset()
        if window and not windowed:
            self.notes.append("which blocks have a sliding window is unknown; all are counted with full attention")
        if self._number("attention.indexer.key_length"):
            self.notes.append("the cache of the sparse attention's indexer is not counted")
        embedding = next((tensor for tensor in self.tensors if tensor.name == "token_embd.weight"), None)
        return ModelMemory(
            facts=self.facts,
            tensors=self.tensors,
            caches=FrozenMap({block: self._cache(block, block in windowed) for block in self.parts}),
            window_tokens=window if windowed else 0,
            vocabulary=embedding.shape[-1] if embedding and embedding.shape else 0,
            widest_ffn=max(
                (self._per_block("feed_forward_length", block) for block in self.facts.dense_blocks), default=0
            ),
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def _window(self) -> int:
        """Size of the sliding window, 0 without one: a size of 0 in the file switches it off."""
        architecture = self.facts.architecture
        if architecture == "exaone4" and len(self.parts) != _EXAONE4_WINDOWED_BLOCKS:
            return 0
        if f"{architecture}.attention.sliding_window" not in self.metadata:
            return _DEFAULT_WINDOWS.get(architecture, 0)
        given = self._number("attention.sliding_window")
        return _FIXED_WINDOWS.get(architecture, given) if given else 0

    def _cache(self, block: int, windowed: bool) -> BlockCache:  # noqa: FBT001 - one caller
        state = self._state_bytes() if self._is_recurrent(block) else 0
        if self._is_recurrent(block) and self.facts.architecture != "falcon-h1":  # which has both in every block
            return BlockCache(state_bytes=state)
        if not any(_ATTENTION.match(part) for part in self.parts[block]) or self._shares_a_cache(block):
            return BlockCache(state_bytes=state)
        heads = self._per_block("attention.head_count_kv", block, self._per_block("attention.head_count", block))
        key, value = self._head_lengths(block, windowed)
        is_mla = self._number("attention.key_length_mla") and self._number("attention.value_length_mla")
        return BlockCache(heads * key, 0 if is_mla else heads * value, windowed, state)

    def _shares_a_cache(self, block: int) -> bool:
        if self.facts.architecture == "gemma3n":
            return block >= _GEMMA3N_CACHING_BLOCKS
        shared = self._number("attention.shared_kv_layers")
        return bool(shared) and block >= len(self.parts) - shared

    def _head_lengths(self, block: int, windowed: bool) -> tuple[int, int]:  # noqa: FBT001 - two callers
        own = self.facts.embedding_length // max(1, self._per_block("attention.head_count", block))
        lengths = []
        for name in ("key", "value"):
            length = self._number(f"attention.{name}_length") or own
            lengths.append((windowed and self._number(f"attention.{name}_length_swa")) or length)
        return lengths[0], lengths[1]

    def _is_recurrent(self, block: int) -> bool:
        if self.facts.architecture == _LIGHTNING:  # its linear attention is named as attention is
            return "attn_norm_2.weight" in self.parts[block]
        return any(_RECURRENT.match(part) for part in self.parts[block])

    def _state_bytes(self) -> int:
        """``n_embd_r`` plus ``n_embd_s`` of llama.cpp, for one sequence."""
        heads = self._per_block("attention.head_count", 0)
        convolution = self._number("ssm.conv_kernel")
        if width := self._number("shortconv.l_cache"):
            elements = self.facts.embedding_length * (width - 1)
        elif self.facts.architecture == _LIGHTNING:
            head, _ = self._head_lengths(0, windowed=False)
            elements = head * head * heads
        elif head := self._number("kda.head_dim"):
            elements = 3 * (convolution - 1 if convolution else 3) * heads * head + head * head * heads
        elif inner := self._number("ssm.inner_size"):
            state, groups = self._number("ssm.state_size"), self._number("ssm.group_count")
            elements = max(convolution - 1, 0) * (inner + 2 * groups * state) + state * inner
        else:
            self.notes.append("the size of the recurrent blocks' state is unknown and not counted")
            return 0
        return elements * _STATE_BYTES

    def _windowed(self) -> frozenset[int]:
        pattern = self.metadata.get(f"{self.facts.architecture}.attention.sliding_window_pattern")
        if isinstance(pattern, tuple):
            return frozenset(block for block in self.parts if block < len(pattern) and pattern[block])
        period, full_first = _WINDOW_PERIODS.get(self.facts.architecture, (0, False))
        if isinstance(pattern, int) and not isinstance(pattern, bool):
            period = pattern
        if period <= 0:
            return frozenset()
        full_at = 0 if full_first else period - 1
        return frozenset(block for block in self.parts if block % period != full_at)

    def _number(self, name: str) -> int:
        value = self.metadata.get(f"{self.facts.architecture}.{name}")
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

    def _per_block(self, name: str, block: int, default: int = 0) -> int:
        value = self.metadata.get(f"{self.facts.architecture}.{name}")
        if isinstance(value, tuple):
            value = value[block] if block < len(value) else 0
            return value if isinstance(value, int) else default
        return self._number(name) or default


def _padded(tokens: int) -> int:
    return -(-tokens // _PADDING_TOKENS) * _PADDING_TOKENS
