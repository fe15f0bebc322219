"""Fixtures that every part of the tests may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.kernel_cache import use_kernel_cache
from engine.model.hub import resolve


def take_one_core(worker: str) -> None:
    """Each xdist worker has a core of its own, its servers too: two that share both cores wait for each other's threads."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


if "PYTEST_XDIST_WORKER" in os.environ:
    take_one_core(os.environ["PYTEST_XDIST_WORKER"])  # before any import counts the cores
use_kernel_cache()  # before any test imports numba: kernels are compiled once in a fresh clone
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF of the default model: fetched once into OCTAVO_HOME, as ``octavo pull smollm2-135m`` does."""
    return resolve("smollm2-135m", progress=lambda done, total: None).path
