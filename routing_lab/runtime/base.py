"""What every runtime can do, and the values it hands back: the contract that the rest of the lab is written against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, Literal, Protocol, runtime_checkable

from routing_lab.model import ModelFacts
from routing_lab.placement import Placement
from routing_lab.schedule import Schedule

__all__ = [
    "DRAFTS_TOGETHER",
    "Attestation",
    "Capability",
    "DecodeTiming",
    "Draft",
    "FinishReason",
    "Generation",
    "Runtime",
    "RuntimeBuild",
    "RuntimeOptions",
    "Verified",
    "Verifier",
]

FinishReason = Literal["stop", "length"]

DRAFTS_TOGETHER: Final = 8
"""Drafts that a ``Verifier`` checks best at once: with pieces of 63 tokens they fill the usual batch of 512."""


class Capability(StrEnum):
    """How a runtime can set the number of experts, from most to least able."""

    PRELOAD = "preload"
    """Per block, through the native override on an unmodified libllama."""
    GGUF_ARRAY = "gguf_array"
    """Per block, because this libllama honours an array under ``ARCH.expert_used_count`` by itself."""
    UNIFORM_ONLY = "uniform_only"
    """One count for all blocks, through the stock ``kv_overrides`` scalar."""


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """How a model is loaded; nothing in here changes what is computed except through rounding.

    ``context_tokens`` bounds prompt plus completion. ``threads`` of ``None`` means all the cores this process may use,
    or one for a model so small that threads would only wait for each other; a loaded runtime's own options name the
    number.
    ``library_dir`` is the folder that holds libllama (``None``: the one ``llama-cpp-python`` would load, which honours
    ``LLAMA_CPP_LIB_PATH``). ``rpc_servers`` (``host:port``) lend their devices. Without ``mmap`` the weights are read
    into memory and not mapped from the file (llama.cpp may then repack those of the host, which rounds differently).
    ``request_timeout_s`` bounds one request to the model's process before it counts as hung.
    """

    threads: int | None = None
    context_tokens: int = 4096
    batch_tokens: int = 512
    placement: Placement = field(default_factory=Placement)
    kv_type: Literal["f16", "f32"] = "f16"
    override: Literal["auto", "off"] = "auto"
    library_dir: Path | None = None
    rpc_servers: tuple[str, ...] = ()
    mmap: bool = True
    request_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class RuntimeBuild:
    """Which library runs the model: what a certificate needs to name it."""

    name: str
    version: str
    library: str
    library_digest: str
    system_info: str


@dataclass(frozen=True, slots=True)
class Attestation:
    """Counts read back from the running graph: block -> experts that the block's router really selects.

    ``summed`` are the counts read at the other end of the block (how many expert outputs its sum adds up).
    """

    selected: Mapping[int, int]
    summed: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Generation:
    """One greedy completion. ``llama_seconds`` is the part of ``seconds`` spent inside libllama.

    ``tokens`` counts every token that was generated, an end-of-generation token or one of a stop string included.
    ``smallest_margin`` is the smallest gap in logits between the two best tokens over all generated positions, where it
    was asked for: how close the completion came to being another one. ``token_ids`` are the generated tokens by number,
    where the runtime can say: what a ``Draft`` is made of. ``margins`` are the gaps of all of them, where asked for.
    """

    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    tokens: int
    seconds: float
    llama_seconds: float
    smallest_margin: float | None = None
    token_ids: tuple[int, ...] | None = None
    margins: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A guess at the completion of a raw prompt, and the most tokens that the completion may have."""

    prompt: str
    tokens: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Verified:
    """What became of a draft under the applied schedule.

    ``generation`` is what greedy decoding gives; its times are this draft's share of those of its batch, and its
    ``smallest_margin`` runs over all positions. ``kept`` of the ``drafted`` tokens were right: these were not decoded.
    Where ``doubtful``, two best tokens were closer than the tie margin: the generation ends there, and nothing is known
    about what follows.
    """

    generation: Generation
    kept: int
    drafted: int
    doubtful: bool


@dataclass(frozen=True, slots=True)
class DecodeTiming:
    """Time to decode ``tokens`` single tokens after a prompt that is not counted.

    ``prompt_seconds`` is the time of that prompt, where the runtime can tell it.
    """

    tokens: int
    seconds: float
    prompt_seconds: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Decode rate in tokens per second."""
        return self.tokens / self.seconds


class Runtime(Protocol):
    """A loaded model whose schedule can be switched.

    Any method raises ``RuntimeFailureError`` when the model's process dies or hangs. The runtime has then already
    thrown the process away; the next call starts a new one and applies the last schedule again.
    """

    @property
    def facts(self) -> ModelFacts:
        """Facts of the loaded model."""

    @property
    def capability(self) -> Capability:
        """How this runtime sets expert counts."""

    @property
    def build(self) -> RuntimeBuild:
        """The library that runs the model."""

    @property
    def options(self) -> RuntimeOptions:
        """The options the model was loaded with."""

    def apply(self, schedule: Schedule) -> Attestation:
        """Switch to ``schedule`` without reloading weights and read the counts back.

        Raises ``AttestationError`` on any mismatch, ``RuntimeUnsupportedError`` where this runtime cannot express
        the schedule and ``UserFileError`` where the schedule does not fit the model.
        """

    def render_chat(self, user: str, *, thinking: bool | None = None) -> str:
        """The raw prompt that the model's own chat template makes of one user message (generation prompt added)."""

    def generate(self, prompt: str, *, max_tokens: int, stop: Sequence[str] = (), margins: bool = False) -> Generation:
        """Greedy completion of a raw prompt under the applied schedule, from an empty cache.

        The prompt is tokenised with special tokens recognised and BOS added where the model asks for it. Generation
        ends at an end-of-generation token or at the first stop string, which is not part of ``text`` (reason
        ``stop``), or after ``max_tokens`` or at the end of the context (reason ``length``). ``margins`` asks for
        ``smallest_margin`` and ``margins``. Raises ``UsageError`` for a prompt that is empty or leaves no room in the
        context.
        """

    def decode_timing(self, *, tokens: int, prompt_tokens: int = 16) -> DecodeTiming:
        """Time ``tokens`` single-token decodes under the applied schedule after an uncounted prompt.

        Each step decodes one token and picks the best next one, as a server does. The tokens fed are a fixed stream,
        the same for every schedule, so that two schedules do the same work. (A real server cannot be fed: there they
        are what the model picks after a fixed prompt.)
        """

    def close(self) -> None:
        """Free the model; safe to call twice."""


@runtime_checkable
class Verifier(Protocol):
    """A runtime that can check drafts in batches, which costs a prompt's time per token instead of a completion's."""

    def verify(self, drafts: Sequence[Draft], *, stop: Sequence[str] = (), tie_margin: float = 0.0) -> list[Verified]:
        """What ``generate`` would give for each draft's prompt, in the order given.

        Without doubt (see ``Verified``) the generation equals that of ``generate`` as far as logits of a batch differ
        from those of single tokens by less than ``tie_margin``; ``probes.verify.calibrate`` measures that.
        Raises ``UsageError`` as ``generate`` does, and where there is no draft.
        """
