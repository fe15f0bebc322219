"""One rule: each step, let every request's computed tokens catch up with its known tokens, under one token budget.

Decode, chunked prefill, prefix hits and resumption after a preemption are this rule with other numbers.
The one writer of requests and queues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.kv.history import FoundTokens
from engine.kv.manager import KVCacheManager
from engine.kv.match import PrefixMatch
from engine.kv.tiers import Tier
from engine.request import FinishReason, Request, RequestStatus, TokenEvent
from engine.sched.admission import Gate, lasting_blocks
from engine.sched.draft import Draft, is_prefill
from engine.sched.fairness import ServedTokens
from engine.sched.inflight import InFlight
from engine.sched.plan import SampledToken, SampledTokens, SampleSpec, ScheduledSequence, StepPlan, Turn
from engine.sched.pressure import PressurePolicy, cheapest_to_bring_back
from engine.sched.promotion import Promotions
from engine.sched.waiting import Overtaking, WaitingQueue
from engine.stats import Admission


@dataclass(slots=True)
class StepCounts:
    """What one step came to, collected between schedule() and the end of update()."""

    num_scheduled_tokens: int = 0
    num_prompt_tokens: int = 0
    num_sampled_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_regrown_tokens: int = 0
    num_preemptions: int = 0
    admissions: list[Admission] = field(default_factory=list)


class Scheduler:
    """Continuous batching over a KV cache that is handed out as it is needed.

    ``max_prefill_beside_decodes`` bounds the prefill tokens of a step in which any request decodes; None is no bound.

    Order within a step: requests that decode, then running prefills by priority, then waiting requests in order of service. When
    blocks run out, a running request is preempted: its blocks stay cached, and resuming is an ordinary prefix match. Which one goes
    and who may join is the pressure policy's business. It bounds how often a request is preempted, and one request of the longest
    length always fits, so there is progress.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eos_token_ids: tuple[int, ...],
        clock: Callable[[], float],
        max_prefill_beside_decodes: int | None = None,
        pressure: PressurePolicy | None = None,
    ) -> None:
        self.manager = manager
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # so that every decode advances at every step
        self.max_num_batched_tokens = max_num_batched_tokens
        self._max_prefill_beside_decodes = max_prefill_beside_decodes or max_num_batched_tokens
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._pressure = pressure if pressure is not None else cheapest_to_bring_back()
        self._served = ServedTokens()
        self._waiting = WaitingQueue(self._served)
        self._in_flight = InFlight(manager.block_size, allow_partial=manager.allow_partial)
        self._promotions = Promotions(manager.tiers, clock)
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
        """Tokens whose K and V the running requests hold and read."""
        return self.manager.num_held_tokens

    def take_counts(self) -> StepCounts:
        """The counts since the last call."""
        counts, self._counts = self._counts, StepCounts()
        return counts

    def add(self, request: Request) -> TokenEvent | None:
        """Queue a request. One that the cache can never hold ends here, and its last word is returned."""
        needed, total = self.manager.num_blocks_for(request.max_num_tokens), lasting_blocks(self.manager)
        if needed > total:
            request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.ERROR
            error = f"{request.max_num_tokens} tokens of prompt and max_tokens take {needed} blocks; the KV cache has {total}"
            return TokenEvent(request.request_id, None, FinishReason.ERROR, num_cached_tokens=0, error=error)
        request.is_stream = self.manager.is_stream(request.max_num_tokens)
        self._served.enter(request.tenant)
        self._waiting.add(request)
        return None

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request now and give its blocks back. None when it is unknown or has ended already."""
        request = self._waiting.remove(request_id) or self._running.get(request_id)
        if request is None:
            return None
        self._finish(request, FinishReason.ABORT)
        return TokenEvent(request_id, None, FinishReason.ABORT, num_cached_tokens=request.num_cached_tokens)

    def schedule(self) -> StepPlan:
        """Choose the next step's tokens and give them blocks. The plan is empty only when nothing runs, or waits for anything but
        the disk."""
        draft = self._new_draft()
        num_preemptions = self._counts.num_preemptions
        self._schedule_running(draft)
        if self._counts.num_preemptions == num_preemptions:
            self._schedule_waiting(draft)
        sequences = tuple(self._sequence(self._running[request_id], n) for request_id, n in draft.chosen.items())
        tiers = self.manager.tiers
        plan = StepPlan(sequences, self.manager.take_copies(), tiers.stores, tiers.loads, self._take_turns())
        self._counts.num_scheduled_tokens += plan.num_tokens
        assert sequences or not self.has_work or self._waits_for_disk(), "there is work, but no step for it"
        return plan

    def _take_turns(self) -> tuple[Turn, ...]:
        turns = self.manager.take_turns()
        return tuple(
            Turn(turn.block_ids, turn.distance, self._running[request_id].namespace.rope_class) for request_id, turn in turns
        )

    def _new_draft(self) -> Draft:
        any_decodes = any(not is_prefill(request) for request in self._running.values())
        max_prefill = self._max_prefill_beside_decodes if any_decodes else self.max_num_batched_tokens
        return Draft(self.max_num_batched_tokens, max_prefill, self.manager.block_size)

    def _waits_for_disk(self) -> bool:
        return not self._running and any(self._promotions.holds(request.request_id) for request in self._waiting)

    def _schedule_running(self, draft: Draft) -> None:
        by_arrival = list(self._running.values())
        decodes = [request for request in by_arrival if not is_prefill(request)]
        prefills = sorted(filter(is_prefill, by_arrival), key=lambda request: request.priority)
        for request in (*decodes, *prefills):
            if request.status is not RequestStatus.RUNNING:
                continue  # it was preempted for another in this very step
            num_tokens = self._chunk(request, draft)
            if num_tokens == 0:
                return
            if self._make_room(request, request.num_computed_tokens + num_tokens, draft):
                draft.take(request, num_tokens)

    def _chunk(self, request: Request, draft: Draft) -> int:
        num_tokens = draft.chunk(request)
        return min(num_tokens, self.manager.num_to_go(request.num_computed_tokens)) if request.is_stream else num_tokens

    def _make_room(self, request: Request, num_tokens: int, draft: Draft) -> bool:
        """Give the request blocks, preempting others as needed. False when it had to be preempted itself."""
        manager = self.manager
        while not manager.allocate(request.request_id, num_tokens):
            num_short = manager.num_missing_blocks(request.request_id, num_tokens) - manager.num_available_blocks
            victim = self._pressure.victims.choose(tuple(self._running.values()), num_short, manager)
            draft.drop(victim)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        self._send_back(victim)
        victim.num_preemptions += 1
        self._waiting.add(victim)
        self._counts.num_preemptions += 1

    def _grow(self, request: Request) -> None:
        """Let the request come back in the next RoPE class, where all of it is computed again but what is cached there."""
        self._send_back(request)
        request.namespace = request.namespace._replace(rope_class=request.namespace.rope_class + 1)
        request.is_regrowing = True
        self._waiting.add(request)

    def _send_back(self, request: Request) -> None:
        """From running to waiting. Its blocks stay cached."""
        del self._running[request.request_id]
        self.manager.free(request.request_id)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0

    def _schedule_waiting(self, draft: Draft) -> None:
        """Admit in order of service. Those held back for a running one, or for the disk, are passed by, not waited for; those
        without room may be overtaken for a while.

        At most ``max_num_seqs`` are looked at, so that a long queue that can all be held back does not hold up the step.
        """
        self._promotions.give_up_overdue()
        if not self._waiting or not self._has_room(draft):
            return
        gate = self._pressure.admission.open(self._running.values(), self.manager)
        overtaking = Overtaking(self._pressure.max_tries)
        num_looks = self.max_num_seqs
        for request in self._waiting:
            if not self._has_room(draft) or num_looks == 0 or not overtaking.may_try(request):
                return
            if self._is_held(request):
                continue
            num_looks -= 1
            match = self._match(request)
            if self._in_flight.hold_back(request, match, self._running):
                continue
            fitting = _fitting(request, match, gate)
            if fitting is None:
                overtaking.pass_over(request)
            elif not self._promotions.start(request.request_id, match):
                overtaking.note_admission()
                gate.book(request, fitting)
                self._admit(request, fitting, draft)

    def _match(self, request: Request) -> PrefixMatch:
        if request.is_stream:
            return PrefixMatch((), 0)
        return self.manager.match_prefix(request.namespace, request.token_ids, request.num_public_tokens)

    def _is_held(self, request: Request) -> bool:
        return self._promotions.holds(request.request_id) or self._in_flight.is_held(request.request_id, self._running)

    def _has_room(self, draft: Draft) -> bool:
        return draft.has_room and len(self._running) < self.max_num_seqs

    def _admit(self, request: Request, match: PrefixMatch, draft: Draft) -> None:
        self._waiting.remove(request.request_id)
        if request.is_stream:
            self.manager.admit_stream(request.request_id)
        else:
            self.manager.admit(request.request_id, request.namespace, match)
        self._note_admission(request, match)
        num_tokens = self._chunk(request, draft)
        allocated = self.manager.allocate(request.request_id, request.num_computed_tokens + num_tokens)
        assert allocated, "the gate promised these blocks"
        draft.take(request, num_tokens)

    def _note_admission(self, request: Request, match: PrefixMatch) -> None:
        self._promotions.forget(request.request_id)
        num_resident = self._in_flight.forget(request.request_id)
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = match.num_tokens
            self._served.charge(request.tenant, request.num_prompt_tokens - match.num_tokens)
            sources = self.manager.sources(request.namespace, request.prompt_token_ids, match, _found(match, num_resident))
            wait = self._clock() - request.arrival_time
            admission = Admission(
                request.request_id, request.num_prompt_tokens, match.num_tokens, wait, sources, request.namespace.rope_class
            )
            self._counts.admissions.append(admission)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = match.num_tokens
        self._running[request.request_id] = request
        self._note_covered(request)

    def _note_covered(self, request: Request) -> None:
        """Count the prompt tokens that are covered for the first time."""
        before, now = request.max_computed_tokens, request.num_computed_tokens
        request.is_regrowing = request.is_regrowing and now < before
        if now > before:
            prompt = request.num_prompt_tokens
            self._counts.num_prompt_tokens += min(now, prompt) - min(before, prompt)
            request.max_computed_tokens = now

    def _sequence(self, request: Request, num_tokens: int) -> ScheduledSequence:
        start, num_released = request.num_computed_tokens, self.manager.num_released_blocks(request.request_id)
        end = start + num_tokens
        num_again = max(0, min(end, request.max_computed_tokens) - start)
        if request.is_regrowing:
            self._counts.num_regrown_tokens += num_again
        else:
            self._counts.num_recomputed_tokens += num_again
        return ScheduledSequence(
            request_id=request.request_id,
            token_ids=tuple(request.token_ids[start:end]),
            start=start - num_released * self.manager.block_size if request.is_stream else start,
            block_table=tuple(self.manager.block_table(request.request_id)),
            first_block=0 if request.is_stream else num_released,
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
        self.manager.finish_step()
        events: list[TokenEvent] = []
        for sequence, token in zip(plan.sequences, sampled.tokens, strict=True):
            request = self._running[sequence.request_id]
            request.num_computed_tokens += len(sequence.token_ids)
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
        self._served.charge(request.tenant, 1)
        reason = self._finish_reason(request, token.token_id)
        if reason is not None:
            self._finish(request, reason)
        elif request.has_outgrown:
            self._grow(request)
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
        self._promotions.forget(request.request_id)
        if self._running.pop(request.request_id, None) is not None:
            self.manager.free(request.request_id)
        self._in_flight.forget(request.request_id)
        self._leave(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self._pressure.admission.note_finished(request)
        for preempted in reversed(tuple(self._waiting.preempted())):  # the first to come back is the last to be evicted
            self.manager.keep(preempted.namespace, preempted.token_ids, preempted.num_public_tokens)

    def _leave(self, request: Request) -> None:
        """The tenant has one request less. What it was charged for at admission and did not get is given back."""
        if request.status is not RequestStatus.WAITING:
            self._served.charge(request.tenant, -max(0, request.num_prompt_tokens - request.max_computed_tokens))
        self._served.leave(request.tenant)


def _fitting(request: Request, match: PrefixMatch, gate: Gate) -> PrefixMatch | None:
    """What the request can start from, if it fits now. The block of a partial match has to stay beside its copy for a step:
    where there is no room for both, that part is computed."""
    return next((candidate for candidate in (match, match.without_partial()) if gate.fits(request, candidate)), None)


def _found(match: PrefixMatch, num_resident: int | None) -> FoundTokens:
    """The matched tokens by where they came from. ``num_resident`` were there before the request was held back for a running one."""
    host, disk = match.num_tier_tokens(Tier.HOST), match.num_tier_tokens(Tier.DISK)
    on_device = match.num_tokens - host - disk
    in_flight = max(0, on_device - num_resident) if num_resident is not None else 0
    return FoundTokens(device=on_device - in_flight, host=host, disk=disk, in_flight=in_flight)
