"""A mapping that cannot change: frozen values hold it, and it can be hashed, pickled and compared with a dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

__all__ = ["FrozenMap"]

K = TypeVar("K")
V = TypeVar("V")


class FrozenMap(Mapping[K, V]):
    """An immutable copy of a mapping, in the order of the original.

    ``types.MappingProxyType`` is only a view (its owner can still change it) and cannot be pickled, so that a value
    holding one could not be handed to a child process.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[K, V]) -> None:
        object.__setattr__(self, "_items", dict(items))

    def __getitem__(self, key: K) -> V:
        items: dict[K, V] = self._items
        return items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a FrozenMap cannot change ({name})")

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __reduce__(self) -> tuple[type[FrozenMap[K, V]], tuple[dict[K, V]]]:
        return type(self), (dict(self._items),)

    def __repr__(self) -> str:
        return f"FrozenMap({self._items!r})"

    _items: dict[K, V]
