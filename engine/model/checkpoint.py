"""A checkpoint, whatever its file format: a config, and where each tensor's bytes lie and how they are encoded.

Tensors go by Hugging Face's names ("model.layers.0.self_attn.q_proj.weight"). Knows neither the formats' headers nor how
the model wants its weights arranged.

Rows are read with plain file reads, a chunk at a time, not through mmap: mapped pages would count as this process's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engine.errors import DamagedModelError, ModelNotFoundError
from engine.model_config import ModelConfig

# Encodings by ggml's names; the plain ones have the same names in safetensors.
PLAIN_ENCODINGS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTIZED_ENCODINGS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

# Temporaries of gguf's dequantize that stay in the cache, and small enough that malloc keeps them between chunks.
CHUNK_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns ``first`` and on of a stored matrix that is ``num_columns`` wide, as many as the tensor has rows."""

    first: int
    num_columns: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Bytes ``offset : offset + nbytes`` of ``file``, row by row. ``name`` is the file's own name for the tensor.

    ``pair_heads``: the rows of each of so many heads stand in the order of adjacent rotary pairs (x0, y0, x1, y1, ...)
    rather than halves (x0, x1, ..., y0, y1, ...), as GGUF's llama architecture has its q and k. None: halves.
    ``columns``: stored the other way round, as some of the columns of a matrix [shape[1], columns.num_columns] (GPT-2).
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    file: Path
    offset: int
    nbytes: int
    pair_heads: int | None = None
    columns: Columns | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened model: its headers have been read and checked, its tensors not yet."""

    path: Path
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]

    @property
    def matrix_types(self) -> tuple[str, ...]:
        """How the matrices are stored, the most frequent first: by torch's names, or ggml's where they are quantized."""
        counts = Counter(tensor.encoding for tensor in self.tensors.values() if len(tensor.shape) > 1)
        plain = {encoding: str(dtype).removeprefix("torch.") for encoding, dtype in PLAIN_ENCODINGS.items()}
        return tuple(plain.get(encoding, encoding) for encoding, _ in counts.most_common())


def copy_rows(tensor: StoredTensor, target: torch.Tensor, on_read: Callable[[int], None]) -> None:
    """Decode ``tensor`` into ``target`` (same shape, any float dtype, any device), undoing the pair order of its rows.

    ``on_read`` is told the number of bytes after each chunk. Raises DamagedModelError where the file ends early.
    """
    if tensor.columns is not None:
        _copy_columns(tensor, tensor.columns, target, on_read)
        return
    order = None if tensor.pair_heads is None else _halves_order(tensor.shape[0], tensor.pair_heads).to(target.device)
    for start, rows, num_bytes in _read_rows(tensor):
        stop = start + rows.shape[0]
        if order is None:
            target[start:stop].copy_(rows)
        else:
            target.index_copy_(0, order[start:stop], rows.to(target.device, target.dtype))
        on_read(num_bytes)


def _copy_columns(tensor: StoredTensor, columns: Columns, target: torch.Tensor, on_read: Callable[[int], None]) -> None:
    """Every chunk of the stored rows becomes some columns of the target. The whole stored matrix is read for it."""
    stored = replace(tensor, shape=(tensor.shape[1], columns.num_columns), columns=None)
    last = columns.first + tensor.shape[0]
    for start, rows, num_bytes in _read_rows(stored):
        target[:, start : start + rows.shape[0]].copy_(rows[:, columns.first : last].T)
        on_read(num_bytes)


def read_values(tensor: StoredTensor) -> torch.Tensor:
    """The whole tensor in float32, for small ones."""
    values = torch.empty(tensor.shape, dtype=torch.float32)
    copy_rows(tensor, values, lambda num_bytes: None)
    return values


def same_values(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two tensors decode to the same numbers, compared chunk by chunk."""
    if a.shape != b.shape:
        return False
    return all(torch.equal(x[1].float(), y[1].float()) for x, y in zip(_read_rows(a), _read_rows(b), strict=True))


def _halves_order(num_rows: int, heads: int) -> torch.Tensor:
    """For each row in pair order, the row's index in halves order."""
    return torch.arange(num_rows).view(heads, 2, num_rows // heads // 2).transpose(1, 2).reshape(-1)


def _read_rows(tensor: StoredTensor) -> Iterator[tuple[int, torch.Tensor, int]]:
    """Chunks as (first row, rows, bytes read). The rows are valid until the next chunk is asked for."""
    num_rows = tensor.shape[0]
    row_shape, row_bytes = tensor.shape[1:], tensor.nbytes // num_rows
    row_elements = int(np.prod(row_shape))
    chunk_rows = max(1, CHUNK_ELEMENTS // row_elements)
    buffer = np.empty(min(chunk_rows, num_rows) * row_bytes, dtype=np.uint8)
    try:
        with tensor.file.open("rb", buffering=0) as file:
            file.seek(tensor.offset)
            for start in range(0, num_rows, chunk_rows):
                rows = min(chunk_rows, num_rows - start)
                raw = buffer[: rows * row_bytes]
                _read_exactly(file, raw, tensor)
                yield start, _decode(raw, tensor.encoding).view(rows, *row_shape), raw.nbytes
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {tensor.file}: {error.strerror}") from error


def _read_exactly(file: BinaryIO, target: npt.NDArray[np.uint8], tensor: StoredTensor) -> None:
    done = 0
    while done < target.nbytes:
        count = file.readinto(target[done:])  # type: ignore[attr-defined]
        if not count:
            raise DamagedModelError(f"{tensor.file} ends within tensor {tensor.name} (truncated?)")
        done += count


def _decode(raw: npt.NDArray[np.uint8], encoding: str) -> torch.Tensor:
    if encoding in PLAIN_ENCODINGS:
        return torch.from_numpy(raw).view(PLAIN_ENCODINGS[encoding])
    kind = GGMLQuantizationType[encoding]
    # As a single row: dequantize works on groups of 16 rows, and many short groups take several times as long.
    return torch.from_numpy(dequantize(raw.reshape(1, -1), kind)).view(-1)


def encoded_nbytes(shape: tuple[int, ...], encoding: str) -> int:
    """Bytes of a tensor of ``shape``, whose rows are whole blocks of ``encoding``."""
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[encoding]]
    return int(np.prod(shape)) // block_size * block_bytes
