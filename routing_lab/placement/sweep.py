"""Measure placements against each other: how fast each decodes, and what it takes of both memories meanwhile.

Placements take turns as schedules do (see ``measure``): every round decodes once under each, in an order that turns
around from round to round, so that a machine that warms up favours nobody. A placement is a property of a loaded model,
so each turn loads it; a model that stayed loaded beside the others would take the very memory that is measured. For a
small model ``keep_loaded`` saves the time.

Major page faults and swap are counted while decoding is timed, after an untimed stretch that brings the weights in.
What is still read from disk then will be read for every token to come.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, Self

from routing_lab.errors import RuntimeFailureError, RuntimeUnsupportedError, UsageError
from routing_lab.measure import SpeedRatio, fewest_rounds
from routing_lab.model import ModelFacts, format_blocks, parse_blocks
from routing_lab.placement.value import Placement
from routing_lab.runtime.base import DecodeTiming
from routing_lab.runtime.libllama import Buffer

__all__ = [
    "CSV_COLUMNS",
    "Choice",
    "PlacedRuntime",
    "Sample",
    "SweepRow",
    "SweepSettings",
    "Taken",
    "distinct",
    "expert_placements",
    "layer_placements",
    "sweep",
]

PROC: Final = Path("/proc")
_MAJOR_FAULTS_FIELD: Final = 11  # of /proc/PID/stat, counted from 0; the name before it may hold blanks
_FIELDS_AFTER_NAME: Final = 2


class PlacedRuntime(Protocol):
    """What a sweep needs of a loaded model."""

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """What the library took of each device's memory."""

    @property
    def process_id(self) -> int | None:
        """The process that decodes."""

    def decode_timing(self, *, tokens: int, prompt_tokens: int = 16) -> DecodeTiming:
        """Time single-token decodes."""


Open = Callable[[Placement], AbstractContextManager[PlacedRuntime]]


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """How much is decoded per placement: ``rounds`` times ``tokens``, each after ``warmup_tokens`` not counted.

    A prompt of ``prompt_tokens`` comes before each stretch and is never timed.
    """

    tokens: int = 64
    rounds: int = 6
    warmup_tokens: int = 16
    prompt_tokens: int = 16
    confidence: float = 0.95
    keep_loaded: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.warmup_tokens < 1 or self.prompt_tokens < 1:
            raise ValueError(f"tokens, warmup_tokens and prompt_tokens must be positive: {self}")
        if self.rounds < (needed := fewest_rounds(self.confidence)):
            raise ValueError(f"{self.rounds} rounds give no {self.confidence:.0%} interval; it takes at least {needed}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of one placement.

    ``resident_bytes`` and ``swapped_bytes`` are the process's own after decoding, ``major_faults`` its page faults that
    read from a disk while decoding. ``swapped_in_pages`` counts for the whole machine. ``None``: this system does not
    tell.
    """

    tokens_per_s: float
    resident_bytes: int | None = None
    swapped_bytes: int | None = None
    major_faults: int | None = None
    swapped_in_pages: int | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """Bytes that libllama took on one side, by what they are for.

    Caches are those of attention and recurrent states; compute buffers hold logits and one batch at work. Weights that
    are mapped count from the first to the last tensor of that side.
    """

    weight_bytes: int = 0
    cache_bytes: int = 0
    compute_bytes: int = 0

    @classmethod
    def by(cls, buffers: Iterable[Buffer]) -> Taken:
        """Add up the buffers of one side."""
        sums = {"weight_bytes": 0, "cache_bytes": 0, "compute_bytes": 0}
        for buffer in buffers:
            sums[_PARTS.get(buffer.use, "compute_bytes")] += buffer.size_bytes
        return cls(**sums)

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.cache_bytes + self.compute_bytes


_PARTS: Final = {"model": "weight_bytes", "KV": "cache_bytes", "RS": "cache_bytes"}


@dataclass(frozen=True, slots=True)
class SweepRow:
    """A placement, what libllama took for it on each side, and its turns; ``error`` says why there are none.

    ``ratio`` compares with the first placement of the sweep that ran, round by round; ``None`` while there are too few
    rounds for an interval.
    """

    placement: Placement
    device: Taken = Taken()
    host: Taken = Taken()
    samples: tuple[Sample, ...] = ()
    ratio: SpeedRatio | None = None
    error: str | None = None

    @property
    def title(self) -> str:
        """Its name, or what it is."""
        return self.placement.name or self.placement.describe()

    @property
    def device_bytes(self) -> int:
        """What libllama took of the device."""
        return self.device.total_bytes

    @property
    def host_bytes(self) -> int:
        """What libllama took of the host."""
        return self.host.total_bytes

    @property
    def tokens_per_s(self) -> float | None:
        """Median decode rate."""
        return statistics.median(sample.tokens_per_s for sample in self.samples) if self.samples else None

    def most(self, name: str) -> int | None:
        """The largest value that any turn had under ``name``, ``None`` where the system did not tell."""
        values = [getattr(sample, name) for sample in self.samples]
        return max((value for value in values if value is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """The row as CSV and JSON can hold it, under ``CSV_COLUMNS``."""
        return {
            "placement": self.placement.name,
            "gpu_layers": self.placement.gpu_layers,
            "host_experts": format_blocks(self.placement.host_experts),
            "tokens_per_s": self.tokens_per_s,
            "ratio": self.ratio and self.ratio.ratio,
            "ratio_low": self.ratio and self.ratio.low,
            "ratio_high": self.ratio and self.ratio.high,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "host_weight_bytes": self.host.weight_bytes,
            "host_cache_bytes": self.host.cache_bytes,
            "host_compute_bytes": self.host.compute_bytes,
            "resident_bytes": self.most("resident_bytes"),
            "swapped_bytes": self.most("swapped_bytes"),
            "major_faults": self.most("major_faults"),
            "swapped_in_pages": self.most("swapped_in_pages"),
            "error": self.error,
        }


CSV_COLUMNS: Final = tuple(SweepRow(Placement()).to_dict())


@dataclass(frozen=True, slots=True)
class Choice:
    """The placement that a sweep speaks for: of the fastest and those equal to it, the one that takes least.

    ``equal`` are the placements whose rate, round by round, is not below that of the fastest beyond the interval. Among
    them the fewest bytes of the device count, then the fewest of the host, then the rate. ``others`` is how many ran
    besides the chosen one.
    """

    chosen: SweepRow
    fastest: SweepRow
    equal: tuple[SweepRow, ...]
    others: int = 0

    @classmethod
    def of(cls, rows: Sequence[SweepRow], confidence: float = 0.95) -> Choice | None:
        """Choose among those that ran, ``None`` where none did or there were too few rounds for an interval."""
        ran = [row for row in rows if len(row.samples) >= fewest_rounds(confidence)]
        if not ran:
            return None
        fastest = max(ran, key=_rate)
        equal = tuple(row for row in ran if row is not fastest and _reaches(row, fastest, confidence))
        chosen = min((fastest, *equal), key=lambda row: (row.device_bytes, row.host_bytes, -_rate(row)))
        return cls(chosen, fastest, equal, len(ran) - 1)

    def describe(self) -> str:
        """One line: which, and why."""
        if not self.others:
            return f"{self.chosen.title}: no other placement ran"
        if not self.equal:
            return f"{self.chosen.title}: the fastest, beyond the interval of any other"
        if self.chosen is self.fastest:
            others = "; ".join(row.title for row in self.equal)
            return f"{self.chosen.title}: the fastest, and the smallest of those equal within the interval ({others})"
        less = self.chosen.device_bytes < self.fastest.device_bytes
        what = "least of the device" if less else "least memory"
        equal = f"those equal within the interval, the fastest ({self.fastest.title}) among them"
        return f"{self.chosen.title}: takes the {what} of {equal}"


def _rate(row: SweepRow) -> float:
    return row.tokens_per_s or 0.0


def _reaches(row: SweepRow, fastest: SweepRow, confidence: float) -> bool:
    rates = [[sample.tokens_per_s for sample in one.samples] for one in (row, fastest)]
    return SpeedRatio.from_rates(rates[0], rates[1], confidence).high >= 1


def distinct(placements: Iterable[Placement]) -> tuple[list[Placement], list[str]]:
    """The placements without those that put everything where another one does, and a line for each left out."""
    kept: list[Placement] = []
    said: list[str] = []
    for placement in placements:
        same = next((other for other in kept if other.same_place(placement)), None)
        if same is None:
            kept.append(placement)
        elif same.name == placement.name:
            said.append(f"{same.name!r} was asked for twice and is measured once")
        else:
            said.append(f"{placement.name!r} is the same placement as {same.name!r} and is measured as that")
    return kept, list(dict.fromkeys(said))


def expert_placements(facts: ModelFacts, asked: Sequence[str]) -> list[Placement]:
    """All layers on the device, and the experts of some blocks on the host.

    An entry is a number (the first so many blocks that have experts) or a range of blocks (``33-40``).

    Raises ``UsageError`` for an entry that is neither, or that this model does not have.
    """
    stored = [block for block in facts.blocks_with_experts if block not in facts.mtp_blocks]
    placements = []
    for entry in map(str.strip, asked):
        is_count = entry.isascii() and entry.isdigit()
        try:
            blocks = tuple(stored[: _count(entry, len(stored))]) if is_count else parse_blocks(entry)
        except ValueError as error:
            raise UsageError(f"blocks: {error}") from None
        if not entry:
            raise UsageError("blocks: an entry of the list is empty")
        several = "blocks" if len(blocks) > 1 else "block"
        name = f"experts of {several} {format_blocks(blocks)} on the host" if blocks else "all on the device"
        placements.append(Placement(facts.blocks + 1, blocks, name))
    return placements


def layer_placements(facts: ModelFacts, asked: Sequence[int]) -> list[Placement]:
    """Whole layers on the device, the last so many; the rest, experts and all, on the host.

    Raises ``UsageError`` for more layers than there are.
    """
    most = facts.blocks + 1
    if beyond := [layers for layers in asked if layers > most]:
        raise UsageError(f"layers: {facts.name} has {most} with its output, not {beyond[0]}")
    return [Placement(layers, name=f"{layers} of {most} layers on the device") for layers in asked]


def sweep(
    opened: Open,
    placements: Sequence[Placement],
    settings: SweepSettings | None = None,
    *,
    on_progress: Callable[[str], None] | None = None,
    on_round: Callable[[list[SweepRow]], None] | None = None,
) -> list[SweepRow]:
    """Measure every placement in common rounds; one that cannot be loaded gets a row that says so.

    Args:
        opened: Loads the model under a placement and frees it at the end.
        placements: What to compare; the first one that runs is what the others are compared with.
        settings: Rounds and tokens.
        on_progress: Called with what is done next.
        on_round: Called after each round with the rows so far, for who wants to keep them should the rest be lost.

    Raises:
        UsageError: There is nothing to compare.
    """
    if not placements:
        raise UsageError("there is no placement to measure")
    run = _Sweep(opened, placements, settings or SweepSettings(), on_progress or (lambda _what: None))
    with run:
        for _ in run.rounds():
            if on_round is not None:
                on_round(run.rows())
        return run.rows()


@dataclass(slots=True)
class _Sweep:
    """The sweep in progress."""

    opened: Open
    placements: Sequence[Placement]
    settings: SweepSettings
    report: Callable[[str], None]
    _samples: dict[int, list[Sample]] = field(default_factory=dict)
    _sizes: dict[int, tuple[Taken, Taken]] = field(default_factory=dict)
    _errors: dict[int, str] = field(default_factory=dict)
    _kept: dict[int, PlacedRuntime] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rounds(self) -> Iterator[int]:
        """Every round; a number for each that is done."""
        order = list(range(len(self.placements)))
        for number in range(self.settings.rounds):
            for which in order:
                if which not in self._errors:
                    name = self.placements[which].name or self.placements[which].describe()
                    self.report(f"round {number + 1} of {self.settings.rounds}: {name}")
                    self._turn(which)
            order.reverse()
            yield number

    def rows(self) -> list[SweepRow]:
        """What the rounds so far came to."""
        which = range(len(self.placements))
        first = next((index for index in which if index not in self._errors), None)
        return [self._row(index, first) for index in which]

    def _turn(self, which: int) -> None:
        try:
            if self.settings.keep_loaded:
                if which not in self._kept:
                    self._kept[which] = self._stack.enter_context(self.opened(self.placements[which]))
                self._measure(which, self._kept[which])
            else:
                with self.opened(self.placements[which]) as runtime:
                    self._measure(which, runtime)
        except (RuntimeUnsupportedError, RuntimeFailureError) as error:
            self._errors[which] = str(error)

    def _measure(self, which: int, runtime: PlacedRuntime) -> None:
        buffers = runtime.buffers
        self._sizes[which] = (
            Taken.by(buffer for buffer in buffers if buffer.on_device),
            Taken.by(buffer for buffer in buffers if not buffer.on_device),
        )
        prompt_tokens = self.settings.prompt_tokens
        runtime.decode_timing(tokens=self.settings.warmup_tokens, prompt_tokens=prompt_tokens)
        before = _counters(runtime.process_id)
        timing = runtime.decode_timing(tokens=self.settings.tokens, prompt_tokens=prompt_tokens)
        after = _counters(runtime.process_id)
        sample = Sample(
            tokens_per_s=timing.tokens_per_s,
            resident_bytes=after.get("resident_bytes"),
            swapped_bytes=after.get("swapped_bytes"),
            major_faults=_difference(before, after, "major_faults"),
            swapped_in_pages=_difference(before, after, "swapped_in_pages"),
        )
        self._samples.setdefault(which, []).append(sample)

    def _row(self, which: int, first: int | None) -> SweepRow:
        device, host = self._sizes.get(which, (Taken(), Taken()))
        error = self._errors.get(which)
        if error is not None or first is None:
            return SweepRow(self.placements[which], device, host, error=error)
        rates = [[sample.tokens_per_s for sample in self._samples[index]] for index in (which, first)]
        ratio = None  # before there are rounds enough for an interval
        if len(rates[0]) >= fewest_rounds(self.settings.confidence):
            ratio = SpeedRatio.from_rates(rates[0], rates[1], self.settings.confidence)
        return SweepRow(self.placements[which], device, host, tuple(self._samples[which]), ratio)


def _count(entry: str, most: int) -> int:
    count = int(entry)
    if count > most:
        raise ValueError(f"{count} blocks with experts are asked for, and the model has {most}")
    return count


def _difference(before: dict[str, int], after: dict[str, int], name: str) -> int | None:
    return after[name] - before[name] if name in before and name in after else None


def _counters(process: int | None) -> dict[str, int]:
    """What the system says about a process and about swapping; what it does not say is left out."""
    if process is None:
        return {}
    counters = {}
    try:
        stat = (PROC / str(process) / "stat").read_text(encoding="utf-8", errors="replace")
        counters["major_faults"] = int(stat.rpartition(")")[2].split()[_MAJOR_FAULTS_FIELD - _FIELDS_AFTER_NAME])
        status = _named_numbers(PROC / str(process) / "status")
        for name, key in (("resident_bytes", "VmRSS:"), ("swapped_bytes", "VmSwap:")):
            if key in status:
                counters[name] = status[key] * 1024
        counters["swapped_in_pages"] = _named_numbers(PROC / "vmstat")["pswpin"]
    except (OSError, KeyError, IndexError, ValueError):
        pass  # another system, or a process that has just ended: the turn itself will say so
    return counters


def _named_numbers(path: Path) -> dict[str, int]:
    words = (line.split() for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
