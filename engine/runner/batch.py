"""From a plan to the tensors of one step, built whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.metadata import AttentionWork, WorkItem
from engine.model.rope import RopeTable
from engine.sched.plan import SampleSpec, ScheduledSequence, StepPlan


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Everything the model needs for a step.

    token_ids, positions int64 [rows]; cos, sin float32 [rows, rotary_dim / 2]; sample_rows int64 [samples], the last row of each sequence that
    samples, in the order of ``specs``; ``sampling_sequences`` are their places in the plan.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    sample_rows: torch.Tensor
    work: AttentionWork
    specs: tuple[SampleSpec, ...]
    sampling_sequences: tuple[int, ...]


def build_batch(
    plan: StepPlan, rope: RopeTable, block_size: int, device: torch.device, window: int | None = None
) -> ForwardBatch:
    """``window``: how many tokens a query sees, its own included; None is all."""
    token_ids: list[int] = []
    all_positions: list[int] = []
    rope_rows: list[int] = []
    slots: list[int] = []
    items: list[WorkItem] = []
    sample_rows: list[int] = []
    specs: list[SampleSpec] = []
    sampling: list[int] = []
    for index, sequence in enumerate(plan.sequences):
        items.append(_work_item(sequence, len(token_ids), block_size, window))
        positions = range(sequence.start, sequence.seq_len)
        token_ids.extend(sequence.token_ids)
        all_positions.extend(positions)
        rope_rows.extend(rope.row(sequence.rope_class, position) for position in positions)
        table, first = sequence.block_table, sequence.first_block
        slots.extend(table[p // block_size - first] * block_size + p % block_size for p in positions)
        if sequence.sample is not None:
            sample_rows.append(len(token_ids) - 1)
            specs.append(sequence.sample)
            sampling.append(index)
    rows = torch.tensor(rope_rows, dtype=torch.long, device=device)
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.long, device=device),
        positions=torch.tensor(all_positions, dtype=torch.long, device=device),
        cos=rope.cos[rows],
        sin=rope.sin[rows],
        sample_rows=torch.tensor(sample_rows, dtype=torch.long, device=device),
        work=AttentionWork(tuple(items), tuple(slots), block_size),
        specs=tuple(specs),
        sampling_sequences=tuple(sampling),
    )


def _work_item(sequence: ScheduledSequence, first_row: int, block_size: int, window: int | None) -> WorkItem:
    return WorkItem(
        query_start=first_row,
        num_queries=len(sequence.token_ids),
        first_position=sequence.start,
        block_ids=sequence.block_table,
        start=sequence.first_block * block_size,
        end=sequence.seq_len,
        tail_slot=sequence.tail_slot,
        window=window,
    )
