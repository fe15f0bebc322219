"""Where compiled CPU kernels are kept between runs: one folder for each state of the sources.

numba tells a stale kernel by the file it is written in, not by the files whose kernels it calls: after an update, or a change of a
kernel that others inline, it would go on running the old code. Imports neither numba nor torch.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_SOURCES = ("attention", "model")


def kernel_cache_folder() -> Path:
    """OCTAVO_HOME/kernels/<digest of the sources>; OCTAVO_HOME is ~/.cache/octavo unless set."""
    home = Path(os.environ.get("OCTAVO_HOME") or "~/.cache/octavo").expanduser()
    digest = hashlib.sha256()
    for package in _SOURCES:
        for source in sorted((Path(__file__).parent / package).glob("*.py")):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return home / "kernels" / digest.hexdigest()[:16]


def use_kernel_cache() -> None:
    """Point numba there, unless NUMBA_CACHE_DIR is set. Of effect only before numba is imported."""
    os.environ.setdefault("NUMBA_CACHE_DIR", str(kernel_cache_folder()))
