"""From a path to a tokenizer."""

from __future__ import annotations

from pathlib import Path

from engine.errors import DamagedModelError, ModelNotFoundError
from engine.tokenizer.base import Tokenizer
from engine.tokenizer.from_folder import tokenizer_from_folder
from engine.tokenizer.from_gguf import tokenizer_from_gguf


def load_tokenizer(model_path: Path) -> Tokenizer:
    """The tokenizer of a folder (tokenizer.json before tokenizer.model) or of a GGUF file; reads no weights.

    Raises, each with one line that names the file:
        ModelNotFoundError: nothing is there, or a folder without a tokenizer.
        DamagedModelError: a file that cannot be read or is not what it claims to be.
        UnsupportedModelError: a kind of tokenizer, pre-tokenizer or decoder that is not built.
    """
    if not model_path.exists():
        raise ModelNotFoundError(f"no model at {model_path}")
    try:
        return tokenizer_from_folder(model_path) if model_path.is_dir() else tokenizer_from_gguf(model_path)
    except OSError as error:
        raise DamagedModelError(f"{model_path}: cannot be read: {error.strerror}") from None
