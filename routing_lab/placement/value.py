"""Where weights and caches live: which blocks go to the device, and what of those stays in host memory.

Placement changes memory and speed, never what is computed; that is why it is a file of its own and not part of a
schedule::

    placement: experts-of-the-upper-half-on-the-host
    model: {architecture: qwen3moe, blocks: 48, experts: 128}   # optional: what it was written for
    gpu_layers: 99          # blocks on the device, counted from the last one; more than there are means all
    host_experts: "20-47"   # of those, the blocks whose routed experts stay in host memory
    host_tensors:           # and single kinds of tensors that stay there, with their blocks
      down_experts: "10-19"
      attention: "0-3"
    host_output: true       # the output matrix stays there (the token embedding always does)
    host_kv: true           # the KV cache stays there, for all blocks
    context: 8192           # tokens; a placement that fits does so for a context
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from routing_lab.errors import Problem, UserFileError
from routing_lab.model import MAX_BLOCKS, ModelFacts, format_blocks, parse_blocks
from routing_lab.schedule import ScheduledModel, read_scheduled_model
from routing_lab.yamlfile import Fields, read_text, render_yaml

__all__ = [
    "EXPERTS_PATTERN",
    "MAX_CONTEXT",
    "MAX_GPU_LAYERS",
    "HostTensors",
    "Placement",
    "TensorKind",
    "block_pattern",
]

MAX_GPU_LAYERS: Final = 1 << 20
MAX_CONTEXT: Final = 1 << 30

EXPERTS_PATTERN: Final = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Tensors of a block's routed experts, as llama.cpp's own ``--n-cpu-moe`` names them (``LLM_FFN_EXPS_REGEX`` in
``common/common.h``): fused ones and scales included, no shared expert."""
OUTPUT_PATTERN: Final = r"^output\.weight"


class TensorKind(StrEnum):
    """A part of a block that can live apart from the rest of it."""

    UP_EXPERTS = "up_experts"
    """With the gate, in models that store both as one tensor."""
    GATE_EXPERTS = "gate_experts"
    DOWN_EXPERTS = "down_experts"
    SHARED_EXPERTS = "shared_experts"
    DENSE_FFN = "dense_ffn"
    ATTENTION = "attention"
    """Attention, or the recurrence that stands in its place; not its cache."""

    @property
    def pattern(self) -> str:
        """What follows ``blk.N`` in the names of its tensors, as a regular expression."""
        return _PATTERNS[self]


_PATTERNS: Final[Mapping[TensorKind, str]] = {
    TensorKind.UP_EXPERTS: r"\.ffn_(up|gate_up)_(ch|)exps",
    TensorKind.GATE_EXPERTS: r"\.ffn_gate_(ch|)exps",
    TensorKind.DOWN_EXPERTS: r"\.ffn_down_(ch|)exps",
    TensorKind.SHARED_EXPERTS: r"\.ffn_(up|down|gate)_shexp",
    TensorKind.DENSE_FFN: r"\.ffn_(up|down|gate)\.",
    TensorKind.ATTENTION: r"\.(attn|ssm|shortconv|indexer)",
}


@dataclass(frozen=True, slots=True)
class HostTensors:
    """One kind of tensors in host memory, and the blocks (sorted) in which it is."""

    kind: TensorKind
    blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", _checked(self.blocks, self.kind))
        if not self.blocks:
            raise ValueError(f"{self.kind} names no block")


@dataclass(frozen=True, slots=True)
class Placement:
    """Blocks on the device and what of them is on the host. The default is everything in host memory.

    ``gpu_layers`` counts as llama.cpp's ``--n-gpu-layers`` does: the output layer first, then the blocks from the last
    one down. ``host_experts`` are blocks, sorted; naming one that is not on the device changes nothing.
    ``context_tokens`` is the context that the placement was made for, ``None`` where it does not say.
    """

    gpu_layers: int = 0
    host_experts: tuple[int, ...] = ()
    name: str = ""
    host_tensors: tuple[HostTensors, ...] = field(default=())
    host_output: bool = False
    host_kv: bool = False
    context_tokens: int | None = None
    model: ScheduledModel | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.gpu_layers <= MAX_GPU_LAYERS:
            raise ValueError(f"gpu_layers is {self.gpu_layers}; it must lie within 0 and {MAX_GPU_LAYERS}")
        if self.context_tokens is not None and not 1 <= self.context_tokens <= MAX_CONTEXT:
            raise ValueError(f"context_tokens is {self.context_tokens}; it must lie within 1 and {MAX_CONTEXT}")
        object.__setattr__(self, "host_experts", _checked(self.host_experts, "host_experts"))
        kinds = [tensors.kind for tensors in self.host_tensors]
        if len(set(kinds)) < len(kinds):
            raise ValueError("host_tensors names a kind twice")
        order = list(TensorKind)
        ordered = sorted(self.host_tensors, key=lambda tensors: order.index(tensors.kind))
        object.__setattr__(self, "host_tensors", tuple(ordered))

    @classmethod
    def load(cls, path: Path) -> Placement:
        """Read a placement file. Raises ``UserFileError`` with every problem in it."""
        return cls.from_yaml(read_text(path), str(path))

    @classmethod
    def from_yaml(cls, text: str, file: str = "placement") -> Placement:
        """Parse a placement; ``file`` names it in messages. Raises ``UserFileError`` with every problem in it."""
        top = Fields.parse(text, file)
        name = top.text("placement", default="")
        model = read_scheduled_model(top.section("model"))
        gpu_layers = top.integer("gpu_layers", default=0, minimum=0, maximum=MAX_GPU_LAYERS)
        host_experts = _read_blocks(top, "host_experts", default="")
        host_tensors = _read_host_tensors(top.section("host_tensors"))
        host_output = top.boolean("host_output", default=False)
        host_kv = top.boolean("host_kv", default=False)
        context_tokens = top.integer("context", default=None, minimum=1, maximum=MAX_CONTEXT)
        if model is not None:
            named = {"host_experts": host_experts, **{f"host_tensors.{t.kind}": t.blocks for t in host_tensors}}
            for where, blocks in named.items():
                beyond = [block for block in blocks if block >= model.blocks >= 1]
                if beyond:
                    what = f"names block {format_blocks(beyond)}, and the model section says {model.blocks} blocks"
                    top.problem(where, what)
        top.finish()
        return cls(gpu_layers, host_experts, name, host_tensors, host_output, host_kv, context_tokens, model)

    def to_yaml(self) -> str:
        """The placement as a file; reading it back gives an equal placement."""
        data: dict[str, object] = {"placement": self.name} if self.name else {}
        if self.model is not None:
            data["model"] = self.model.to_dict()
        data["gpu_layers"] = self.gpu_layers
        if self.host_experts:
            data["host_experts"] = format_blocks(self.host_experts)
        if self.host_tensors:
            data["host_tensors"] = {str(part.kind): format_blocks(part.blocks) for part in self.host_tensors}
        if self.host_output:
            data["host_output"] = True
        if self.host_kv:
            data["host_kv"] = True
        if self.context_tokens is not None:
            data["context"] = self.context_tokens
        return render_yaml(data, flow=("model",))

    def save(self, path: Path) -> None:
        """Write ``to_yaml`` to ``path``."""
        path.write_text(self.to_yaml(), encoding="utf-8")

    def check(self, facts: ModelFacts) -> None:
        """Raise ``UserFileError`` where this is for another model, or names blocks that lack what should be moved."""
        if self.model is not None and (misfits := self.model.misfits(facts, what="placement")):
            raise UserFileError(self.name or "placement", misfits)
        stored = facts.blocks_with_experts
        parts = {"host_experts": (self.host_experts, stored)}
        for part in self.host_tensors:
            parts[f"host_tensors.{part.kind}"] = (part.blocks, _blocks_that_may_have(part.kind, facts))
        wrong = {where: [block for block in blocks if block not in has] for where, (blocks, has) in parts.items()}
        problems = [_misfit(where, blocks, facts) for where, blocks in wrong.items() if blocks]
        if problems:
            raise UserFileError(self.name or "placement", problems)

    def override_patterns(self) -> list[str]:
        """What ``--override-tensor`` matches: one regular expression for each kind of tensor that stays on the host."""
        patterns = [block_pattern(self.host_experts, EXPERTS_PATTERN)] if self.host_experts else []
        patterns += [block_pattern(part.blocks, part.kind.pattern) for part in self.host_tensors]
        return [*patterns, OUTPUT_PATTERN] if self.host_output else patterns

    def to_flags(self, *, short: bool = False) -> list[str]:
        """Explicit llama-server flags: a placement flag that is given keeps ``--fit`` from choosing another.

        With ``short``, experts of the first blocks are said as ``--n-cpu-moe N``, which moves the experts of the first
        N blocks, where ``host_experts`` are exactly those. The context is no part of it.
        """
        flags = ["--n-gpu-layers", str(self.gpu_layers)]
        patterns = self.override_patterns()
        if short and self.host_experts and self.host_experts == tuple(range(len(self.host_experts))):
            flags += ["--n-cpu-moe", str(len(self.host_experts))]
            patterns = patterns[1:]
        for pattern in patterns:
            flags += ["--override-tensor", f"{pattern}=CPU"]
        return [*flags, "--no-kv-offload"] if self.host_kv else flags

    def same_place(self, other: Placement) -> bool:
        """Whether both put everything in the same place, whatever they are called."""
        return self.describe() == other.describe()

    def describe(self, layers: int | None = None) -> str:
        """One line for a table or a report; equal for placements that are the same but for their name.

        ``layers`` is how many the model has, its output layer among them: more than those are called all of them.
        """
        if self.gpu_layers == 0:
            return "everything in host memory"
        if layers is not None and self.gpu_layers >= layers:
            parts = [f"all {layers} layers on the device"]
        else:
            parts = [f"the last {self.gpu_layers} layers on the device" if self.gpu_layers > 1 else _ONE_LAYER]
        if self.host_experts:
            parts.append(f"routed experts of blocks {format_blocks(self.host_experts)} in host memory")
        parts += [
            f"{part.kind.replace('_', ' ')} of blocks {format_blocks(part.blocks)} in host memory"
            for part in self.host_tensors
        ]
        if self.host_output:
            parts.append("the output matrix in host memory")
        if self.host_kv:
            parts.append("the KV cache in host memory")
        return ", ".join(parts)


_ONE_LAYER: Final = "the last layer (the output) on the device"
_OF_EXPERTS: Final = frozenset({TensorKind.UP_EXPERTS, TensorKind.GATE_EXPERTS, TensorKind.DOWN_EXPERTS})


def _blocks_that_may_have(kind: TensorKind, facts: ModelFacts) -> tuple[int, ...]:
    """Blocks that may have such tensors as far as the facts tell: of the rest of a block they give only the sum."""
    if kind in _OF_EXPERTS:
        return facts.blocks_with_experts
    if kind is TensorKind.SHARED_EXPERTS:
        return tuple(block for block, part in facts.block_bytes.items() if part.shared_experts)
    return tuple(range(facts.blocks))


def block_pattern(blocks: Iterable[int], rest: str) -> str:
    """A regular expression for the tensors of ``blocks`` whose names go on with ``rest``."""
    return rf"blk\.({'|'.join(map(str, blocks))}){rest}"


def _checked(blocks: Iterable[int], where: str) -> tuple[int, ...]:
    unique = tuple(sorted(set(blocks)))
    if unique and not 0 <= unique[0] <= unique[-1] < MAX_BLOCKS:
        wrong = unique[0] if unique[0] < 0 else unique[-1]
        raise ValueError(f"{where} holds block {wrong}; blocks lie within 0 and {MAX_BLOCKS - 1}")
    return unique


def _misfit(where: str, wrong: list[int], facts: ModelFacts) -> Problem:
    stored, named = facts.blocks_with_experts, "routed experts"
    if where == f"host_tensors.{TensorKind.SHARED_EXPERTS}":
        stored, named = _blocks_that_may_have(TensorKind.SHARED_EXPERTS, facts), "shared experts"
    if named == "shared experts" or where in {"host_experts", *(f"host_tensors.{kind}" for kind in _OF_EXPERTS)}:
        what = f"blocks without {named}: {format_blocks(wrong)}"
        return Problem(where, what, f"{facts.name} has them in {format_blocks(stored)}" if stored else "it has none")
    return Problem(where, f"there is no block {format_blocks(wrong)}", f"{facts.name} has {facts.blocks} blocks")


def _read_blocks(section: Fields, key: str, default: str | None = None) -> tuple[int, ...]:
    raw = section.raw(key, default)
    # A single block is a number to YAML.
    written = str(raw) if isinstance(raw, int) and not isinstance(raw, bool) else raw
    if not isinstance(written, str):
        section.problem(key, "is no range of blocks", 'write it as "20-40" or "0-6,20-40"')
        return ()
    try:
        blocks = parse_blocks(written)
    except ValueError as error:
        section.problem(key, str(error))
        return ()
    if default is None and not blocks:
        section.problem(key, "names no block")
    return blocks


def _read_host_tensors(section: Fields | None) -> tuple[HostTensors, ...]:
    if section is None:
        return ()
    read = {kind: _read_blocks(section, kind) for kind in TensorKind if section.has(kind)}
    for kind in TensorKind:
        section.raw(kind)  # so that the message on an unknown kind lists them all
    return tuple(HostTensors(kind, blocks) for kind, blocks in read.items() if blocks)
