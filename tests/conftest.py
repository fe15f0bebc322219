"""Fixtures that every part of the tests may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.model.hub import resolve


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF of the default model: fetched once into OCTAVO_HOME, as ``octavo pull smollm2-135m`` does."""
    return resolve("smollm2-135m", progress=lambda done, total: None).path


@pytest.fixture(scope="session", autouse=True)
def _kernel_cache() -> None:
    """Compiled kernels are kept between runs; in a fresh clone they are compiled once."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
