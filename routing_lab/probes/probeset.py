r"""Probes and probe sets: frozen values, their YAML form, and the digest that names what a set asks.

::

    probes: arithmetic-core          # name
    prompt: chat                     # raw: prompts are sent as they are; chat: through the model's own template
    thinking: false                  # chat only; absent: the template's own default
    max_tokens: 256                  # budget of a completion; an item may have its own
    stop: ["\nQ:"]                   # optional; a base model would go on with a question of its own
    extract: declared                # or last_number: the last number counts when no answer is declared
    source: {script: ..., seed: 7}   # optional, free-form: where the probes come from
    items:
      - {id: add-01, prompt: "47+86=?", answer: "133", type: integer}
      - {id: third, prompt: "...", answer: "1/3", type: rational, split: holdout, max_tokens: 512, tags: [fractions]}
      - {id: pi, prompt: "...", answer: "3.14", type: decimal, places: 2}
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from routing_lab.answers import AnswerType, validate_expected
from routing_lab.errors import Problem, UserFileError
from routing_lab.yamlfile import Fields, parse_yaml, render_yaml

__all__ = ["DEFAULT_MAX_TOKENS", "Extract", "Probe", "ProbeSet", "PromptStyle", "Split"]

Split = Literal["gate", "holdout"]
PromptStyle = Literal["raw", "chat"]
Extract = Literal["declared", "last_number"]

DEFAULT_MAX_TOKENS = 256

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)

Fault = tuple[str, str, str]
"""A key of an item or a set, what is wrong with its value, and the way out."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One prompt with its exact answer.

    ``max_tokens`` of ``None`` means the set's budget. ``places`` goes with a ``decimal`` answer.

    Raises:
        UserFileError: Something is wrong with a value; all of it is listed.
    """

    id: str
    prompt: str
    answer: str
    type: AnswerType
    split: Split = "gate"
    max_tokens: int | None = None
    places: int | None = None
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if faults := list(_probe_faults({name: getattr(self, name) for name in self.__slots__})):
            raise UserFileError(f"probe {self.id}", [Problem(*fault) for fault in faults])


@dataclass(frozen=True, slots=True)
class ProbeSet:
    """Probes that are asked in the same way.

    Raises:
        UserFileError: Something is wrong with a value, or two items share an id or a prompt; all of it is listed.
    """

    name: str
    items: tuple[Probe, ...]
    prompt: PromptStyle = "raw"
    thinking: bool | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
    stop: tuple[str, ...] = ()
    extract: Extract = "declared"
    source: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        header = {name: getattr(self, name) for name in self.__slots__}
        faults = [*_set_faults(header), *_item_faults([(probe.id, probe.prompt) for probe in self.items])]
        if faults:
            raise UserFileError(f"probe set {self.name}", [Problem(*fault) for fault in faults])

    @classmethod
    def load(cls, path: Path) -> ProbeSet:
        """Read a probe set file. Raises ``UserFileError`` with everything that is wrong with it."""
        return cls._read(Fields.load(path))

    @classmethod
    def from_yaml(cls, text: str, file: str = "probe set") -> ProbeSet:
        """Read a probe set from YAML; ``file`` names it in messages. Raises as ``load`` does."""
        return cls._read(Fields.parse(text, file))

    @classmethod
    def _read(cls, top: Fields) -> ProbeSet:
        header: dict[str, Any] = {
            "name": top.text("probes"),
            "prompt": top.choice("prompt", get_args(PromptStyle)),
            "thinking": top.boolean("thinking", None),
            "max_tokens": top.integer("max_tokens", DEFAULT_MAX_TOKENS),
            "stop": top.texts("stop", ()),
            "extract": top.choice("extract", get_args(Extract), "declared"),
            "source": _read_source(top),
        }
        sections = top.sections("items")
        items = [_read_item(section) for section in sections]
        in_file = {"name": "probes"}
        unread = {key for key, value in header.items() if _is_stand_in(top, in_file.get(key, key), value)}
        unread |= {key for key in ("name", "prompt") if not top.has(in_file.get(key, key))}
        if "prompt" in unread:
            unread.add("thinking")  # whether it means anything depends on the prompt
        for key, what, remedy in _set_faults(header | {"items": items or top.raw("items")}):
            if key not in unread:
                top.problem(in_file.get(key, key), what, remedy)
        for key, what, remedy in _item_faults([(item["id"], item["prompt"]) for item in items]):
            top.problem(key, what, remedy)
        top.finish()
        return cls(items=tuple(Probe(**item) for item in items), **header)

    def to_yaml(self) -> str:
        """The set as YAML, one item a line; ``from_yaml`` gives the same set back."""
        header: dict[str, object] = {"probes": self.name, "prompt": self.prompt}
        if self.thinking is not None:
            header["thinking"] = self.thinking
        header["max_tokens"] = self.max_tokens
        if self.stop:
            header["stop"] = list(self.stop)
        if self.extract != "declared":
            header["extract"] = self.extract
        if self.source:
            header["source"] = dict(self.source)
        lines = [_item_line(probe) for probe in self.items]
        return render_yaml(header, flow=("stop",)) + "items:\n" + "".join(lines)

    def save(self, path: Path) -> None:
        """Write the set to a file. Raises ``UserFileError`` where that is not possible."""
        try:
            path.write_text(self.to_yaml(), encoding="utf-8")
        except OSError as error:
            raise UserFileError(str(path), [Problem("", f"cannot be written: {error.strerror or error}")]) from None

    def split(self, split: Split) -> tuple[Probe, ...]:
        """The probes of one split, in the order of the file."""
        return tuple(probe for probe in self.items if probe.split == split)

    def budget(self, probe: Probe) -> int:
        """The number of tokens that the completion of ``probe`` may have."""
        return self.max_tokens if probe.max_tokens is None else probe.max_tokens

    @property
    def digest(self) -> str:
        """``sha256:`` and the digest of everything that can change a verdict.

        Names, tags, the source, the layout of the file and the order of its items are left out: they change no answer.
        """
        asked = {
            "digest": 1,
            "prompt": self.prompt,
            "thinking": self.thinking,
            "stop": sorted(set(self.stop)),
            "extract": self.extract,
            "items": [
                [probe.id, probe.prompt, probe.answer, probe.type, probe.split, self.budget(probe), probe.places]
                for probe in sorted(self.items, key=lambda probe: probe.id)
            ],
        }
        canonical = json.dumps(asked, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(canonical.encode("ascii")).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# What can be wrong, said once for files and for values made in code


def _probe_faults(probe: Mapping[str, Any]) -> Iterator[Fault]:
    if not _ID.fullmatch(probe["id"]):
        yield "id", f"is {probe['id']!r}", "use up to 100 letters, digits, dots, dashes and underscores"
    yield from _text_faults("prompt", probe["prompt"], "write the question")
    yield from _text_faults("answer", probe["answer"], "write the exact answer")
    yield from _type_faults(probe)
    if probe["split"] not in get_args(Split):
        yield "split", f"is {probe['split']!r}", "known: " + ", ".join(get_args(Split))
    if probe["max_tokens"] is not None and probe["max_tokens"] < 1:
        yield "max_tokens", f"is {probe['max_tokens']}; a completion needs at least one token", ""
    if not all(tag.strip() for tag in probe["tags"]):
        yield "tags", "has a blank tag", "leave it out"
    yield from _character_faults("tags", *probe["tags"])


def _text_faults(key: str, text: str, remedy: str) -> Iterator[Fault]:
    if not text.strip():
        yield key, "is blank", remedy
    yield from _character_faults(key, text)


def _character_faults(key: str, *texts: str) -> Iterator[Fault]:
    if any(character == "\0" or "\ud800" <= character <= "\udfff" for text in texts for character in text):
        yield key, "has a NUL or half a surrogate pair, which no tokenizer takes", "remove it"


def _type_faults(probe: Mapping[str, Any]) -> Iterator[Fault]:
    """Whether the answer is one of its type; a rule that is broken before makes the later ones meaningless."""
    answer, answer_type, places = probe["answer"], probe["type"], probe["places"]
    if answer_type not in get_args(AnswerType):
        yield "type", f"is {answer_type!r}", "known: " + ", ".join(get_args(AnswerType))
    elif answer_type == "decimal" and places is None:
        yield (
            "places",
            "is missing: a decimal answer is exact to a stated number of places",
            "add places: 2, for instance",
        )
    elif answer_type != "decimal" and places is not None:
        yield "places", f"is {places}, but the type is {answer_type}", "only decimal answers have places"
    elif places is not None and not 0 <= places <= MAX_PLACES:
        yield "places", f"is {places}", f"use 0 to {MAX_PLACES}"
    elif answer.strip():
        try:
            validate_expected(answer, answer_type, places)
        except ValueError as error:
            yield "answer", f"cannot be checked as {answer_type}: {answer[:60]!r}: {error}", ""


MAX_PLACES = 30


def _set_faults(header: Mapping[str, Any]) -> Iterator[Fault]:
    yield from _text_faults("name", header["name"], "give the set a name")
    if header["prompt"] not in get_args(PromptStyle):
        yield "prompt", f"is {header['prompt']!r}", "known: " + ", ".join(get_args(PromptStyle))
    if header["extract"] not in get_args(Extract):
        yield "extract", f"is {header['extract']!r}", "known: " + ", ".join(get_args(Extract))
    if header["thinking"] is not None and header["prompt"] == "raw":
        yield "thinking", "means nothing for raw prompts", "use prompt: chat, or leave it out"
    if header["max_tokens"] < 1:
        yield "max_tokens", f"is {header['max_tokens']}; a completion needs at least one token", ""
    if not all(header["stop"]):
        yield "stop", "has an empty text, at which every completion would end", "leave it out"
    yield from _character_faults("stop", *header["stop"])
    if not _survives_its_file(header["source"]):
        yield "source", "holds what a file cannot give back", "use texts, finite numbers, lists and mappings of them"
    if isinstance(header["items"], Sequence) and not header["items"]:
        yield "items", "is empty", "a set needs at least one probe"


def _survives_its_file(source: object) -> bool:
    """Whether a free-form section comes back from YAML as it is (a tuple, a NaN or an object does not)."""
    if not isinstance(source, Mapping) or not all(isinstance(key, str) for key in source):
        return False
    try:
        written = render_yaml({"source": dict(source)})
        written.encode()
        return parse_yaml(written, "source") == {"source": source}
    except (yaml.YAMLError, UserFileError, ValueError, TypeError, RecursionError):
        return False


def _item_faults(asked: Sequence[tuple[str, str]]) -> Iterator[Fault]:
    """Ids and prompts that are there twice; a question in both splits would leak from the gate into the holdout."""
    for column, key in enumerate(("id", "prompt")):
        first: dict[str, int] = {}
        for index, item in enumerate(asked):
            value = item[column]
            if value and first.setdefault(value, index) != index:
                remedy = "every probe needs its own" if key == "id" else "ask every question once"
                yield f"items[{index}].{key}", f"is the same as that of items[{first[value]}]", remedy


# ---------------------------------------------------------------------------------------------------------------------
# YAML


def _read_source(top: Fields) -> dict[str, Any]:
    section = top.section("source")
    if section is None:
        return {}
    section.all_read()
    return {str(key): value for key, value in section.values.items()}


def _read_item(section: Fields) -> dict[str, Any]:
    """The fields of one item; what is wrong with them is noted in ``section``."""
    item: dict[str, Any] = {
        "id": section.text("id"),
        "prompt": section.text("prompt"),
        "answer": section.text("answer"),
        "type": section.choice("type", get_args(AnswerType)),
        "split": section.choice("split", get_args(Split), "gate"),
        "max_tokens": section.integer("max_tokens", None),
        "places": section.integer("places", None),
        "tags": section.texts("tags", ()),
    }
    unread = {key for key, value in item.items() if _is_stand_in(section, key, value)}
    unread |= {key for key in ("id", "prompt", "answer", "type") if not section.has(key)}
    if "type" in unread:
        unread |= {"answer", "places"}  # nothing can be said of them without a type
    for key, what, remedy in _probe_faults(item):
        if key not in unread:
            section.problem(key, what, remedy)
    return item


def _is_stand_in(fields: Fields, key: str, read: object) -> bool:
    """Whether ``read`` only stands in for a value of the file that was refused, so that nothing is to be said of it.

    Types are compared too, since ``false`` equals 0. Of a list the good elements are kept, and they are the file's own.
    """
    if not fields.has(key) or isinstance(read, (tuple, dict)):
        return False
    raw = fields.raw(key)
    return type(raw) is not type(read) or raw != read


def _item_line(probe: Probe) -> str:
    item: dict[str, object] = {"id": probe.id, "prompt": probe.prompt, "answer": probe.answer, "type": probe.type}
    item["split"] = probe.split
    item |= {key: value for key in ("max_tokens", "places") if (value := getattr(probe, key)) is not None}
    if probe.tags:
        item["tags"] = list(probe.tags)
    # JSON is YAML's flow style with every string on one line; only what YAML calls unprintable needs an escape more.
    line = _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(item, ensure_ascii=False))
    return f"  - {line}\n"


_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
