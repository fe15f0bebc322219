"""A step on one device: plan in, sampled tokens out."""

from __future__ import annotations

import torch

from engine.attention.backend import AttentionBackend
from engine.kv.offload import HostBuffer
from engine.model.llama import Model
from engine.model.rope import RopeTable
from engine.runner.batch import ForwardBatch, build_batch
from engine.runner.sampler import sample
from engine.sched.plan import SampledToken, SampledTokens, StepPlan


class ModelRunner:
    """The model over the paged cache; see ``Runner``. ``window``: how many tokens a query sees; None is all."""

    def __init__(
        self,
        model: Model,
        rope: RopeTable,
        attention: AttentionBackend,
        host: HostBuffer,
        device: torch.device,
        window: int | None = None,
    ) -> None:
        self._model = model
        self._rope = rope
        self._attention = attention
        self._host = host
        self._storage = host.storage
        self._device = device
        self._window = window

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> SampledTokens:
        batch, logits = self.forward(plan)
        tokens: list[SampledToken | None] = [None] * len(plan.sequences)
        for index, token in zip(batch.sampling_sequences, sample(logits, batch.specs), strict=True):
            tokens[index] = token
        return SampledTokens(tuple(tokens))

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> tuple[ForwardBatch, torch.Tensor]:
        """The batch, and logits [samples, vocab_size] of the sequences that sample; makes the copies, writes the step's K and V."""
        batch = self._prepare(plan)
        return batch, self._model.forward(batch.token_ids, batch.positions, batch.cos, batch.sin, batch.sample_rows)

    @torch.inference_mode()
    def score(self, plan: StepPlan) -> torch.Tensor:
        """Logits [rows, vocab_size] of every token of the plan; writes their K and V."""
        batch = self._prepare(plan)
        rows = torch.arange(len(batch.token_ids), device=self._device)
        return self._model.forward(batch.token_ids, batch.positions, batch.cos, batch.sin, rows)

    def _prepare(self, plan: StepPlan) -> ForwardBatch:
        """Move and copy blocks, and tell the attention what comes."""
        self._host.move(plan.stores, plan.loads)
        for copy in plan.copies:
            self._storage.copy(copy)
        for turn in plan.turns:
            self._storage.turn_keys(turn.block_ids, *self._rope.turn(turn.rope_class, -turn.distance))
        batch = build_batch(plan, self._rope, self._storage.format.block_size, self._device, self._window)
        self._attention.plan(batch.work)
        return batch
