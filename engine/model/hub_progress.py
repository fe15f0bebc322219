"""A progress bar for huggingface_hub that draws nothing and reports bytes to a callable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]


def reporting_bar(progress: Callable[[int, int], None]) -> type[Any]:
    """A tqdm class whose bars over bytes call ``progress(bytes done, bytes in all)``.

    The hub keeps two such bars (received, written); both go up to the same total, and the further one is reported. The
    total grows while the hub still finds files, and may be 0 before.
    """
    done: dict[int, int] = {}

    class ReportingBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})
            self._counts_bytes = kwargs.get("unit") == "B"

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts_bytes:
                done[id(self)] = int(self.n)
                progress(max(done.values()), int(self.total or 0))

    return ReportingBar
