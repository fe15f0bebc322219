"""A step in the making: how many tokens each chosen request computes, and what is left of the step.

Knows requests and counts. Does not know blocks or the order of service.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.request import Request


class Draft:
    """The budget of one step. While any request decodes, prefills take ``max_prefill_tokens`` of it at most, so that the gaps
    between the tokens of those that decode stay short whatever prompt arrives; without any, prefills take it all.
    """

    def __init__(self, budget: int, max_prefill_tokens: int, block_size: int) -> None:
        self._left = budget
        self._prefill_left = max_prefill_tokens
        self._block_size = block_size
        self._chosen: dict[str, int] = {}

    @property
    def chosen(self) -> Mapping[str, int]:
        """Tokens by request id, in the order of choice."""
        return self._chosen

    @property
    def has_room(self) -> bool:
        """Whether one more prefill may take part."""
        return self._left > 0 and self._prefill_left > 0

    def chunk(self, request: Request) -> int:
        """How many tokens the request may compute in this step; 0 is none.

        A chunk that does not reach the request's last token ends at the edge of a block, where that costs a quarter of it at most.
        """
        wanted = request.num_uncomputed_tokens
        num_tokens = min(wanted, self._left, self._prefill_left if is_prefill(request) else 1)
        num_beyond = (request.num_computed_tokens + num_tokens) % self._block_size
        return num_tokens - num_beyond if num_tokens < wanted and 4 * num_beyond <= num_tokens else num_tokens

    def take(self, request: Request, num_tokens: int) -> None:
        self._chosen[request.request_id] = num_tokens
        self._charge(request, num_tokens)

    def drop(self, request: Request) -> None:
        """The request is preempted: its tokens, if it was chosen, are for others."""
        self._charge(request, -self._chosen.pop(request.request_id, 0))

    def _charge(self, request: Request, num_tokens: int) -> None:
        self._left -= num_tokens
        if is_prefill(request):
            self._prefill_left -= num_tokens


def is_prefill(request: Request) -> bool:
    """Whether more than its newest token is to be computed."""
    return request.num_uncomputed_tokens > 1
