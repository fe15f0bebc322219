"""The tensors of one step, number by number."""

from __future__ import annotations

import torch

from engine.attention.metadata import WorkItem
from engine.model.rope import RopeTable
from engine.request import SamplingParams
from engine.rope_classes import RopeClass
from engine.rope_config import RopeConfig
from engine.runner.batch import build_batch
from engine.runner.sampler import sample
from engine.sched.plan import SampleSpec, ScheduledSequence, StepPlan

CPU = torch.device("cpu")


def rope_table(num_classes: int = 1) -> RopeTable:
    ropes = [RopeConfig(rope_type="default", theta=100.0 * (i + 1), head_dim=4, rotary_dim=4) for i in range(num_classes)]
    return RopeTable([RopeClass("", rope, 32, 32) for rope in ropes], CPU)


def spec(position: int) -> SampleSpec:
    return SampleSpec(SamplingParams(), seed=0, position=position)


def test_a_chunk_a_decode_and_a_last_chunk() -> None:
    plan = StepPlan(
        (
            ScheduledSequence("chunk", (10, 11, 12), 3, (7, 2), 0, None),
            ScheduledSequence("decode", (20,), 8, (5, 0, 9), 0, spec(4)),
            ScheduledSequence("last", (30, 31), 0, (1,), 0, spec(0)),
        )
    )
    rope = rope_table()
    batch = build_batch(plan, rope, 4, CPU)
    assert batch.token_ids.tolist() == [10, 11, 12, 20, 30, 31]
    positions = [3, 4, 5, 8, 0, 1]
    assert torch.equal(batch.cos, rope.cos[positions])
    assert torch.equal(batch.sin, rope.sin[positions])
    assert batch.work.slots == (7 * 4 + 3, 2 * 4 + 0, 2 * 4 + 1, 9 * 4 + 0, 1 * 4 + 0, 1 * 4 + 1)
    assert batch.work.items == (
        WorkItem(0, 3, 3, (7, 2), 0, 6),
        WorkItem(3, 1, 8, (5, 0, 9), 0, 9),
        WorkItem(4, 2, 0, (1,), 0, 2),
    )
    assert batch.sample_rows.tolist() == [3, 5]
    assert batch.specs == (spec(4), spec(0))
    assert batch.sampling_sequences == (1, 2)


def test_the_rope_class_chooses_the_rows() -> None:
    rope = rope_table(2)
    plan = StepPlan(tuple(ScheduledSequence(str(i), (1,), 9, (0, 1, 2), i, spec(0)) for i in range(2)))
    batch = build_batch(plan, rope, 4, CPU)
    assert torch.equal(batch.cos, rope.cos[[9, 32 + 9]])
    assert not torch.equal(batch.cos[0], batch.cos[1])


def test_a_step_in_which_nothing_samples() -> None:
    plan = StepPlan((ScheduledSequence("a", (1, 2), 0, (0,), 0, None),))
    batch = build_batch(plan, rope_table(), 4, CPU)
    assert batch.sample_rows.tolist() == []
    assert sample(torch.empty(0, 50), batch.specs) == ()
