"""The key-value part of a GGUF file, read without touching tensors. Knows the container, not what the keys mean.

The gguf package builds several numpy views for each array element, which takes seconds for the 49,000 tokens of a small
model; here an array of strings costs one slice each.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from engine.errors import DamagedModelError, UnsupportedModelError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# GGUF's value type -> struct's format character
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MIN_STRING_BYTES = 8  # its length alone
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Every metadata key with its value: str, bool, int, float, or a list of one of these.

    Raises:
        UnsupportedModelError: a version or byte order that is not read here.
        DamagedModelError: not a GGUF file, cut short, or inconsistent.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data, path).metadata()
    except (struct.error, OverflowError, ValueError) as error:  # past the end; an empty file; not UTF-8
        raise DamagedModelError(f"{path}: damaged GGUF header: {error}") from None


class _Cursor:
    """A position in the mapped file that moves on with every value read."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def metadata(self) -> dict[str, Any]:
        if self._data[:4] != MAGIC:
            raise DamagedModelError(f"{self._path} is not a GGUF file")
        self._at = 4
        version = self._u32()
        if version not in _VERSIONS:
            raise UnsupportedModelError(
                f"{self._path}: GGUF version {version} in this byte order; supported: 2, 3 little-endian"
            )
        self._u64()  # number of tensors
        num_keys = self._u64()
        return {self._string(): self._value(self._u32()) for _ in range(num_keys)}

    def _u32(self) -> int:
        (value,) = _U32.unpack_from(self._data, self._at)
        self._at += 4
        return int(value)

    def _u64(self) -> int:
        (value,) = _U64.unpack_from(self._data, self._at)
        self._at += 8
        return int(value)

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        data, at, unpack = self._data, self._at, _U64.unpack_from  # locals: this loop runs 400,000 times for Llama 3
        strings = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(data, at)[0]
            strings.append(data[start:at].decode())
        if at > len(data):
            raise ValueError(f"a string ends at byte {at} of {len(data)}")
        self._at = at
        return strings

    def _value(self, value_type: int) -> Any:
        if value_type == _STRING:
            return self._string()
        if value_type == _ARRAY:
            return self._array(self._u32(), self._u64())
        return self._scalars(value_type, 1)[0]

    def _array(self, value_type: int, count: int) -> list[Any]:
        if value_type != _STRING:
            return self._scalars(value_type, count)
        if count * _MIN_STRING_BYTES > len(self._data) - self._at:
            raise ValueError(f"an array of {count} strings does not fit the file")
        return self._strings(count)

    def _scalars(self, value_type: int, count: int) -> list[Any]:
        if value_type not in _SCALARS:
            raise ValueError(f"unknown value type {value_type} at byte {self._at}")
        char = _SCALARS[value_type]
        size = count * struct.calcsize("<" + char)
        if size > len(self._data) - self._at:
            raise ValueError(f"an array of {count} numbers does not fit the file")
        values = list(struct.unpack_from(f"<{count}{char}", self._data, self._at))
        self._at += size
        return values
