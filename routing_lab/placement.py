"""Where weights live: which blocks go to the device, and which of those leave their routed experts in host memory.

Placement changes memory and speed, never what is computed; that is why it is a file of its own and not part of a
schedule::

    placement: experts-of-the-upper-half-on-the-host
    gpu_layers: 99          # blocks on the device, counted from the last one; more than there are means all
    host_experts: "20-40"   # of those, the blocks whose routed experts stay in host memory
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from routing_lab.errors import Problem, UserFileError
from routing_lab.model import ModelFacts, format_blocks, parse_blocks
from routing_lab.yamlfile import Fields, read_text, render_yaml

__all__ = ["Placement"]

MAX_GPU_LAYERS = 1 << 20


@dataclass(frozen=True, slots=True)
class Placement:
    """Blocks on the device and blocks with experts on the host. The default is everything in host memory.

    ``gpu_layers`` counts as llama.cpp's ``--n-gpu-layers`` does: the last so many blocks, the output layer after them.
    ``host_experts`` are blocks, sorted; naming one that is not on the device changes nothing.
    """

    gpu_layers: int = 0
    host_experts: tuple[int, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.gpu_layers <= MAX_GPU_LAYERS:
            raise ValueError(f"gpu_layers is {self.gpu_layers}; it must be 0 or more")
        if any(block < 0 for block in self.host_experts):
            raise ValueError("host_experts holds a negative block")
        object.__setattr__(self, "host_experts", tuple(sorted(set(self.host_experts))))

    @classmethod
    def load(cls, path: Path) -> Placement:
        """Read a placement file. Raises ``UserFileError`` with every problem in it."""
        return cls.from_yaml(read_text(path), str(path))

    @classmethod
    def from_yaml(cls, text: str, file: str = "placement") -> Placement:
        """Parse a placement; ``file`` names it in messages. Raises ``UserFileError`` with every problem in it."""
        top = Fields.parse(text, file)
        name = top.text("placement", default="")
        gpu_layers = top.integer("gpu_layers", default=0, minimum=0, maximum=MAX_GPU_LAYERS)
        host_experts: tuple[int, ...] = ()
        raw = top.raw("host_experts", "")
        # A single block is a number to YAML.
        written = str(raw) if isinstance(raw, int) and not isinstance(raw, bool) else raw
        if not isinstance(written, str):
            top.problem("host_experts", "is no range of blocks", 'write it as "20-40" or "0-6,20-40"')
        elif written.strip():
            try:
                host_experts = parse_blocks(written)
            except ValueError as error:
                top.problem("host_experts", str(error))
        top.finish()
        return cls(gpu_layers, host_experts, name)

    def to_yaml(self) -> str:
        """The placement as a file; reading it back gives an equal placement."""
        data: dict[str, object] = {"placement": self.name} if self.name else {}
        data |= {"gpu_layers": self.gpu_layers}
        if self.host_experts:
            data |= {"host_experts": format_blocks(self.host_experts)}
        return render_yaml(data)

    def save(self, path: Path) -> None:
        """Write ``to_yaml`` to ``path``."""
        path.write_text(self.to_yaml(), encoding="utf-8")

    def check(self, facts: ModelFacts) -> None:
        """Raise ``UserFileError`` where a block of ``host_experts`` has no routed experts in this model."""
        stored = facts.blocks_with_experts
        wrong = [block for block in self.host_experts if block not in stored]
        if wrong:
            what = f"blocks without routed experts: {format_blocks(wrong)}"
            remedy = f"{facts.name} has them in {format_blocks(stored)}" if stored else f"{facts.name} has none"
            raise UserFileError(self.name or "placement", [Problem("host_experts", what, remedy)])

    def override_patterns(self) -> list[str]:
        """What ``--override-tensor`` matches: one regular expression for all experts on the host, or none.

        Reaches the routed experts' tensors, fused ones and scales included, and no shared expert; the same names as
        llama.cpp's own ``--n-cpu-moe`` (``LLM_FFN_EXPS_REGEX`` in ``common/common.h``).
        """
        if not self.host_experts:
            return []
        blocks = "|".join(map(str, self.host_experts))
        return [rf"blk\.({blocks})\.ffn_(up|down|gate|gate_up)_(ch|)exps"]

    def to_flags(self) -> list[str]:
        """Explicit llama-server flags: a placement flag that is given keeps ``--fit`` from choosing another."""
        flags = ["--n-gpu-layers", str(self.gpu_layers)]
        for pattern in self.override_patterns():
            flags += ["--override-tensor", f"{pattern}=CPU"]
        return flags

    def describe(self) -> str:
        """One line for a table or a report."""
        if self.gpu_layers == 0:
            return "everything in host memory"
        where = f"the last {self.gpu_layers} layers on the device"
        if not self.host_experts:
            return where
        return f"{where}, routed experts of blocks {format_blocks(self.host_experts)} in host memory"
