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
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from routing_lab.model import FrozenMap, ModelMemory, TensorInfo, format_blocks
from routing_lab.placement.value import EXPERTS_PATTERN, OUTPUT_PATTERN, Placement, TensorKind
from routing_lab.schedule import ScheduledModel

__all__ = ["GIB", "KINDS", "Limits", "Plan", "Side", "TradeRow", "kinds_of_blocks", "plan", "suggest", "trade"]

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

    @property
    def device_usable_bytes(self) -> int | None:
        """What a model may take of the device, ``None`` without a limit."""
        return _usable(self.device_bytes, self.device_spare_bytes)

    @property
    def host_usable_bytes(self) -> int | None:
        """What a model may take of the host, ``None`` without a limit."""
        return _usable(self.host_bytes, self.host_spare_bytes)


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
    def element_bytes(self) -> float:
        """Bytes of a cached element."""
        return _ELEMENT_BYTES[self.kv_type]

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
        limits, said = self.limits, []
        if not self.fits_device:
            short = _shortage("device", self.device.total_bytes, limits.device_bytes or 0, limits.device_spare_bytes)
            said.append(f"{short}: loading would fail")
        if not self.fits_host:
            short = _shortage("host", self.host.total_bytes, limits.host_bytes or 0, limits.host_spare_bytes)
            said.append(
                f"{short}: it would swap, or read weights from the disk again and again "
                "(a published run with all experts on a host of 32 GB fell to 3 tokens/s)"
            )
        return tuple(said)


@dataclass(frozen=True, slots=True)
class TradeRow:
    """For one context: the fewest blocks whose experts must stay on the host, ``None`` where not even all suffice.

    ``host_layers`` are the whole layers that must stay there besides.
    """

    context_tokens: int
    host_blocks: int | None
    device_bytes: int
    host_bytes: int
    host_layers: int = 0


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
    layout = _Layout(memory, _parts(memory), placement)
    return layout.plan(placement, limits or Limits(), _Load(context_tokens, batch_tokens, kv_type))


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
    return _Suggestions(memory).best(limits, _Load(context_tokens, batch_tokens, kv_type))


def trade(
    memory: ModelMemory,
    limits: Limits,
    contexts: Iterable[int],
    *,
    batch_tokens: int = 512,
    kv_type: KvType = "f16",
) -> list[TradeRow]:
    """Context against blocks: what each context costs in blocks whose experts must stay on the host."""
    rows, suggestions = [], _Suggestions(memory)
    for context in contexts:
        found = suggestions.best(limits, _Load(context, batch_tokens, kv_type))
        whole = found.placement.gpu_layers > memory.facts.blocks
        rows.append(
            TradeRow(
                context_tokens=context,
                host_blocks=len(found.placement.host_experts) if whole else None,
                device_bytes=found.device.total_bytes,
                host_bytes=found.host.total_bytes,
                host_layers=memory.facts.blocks + 1 - found.placement.gpu_layers,
            )
        )
    return rows


def kinds_of_blocks(memory: ModelMemory) -> dict[int, dict[str, int]]:
    """Bytes of each block's weights by kind, kinds without any left out."""
    sizes: dict[int, Counter[str]] = {block: Counter() for block in memory.caches}
    for part in _parts(memory):
        if part.block in sizes:
            sizes[part.block][part.kind] += part.size_bytes
    return {block: {kind: counts[kind] for kind in KINDS if counts[kind]} for block, counts in sizes.items()}


def _candidates(blocks: int, routed: list[int]) -> Iterable[Placement]:
    for count in range(len(routed) + 1):
        name = f"experts-of-{format_blocks(routed[:count])}-on-the-host" if count else "everything-on-the-device"
        yield Placement(blocks + 1, tuple(routed[:count]), name)
    for layers in range(blocks, 0, -1):
        last = f"last-{layers}-layers" if layers > 1 else "last-layer"
        yield Placement(layers, tuple(routed), f"{last}-without-experts" if routed else last)
    yield Placement(0, (), "everything-on-the-host")


class _Suggestions:
    """The placements that ``suggest`` chooses from; each is laid out once, whatever number of contexts is asked for."""

    def __init__(self, memory: ModelMemory) -> None:
        self._memory, self._of_model = memory, ScheduledModel.of(memory.facts)
        facts = memory.facts
        self._parts = _parts(memory)
        self._routed = [block for block in facts.blocks_with_experts if block not in facts.mtp_blocks]
        self._placements = list(_candidates(facts.blocks, self._routed))
        self._layouts: dict[int, _Layout] = {}

    def best(self, limits: Limits, load: _Load) -> Plan:
        """The first that fits.

        Each takes no more of the device than the one before it: a block's experts that move free at least what the copy
        of one of them takes. So the first is found by halving.
        """
        numbers = range(len(self._placements))
        # The last one has nothing on the device, which fits every device.
        which = bisect_left(numbers, True, key=lambda number: self._plan(number, limits, load).fits_device)
        found, reason = self._plan(which, limits, load), self._why_no_layer_more(which, limits, load)
        return replace(found, notes=(*found.notes, reason)) if reason else found

    def _plan(self, which: int, limits: Limits, load: _Load) -> Plan:
        placement = self._placements[which]
        if which not in self._layouts:
            self._layouts[which] = _Layout(self._memory, self._parts, placement)
        given = replace(placement, context_tokens=load.context_tokens, model=self._of_model)
        return self._layouts[which].plan(given, limits, load)

    def _why_no_layer_more(self, which: int, limits: Limits, load: _Load) -> str | None:
        """Where whole layers stay on the host: what one more on the device would have taken."""
        if which <= len(self._routed):  # so many moves of a block's experts come first
            return None
        there, usable = _bytes(limits.device_bytes or 0), limits.device_usable_bytes or 0
        kept = f"{_bytes(limits.device_spare_bytes)} are kept free"
        if not usable:
            return f"nothing is put on the device: it has {there}, and {kept} on it"
        needed = self._plan(which - 1, limits, load).device.total_bytes
        what = self._placements[which - 1].describe(self._memory.facts.blocks + 1)
        return f"{what} would take {_bytes(needed)} of the device; {_bytes(usable)} of {there} are usable, {kept}"


@dataclass(frozen=True, slots=True)
class _Load:
    """What a model is asked to do at once."""

    context_tokens: int
    batch_tokens: int
    kv_type: KvType

    @property
    def batch(self) -> int:
        """Tokens that are really computed together."""
        return min(self.batch_tokens, self.context_tokens)


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor as a plan sees it; ``block`` is ``None`` outside of all blocks."""

    name: str
    block: int | None
    kind: str
    size_bytes: int
    of_experts: bool


def _parts(memory: ModelMemory) -> list[_Part]:
    return [
        _Part(tensor.name, memory.block_of(tensor), _kind(tensor), tensor.size_bytes, bool(_EXPERTS.match(tensor.name)))
        for tensor in memory.tensors
    ]


@dataclass(frozen=True, slots=True)
class _Moved:
    """What a placement's override patterns match, as sets of blocks: a pattern of hundreds of blocks is slow."""

    experts_of: frozenset[int]
    kinds_of: Mapping[str, frozenset[int]]
    output: bool

    @classmethod
    def by(cls, placement: Placement) -> _Moved:
        kinds = {str(tensors.kind): frozenset(tensors.blocks) for tensors in placement.host_tensors}
        return cls(frozenset(placement.host_experts), kinds, placement.host_output)

    def takes(self, part: _Part) -> bool:
        if part.block is None:
            return self.output and re.match(OUTPUT_PATTERN, part.name) is not None
        return (part.of_experts and part.block in self.experts_of) or part.block in self.kinds_of.get(part.kind, ())


class _Layout:
    """Where every tensor and every cache of a model goes under one placement, for any context."""

    def __init__(self, memory: ModelMemory, parts: Sequence[_Part], placement: Placement) -> None:
        self._memory, self.placement = memory, placement
        # Blocks for multi-token prediction are stored last and count, although they are not loaded.
        blocks = memory.facts.blocks
        first = max(blocks + 1 - placement.gpu_layers, 0) if placement.gpu_layers else blocks + 1
        output_on_device = first <= blocks
        self._device_blocks = [block for block in memory.caches if block >= first]
        self._host_blocks = [block for block in memory.caches if block < first]
        self._device_weights, self._host_weights = Counter[str](), Counter[str]()
        self._largest_host_expert = 0  # of those that blocks on the device have on the host
        moved = _Moved.by(placement)
        for part in parts:
            overridden = moved.takes(part)
            there = part.kind == "output" and output_on_device if part.block is None else part.block >= first
            weights = self._device_weights if there and not overridden else self._host_weights
            weights[part.kind] += part.size_bytes
            if overridden and part.of_experts and there:
                self._largest_host_expert = max(self._largest_host_expert, part.size_bytes)
        # A tied output is a copy of the embedding under its name, which no pattern for the output matrix reaches.
        tied = memory.tied_output and output_on_device
        if tied:
            self._device_weights["output"] += sum(part.size_bytes for part in parts if part.kind == "embedding")
        self._output_works_on_device = output_on_device and (tied or not placement.host_output)
        self._unmoved = _unmoved(placement, parts, tied_output=memory.tied_output)

    def plan(self, given: Placement, limits: Limits, load: _Load) -> Plan:
        """Add up both sides; ``given`` is this placement under another name or for a context."""
        most = self._memory.facts.context_length
        too_long = [f"the model was made for at most {most:,} tokens"] if most and load.context_tokens > most else []
        return Plan(
            placement=given,
            context_tokens=load.context_tokens,
            batch_tokens=load.batch_tokens,
            kv_type=load.kv_type,
            device=self._device(load),
            host=self._host(load),
            limits=limits,
            notes=(*self._memory.notes, *self._unmoved, *too_long),
        )

    def _device(self, load: _Load) -> Side:
        caching = [] if self.placement.host_kv else self._device_blocks
        output, copied = self._output_works_on_device, self._largest_host_expert
        compute = self._compute_bytes(self._device_blocks, load, copied, output=output)
        return self._side(self._device_weights, caching, load, compute)

    def _host(self, load: _Load) -> Side:
        caching = [*self._host_blocks, *(self._device_blocks if self.placement.host_kv else [])]
        working = [*self._host_blocks, *(self._device_blocks if self._largest_host_expert else [])]
        embedded = 8 * load.batch * self._memory.facts.embedding_length
        inputs = self._mask_bytes(list(self._memory.caches), load) + embedded
        compute = self._compute_bytes(working, load, 0, output=not self._output_works_on_device)
        return self._side(self._host_weights, caching, load, max(inputs, compute))

    def _side(self, weights: Counter[str], caching: list[int], load: _Load, compute_bytes: int) -> Side:
        element_bytes = _ELEMENT_BYTES[load.kv_type]
        cached = (self._memory.cache_bytes(block, load.context_tokens, load.batch, element_bytes) for block in caching)
        ordered = {kind: weights[kind] for kind in KINDS if weights[kind]}
        return Side(FrozenMap(ordered), sum(cached), compute_bytes)

    def _compute_bytes(self, blocks: list[int], load: _Load, copied_bytes: int, *, output: bool) -> int:
        """The formula at the head of this module."""
        facts, batch = self._memory.facts, load.batch
        width = facts.embedding_length
        consulted = max(facts.experts_used.values(), default=0)
        inner = max(consulted * (facts.expert_feed_forward_length or 0), self._memory.widest_ffn)
        logits = 4 * batch * (self._memory.vocabulary + width) if output else 0
        if not blocks:
            return logits
        block = 4 * batch * (max(3 * inner, 2 * consulted * width) + 3 * width)
        return max(logits, block + self._mask_bytes(blocks, load) + copied_bytes)

    def _mask_bytes(self, blocks: list[int], load: _Load) -> int:
        attending = (block for block in blocks if self._memory.caches[block].key_elements)
        cached = (self._memory.cached_tokens(block, load.context_tokens, load.batch) for block in attending)
        return 2 * load.batch * max(cached, default=0)


def _unmoved(placement: Placement, parts: Sequence[_Part], *, tied_output: bool) -> list[str]:
    """A note for each kind of tensors that a placement moves and a block it names does not have."""
    notes = []
    for wanted in placement.host_tensors:
        pattern = re.compile(rf"blk\.\d+{wanted.kind.pattern}")
        missing = set(wanted.blocks) - {part.block for part in parts if pattern.match(part.name)}
        if missing:
            notes.append(f"host_tensors.{wanted.kind} moves nothing of blocks without any: {format_blocks(missing)}")
    if placement.host_output and tied_output:
        notes.append("host_output moves nothing: the output matrix is the token embedding, under that name")
    return notes


def _kind(tensor: TensorInfo) -> str:
    if _BLOCK.match(tensor.name):
        return next((str(kind) for kind, pattern in _KIND_PATTERNS if pattern.match(tensor.name)), "other")
    # Whatever is not the embedding of the input goes where the output goes.
    return "embedding" if tensor.name.startswith(("token_embd", "per_layer_token_embd", "position_embd")) else "output"


def _fits(needed: int, there: int | None, spare: int) -> bool:
    return there is None or needed == 0 or needed + spare <= there


def _usable(there: int | None, spare: int) -> int | None:
    return None if there is None else max(there - spare, 0)


def _shortage(side: str, needed: int, there: int, spare: int) -> str:
    kept = f"{_bytes(spare)} kept free of {_bytes(there)}"
    if spare >= there:
        return f"nothing is usable on the {side} ({kept}), and {_bytes(needed)} are needed there"
    return f"the {side} needs {_bytes(needed)}, and {_bytes(there - spare)} are usable ({kept})"


def _bytes(size: int) -> str:
    """In MiB where GiB would round to nothing, as the sizes of small models would."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:,.1f} MiB"
