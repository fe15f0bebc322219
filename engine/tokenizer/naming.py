"""The file's name in front of an error that was found in its content."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import DamagedModelError, UnsupportedModelError


@contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Passes DamagedModelError and UnsupportedModelError on as "path: message" in one line."""
    try:
        yield
    except (DamagedModelError, UnsupportedModelError) as error:
        raise type(error)(f"{path}: {' '.join(str(error).split())}") from None
