"""The header of a GGUF file: its metadata and where its tensors lie. Reads no tensor and knows no model.

The gguf package's own reader makes several numpy objects for every token of the vocabulary (seconds and hundreds of
megabytes for a model's file) and checks few bounds; this one reads the same header in a tenth of a second and refuses a
damaged one in a sentence.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from engine.errors import DamagedModelError, ModelNotFoundError, UnsupportedModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """``shape`` is rows first, as in torch (the file has it the other way round); ``offset`` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    encoding: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """``metadata`` holds Python numbers, booleans, strings and lists of them."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Raises ModelNotFoundError, DamagedModelError or UnsupportedModelError (a version or tensor type not known)."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise DamagedModelError(f"{path}: the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {path}: {error.strerror}") from error


class _Reader:
    """A cursor over the header; every read checks that the file is long enough."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def header(self) -> GGUFHeader:
        if self._bytes(4) != MAGIC:
            raise self._damaged("it does not begin with 'GGUF'")
        version = self._scalar("<I")
        if version not in VERSIONS:
            raise UnsupportedModelError(
                f"{self._path}: GGUF version {version} is not supported (supported: 2, 3, little-endian)"
            )
        num_tensors, num_keys = self._scalar("<Q"), self._scalar("<Q")
        metadata = self._metadata(num_keys)
        listed = [self._tensor_entry() for _ in range(num_tensors)]
        tensors: dict[str, GGUFTensor] = {}
        start = self._data_start(metadata)
        for name, dims, code, offset in listed:
            if name in tensors:
                raise self._damaged(f"tensor {name} is listed twice")
            tensors[name] = self._tensor(name, dims, code, start + offset)
        return GGUFHeader(metadata, tensors)

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._string()
            if key in metadata:
                raise self._damaged(f"key {key} is given twice")
            metadata[key] = self._value(self._scalar("<I"))
        return metadata

    def _data_start(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment must be a power of two, got {alignment!r}")
        return self._at + -self._at % alignment

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._string(), self._scalar("<I")
        if num_dims > 4:
            raise self._damaged(f"tensor {name} has {num_dims} dimensions")
        dims = tuple(self._scalar("<Q") for _ in range(num_dims))
        return name, dims, self._scalar("<I"), self._scalar("<Q")

    def _tensor(self, name: str, dims: tuple[int, ...], code: int, offset: int) -> GGUFTensor:
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise UnsupportedModelError(f"{self._path}: tensor {name} has the unknown type {code}") from None
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if not dims or 0 in dims or dims[0] % block_size:
            raise self._damaged(f"tensor {name} of type {kind.name} cannot have the shape {dims[::-1]}")
        nbytes = dims[0] // block_size * block_bytes
        for dim in dims[1:]:
            nbytes *= dim
        if offset + nbytes > self._size:
            raise self._damaged(f"tensor {name} ends at byte {offset + nbytes}, but the file has {self._size} (truncated?)")
        return GGUFTensor(name, dims[::-1], kind.name, offset, nbytes)

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            item, count = self._scalar("<I"), self._scalar("<Q")
            return [self._string() for _ in range(count)] if item == STRING else self._scalars(item, count)
        return self._scalars(kind, 1)[0]

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALARS:
            raise self._damaged(f"unknown value type {kind} at byte {self._at}")
        code = SCALARS[kind][1]
        return list(struct.unpack(f"<{count}{code}", self._bytes(count * struct.calcsize(SCALARS[kind]))))

    def _scalar(self, code: str) -> Any:
        return struct.unpack(code, self._bytes(struct.calcsize(code)))[0]

    def _string(self) -> str:
        raw = self._bytes(self._scalar("<Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._damaged(f"the text before byte {self._at} is not UTF-8") from None

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > self._size:
            raise self._damaged(f"its header needs byte {end}, but the file has {self._size} (truncated?)")
        raw = self._data[self._at : end]
        self._at = end
        return raw

    def _damaged(self, message: str) -> DamagedModelError:
        return DamagedModelError(f"{self._path} is damaged: {message}")
