"""The folder of compiled kernels follows the sources."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine import kernel_cache


def test_a_changed_source_gets_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    here = Path(kernel_cache.__file__)
    shutil.copytree(here.parent, tmp_path / "engine")
    monkeypatch.setattr(kernel_cache, "__file__", str(tmp_path / "engine" / here.name))
    before = kernel_cache.kernel_cache_folder()
    assert before == kernel_cache.kernel_cache_folder()
    assert before.parent == tmp_path / "home" / "kernels"

    source = tmp_path / "engine" / "attention" / "cpu_kernels.py"
    source.write_text(source.read_text() + "\n# changed\n")

    assert kernel_cache.kernel_cache_folder() != before


def test_the_users_own_folder_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "elsewhere")
    kernel_cache.use_kernel_cache()
    assert kernel_cache.os.environ["NUMBA_CACHE_DIR"] == "elsewhere"
