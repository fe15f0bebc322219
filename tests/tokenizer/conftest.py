"""One small vocabulary of each kind for the whole session."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import vocab_builders as build

from engine.tokenizer import Tokenizer, load_tokenizer

KINDS = ("sentencepiece", "sentencepiece_gguf", "byte_fallback_json", "byte_level_json", "byte_level_gguf", "metaspace_json")


@pytest.fixture(scope="session")
def spm_model() -> bytes:
    return build.train_sentencepiece()


@pytest.fixture(scope="session")
def backends(spm_model: bytes) -> dict[str, tokenizers.Tokenizer]:
    return {
        "byte_fallback_json": build.byte_fallback_tokenizer(spm_model),
        "byte_level_json": build.byte_level_tokenizer(),
        "metaspace_json": build.metaspace_tokenizer(),
    }


@pytest.fixture(scope="session")
def model_paths(
    tmp_path_factory: pytest.TempPathFactory, spm_model: bytes, backends: dict[str, tokenizers.Tokenizer]
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vocabularies")
    paths = {kind: root / (f"{kind}.gguf" if kind.endswith("_gguf") else kind) for kind in KINDS}
    paths["sentencepiece"].mkdir()
    (paths["sentencepiece"] / "tokenizer.model").write_bytes(spm_model)
    build.write_sentencepiece_gguf(paths["sentencepiece_gguf"], spm_model)
    build.write_byte_level_gguf(paths["byte_level_gguf"], backends["byte_level_json"])
    for kind, backend in backends.items():
        paths[kind].mkdir()
        backend.save(str(paths[kind] / "tokenizer.json"))
    names = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}}
    (paths["byte_level_json"] / "tokenizer_config.json").write_text(json.dumps(names))
    return paths


@pytest.fixture(scope="session")
def loaded(model_paths: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: load_tokenizer(path) for kind, path in model_paths.items()}


@pytest.fixture(scope="session", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, loaded: dict[str, Tokenizer]) -> Tokenizer:
    return loaded[request.param]
