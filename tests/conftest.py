"""Fixtures that every part of the tests may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF of the default model, from OCTAVO_TEST_GGUF."""
    path = os.environ.get("OCTAVO_TEST_GGUF")
    assert path, "set OCTAVO_TEST_GGUF to SmolLM2-135M-Instruct.Q4_1.gguf"
    return Path(path)
