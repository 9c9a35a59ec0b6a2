"""Typed access to parsed JSON of unknown age and origin. What is missing is None or empty, what is wrong an error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


class Malformed(ValueError):
    """A key holds something that no version of the format has there. The message names it."""


class Fields:
    """An object of a JSON document. Never changes it. All methods raise Malformed for a value of another type."""

    __slots__ = ("_data", "_where")

    def __init__(self, data: Any, where: str = "") -> None:
        if not isinstance(data, dict):
            raise Malformed(f"{where or 'the document'} is {_kind(data)}, not an object")
        self._data: dict[str, Any] = data
        self._where = where

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def keys(self) -> list[str]:
        """Its keys, in order."""
        return list(self._data)

    def raw(self, key: str) -> Any:
        """The value as it is, or None."""
        return self._data.get(key)

    def text(self, key: str) -> str | None:
        """A string."""
        value = self._data.get(key)
        if value is not None and not isinstance(value, str):
            raise Malformed(f"{self._name(key)} is {_kind(value)}, not a string")
        return value

    def number(self, key: str) -> float | None:
        """A number; NaN and infinity, which Python writes and JSON lacks, are None."""
        return _number(self._data.get(key), self._name(key))

    def required(self, key: str) -> float:
        """A number that the rest means nothing without."""
        value = self.number(key)
        if value is None:
            raise Malformed(f"{self._name(key)} is missing")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self._data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise Malformed(f"{self._name(key)} is {_kind(value)}, not true or false")
        return value

    def child(self, key: str) -> Fields:
        """An object, empty where there is none."""
        value = self._data.get(key)
        return Fields({} if value is None else value, self._name(key))

    def children(self, key: str) -> list[Fields]:
        """A list of objects."""
        return [Fields(item, f"{self._name(key)}[{index}]") for index, item in enumerate(self.list(key))]

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers, without those that are none (null, NaN)."""
        found = (_number(item, f"{self._name(key)}[{index}]") for index, item in enumerate(self.list(key)))
        return tuple(value for value in found if value is not None)

    def list(self, key: str) -> list[Any]:
        """A list, empty where there is none."""
        value = self._data.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise Malformed(f"{self._name(key)} is {_kind(value)}, not a list")
        return value

    def table(self, key: str) -> Mapping[str, float]:
        """An object of numbers, without those that are none."""
        child = self.child(key)
        found = {name: child.number(name) for name in child.keys()}  # noqa: SIM118 (it is no mapping)
        return {name: value for name, value in found.items() if value is not None}

    def texts(self, key: str) -> Mapping[str, str]:
        """An object of anything, each value as text, without nulls."""
        child = self.child(key)
        return {name: as_text(child.raw(name)) for name in child.keys() if child.raw(name) is not None}  # noqa: SIM118

    def _name(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key


def as_text(value: Any) -> str:
    """A value for people: strings as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _number(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Malformed(f"{where} is {_kind(value)}, not a number")
    try:
        return value if math.isfinite(value) else None
    except OverflowError as error:
        raise Malformed(f"{where} is too large a number") from error


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
