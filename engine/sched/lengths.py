"""How long answers tend to get: which share of requests is likely to be still at it some steps from now.

Learned from the answers that ended lately. Knows counts of tokens only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.request import FinishReason, Request

FloatArray = npt.NDArray[np.float64]

HORIZON: npt.NDArray[np.int64] = np.array(
    [*range(4, 64, 4), *range(64, 192, 8), *range(192, 512, 16), 512, 640, 768, 1024, 1536, 2048, 3072, 4096]
)
"""Steps ahead at which the future is looked at. So many, because demand peaks just before somebody ends, not after."""

WINDOW = 256


class OutputLengths:
    """The output lengths of the last ``WINDOW`` requests that ended by themselves or at their limit.

    An answer cut at its limit would have gone on, so it stands as longer than any other: where all answers reach their limits,
    all are expected to. So are they until something has ended.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._sorted: FloatArray = np.empty(0)

    def note(self, request: Request) -> None:
        """Learn from a request that has ended. One that was aborted or failed says nothing of how long it would have become."""
        if request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        cut = request.finish_reason is FinishReason.LENGTH
        self._recent.append(float("inf") if cut else float(request.num_output_tokens))
        self._sorted = np.sort(np.array(self._recent))

    def alive(self, requests: Sequence[Request]) -> FloatArray:
        """[requests, HORIZON]: the probability that a request, decoding from now on, is still running so many steps ahead."""
        done = np.array([request.num_output_tokens for request in requests])[:, None]
        limit = np.array([request.sampling.max_tokens for request in requests])[:, None]
        runs_to_limit = np.array([request.sampling.ignore_eos for request in requests])[:, None]
        num_longer = len(self._sorted) - np.searchsorted(self._sorted, done + HORIZON, side="right")
        num_like_it = len(self._sorted) - np.searchsorted(self._sorted, done, side="right")
        unknown = runs_to_limit | (num_like_it == 0)
        share = np.where(unknown, 1.0, num_longer / np.maximum(num_like_it, 1))
        return np.where(done + HORIZON < limit, share, 0.0)
