"""Schedules: how many experts each block consults per token, as a value, as a file, and checked against a model.

::

    schedule: late-4-early-6
    model: {architecture: qwen35moe, blocks: 41, experts: 256, experts_used: 8}   # optional: what it was written for
    experts_used:            # blocks not listed keep the model's own count
      0-32: 6                # a range, both ends included; also one block (7: 5) or a list ("0-6,22-32": 6)
      33-40: 4
      all: 6                 # optional: every other block that routes, whichever they are
    source: {what: figure 1 of the 12 GB study, decode_tokens_per_s: 111.1, status: correct}   # optional
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from routing_lab.errors import Problem, UsageError, UserFileError
from routing_lab.model import MAX_BLOCKS, BlockBytes, ModelFacts, count_runs, format_blocks, parse_blocks
from routing_lab.yamlfile import Fields, kind_of, read_text, render_yaml

__all__ = [
    "STATUSES",
    "CountChange",
    "Schedule",
    "ScheduleSource",
    "ScheduledModel",
    "blocks_without_experts",
    "counts_yaml",
    "diff",
    "format_blocks",
    "format_counts",
    "is_certificate",
    "parse_blocks",
    "read_counts",
    "read_scheduled_model",
]

STATUSES: Final = ("correct", "wrong_answer", "no_final_answer", "runtime_error")
"""What a source may say about a schedule's answers; the words of ``routing_lab.answers.Status``."""

MAX_NAME: Final = 200

OTHERS: Final = "all"
"""The key for every routed block that is not listed."""

_CERTIFICATE: Final = re.compile(r"^certificate:", re.MULTILINE)
_SCHEDULE: Final = re.compile(r"^schedule:[ \t]*[^\s#]", re.MULTILINE)  # a certificate has a section of this name


@dataclass(frozen=True, slots=True)
class ScheduledModel:
    """The model a schedule was written for, as far as a header tells models apart.

    ``blocks`` are stored blocks. ``experts_used`` is the model's own count, ``None`` where it differs between blocks.
    """

    architecture: str
    blocks: int
    experts: int
    experts_used: int | None = None

    @classmethod
    def of(cls, facts: ModelFacts) -> ScheduledModel:
        """What a schedule for this model would say."""
        return cls(facts.architecture, facts.blocks, facts.experts, facts.uniform_experts_used)

    def facts(self) -> ModelFacts | None:
        """Facts that stand in for the model's own as far as the numbers go, every block taken for one that routes.

        ``None`` where the model's own counts differ between blocks or cannot be: the numbers then do not say them.
        """
        own = self.experts_used
        if own is None or not 1 <= own <= self.experts:
            return None
        blocks = tuple(range(self.blocks))
        return ModelFacts(
            files=(Path("none"),),
            name=f"{self.architecture} of {self.blocks} blocks",
            architecture=self.architecture,
            blocks=self.blocks,
            mtp_blocks=(),
            routed_blocks=blocks,
            dense_blocks=(),
            experts=self.experts,
            experts_used=dict.fromkeys(blocks, own),
            shared_experts=0,
            embedding_length=0,
            expert_feed_forward_length=None,
            context_length=None,
            has_chat_template=False,
            quantization="unknown",
            parameters=0,
            size_bytes=0,
            block_bytes={block: BlockBytes(routed_experts=1) for block in blocks},
            other_bytes=0,
        )

    def misfits(self, facts: ModelFacts, what: str = "schedule") -> list[Problem]:
        """Everything in which ``facts`` describe another model; ``what`` was written for it."""
        actual = ScheduledModel.of(facts)
        pairs = [
            ("architecture", self.architecture, actual.architecture),
            ("blocks", self.blocks, actual.blocks),
            ("experts", self.experts, actual.experts),
            ("experts_used", self.experts_used, actual.experts_used),
        ]
        return [
            Problem(f"model.{key}", f"is {mine}, {facts.name} has {theirs}", f"this {what} is for another model")
            for key, mine, theirs in pairs
            if mine != theirs and mine is not None
        ]

    def to_dict(self) -> dict[str, object]:
        """The section of a file that ``read_scheduled_model`` reads."""
        return _present(
            architecture=self.architecture, blocks=self.blocks, experts=self.experts, experts_used=self.experts_used
        )


@dataclass(frozen=True, slots=True)
class ScheduleSource:
    """Where a schedule comes from and what was said about it there; ``status`` is one of ``STATUSES``."""

    what: str
    decode_tokens_per_s: float | None = None
    status: str | None = None


@dataclass(frozen=True, slots=True)
class CountChange:
    """A run of blocks, both ends included, in which two schedules differ, and their counts there."""

    first: int
    last: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Experts consulted per token, for the blocks that are listed; the others keep the model's own count.

    ``experts_used`` holds (block, count), sorted by block. ``others`` is the count of every routed block that is not
    listed; ``None``: the model's own. Whether blocks and counts exist in a model is a question to ``resolve``; a count
    above the model's own is legal.
    """

    name: str
    experts_used: tuple[tuple[int, int], ...]
    model: ScheduledModel | None = None
    source: ScheduleSource | None = None
    others: int | None = None

    def __post_init__(self) -> None:
        if not _is_name(self.name):
            raise ValueError(
                f"{self.name!r} is no name for a schedule: one printable line of at most {MAX_NAME} characters"
            )
        blocks = [block for block, _ in self.experts_used]
        if blocks != sorted(set(blocks)) or any(not 0 <= block < MAX_BLOCKS for block in blocks):
            raise ValueError("experts_used must list each block once, in order, from 0")
        if any(type(count) is not int for count in (*dict(self.experts_used).values(), self.others or 0)):
            raise ValueError("every count must be a whole number")

    @classmethod
    def from_counts(cls, name: str, counts: Mapping[int, int]) -> Schedule:
        """A schedule from block -> count."""
        return cls(name, tuple(sorted(counts.items())))

    @classmethod
    def uniform(cls, count: int, facts: ModelFacts, name: str | None = None) -> Schedule:
        """``count`` experts in every routed block."""
        counts = dict.fromkeys(facts.routed_blocks, count)
        return replace(cls.from_counts(name or f"uniform-{count}", counts), model=ScheduledModel.of(facts))

    @classmethod
    def baseline(cls, facts: ModelFacts) -> Schedule:
        """The model's own counts."""
        return replace(cls.from_counts("baseline", facts.experts_used), model=ScheduledModel.of(facts))

    @classmethod
    def even_spread(cls, total: int, facts: ModelFacts) -> Schedule:
        """``total`` consulted experts spread evenly over the routed blocks: what no search would have to find.

        Counts differ by at most one, and the blocks with one more lie evenly among the others. Raises ``UsageError``
        where the total does not give every block at least one expert and at most all.
        """
        blocks = facts.routed_blocks
        if not blocks or not len(blocks) <= total <= len(blocks) * facts.experts:
            raise UsageError(f"{total} experts cannot be spread over {len(blocks)} blocks of {facts.experts}")
        # Differences of a rounded line with slope total / len(blocks).
        shares = [(i + 1) * total // len(blocks) - i * total // len(blocks) for i in range(len(blocks))]
        spread = cls.from_counts(f"even-spread-{total}", dict(zip(blocks, shares, strict=True)))
        return replace(spread, model=ScheduledModel.of(facts))

    @classmethod
    def load(cls, path: Path) -> Schedule:
        """Read a schedule file. Raises ``UserFileError`` with every problem in it."""
        return cls.from_yaml(read_text(path), str(path))

    @classmethod
    def from_yaml(cls, text: str, file: str = "schedule", facts: ModelFacts | None = None) -> Schedule:
        """Parse a schedule; ``file`` names it in messages.

        Raises ``UserFileError`` with every problem in it; of a bad file also what does not fit ``facts``.
        """
        if is_certificate(text):
            remedy = "routing-lab export FILE --format schedule makes one of it"
            raise UserFileError(file, [Problem("", "is a certificate, not a schedule", remedy)])
        top = Fields.parse(text, file)
        name = top.text("schedule")
        if isinstance(top.raw("schedule"), str) and not _is_name(name):
            top.problem("schedule", f"must be one printable line of at most {MAX_NAME} characters")
        model = read_scheduled_model(top.section("model"))
        counts_section = top.section("experts_used", required=True)
        others = None if counts_section is None else _read_others(counts_section)
        counts = {} if counts_section is None else read_counts(counts_section, apart=(OTHERS,))
        if counts_section is not None and model is not None:
            _check_written_model(counts_section, counts, others, model)
        source = _read_source(top.section("source"))
        if top.faulty and facts is not None and model is None:
            for problem in _misfits(count_runs(counts), others, facts):
                top.problem(problem.where, problem.what, problem.remedy)
        top.finish()
        return cls(name, tuple(sorted(counts.items())), model, source, others)

    def to_yaml(self) -> str:
        """The schedule as a file; reading it back gives an equal schedule."""
        data: dict[str, object] = {"schedule": self.name}
        if self.model is not None:
            data["model"] = self.model.to_dict()
        rest = {} if self.others is None else {OTHERS: self.others}
        data["experts_used"] = counts_yaml(dict(self.experts_used)) | rest
        if self.source is not None:
            data["source"] = _present(
                what=self.source.what,
                decode_tokens_per_s=self.source.decode_tokens_per_s,
                status=self.source.status,
            )
        return render_yaml(data, flow=("model", "source"))

    def save(self, path: Path) -> None:
        """Write ``to_yaml`` to ``path``."""
        path.write_text(self.to_yaml(), encoding="utf-8")

    def resolve(self, facts: ModelFacts) -> dict[int, int]:
        """The count of every routed block of the model, in order.

        A block for multi-token prediction may be listed, since files number the blocks as stored; it does not run in
        the main pass, so its count has no effect and is left out here.

        Raises ``UserFileError`` with every misfit: a section ``model`` that describes another model, or else blocks
        that have no routed experts, counts below 1 or above the number of experts.
        """
        problems = [] if self.model is None else self.model.misfits(facts)
        if not problems:  # of a schedule for another model, its blocks need not be listed one by one
            problems = _misfits(self.ranges(), self.others, facts)
        if problems:
            raise UserFileError(f"schedule {self.name}", problems)
        counts = self.over(facts.experts_used)
        return {block: counts[block] for block in facts.experts_used}

    def over(self, own: Mapping[int, int]) -> dict[int, int]:
        """The counts of blocks whose own ones are given, and of all listed blocks; nothing is checked."""
        return (dict(own) if self.others is None else dict.fromkeys(own, self.others)) | dict(self.experts_used)

    def completed(self, facts: ModelFacts) -> Schedule:
        """The same schedule with every routed block listed and the model named. Raises as ``resolve`` does."""
        counts = tuple(self.resolve(facts).items())
        return replace(self, experts_used=counts, others=None, model=ScheduledModel.of(facts))

    def key(self, facts: ModelFacts) -> str:
        """Text that is equal for schedules that compute the same: ``"0-6:6,7-32:5"``. Raises as ``resolve`` does."""
        return format_counts(self.resolve(facts))

    def uniform_count(self, facts: ModelFacts) -> int | None:
        """The count where it is the same in all routed blocks, else ``None``. Raises as ``resolve`` does."""
        counts = set(self.resolve(facts).values())
        return counts.pop() if len(counts) == 1 else None

    def total(self, facts: ModelFacts) -> int:
        """Experts consulted per token, summed over all routed blocks. Raises as ``resolve`` does."""
        return sum(self.resolve(facts).values())

    def ranges(self) -> list[tuple[int, int, int]]:
        """The listed blocks as runs (first, last, count), both ends included."""
        return count_runs(dict(self.experts_used))


def diff(before: Schedule, after: Schedule, facts: ModelFacts) -> list[CountChange]:
    """Where two schedules make the model compute differently, in order; empty when nowhere. Raises as ``resolve``."""
    old, new = before.resolve(facts), after.resolve(facts)
    changes: list[CountChange] = []
    for block in old:
        if old[block] == new[block]:
            continue
        first = block
        if changes and (changes[-1].last, changes[-1].before, changes[-1].after) == (block - 1, old[block], new[block]):
            first = changes.pop().first
        changes.append(CountChange(first, block, old[block], new[block]))
    return changes


def is_certificate(text: str) -> bool:
    """Whether a file is a certificate and no schedule: both are YAML, and one is easily given for the other."""
    return _CERTIFICATE.search(text) is not None and _SCHEDULE.search(text) is None


def format_counts(counts: Mapping[int, int]) -> str:
    """Counts as compact text, ``{0: 6, 1: 6, 2: 5}`` -> ``"0-1:6,2:5"``; ``overrides.parse_experts`` reads it."""
    return ",".join(f"{format_blocks(range(first, last + 1))}:{count}" for first, last, count in count_runs(counts))


def counts_yaml(counts: Mapping[int, int]) -> dict[object, int]:
    """Counts in the form that ``read_counts`` reads: ``{"0-32": 6, 33: 4}``."""
    return {first if first == last else f"{first}-{last}": count for first, last, count in count_runs(counts)}


def read_counts(section: Fields, *, apart: Collection[object] = ()) -> dict[int, int]:
    """Block -> count from a mapping of blocks to counts; every problem is noted in ``section``.

    ``apart`` are keys that somebody else reads. A count that is refused is 1 here, so that its blocks can be looked at.
    """
    section.all_read()
    counts: dict[int, int] = {}
    owner: dict[int, object] = {}
    for key, count in section.values.items():
        if key in apart:
            continue
        blocks = _read_block_key(section, key)
        read = _read_count(section, key, count)
        counts = dict.fromkeys(blocks, 1) | counts if read is None else counts | dict.fromkeys(blocks, read)
        for other in dict.fromkeys(owner[block] for block in blocks if block in owner):
            shared = format_blocks(block for block in blocks if owner.get(block) == other)
            section.problem(key, f"overlaps with {other} (both name {shared})", "name every block once")
        owner.update(dict.fromkeys(blocks, key))
    return counts


def _read_others(section: Fields) -> int | None:
    """The count of all blocks that are not listed."""
    return _read_count(section, OTHERS, section.values[OTHERS]) if section.has(OTHERS) else None


def _read_count(section: Fields, key: object, count: object) -> int | None:
    if isinstance(count, bool) or not isinstance(count, int):
        section.problem(key, f"is {kind_of(count)}, not a whole number of experts")
        return None
    if count < 1:
        section.problem(key, f"is {count}; a block consults at least 1 expert")
        return None
    return count


def _is_name(name: str) -> bool:
    return bool(name.strip()) and name.isprintable() and len(name) <= MAX_NAME


def _read_block_key(section: Fields, key: object) -> tuple[int, ...]:
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        section.problem(key, f"the key is {kind_of(key)}", "a key is a block or a range such as 7 or 0-6")
        return ()
    try:
        blocks = parse_blocks(str(key))
    except ValueError as error:
        section.problem(key, str(error))
        return ()
    if not blocks:
        section.problem(key, "names no block")
    return blocks


def read_scheduled_model(section: Fields | None) -> ScheduledModel | None:
    """The section ``model`` of a file, ``None`` where it is absent; every problem is noted in it."""
    if section is None:
        return None
    return ScheduledModel(
        architecture=section.text("architecture"),
        blocks=section.integer("blocks", minimum=1, maximum=MAX_BLOCKS),
        experts=section.integer("experts", minimum=1),
        experts_used=section.integer("experts_used", default=None, minimum=1),
    )


def _check_written_model(section: Fields, counts: Mapping[int, int], others: int | None, model: ScheduledModel) -> None:
    """A file can contradict itself; that needs no model to see."""
    if others is not None and others > model.experts >= 1:
        section.problem(OTHERS, f"is {others}; the model section says {model.experts} experts")
    for first, last, count in count_runs(counts):
        where = format_blocks(range(first, last + 1))
        if last >= model.blocks >= 1:
            section.problem(
                where, f"the model section says {model.blocks} blocks, so the last one is {model.blocks - 1}"
            )
        if count > model.experts >= 1:
            section.problem(where, f"is {count}; the model section says {model.experts} experts")


def _read_source(section: Fields | None) -> ScheduleSource | None:
    if section is None:
        return None
    return ScheduleSource(
        what=section.text("what"),
        decode_tokens_per_s=section.number("decode_tokens_per_s", default=None, minimum=0),
        status=section.choice("status", STATUSES, default=None),
    )


def _misfits(runs: Iterable[tuple[int, int, int]], others: int | None, facts: ModelFacts) -> list[Problem]:
    problems = [misfit for run in runs for misfit in _range_misfits(*run, facts)]
    if others is not None:
        where = f"experts_used.{OTHERS}"
        problems += [] if facts.is_moe else [Problem(where, f"{facts.name} is a dense model: no block routes")]
        problems += _count_misfits(where, others, facts)
    return problems


def _count_misfits(where: str, count: int, facts: ModelFacts) -> list[Problem]:
    if 1 <= count <= facts.experts or not facts.is_moe:
        return []
    return [Problem(where, f"is {count}", f"{facts.name} has {facts.experts} experts: 1 to {facts.experts}")]


def _range_misfits(first: int, last: int, count: int, facts: ModelFacts) -> list[Problem]:
    where = f"experts_used.{format_blocks(range(first, last + 1))}"
    problems = []
    strangers = blocks_without_experts(range(first, last + 1), facts)
    if strangers:
        problems.append(Problem(where, strangers, _where_routed(facts)))
    return problems + _count_misfits(where, count, facts)


def blocks_without_experts(blocks: Iterable[int], facts: ModelFacts) -> str:
    """What is wrong with those of ``blocks`` for which no count can be given; empty when nothing is."""
    wrong = set(blocks) - set(facts.routed_blocks) - (set(facts.mtp_blocks) & set(facts.blocks_with_experts))
    beyond = {block for block in wrong if block >= facts.blocks}
    said = []
    if beyond:
        are = "is" if len(beyond) == 1 else "are"
        there = f"{facts.blocks} blocks (0-{facts.blocks - 1})" if facts.blocks > 1 else "1 block (0)"
        said.append(f"{facts.name} has {there}; {format_blocks(beyond)} {are} none")
    if wrong - beyond:
        said.append(f"block {format_blocks(wrong - beyond)} of {facts.name} has no routed experts to choose from")
    return "; ".join(said)


def _where_routed(facts: ModelFacts) -> str:
    if not facts.is_moe:
        return "it is a dense model"
    return f"experts to choose from are in {format_blocks(facts.routed_blocks)}"


def _present(**values: Any) -> dict[str, Any]:  # noqa: ANN401 - scalars of a YAML file
    return {key: value for key, value in values.items() if value is not None}
