"""Frozen dataclasses to plain data and back, with every problem noted: their fields are the certificate's format."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import operator
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from typing import Any, Final

from routing_lab.certificate.parts import Limit
from routing_lab.errors import Problem
from routing_lab.yamlfile import kind_of, shown_key

__all__ = ["content_digest", "on_one_line", "read_plain", "to_plain"]

Limits = Mapping[tuple[type, str], Limit]


def content_digest(content: Mapping[Any, Any]) -> str:
    """``sha256:`` and the digest of ``content`` in a canonical form; ``none`` where it can have no such form."""
    try:
        canonical = json.dumps(content, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    except TypeError:  # keys of different kinds: nothing that we wrote
        return "none"
    return "sha256:" + hashlib.sha256(canonical.encode("ascii")).hexdigest()


def to_plain(value: Any) -> Any:  # noqa: ANN401 - any field of the certificate
    """What YAML can hold. Fields that have their default value of ``None`` are left out."""
    if is_dataclass(value):
        named = ((field, getattr(value, field.name)) for field in fields(value))
        return {field.name: to_plain(v) for field, v in named if not (v is None and field.default is None)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def on_one_line(value: Any) -> Any:  # noqa: ANN401 - any field of the certificate
    """``value`` with everything that does not print in its texts written as an escape."""
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        changed = {name: new for name, old in named.items() if (new := on_one_line(old)) is not old}
        return replace(value, **changed) if changed else value
    if isinstance(value, tuple):
        items = tuple(map(on_one_line, value))
        return value if all(map(operator.is_, items, value)) else items
    if isinstance(value, str) and not value.isprintable():
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in value)
    return value


def read_plain(kind: Any, data: Any, limits: Limits, problems: list[Problem]) -> Any:  # noqa: ANN401 - as on_one_line
    """Inverse of ``to_plain`` for the dataclass ``kind``.

    What does not fit the types or the ``limits`` of fields is added to ``problems``; ``None`` then stands in for it.
    """
    return _Reader(limits, problems).dataclass(kind, data, "")


class _Reader:
    """One reading; ``where`` is the path of a value, ``limit`` what its field may hold."""

    def __init__(self, limits: Limits, problems: list[Problem]) -> None:
        self._limits = limits
        self._problems = problems

    def dataclass(self, kind: Any, data: Any, where: str) -> Any:  # noqa: ANN401 - as on_one_line
        if not isinstance(data, dict):
            self._note(where, f"is {kind_of(data)}, not a mapping of keys to values")
            return None
        before = len(self._problems)
        types_ = _types(kind)
        values = {}
        for field in fields(kind):
            path = _path(where, field.name)
            if field.name in data:
                limit = self._limits.get((kind, field.name), _no_limit)
                values[field.name] = self._value(types_[field.name], data[field.name], path, limit)
            elif field.default is not None:  # only what is None by default is left out
                self._note(path, "is missing")
        for key in data.keys() - {field.name for field in fields(kind)}:
            self._note(_path(where, key), "is no key of this format")
        if len(self._problems) > before:
            return None
        try:
            return kind(**values)
        except ValueError as error:
            self._note(where, str(error))
            return None

    def _value(self, kind: Any, data: Any, where: str, limit: Limit) -> Any:  # noqa: ANN401 - as on_one_line
        if typing.get_origin(kind) in {types.UnionType, typing.Union}:
            (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
            return None if data is None else self._value(kind, data, where, limit)
        if is_dataclass(kind):
            return self.dataclass(kind, data, where)
        if typing.get_origin(kind) is tuple:
            return self._tuple(typing.get_args(kind)[0], data, where, limit)
        value = _scalar(kind, data)
        if value is None:
            wanted = f"one of {', '.join(kind)}" if issubclass(kind, StrEnum) else _WORDS[kind]
            self._note(where, f"is {kind_of(data)}, not {wanted}")
        elif isinstance(value, str) and not value.isprintable():
            self._note(where, f"is {kind_of(value)}, which has characters that do not print")
        elif wrong := limit(value):
            self._note(where, wrong)
        return value

    def _tuple(self, item: Any, data: Any, where: str, limit: Limit) -> tuple[Any, ...]:  # noqa: ANN401 - as on_one_line
        if isinstance(data, list):
            return tuple(self._value(item, value, f"{where}[{i}]", limit) for i, value in enumerate(data))
        self._note(where, f"is {kind_of(data)}, not a list")
        return ()

    def _note(self, where: str, what: str) -> None:
        self._problems.append(Problem(where, what))


_types = functools.cache(typing.get_type_hints)
_WORDS: Final = {str: "a text", int: "a whole number", float: "a finite number", bool: "true or false"}


def _scalar(kind: type, data: Any) -> Any:  # noqa: ANN401 - as on_one_line
    """``data`` as a value of ``kind``; ``None`` where it is none."""
    if issubclass(kind, StrEnum):
        return kind(data) if data in list(kind) else None
    # Not isinstance: a bool is an int to Python, and never to us.
    if kind is not float or type(data) not in {int, float}:
        return data if type(data) is kind else None
    try:
        number = float(data)
    except OverflowError:  # a whole number beyond the floats
        return None
    return number if math.isfinite(number) else None


def _path(where: str, key: object) -> str:
    return f"{where}.{shown_key(key)}" if where else shown_key(key)


def _no_limit(_value: object) -> str:
    return ""
