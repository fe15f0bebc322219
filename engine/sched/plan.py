"""What a step will do and what came of it: the only things that pass between the scheduler and the runner."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv.block import BlockCopy
from engine.kv.moves import BlockLoad, BlockStore
from engine.request import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How the next token of a sequence is drawn: the same (seed, position) gives the same draw, whoever shares the batch.

    ``position`` counts the sequence's output tokens so far. ``banned_token_ids`` may not be drawn (min_tokens not reached).
    """

    params: SamplingParams
    seed: int
    position: int
    banned_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute ``token_ids`` at positions start, start + 1, ...; their K and V go to the slots that ``block_table`` gives.
    A stream's positions are places in its cache (see engine.kv.stream).

    ``block_table`` begins with block ``first_block`` of the sequence: those before it lie behind its window.
    ``sample`` is None while the sequence's last known token is not among them. ``tail_slot``: where the open last block of the
    sequence lies in a quantized format; its blocks get their bytes when they fill. None in float formats.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    rope_class: int
    sample: SampleSpec | None
    tail_slot: int | None = None
    first_block: int = 0

    @property
    def seq_len(self) -> int:
        """Context length once these tokens are computed."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Turn:
    """Keys of a stream that have got other places: see BlockTurn."""

    block_ids: tuple[int, ...]
    distance: int
    rope_class: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Each request once; the tokens are within the budget; no two sequences write to one block.

    ``stores``, then ``loads``, then ``copies``, then ``turns`` are made first, each in its order, before any of the sequences' tokens is computed.
    """

    sequences: tuple[ScheduledSequence, ...]
    copies: tuple[BlockCopy, ...] = ()
    stores: tuple[BlockStore, ...] = ()
    loads: tuple[BlockLoad, ...] = ()
    turns: tuple[Turn, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The outcome of one ``SampleSpec``: a token, or the reason why there is none."""

    token_id: int | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One entry for each sequence of the plan, in its order; None where nothing was to be sampled."""

    tokens: tuple[SampledToken | None, ...]
