"""Opens a folder in Hugging Face layout: config.json, and model.safetensors or the shards that its index names."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import DamagedModelError, ModelNotFoundError, UnsupportedModelError
from engine.model.checkpoint import PLAIN_ENCODINGS, Checkpoint, StoredTensor, encoded_nbytes
from engine.model.gpt2_checkpoint import CAUSAL_MASK, name_like_llama
from engine.model_config import GPT2, ModelConfig
from engine.model_fields import shown

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def open_folder(folder: Path) -> Checkpoint:
    """Read config and headers. Raises ModelNotFoundError, DamagedModelError or UnsupportedModelError."""
    generation_path = folder / "generation_config.json"
    config = _read_json(folder / "config.json")
    generation_config = _read_json(generation_path) if generation_path.exists() else None
    model_config = ModelConfig.from_hf(config, generation_config)
    if model_config.architecture == GPT2:
        return Checkpoint(folder, model_config, name_like_llama(folder, _tensors(folder, ignored=CAUSAL_MASK)))
    return Checkpoint(folder, model_config, _tensors(folder))


def _tensors(folder: Path, ignored: str = "") -> dict[str, StoredTensor]:
    """All but those whose whole name the regular expression ``ignored`` matches; these may have types that are not supported."""
    if (folder / WEIGHTS).exists():
        return _read_header(folder / WEIGHTS, ignored)
    if not (folder / INDEX).exists():
        raise ModelNotFoundError(f"no {WEIGHTS} and no {INDEX} in {folder}")
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedModelError(f"{folder / INDEX}: weight_map is missing or empty")
    shards: dict[str, dict[str, StoredTensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, shard in weight_map.items():
        if re.fullmatch(ignored, name):
            continue
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise DamagedModelError(f"{folder / INDEX}: {shown(shard)} is not the name of a shard in this folder")
        if shard not in shards:
            shards[shard] = _read_header(folder / shard, ignored)
        if name not in shards[shard]:
            raise DamagedModelError(f"{folder / shard}: tensor {name}, which {INDEX} places here, is missing")
        tensors[name] = shards[shard][name]
    for shard, held in shards.items():
        for name in held.keys() - tensors.keys():
            raise DamagedModelError(f"{folder / shard}: tensor {name} is not in {INDEX}")
    return tensors


def _read_header(path: Path, ignored: str) -> dict[str, StoredTensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise DamagedModelError(f"{path} is damaged: no safetensors header fits its {size} bytes (truncated?)")
            header = _parse_json(path, file.read(length))
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {path}: {error.strerror}") from error
    header.pop("__metadata__", None)
    kept = {name: entry for name, entry in header.items() if not re.fullmatch(ignored, name)}
    return {name: _stored(path, name, entry, 8 + length, size) for name, entry in kept.items()}


def _stored(path: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:
    encoding, shape, (begin, end) = _entry(path, name, entry)
    if encoding not in PLAIN_ENCODINGS:
        known = ", ".join(PLAIN_ENCODINGS)
        raise UnsupportedModelError(f"{path}: tensor {name} has type {encoding}, which is not supported (supported: {known})")
    if end - begin != encoded_nbytes(shape, encoding):
        raise DamagedModelError(f"{path} is damaged: tensor {name} has {end - begin} bytes for {encoding} of shape {shape}")
    if start + end > size:
        raise DamagedModelError(
            f"{path} is damaged: tensor {name} ends at byte {start + end}, but the file has {size} (truncated?)"
        )
    return StoredTensor(name, shape, encoding, path, start + begin, end - begin)


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    try:
        encoding, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        raise DamagedModelError(f"{path} is damaged: the entry of tensor {name} is {shown(entry)}") from None
    if not isinstance(encoding, str) or not all(type(n) is int and n >= 0 for n in numbers) or 0 in shape or not shape:
        raise DamagedModelError(f"{path} is damaged: the entry of tensor {name} is {shown(entry)}")
    return encoding, tuple(shape), (begin, end)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return _parse_json(path, path.read_bytes())
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {path}: {error.strerror}") from error


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    """A JSON object, or DamagedModelError."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DamagedModelError(f"{path} is damaged: not JSON ({error})") from None
    if not isinstance(value, Mapping):
        raise DamagedModelError(f"{path} is damaged: an object is expected, found {shown(value)}")
    return dict(value)
