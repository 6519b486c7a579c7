"""Strict reading of the YAML files people write: every problem at once, each with its path and the way out.

A file is read field by field, and whatever is wrong is collected; nothing is raised before ``finish``::

    top = Fields.load(Path("probes/arithmetic.yaml"))      # or Fields.parse(text, file="probes/arithmetic.yaml")
    name = top.text("probes")                              # required: no default
    budget = top.integer("max_tokens", default=256, minimum=1)
    for item in top.sections("items"):                     # a list of mappings, each with its own path (items[3])
        prompt = item.text("prompt")
        kind = item.choice("type", ("integer", "rational"), default="integer")
        if not prompt.strip():
            item.problem("prompt", "is blank", "write the question")
    top.finish()                                           # UserFileError: all problems, unknown keys among them

A field that is missing or has the wrong kind gives a stand-in of the right type, so that reading can go on; ``finish``
then raises, and nobody ever uses the stand-in. Values that need more rules go through ``problem``.

The accepted language is YAML without its traps: one document of UTF-8, at most 16 MiB, no anchors and aliases (a file
of a kilobyte can ask for gigabytes with them), no tags, no key twice. Words and numbers mean what they look like, as in
YAML 1.2: ``true`` and ``false`` are the only truth values, whole numbers are plain decimal digits, and everything that
YAML 1.1 reads as something else than it shows (``yes``, ``010`` for 8, ``1:30`` for 90, ``1_000``, ``0x10``, dates) is
text. A key is a whole number or the text that was written.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml

from routing_lab.errors import Problem, UserFileError
from routing_lab.files import open_file

__all__ = ["MAX_BYTES", "Fields", "kind_of", "parse_yaml", "read_text", "render_yaml", "shown_key"]

MAX_BYTES: Final = 16 * 1024 * 1024
"""Largest file that is read, in bytes: a hundred thousand probes fit, a model given by mistake does not."""

MAX_DEPTH: Final = 32
"""Deepest nesting that is read; every format of the project needs less than six levels."""

MAX_SHOWN: Final = 60
"""Most characters of a value that a message shows."""

T = TypeVar("T")


class _Missing:
    """Marks a parameter that was not given, where ``None`` is a meaningful value."""


_MISSING: Final = _Missing()

# libyaml parses ten times faster; the fallback reads the same language.
_Base: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """``SafeLoader`` that reports duplicate keys and takes nothing for a number that does not look like it."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.problems: list[Problem] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """Build the mapping and note every key that is there twice, with its line."""
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key is a list or a mapping; keys are plain words or numbers", key_node.start_mark
                )
            # Only whole numbers: of other keys a message has to show what was written, not what became of it.
            key = self.construct_object(key_node, deep=deep) if key_node.tag == _INTEGER_TAG else key_node.value
            if key in mapping:
                self.problems.append(
                    Problem(_line(key_node.start_mark), f"key {key_node.value!r} is here twice", "keep one of them")
                )
            mapping[key] = self.construct_object(value_node, deep=deep)
        return mapping


_INTEGER_TAG: Final = "tag:yaml.org,2002:int"
_FLOAT: Final = re.compile(
    r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
# The core schema of YAML 1.2 (https://yaml.org/spec/1.2.2, 10.3.2) without its octal and hexadecimal numbers, and
# without leading zeros: whoever writes 010 may mean 8 or 10.
_SCALARS: Final = (
    ("tag:yaml.org,2002:null", re.compile("~|null|Null|NULL|"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF")),
    (_INTEGER_TAG, re.compile("[-+]?(?:0|[1-9][0-9]*)"), list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789")),
)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """What plain words are taken for, by their first character, in PyYAML's form."""
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, firsts in _SCALARS:
        for first in firsts:
            # PyYAML matches only the start.
            table.setdefault(first, []).append((tag, re.compile(f"(?:{pattern.pattern})$")))
    return table


_Loader.yaml_implicit_resolvers = _resolvers()


def read_text(path: Path) -> str:
    """The text of a UTF-8 file of at most ``MAX_BYTES``, or of ``/dev/stdin`` or ``/dev/fd/N``.

    Raises ``UserFileError`` where it is not one; other pipes and devices are none.
    """
    try:
        with path.open("rb") if _is_stream(path) else open_file(path) as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserFileError(str(path), [Problem("", f"cannot be read: {error.strerror or error}")]) from None
    except ValueError as error:  # a NUL in the name
        raise UserFileError(repr(str(path)), [Problem("", f"is no file name: {error}")]) from None
    if len(raw) > MAX_BYTES:
        raise UserFileError(str(path), [_too_large()])
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"is no UTF-8 text (byte 0x{raw[error.start]:02x} at offset {error.start})"
        remedy = "this is a GGUF model; give it with --model" if raw.startswith(b"GGUF") else "save the file as UTF-8"
        raise UserFileError(str(path), [Problem("", what, remedy)]) from None


def _is_stream(path: Path) -> bool:
    """Whether this is a name for what the shell has opened already: ``command |``, ``< file``, ``<(command)``."""
    return str(path) == "/dev/stdin" or str(path.parent) == "/dev/fd"


def parse_yaml(text: str, file: str) -> object:
    """The one document in ``text``, as plain dicts, lists and scalars. Raises ``UserFileError`` naming ``file``."""
    # A character is at least a byte, so a text that passes needs no more than 4 times MAX_BYTES of memory.
    if len(text) > MAX_BYTES:
        raise UserFileError(file, [_too_large()])
    try:
        _refuse_traps(text, file)
        loader = _Loader(text)
        try:
            document = loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise UserFileError(file, [_syntax_problem(error)]) from None
    except (ValueError, OverflowError) as error:  # a number of thousands of digits, a lone surrogate
        raise UserFileError(file, [Problem("", f"has a value that cannot be read: {error}")]) from None
    if loader.problems:
        raise UserFileError(file, loader.problems)
    result: object = document
    return result


def render_yaml(data: Mapping[str, object], *, flow: Iterable[str] = ()) -> str:
    """``data`` as YAML, keys in the given order; the values of the keys in ``flow`` stand on one line if they can."""
    inline = frozenset(flow)
    parts = []
    for key, value in data.items():
        if key in inline and isinstance(value, (Mapping, list, tuple)):
            body = _dump(value, default_flow_style=True, width=math.inf)
            if body.count("\n") == 1:  # a text of several lines has no place on one
                parts.append(f"{_dump({key: 0}).rstrip()[:-1]}{body}")
                continue
        parts.append(_dump({key: value}, width=120))
    return "".join(parts)


class _Dumper(yaml.SafeDumper):
    """``SafeDumper`` whose texts read back as texts, here and under YAML 1.1.

    The rarer line breaks are escaped, which PyYAML writes raw and reads back as a blank; ``1e5`` is quoted, which is a
    number only to the newer language.
    """


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"(?:{_FLOAT.pattern})$"), list("-+.0123456789"))


def _dump(value: object, **layout: Any) -> str:  # noqa: ANN401 - PyYAML's own options
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **layout)
    return text


def kind_of(value: object) -> str:
    """What a value is, in the words of someone who writes YAML (``a number``, ``nothing``, ``a list``)."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return f"the number {_short(value)}"
    if isinstance(value, str):
        return f"the text {_short(value)}"
    return "a list" if isinstance(value, list) else "a mapping"


def shown_key(key: object) -> str:
    """A key as messages show it: as it was written, unless it is long or holds what does not print."""
    text = str(key)
    return text if text.isprintable() and text and len(text) <= MAX_SHOWN else _short(key)


class Fields:
    """One mapping of a file, read key by key; all sections of a file share one list of problems.

    The file's text is parsed with ``parse`` or ``load``; ``finish`` on that object ends the reading.
    """

    def __init__(self, values: Mapping[object, object], file: str, path: str = "", root: Fields | None = None) -> None:
        self.values = values
        self.file = file
        self.path = path
        self._root = root or self
        self._asked: set[object] = set()
        self._problems: list[Problem] = []
        self._sections: list[Fields] = []

    @classmethod
    def load(cls, path: Path) -> Fields:
        """Read a file. Raises ``UserFileError`` where it is unreadable, no YAML or no mapping."""
        return cls.parse(read_text(path), str(path))

    @classmethod
    def parse(cls, text: str, file: str) -> Fields:
        """Read a text; ``file`` names it in messages. Raises ``UserFileError`` where it is no YAML or no mapping."""
        document = parse_yaml(text, file)
        if not isinstance(document, dict):
            found = "empty" if document is None else kind_of(document)
            what = f"is {found}, not a mapping of keys to values"
            raise UserFileError(file, [Problem("", what)])
        return cls(document, file)

    def at(self, key: object) -> str:
        """The path of ``key`` in the file, as messages show it: ``items[3].answer``."""
        return f"{self.path}.{shown_key(key)}" if self.path else shown_key(key)

    def problem(self, key: object, what: str, remedy: str = "") -> None:
        """Note that ``key`` of this section (or the section itself for ``""``) is wrong."""
        where = self.path if key == "" else self.at(key)
        self._root._problems.append(Problem(where, what, remedy))  # noqa: SLF001 - the root is of this class

    @property
    def faulty(self) -> bool:
        """Whether something in the file was found wrong by now."""
        return bool(self._root._problems)  # noqa: SLF001 - the root is of this class

    def has(self, key: str) -> bool:
        """Whether the key is there, whatever its value. Does not count as reading it."""
        return key in self.values

    def raw(self, key: str, default: object = None) -> object:
        """The value as YAML gives it, unchecked."""
        self._asked.add(key)
        return self.values.get(key, default)

    def text(self, key: str, default: T | _Missing = _MISSING) -> str | T:
        """A text. Numbers, ``true`` and ``false`` are refused: they may have been meant as such."""
        value: str | T = self._typed(key, (str,), "a text", default, "", remedy="put it in quotes")
        return value

    def integer(
        self, key: str, default: T | _Missing = _MISSING, *, minimum: int | None = None, maximum: int | None = None
    ) -> int | T:
        """A whole number between ``minimum`` and ``maximum``, both included."""
        value: int | T = self._typed(key, (int,), "a whole number", default, minimum or 0, remedy=self._digits(key))
        if isinstance(value, int) and key in self.values:
            self._check_range(key, value, minimum, maximum)
        return value

    def number(
        self, key: str, default: T | _Missing = _MISSING, *, minimum: float | None = None, maximum: float | None = None
    ) -> float | T:
        """A finite number between ``minimum`` and ``maximum``, both included; whole numbers become floats."""
        value: float | T = self._typed(key, (int, float), "a number", default, minimum or 0.0, remedy=self._digits(key))
        if isinstance(value, (int, float)) and key in self.values:
            if not _is_finite(value):
                self.problem(key, f"is {_short(value)}, not a finite number")
                return 0.0
            self._check_range(key, value, minimum, maximum)
            return float(value)
        return value

    def boolean(self, key: str, default: T | _Missing = _MISSING) -> bool | T:
        """``true`` or ``false``."""
        value: bool | T = self._typed(key, (bool,), "true or false", default, False)
        return value

    def choice(self, key: str, options: Sequence[str], default: T | _Missing = _MISSING) -> str | T:
        """One of the words in ``options``."""
        value: str | T = self._typed(key, (str,), f"one of {', '.join(options)}", default, options[0])
        if isinstance(value, str) and key in self.values and value not in options:
            self.problem(key, f"is {_short(value)}, not one of {', '.join(options)}", _near(value, options))
            return options[0]
        return value

    def texts(self, key: str, default: T | _Missing = _MISSING) -> tuple[str, ...] | T:
        """A list of texts."""
        values: tuple[str, ...] | T = self._list(key, str, "texts", default)
        return values

    def integers(self, key: str, default: T | _Missing = _MISSING) -> tuple[int, ...] | T:
        """A list of whole numbers."""
        values: tuple[int, ...] | T = self._list(key, int, "whole numbers", default)
        return values

    def section(self, key: str, *, required: bool = False) -> Fields | None:
        """A mapping under ``key``; ``None`` where it is absent or no mapping."""
        default = _MISSING if required else None
        value: Any = self._typed(key, (dict,), "a mapping of keys to values", default, None)
        return None if value is None else self._child(value, self.at(key))

    def sections(self, key: str, *, required: bool = True) -> list[Fields]:
        """A list of mappings under ``key``; elements that are no mapping are noted and left out."""
        default: Any = _MISSING if required else []
        values: Any = self._typed(key, (list,), "a list of mappings", default, [])
        found = []
        for index, value in enumerate(values):
            path = f"{key}[{index}]"
            if isinstance(value, dict):
                found.append(self._child(value, self.at(path)))
            else:
                self.problem(path, f"is {kind_of(value)}, not a mapping of keys to values")
        return found

    def finish(self) -> None:
        """End the reading: raise ``UserFileError`` with every problem, keys that nobody read among them."""
        root = self._root
        problems = [*root._problems, *root._unknown_keys()]  # noqa: SLF001 - the root is of this class
        if problems:
            raise UserFileError(self.file, problems)

    def all_read(self) -> None:
        """Declare that every key of this section is known (a free-form section, or keys that are data)."""
        self._asked.update(self.values)

    def _child(self, values: Mapping[object, object], path: str) -> Fields:
        child = Fields(values, self.file, path, self._root)
        self._sections.append(child)
        return child

    def _unknown_keys(self) -> list[Problem]:
        known = sorted(str(key) for key in self._asked)
        problems = [
            Problem(self.at(key), "is no key of this format", _near(str(key), known) or f"known: {', '.join(known)}")
            for key in self.values
            if key not in self._asked
        ]
        for section in self._sections:
            problems += section._unknown_keys()  # noqa: SLF001 - of this class
        return problems

    def _typed(
        self,
        key: str,
        types: tuple[type, ...],
        wanted: str,
        default: T | _Missing,
        stand_in: Any,  # noqa: ANN401 - of the type asked for
        *,
        remedy: str = "",
    ) -> Any:  # noqa: ANN401 - of the type asked for
        value = self.raw(key, _MISSING)
        if isinstance(value, _Missing):
            if not isinstance(default, _Missing):
                return default
            self.problem(key, f"is missing; it should be {wanted}")
            return stand_in
        # bool is an int to Python, and never a number to the writer of a file.
        if isinstance(value, types) and (bool in types or not isinstance(value, bool)):
            return value
        self.problem(key, f"is {kind_of(value)}, not {wanted}", "" if isinstance(value, (list, dict)) else remedy)
        return stand_in

    def _digits(self, key: str) -> str:
        """The way out for a text where a number belongs: ``010`` and ``1_000`` look like numbers to their writer."""
        value = self.values.get(key)
        looks = isinstance(value, str) and value[:1] in set("-+.0123456789")
        return "write numbers in plain decimal digits, without quotes" if looks else ""

    def _list(self, key: str, type_: type[T], plural: str, default: Any) -> Any:  # noqa: ANN401 - as _typed
        values = self._typed(key, (list,), f"a list of {plural}", default, [])
        if not isinstance(values, list):
            return values
        good = []
        for index, value in enumerate(values):
            if isinstance(value, type_) and not isinstance(value, bool):
                good.append(value)
            else:
                remedy = "put it in quotes" if type_ is str else ""
                self.problem(f"{key}[{index}]", f"is {kind_of(value)}; the list is of {plural}", remedy)
        return tuple(good)

    def _check_range(self, key: str, value: float, minimum: float | None, maximum: float | None) -> None:
        if minimum is not None and value < minimum:
            self.problem(key, f"is {_short(value)}, below the least allowed, {minimum}")
        if maximum is not None and value > maximum:
            self.problem(key, f"is {_short(value)}, above the most allowed, {maximum}")


def _refuse_traps(text: str, file: str) -> None:
    """Refuse what makes a small file explode or mean something else than it shows; needs no tree of the file."""
    depth = 0
    for event in yaml.parse(text, Loader=_Base):
        line = _line(event.start_mark)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            remedy = "write the value out"
            raise UserFileError(file, [Problem(line, "anchors and aliases (& and *) are not accepted", remedy)])
        tag = getattr(event, "tag", None)
        if tag not in {None, "!"}:
            raise UserFileError(file, [Problem(line, f"tags are not accepted ({tag})", "leave the tag away")])
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise UserFileError(file, [Problem(line, f"is nested deeper than {MAX_DEPTH} levels")])


def _syntax_problem(error: yaml.YAMLError) -> Problem:
    if isinstance(error, yaml.MarkedYAMLError):
        return Problem(
            _line(error.problem_mark or error.context_mark), f"is no valid YAML: {error.problem or error.context}"
        )
    return Problem("", f"is no valid YAML: {str(error).splitlines()[0]}")


def _line(mark: Any) -> str:  # noqa: ANN401 - the marks of libyaml and of PyYAML share no type
    return f"line {mark.line + 1}" if mark is not None else ""


def _too_large() -> Problem:
    return Problem("", f"is larger than {MAX_BYTES // 1024 // 1024} MiB, more than any file of this kind needs")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the floats
        return False


def _near(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""


def _short(value: object, most: int = MAX_SHOWN) -> str:
    shown = repr(value)
    return shown if len(shown) <= most else shown[:most] + "..."
