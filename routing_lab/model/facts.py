"""``ModelFacts``: which blocks of a model route, to how many experts, and what the parts of each block weigh."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from routing_lab.errors import Problem, UserFileError
from routing_lab.model.blocks import MAX_BLOCKS
from routing_lab.model.frozen import FrozenMap
from routing_lab.model.gguf_header import CorruptHeaderError, GgufHeader, TensorInfo, read_header

__all__ = ["BlockBytes", "ModelFacts", "read_shards"]

MAX_SHARDS: Final = 9999
MAX_EXPERTS: Final = 1 << 16

_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)", re.ASCII | re.DOTALL)
_SHARD = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII | re.DOTALL)
# Names as in llama.cpp's src/llama-arch.cpp. ffn_norm_exps is a plain norm in spite of its name.
_ROUTED = re.compile(r"ffn_(?:gate|up|down|gate_up)_(?:exps|chexps)\.")
_EXPERT_WEIGHT = re.compile(r"ffn_(?:gate|up|down|gate_up)_exps\.weight")
_SHARED = re.compile(r"ffn_\w+_shexp\.")
_ROUTER = re.compile(r"ffn_gate_inp\.|exp_probs_b|ffn_gate_tid2eid")
# A table from token to experts instead of a router's choice (DeepSeek's hash layers): its width is the count, for good.
_HASH_ROUTED = re.compile(r"ffn_gate_tid2eid")
_NEXTN = re.compile(r"nextn\.")


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """What the tensors of one block take in the file, in bytes, by what they are for."""

    routed_experts: int = 0
    shared_experts: int = 0
    router: int = 0
    other: int = 0
    """Attention or recurrence, norms, and the feed-forward part of dense blocks."""

    @property
    def total(self) -> int:
        """All of the block, in bytes."""
        return self.routed_experts + self.shared_experts + self.router + self.other


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the header of a GGUF says about a model.

    Blocks are numbered from 0 as stored. What a block *is* is decided from its tensors: ``routed_blocks`` have routed
    experts and a router and run in the main pass; ``mtp_blocks`` are stored but run only for drafting (multi-token
    prediction); ``dense_blocks`` run in the main pass without routed experts. In none of the three are a block whose
    experts are looked up in a fixed table (no schedule reaches it) and one that is counted but stores no tensor.
    """

    files: tuple[Path, ...]
    """The shards in order; one file for most models."""
    name: str
    architecture: str
    blocks: int
    """Stored blocks, those for multi-token prediction included."""
    mtp_blocks: tuple[int, ...]
    routed_blocks: tuple[int, ...]
    dense_blocks: tuple[int, ...]
    experts: int
    """Routed experts per block; 0 for a dense model."""
    experts_used: Mapping[int, int]
    """The model's own count for each routed block: the baseline."""
    shared_experts: int
    """Experts that every token uses, per block; no schedule changes them."""
    embedding_length: int
    expert_feed_forward_length: int | None
    context_length: int | None
    has_chat_template: bool
    quantization: str
    """The type that holds most bytes of the routed experts (of everything, in a dense model)."""
    parameters: int
    size_bytes: int
    """Size of all files."""
    block_bytes: Mapping[int, BlockBytes]
    other_bytes: int
    """Tensors outside of all blocks: embeddings, output, final norm."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Mapping) and not isinstance(value, FrozenMap):
                object.__setattr__(self, field.name, FrozenMap(value))
        if set(self.experts_used) != set(self.routed_blocks):
            raise ValueError("experts_used must name exactly the routed blocks")
        if any(not 1 <= count <= self.experts for count in self.experts_used.values()):
            raise ValueError(f"the model's own counts must lie within 1 and {self.experts}")

    @classmethod
    def read(cls, path: Path) -> ModelFacts:
        """Read a GGUF; of a split model give any shard. Reads headers only, whatever the size of the file.

        Raises ``UserFileError`` for a file that is missing, no GGUF, damaged, cut off, or short of a shard, and for
        a header that contradicts its tensors.
        """
        shards = read_shards(path)
        tensors = [tensor for _, header in shards for tensor in header.tensors]
        return _Draft(shards[0][0], shards[0][1].metadata, tensors).facts(
            files=tuple(file for file, _ in shards), size_bytes=sum(header.size_bytes for _, header in shards)
        )

    @property
    def is_moe(self) -> bool:
        """Whether any block of the main pass routes, so that a schedule has something to change."""
        return bool(self.routed_blocks)

    @property
    def blocks_with_experts(self) -> tuple[int, ...]:
        """Blocks that store routed experts, those for multi-token prediction included."""
        return tuple(block for block, part in self.block_bytes.items() if part.routed_experts)

    @property
    def uniform_experts_used(self) -> int | None:
        """The model's own count where it is the same in all routed blocks, else ``None``."""
        counts = set(self.experts_used.values())
        return counts.pop() if len(counts) == 1 else None

    @property
    def routed_expert_bytes(self) -> int:
        """Bytes of the routed experts of the main pass: what placement moves."""
        return sum(self.block_bytes[block].routed_experts for block in self.routed_blocks)

    @property
    def expert_fraction(self) -> float:
        """Share of all tensor bytes that are routed experts of the main pass, 0 to 1."""
        total = self.other_bytes + sum(part.total for part in self.block_bytes.values())
        return self.routed_expert_bytes / total if total else 0.0


def read_shards(path: Path) -> list[tuple[Path, GgufHeader]]:
    """The headers of all files of the model, first shard first."""
    first = _read_one(path)
    number, count = _split(first, path)
    if count <= 1:
        return [(path, first)]
    match = _SHARD.fullmatch(path.name)
    if match is None or int(match["count"]) != count or int(match["number"]) != number + 1:
        what = f"says it is shard {number + 1} of {count}; its name should end in -{number + 1:05}-of-{count:05}.gguf"
        raise UserFileError(str(path), [Problem("split.count", what, "give the shards the names they were made with")])
    paths = [path.with_name(f"{match['prefix']}-{index + 1:05}-of-{count:05}.gguf") for index in range(count)]
    missing = [Problem("", f"shard {shard.name} is missing") for shard in paths if not shard.exists()]
    if missing:
        raise UserFileError(str(path), missing)
    shards = []
    for index, shard in enumerate(paths):
        header = first if shard == path else _read_one(shard)
        if _split(header, shard) != (index, count):
            raise UserFileError(
                str(shard), [Problem("split.no", f"is not shard {index + 1} of {count} as its name says")]
            )
        shards.append((shard, header))
    return shards


def _read_one(path: Path) -> GgufHeader:
    try:
        return read_header(path)
    except CorruptHeaderError as error:
        raise UserFileError(str(path), [Problem("", str(error))]) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else None
        raise UserFileError(str(path), [Problem("", f"cannot be read: {reason or error}")]) from None


def _split(header: GgufHeader, path: Path) -> tuple[int, int]:
    """Index and number of shards; ``(0, 1)`` for a model of one file."""
    count = header.metadata.get("split.count", 1)
    number = header.metadata.get("split.no", 0)
    if not _is_count(count, MAX_SHARDS) or not _is_count(number, MAX_SHARDS):
        raise UserFileError(str(path), [Problem("split.count", f"is {count!r} with split.no {number!r}")])
    return number, count  # type: ignore[return-value]


class _Draft:
    """Collects the facts and every contradiction between metadata and tensors on the way."""

    def __init__(self, path: Path, metadata: Mapping[str, object], tensors: Iterable[TensorInfo]) -> None:
        self.path = path
        self.metadata = metadata
        self.problems: list[Problem] = []
        self.outside: list[TensorInfo] = []
        self.by_block: dict[int, dict[str, TensorInfo]] = defaultdict(dict)
        for tensor in tensors:
            match = _BLOCK.fullmatch(tensor.name)
            if match is None:
                self.outside.append(tensor)
            else:
                self.by_block[int(match[1])][match[2]] = tensor
        self.architecture = self._text("general.architecture")

    def facts(self, files: tuple[Path, ...], size_bytes: int) -> ModelFacts:
        """The facts. Raises ``UserFileError`` with everything that does not fit together."""
        if not self.architecture:
            self._problem("general.architecture", "is missing; this may be a GGUF file without a model")
        blocks = self._blocks()
        self._stop_at_problems()
        main, mtp = self._passes(blocks)
        experts = self._experts()
        routed = tuple(block for block in main if self._routes(block))
        used = self._experts_used(routed, experts, blocks)
        embedding_length = self._count("embedding_length") or 0
        self._stop_at_problems()
        return ModelFacts(
            files=files,
            name=self._text("general.name") or self.path.stem,
            architecture=self.architecture,
            blocks=blocks,
            mtp_blocks=tuple(mtp),
            routed_blocks=routed,
            dense_blocks=tuple(block for block in main if not self._has(block, _ROUTED)),
            experts=experts,
            experts_used=FrozenMap(used),
            shared_experts=self._shared_experts(main),
            embedding_length=embedding_length,
            expert_feed_forward_length=self._expert_width(routed),
            context_length=self._count("context_length"),
            has_chat_template="tokenizer.chat_template" in self.metadata,
            quantization=self._quantization(routed),
            parameters=sum(tensor.elements for tensor in self._all_tensors()),
            size_bytes=size_bytes,
            block_bytes=FrozenMap({block: self._bytes(block) for block in range(blocks)}),
            other_bytes=sum(tensor.size_bytes for tensor in self.outside),
        )

    def _blocks(self) -> int:
        stored = max(self.by_block, default=-1) + 1
        told = self._count("block_count")
        if told is not None and stored > told:
            self._problem(self._key("block_count"), f"is {told}, and there are tensors of block {stored - 1}")
        blocks = stored if told is None else told
        if blocks > MAX_BLOCKS:
            self._problem(self._key("block_count"), f"is {blocks}, more than any model has")
        if blocks == 0:
            self._problem("", "holds no blocks, so it is no language model")
        return blocks

    def _passes(self, blocks: int) -> tuple[list[int], list[int]]:
        """Blocks of the main pass, and those for multi-token prediction.

        llama.cpp leaves the last ``nextn_predict_layers`` blocks out of the main pass; where the key is lost, the
        tensors tell. Not every block that is left out predicts: a granite-switch model that llama.cpp has saved counts
        its router's cache as such a block, which has no tensors, and so do files whose prediction block was cut off.
        """
        told = min(self._count("nextn_predict_layers") or 0, blocks)
        left_out = set(range(blocks - told, blocks)) | {block for block in self.by_block if self._has(block, _NEXTN)}
        main = [block for block in range(blocks) if block not in left_out]
        return main, sorted(left_out & self.by_block.keys())

    def _experts(self) -> int:
        sizes = Counter(
            tensor.shape[-1]
            for block in self.by_block
            for rest, tensor in self.by_block[block].items()
            if _EXPERT_WEIGHT.fullmatch(rest) and len(tensor.shape) == 3  # noqa: PLR2004 - rows, columns, experts
        )
        if not sizes:
            return 0
        told = self._count("expert_count")
        if len(sizes) > 1:
            self._problem("", f"blocks have different numbers of experts ({', '.join(map(str, sorted(sizes)))})")
        experts = sizes.most_common(1)[0][0]
        if told is not None and told != experts:
            self._problem(self._key("expert_count"), f"is {told}, and the tensors hold {experts} experts")
        if not 1 <= experts <= MAX_EXPERTS:
            self._problem("", f"the tensors claim {experts} experts")
        return experts

    def _experts_used(self, routed: tuple[int, ...], experts: int, blocks: int) -> dict[int, int]:
        if not routed:
            return {}
        key = self._key("expert_used_count")
        told: Any = self.metadata.get(key)
        if told is None:
            self._problem(key, "is missing, so the model's own count is unknown")
            return {}
        if isinstance(told, tuple) and len(told) != blocks:
            self._problem(key, f"has {len(told)} counts for {blocks} blocks")
            return {}
        counts = [told[block] if isinstance(told, tuple) else told for block in routed]
        wrong = {repr(count) for count in counts if not _is_count(count, experts) or count == 0}
        if wrong:
            self._problem(key, f"is {', '.join(sorted(wrong))}; the model has {experts} experts per block")
        return dict(zip(routed, counts, strict=True))

    def _shared_experts(self, main: list[int]) -> int:
        present = any(self._has(block, _SHARED) for block in main)
        return max(self._count("expert_shared_count") or 1, 1) if present else 0

    def _expert_width(self, routed: tuple[int, ...]) -> int | None:
        told = self._count("expert_feed_forward_length")
        if told is not None or not routed:
            return told
        down = self.by_block[routed[0]].get("ffn_down_exps.weight")
        return down.shape[0] if down is not None and down.shape else None

    def _quantization(self, routed: tuple[int, ...]) -> str:
        chosen = [tensor for block in routed for rest, tensor in self.by_block[block].items() if _ROUTED.match(rest)]
        sizes: Counter[str] = Counter()
        for tensor in chosen or self._all_tensors():
            sizes[tensor.type] += tensor.size_bytes
        return sizes.most_common(1)[0][0] if sizes else ""

    def _bytes(self, block: int) -> BlockBytes:
        sizes: Counter[str] = Counter()
        for rest, tensor in self.by_block.get(block, {}).items():
            sizes[_part(rest)] += tensor.size_bytes
        return BlockBytes(**sizes)

    def _routes(self, block: int) -> bool:
        return self._has(block, _ROUTED) and self._has(block, _ROUTER) and not self._has(block, _HASH_ROUTED)

    def _has(self, block: int, pattern: re.Pattern[str]) -> bool:
        return any(pattern.match(rest) for rest in self.by_block.get(block, ()))

    def _all_tensors(self) -> list[TensorInfo]:
        return [*self.outside, *(tensor for block in self.by_block.values() for tensor in block.values())]

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def _text(self, key: str) -> str:
        value = self.metadata.get(key, "")
        if isinstance(value, str):
            return value
        self._problem(key, f"is {value!r}, not a text")
        return ""

    def _count(self, name: str) -> int | None:
        """A whole number under ``ARCH.name``; an array (a value per block) has no single one and gives ``None``."""
        value = self.metadata.get(self._key(name))
        if value is None or isinstance(value, tuple):
            return None
        if not _is_count(value, (1 << 63) - 1):
            self._problem(self._key(name), f"is {value!r}, not a count")
            return None
        return value  # type: ignore[return-value]

    def _problem(self, where: str, what: str) -> None:
        self.problems.append(Problem(where, what))

    def _stop_at_problems(self) -> None:
        if self.problems:
            raise UserFileError(str(self.path), self.problems)


def _part(rest: str) -> str:
    """The field of ``BlockBytes`` that a tensor of a block counts for."""
    if _ROUTED.match(rest):
        return "routed_experts"
    if _SHARED.match(rest):
        return "shared_experts"
    return "router" if _ROUTER.match(rest) else "other"


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
