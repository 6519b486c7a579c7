"""Will it fit? What a placement takes on the device and on the host, from the header of a GGUF alone.

Weights and caches are sums over tensors, found as llama.cpp finds them: a block goes to the device by its number, a
tensor of it stays on the host where an override pattern matches its name. Compute buffers are an **estimate**, fitted
to what llama.cpp of October 2026 reserve with flash attention, for a batch of U tokens::

    4 U (V + E)                                          logits of a whole batch, where the output matrix is
    4 U (max(3 W, 2 K E) + 3 E) + 2 U C + X              one block at work, where any block is

with V the vocabulary, E the embedding length, W the widest inner layer (K experts of F, or a dense one), K the experts
consulted, C the cached tokens (the attention mask is F16) and X the largest expert tensor that a block on the device
has on the host (a device copies it for a prompt). The larger line counts; the host needs at least ``2 U C + 8 U E``,
since masks and inputs begin there. A driver takes memory besides, which is what ``Limits.device_spare_bytes`` is for.

Host weights are the bytes of the tensors that are used there. A file that is mapped shows as more: everything between
its first and its last tensor of the host, of which only what is used has to stay in memory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from routing_lab.model import FrozenMap, ModelMemory, TensorInfo, format_blocks
from routing_lab.placement import EXPERTS_PATTERN, Placement, TensorKind
from routing_lab.schedule import ScheduledModel

__all__ = ["GIB", "KINDS", "Limits", "Plan", "Side", "TradeRow", "block_kinds", "plan", "suggest", "trade"]

GIB: Final = 2**30
_ELEMENT_BYTES: Final[Mapping[str, float]] = {"f16": 2.0, "f32": 4.0, "q8_0": 34 / 32}
KvType = Literal["f16", "f32", "q8_0"]

_BLOCK = re.compile(r"blk\.(\d+)\.", re.ASCII)
_EXPERTS = re.compile(rf"blk\.\d+{EXPERTS_PATTERN}", re.ASCII)
_KIND_PATTERNS: Final = tuple((kind, re.compile(rf"blk\.\d+{kind.pattern}", re.ASCII)) for kind in TensorKind)

KINDS: Final = (*(str(kind) for kind in TensorKind), "other", "output", "embedding")
"""Names of the kinds of tensors that a plan tells apart; ``other`` are routers and norms."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Memory of the two sides in bytes; ``None``: whatever is needed is there.

    The spare bytes are left free: on the device for its driver and a screen, on the host for everything else that runs.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    device_spare_bytes: int = GIB // 2
    host_spare_bytes: int = 2 * GIB

    def __post_init__(self) -> None:
        given = (self.device_bytes or 0, self.host_bytes or 0, self.device_spare_bytes, self.host_spare_bytes)
        if any(size < 0 for size in given):
            raise ValueError(f"memory cannot be negative: {self}")


@dataclass(frozen=True, slots=True)
class Side:
    """Bytes on one side: weights by kind, caches, and the estimate of the compute buffers."""

    weights: Mapping[str, int] = field(default_factory=lambda: FrozenMap[str, int]({}))
    cache_bytes: int = 0
    compute_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return sum(self.weights.values())

    @property
    def total_bytes(self) -> int:
        """Everything, the estimate included."""
        return self.weight_bytes + self.cache_bytes + self.compute_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """What a placement takes for a context of ``context_tokens``, and what to mind about it."""

    placement: Placement
    context_tokens: int
    batch_tokens: int
    kv_type: KvType
    device: Side
    host: Side
    limits: Limits
    notes: tuple[str, ...] = ()

    @property
    def fits_device(self) -> bool:
        """Whether the device has room, its spare bytes left free."""
        return _fits(self.device.total_bytes, self.limits.device_bytes, self.limits.device_spare_bytes)

    @property
    def fits_host(self) -> bool:
        """Whether the host has room, its spare bytes left free."""
        return _fits(self.host.total_bytes, self.limits.host_bytes, self.limits.host_spare_bytes)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What will go wrong, worst first."""
        said = []
        if not self.fits_device:
            said.append(
                f"the device needs {_gib(self.device.total_bytes)} and has {_gib(self.limits.device_bytes or 0)}, "
                f"of which {_gib(self.limits.device_spare_bytes)} should stay free: loading would fail"
            )
        if not self.fits_host:
            said.append(
                f"the host needs {_gib(self.host.total_bytes)} and has {_gib(self.limits.host_bytes or 0)}, "
                f"of which {_gib(self.limits.host_spare_bytes)} should stay free: it would swap, or read weights from "
                "the disk again and again (a published run with all experts on a host of 32 GB fell to 3 tokens/s)"
            )
        return tuple(said)


@dataclass(frozen=True, slots=True)
class TradeRow:
    """For one context: the fewest blocks whose experts must stay on the host, ``None`` where not even all suffice."""

    context_tokens: int
    host_blocks: int | None
    device_bytes: int
    host_bytes: int


def plan(
    memory: ModelMemory,
    placement: Placement,
    limits: Limits | None = None,
    *,
    context_tokens: int = 4096,
    batch_tokens: int = 512,
    kv_type: KvType = "f16",
) -> Plan:
    """Add up both sides of a placement.

    Raises ``UserFileError`` where the placement does not fit the model.
    """
    placement.check(memory.facts)
    sides = _Sides(memory, placement, context_tokens, min(batch_tokens, context_tokens), kv_type)
    return Plan(
        placement=placement,
        context_tokens=context_tokens,
        batch_tokens=batch_tokens,
        kv_type=kv_type,
        device=sides.device(),
        host=sides.host(),
        limits=limits or Limits(),
        notes=memory.notes,
    )


def suggest(
    memory: ModelMemory,
    limits: Limits,
    *,
    context_tokens: int = 4096,
    batch_tokens: int = 512,
    kv_type: KvType = "f16",
) -> Plan:
    """The placement with the fewest blocks' experts on the host that fits the device; whole blocks where all do not.

    The blocks are the first ones, so that ``--n-cpu-moe`` says the same. Where nothing fits, everything is on the host.
    The result may still not fit the host: see its ``warnings``.
    """
    facts = memory.facts
    routed = [block for block in facts.blocks_with_experts if block not in facts.mtp_blocks]
    for placement in _candidates(facts.blocks, routed):
        given = replace(placement, context_tokens=context_tokens, model=ScheduledModel.of(facts))
        found = plan(memory, given, limits, context_tokens=context_tokens, batch_tokens=batch_tokens, kv_type=kv_type)
        if found.fits_device:
            return found
    raise AssertionError("a placement with nothing on the device fits every device")


def trade(
    memory: ModelMemory,
    limits: Limits,
    contexts: Iterable[int],
    *,
    batch_tokens: int = 512,
    kv_type: KvType = "f16",
) -> list[TradeRow]:
    """Context against blocks: what each context costs in blocks whose experts must stay on the host."""
    rows = []
    for context in contexts:
        found = suggest(memory, limits, context_tokens=context, batch_tokens=batch_tokens, kv_type=kv_type)
        whole = found.placement.gpu_layers > memory.facts.blocks
        rows.append(
            TradeRow(
                context_tokens=context,
                host_blocks=len(found.placement.host_experts) if whole else None,
                device_bytes=found.device.total_bytes,
                host_bytes=found.host.total_bytes,
            )
        )
    return rows


def block_kinds(memory: ModelMemory, block: int) -> dict[str, int]:
    """Bytes of one block's weights by kind, kinds without any left out."""
    sizes: Counter[str] = Counter()
    for tensor in memory.tensors:
        if memory.block_of(tensor) == block:
            sizes[_kind(tensor)] += tensor.size_bytes
    return {kind: sizes[kind] for kind in KINDS if sizes[kind]}


def _candidates(blocks: int, routed: list[int]) -> Iterable[Placement]:
    for count in range(len(routed) + 1):
        name = f"experts-of-{format_blocks(routed[:count])}-on-the-host" if count else "everything-on-the-device"
        yield Placement(blocks + 1, tuple(routed[:count]), name)
    for layers in range(blocks, 0, -1):
        yield Placement(layers, tuple(routed), f"last-{layers}-layers-without-experts")
    yield Placement(0, (), "everything-on-the-host")


class _Sides:
    """Where every tensor and every cache of a model goes under one placement."""

    def __init__(
        self, memory: ModelMemory, placement: Placement, context_tokens: int, batch_tokens: int, kv_type: KvType
    ) -> None:
        self._memory, self._placement = memory, placement
        self._context_tokens, self._batch_tokens = context_tokens, batch_tokens
        self._element_bytes = _ELEMENT_BYTES[kv_type]
        self._patterns = [re.compile(pattern) for pattern in placement.override_patterns()]
        # Blocks for multi-token prediction are stored last and count, although they are not loaded.
        blocks = memory.facts.blocks
        self._first = max(blocks + 1 - placement.gpu_layers, 0) if placement.gpu_layers else blocks + 1
        self._output_on_device = self._first <= blocks
        self._device_blocks = [block for block in memory.caches if block >= self._first]
        self._host_blocks = [block for block in memory.caches if block < self._first]

    def device(self) -> Side:
        weights: Counter[str] = Counter()
        for tensor in self._memory.tensors:
            if self._on_device(tensor):
                weights[_kind(tensor)] += tensor.size_bytes
        if self._memory.tied_output and self._output_on_device:  # the device gets a copy of its own
            weights["output"] += sum(t.size_bytes for t in self._memory.tensors if _kind(t) == "embedding")
        caching = [] if self._placement.host_kv else self._device_blocks
        output = self._output_on_device and not self._placement.host_output
        copied = self._largest_host_expert()
        return self._side(weights, caching, self._compute_bytes(self._device_blocks, copied, output=output))

    def host(self) -> Side:
        weights: Counter[str] = Counter()
        for tensor in self._memory.tensors:
            if not self._on_device(tensor):
                weights[_kind(tensor)] += tensor.size_bytes
        caching = [*self._host_blocks, *(self._device_blocks if self._placement.host_kv else [])]
        output = not self._output_on_device or self._placement.host_output
        working = [*self._host_blocks, *(self._device_blocks if self._largest_host_expert() else [])]
        inputs = (
            self._mask_bytes(list(self._memory.caches)) + 8 * self._batch_tokens * self._memory.facts.embedding_length
        )
        return self._side(weights, caching, max(inputs, self._compute_bytes(working, 0, output=output)))

    def _side(self, weights: Counter[str], caching: list[int], compute_bytes: int) -> Side:
        cached = (
            self._memory.cache_bytes(block, self._context_tokens, self._batch_tokens, self._element_bytes)
            for block in caching
        )
        ordered = {kind: weights[kind] for kind in KINDS if weights[kind]}
        return Side(FrozenMap(ordered), sum(cached), compute_bytes)

    def _on_device(self, tensor: TensorInfo) -> bool:
        if self._overridden(tensor):
            return False
        block = self._memory.block_of(tensor)
        if block is None:
            return self._output_on_device and _kind(tensor) == "output"
        return block >= self._first

    def _overridden(self, tensor: TensorInfo) -> bool:
        return any(pattern.search(tensor.name) for pattern in self._patterns)

    def _largest_host_expert(self) -> int:
        """Of the experts that blocks on the device have on the host, the largest tensor."""
        on_host = (
            tensor.size_bytes
            for tensor in self._memory.tensors
            if _EXPERTS.match(tensor.name)
            and self._overridden(tensor)
            and (self._memory.block_of(tensor) or 0) >= self._first
        )
        return max(on_host, default=0)

    def _compute_bytes(self, blocks: list[int], copied_bytes: int, *, output: bool) -> int:
        """The formula at the head of this module."""
        facts, batch = self._memory.facts, self._batch_tokens
        width = facts.embedding_length
        consulted = max(facts.experts_used.values(), default=0)
        inner = max(consulted * (facts.expert_feed_forward_length or 0), self._memory.widest_ffn)
        logits = 4 * batch * (self._memory.vocabulary + width) if output else 0
        if not blocks:
            return logits
        block = 4 * batch * (max(3 * inner, 2 * consulted * width) + 3 * width) + self._mask_bytes(blocks)
        return max(logits, block + copied_bytes)

    def _mask_bytes(self, blocks: list[int]) -> int:
        attending = (block for block in blocks if self._memory.caches[block].key_elements)
        cached = (self._memory.cached_tokens(block, self._context_tokens, self._batch_tokens) for block in attending)
        return 2 * self._batch_tokens * max(cached, default=0)


def _kind(tensor: TensorInfo) -> str:
    if _BLOCK.match(tensor.name):
        return next((str(kind) for kind, pattern in _KIND_PATTERNS if pattern.match(tensor.name)), "other")
    # Whatever is not the embedding of the input goes where the output goes.
    return "embedding" if tensor.name.startswith(("token_embd", "per_layer_token_embd", "position_embd")) else "output"


def _fits(needed: int, there: int | None, spare: int) -> bool:
    return there is None or needed == 0 or needed + spare <= there


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB"
