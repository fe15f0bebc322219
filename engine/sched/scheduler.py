"""One rule: each step, let every request's computed tokens catch up with its known tokens, under one token budget.

Decode, chunked prefill, prefix hits and resumption after a preemption are this rule with other numbers.
The one writer of requests and queues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.kv.manager import KVCacheManager
from engine.request import FinishReason, Request, RequestStatus, TokenEvent
from engine.sched.plan import SampledToken, SampledTokens, SampleSpec, ScheduledSequence, StepPlan
from engine.sched.waiting import WaitingQueue
from engine.stats import Admission


@dataclass(slots=True)
class StepCounts:
    """What one step came to, collected between schedule() and the end of update()."""

    num_scheduled_tokens: int = 0
    num_prompt_tokens: int = 0
    num_sampled_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    admissions: list[Admission] = field(default_factory=list)


@dataclass(slots=True)
class _Draft:
    """A step in the making: how many tokens each chosen request computes, and what is left of the budget."""

    budget: int
    chosen: dict[str, int] = field(default_factory=dict)

    def take(self, request: Request, num_tokens: int) -> None:
        self.chosen[request.request_id] = num_tokens
        self.budget -= num_tokens

    def drop(self, request: Request) -> None:
        self.budget += self.chosen.pop(request.request_id, 0)


class Scheduler:
    """Continuous batching over a KV cache that is handed out as it is needed.

    Order within a step: requests that decode, then running prefills, then waiting requests; each by arrival. When blocks run
    out, the newest running request is preempted: its blocks stay cached, and resuming is an ordinary prefix match. The oldest
    running request is never preempted for another, and one request of the longest length always fits, so there is progress.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eos_token_ids: tuple[int, ...],
        clock: Callable[[], float],
    ) -> None:
        self.manager = manager
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # so that every decode advances at every step
        self.max_num_batched_tokens = max_num_batched_tokens
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._waiting = WaitingQueue()
        self._running: dict[str, Request] = {}
        self._counts = StepCounts()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_context_tokens(self) -> int:
        """Tokens whose K and V the running requests read."""
        return sum(request.num_computed_tokens for request in self._running.values())

    def take_counts(self) -> StepCounts:
        """The counts since the last call."""
        counts, self._counts = self._counts, StepCounts()
        return counts

    def add(self, request: Request) -> None:
        """Queue a request. Its prompt and max_tokens must fit the cache: who lets it in has checked that."""
        longest = request.num_prompt_tokens + request.sampling.max_tokens
        assert self.manager.num_blocks_for(longest) <= self.manager.num_blocks, "a request that can never fit was let in"
        self._waiting.append(request)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request now and give its blocks back. None when it is unknown or has ended already."""
        request = self._waiting.remove(request_id) or self._running.get(request_id)
        if request is None:
            return None
        self._finish(request, FinishReason.ABORT)
        return TokenEvent(request_id, None, FinishReason.ABORT, num_cached_tokens=request.num_cached_tokens)

    def schedule(self) -> StepPlan:
        """Choose the next step's tokens and give them blocks. The plan is empty only when nothing runs or waits."""
        draft = _Draft(self.max_num_batched_tokens)
        num_preemptions = self._counts.num_preemptions
        self._schedule_running(draft)
        if self._counts.num_preemptions == num_preemptions:
            self._schedule_waiting(draft)
        sequences = tuple(self._sequence(self._running[request_id], n) for request_id, n in draft.chosen.items())
        plan = StepPlan(sequences)
        self._counts.num_scheduled_tokens += plan.num_tokens
        assert sequences or not self.has_work, "there is work, but no step for it"
        return plan

    def _schedule_running(self, draft: _Draft) -> None:
        by_arrival = list(self._running.values())
        decodes = [request for request in by_arrival if request.num_uncomputed_tokens == 1]
        prefills = [request for request in by_arrival if request.num_uncomputed_tokens != 1]
        for request in (*decodes, *prefills):
            if draft.budget == 0:
                return
            if request.status is not RequestStatus.RUNNING:
                continue  # it was preempted for an older one in this very step
            num_tokens = min(request.num_uncomputed_tokens, draft.budget)
            if self._make_room(request, request.num_computed_tokens + num_tokens, draft):
                draft.take(request, num_tokens)

    def _make_room(self, request: Request, num_tokens: int, draft: _Draft) -> bool:
        """Give the request blocks, preempting newer ones as needed. False when it had to be preempted itself."""
        while not self.manager.allocate(request.request_id, num_tokens):
            victim = next(reversed(self._running.values()))
            draft.drop(victim)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        del self._running[victim.request_id]
        self.manager.free(victim.request_id)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self._waiting.put_back(victim)
        self._counts.num_preemptions += 1

    def _schedule_waiting(self, draft: _Draft) -> None:
        while self._waiting and draft.budget > 0 and len(self._running) < self.max_num_seqs:
            request = self._waiting.peek()
            match = self.manager.match_prefix(request.namespace, request.token_ids)
            if not self.manager.can_admit(match, request.num_tokens, self._num_reserved_blocks()):
                return
            self._waiting.popleft()
            self.manager.admit(request.request_id, request.namespace, match)
            self._note_admission(request, match.num_tokens)
            num_tokens = min(request.num_uncomputed_tokens, draft.budget)
            allocated = self.manager.allocate(request.request_id, request.num_computed_tokens + num_tokens)
            assert allocated, "can_admit promised these blocks"
            draft.take(request, num_tokens)

    def _num_reserved_blocks(self) -> int:
        """Blocks that running requests still need for what they know by now, and one more for each to grow into."""
        missing = (self.manager.num_missing_blocks(r.request_id, r.num_tokens + 1) for r in self._running.values())
        return sum(missing)

    def _note_admission(self, request: Request, num_matched: int) -> None:
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_matched
            wait = self._clock() - request.arrival_time
            self._counts.admissions.append(Admission(request.request_id, request.num_prompt_tokens, num_matched, wait))
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_matched
        self._running[request.request_id] = request
        self._note_covered(request)

    def _note_covered(self, request: Request) -> None:
        """Count the prompt tokens that are covered for the first time."""
        before, now = request.max_computed_tokens, request.num_computed_tokens
        if now > before:
            prompt = request.num_prompt_tokens
            self._counts.num_prompt_tokens += min(now, prompt) - min(before, prompt)
            request.max_computed_tokens = now

    def _sequence(self, request: Request, num_tokens: int) -> ScheduledSequence:
        start = request.num_computed_tokens
        end = start + num_tokens
        self._counts.num_recomputed_tokens += max(0, min(end, request.max_computed_tokens) - start)
        return ScheduledSequence(
            request_id=request.request_id,
            token_ids=tuple(request.token_ids[start:end]),
            start=start,
            block_table=tuple(self.manager.block_table(request.request_id)),
            tail_slot=self.manager.tail_slot(request.request_id),
            rope_class=request.namespace.rope_class,
            sample=self._sample_spec(request) if end == request.num_tokens else None,
        )

    def _sample_spec(self, request: Request) -> SampleSpec:
        sampling = request.sampling
        banned: tuple[int, ...] = ()
        if request.num_output_tokens < sampling.min_tokens:
            banned = sampling.stop_token_ids if sampling.ignore_eos else (*self._eos_token_ids, *sampling.stop_token_ids)
        return SampleSpec(sampling, request.seed, request.num_output_tokens, banned)

    def update(self, plan: StepPlan, sampled: SampledTokens) -> list[TokenEvent]:
        """Book what the step computed: publish full blocks, append tokens, end what has ended. One event for each sample."""
        events: list[TokenEvent] = []
        for sequence, token in zip(plan.sequences, sampled.tokens, strict=True):
            request = self._running[sequence.request_id]
            request.num_computed_tokens = sequence.seq_len
            self._note_covered(request)
            self.manager.commit(request.request_id, request.token_ids, request.num_computed_tokens)
            if token is not None:
                events.append(self._accept(request, token))
        return events

    def _accept(self, request: Request, token: SampledToken) -> TokenEvent:
        cached = request.num_cached_tokens if request.num_output_tokens == 0 else None
        if token.token_id is None:
            self._finish(request, FinishReason.ERROR)
            return TokenEvent(request.request_id, None, FinishReason.ERROR, cached, token.error)
        request.token_ids.append(token.token_id)
        self._counts.num_sampled_tokens += 1
        reason = self._finish_reason(request, token.token_id)
        if reason is not None:
            self._finish(request, reason)
        return TokenEvent(request.request_id, token.token_id, reason, cached)

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        sampling = request.sampling
        if request.num_output_tokens >= sampling.min_tokens:
            if token_id in sampling.stop_token_ids:
                return FinishReason.STOP
            if token_id in self._eos_token_ids and not sampling.ignore_eos:
                return FinishReason.STOP
        if request.num_output_tokens >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if self._running.pop(request.request_id, None) is not None:
            self.manager.free(request.request_id)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
