"""What must hold after a soak: the client's books against the server's counters, and memory that does not grow.

A request that was given up before any byte of its answer came may never have reached the server, so these give bounds only; every
other one is counted exactly. Sums of the server's own counters must always be equal.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from loadtest.metrics import Metrics
from loadtest.stream import Usage

WARM_UP = 0.2  # of the requests: by then every block has been written once
GROWTH_BYTES = 16 << 20
GROWTH_SHARE = 0.02


@dataclass(slots=True)
class Tally:
    """The client's side. ``answer_s``: about how long an answer takes, the recent ones counting most."""

    answer_s: float = 0.2
    num_sent: int = 0
    num_answered: int = 0
    num_hung_up: int = 0
    num_begun: int = 0
    num_prompt_tokens: int = 0
    num_answered_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def num_ended(self) -> int:
        return self.num_answered + self.num_hung_up + len(self.failures)

    @property
    def num_doubtful(self) -> int:
        """Given up before any byte of the answer came."""
        return self.num_hung_up - self.num_begun

    def sent(self, num_prompt_tokens: int) -> None:
        self.num_sent += 1
        self.num_prompt_tokens += num_prompt_tokens

    def hung_up(self, *, has_begun: bool) -> None:
        self.num_hung_up += 1
        self.num_begun += has_begun

    def failed(self, message: str) -> None:
        self.failures.append(message)

    def answered(self, usage: Usage, num_output_tokens: int, seconds: float) -> None:
        if usage.completion_tokens != num_output_tokens:
            self.failed(f"{usage.completion_tokens} tokens where {num_output_tokens} were asked for")
            return
        self.num_answered += 1
        self.num_answered_prompt_tokens += usage.prompt_tokens
        self.num_cached_tokens += usage.cached_tokens or 0
        self.num_output_tokens += usage.completion_tokens
        self.answer_s += 0.05 * (seconds - self.answer_s)


@dataclass(slots=True)
class Memory:
    """(requests ended by then, resident bytes) of one process."""

    name: str
    samples: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    found: str
    wanted: str
    holds: bool


def equal(name: str, found: float, wanted: float) -> Check:
    return Check(name, f"{found:,.0f}", f"{wanted:,.0f}", found == wanted)


def within(name: str, found: float, low: float, high: float) -> Check:
    return Check(name, f"{found:,.0f}", f"{low:,.0f} to {high:,.0f}", low <= found <= high)


def counter_checks(
    tally: Tally, grown: Metrics, end: Metrics, calm: Tally, calm_grown: Metrics, calm_end: Metrics
) -> list[Check]:
    """``grown`` over the part with hang-ups, ``end`` the values after it; the same for the calm part."""
    reasons = grown.by_label("octavo_requests_total", "finish_reason")
    ended = sum(reasons.values())
    answers = reasons["stop"] + reasons["length"]
    return [
        Check("requests that failed", "; ".join(sorted({*tally.failures, *calm.failures})) or "none", "none",
              not tally.failures and not calm.failures),
        equal("requests sent = answered + hung up", tally.num_sent, tally.num_answered + tally.num_hung_up),
        within("requests by finish reason, sum; not less than sent - doubtful", ended, tally.num_sent - tally.num_doubtful,
               tally.num_sent),
        within("answered by the server (stop, length)", answers, tally.num_answered, tally.num_answered + tally.num_hung_up),
        within("aborted", reasons["abort"], tally.num_hung_up - tally.num_doubtful - (answers - tally.num_answered),
               tally.num_hung_up),
        equal("errors", reasons["error"], 0),
        within("prompt tokens", grown["octavo_prompt_tokens_total"], tally.num_answered_prompt_tokens, tally.num_prompt_tokens),
        *_sums("", grown),
        *_idle("", end),
        *_calm(calm, calm_grown),
        *_sums("calm: ", calm_grown),
        *_idle("calm: ", calm_end),
    ]  # fmt: skip


def _sums(prefix: str, grown: Metrics) -> list[Check]:
    """What holds between the server's own counters, whatever was sent."""
    sources = grown.by_label("octavo_prompt_tokens_by_source_total", "source")
    found = sum(sources[source] for source in ("device", "host", "disk", "in_flight"))
    prompt, hits = grown["octavo_prompt_tokens_total"], grown["octavo_prefix_cache_hit_tokens_total"]
    ended = sum(grown.by_label("octavo_requests_total", "finish_reason").values())
    gaps = grown["octavo_time_to_first_token_seconds_count"] + grown["octavo_inter_token_latency_seconds_count"]
    return [
        equal(f"{prefix}durations = requests by finish reason", grown["octavo_request_duration_seconds_count"], ended),
        equal(f"{prefix}prompt tokens by source = prompt tokens", sum(sources.values()), prompt),
        equal(f"{prefix}found tokens by source = hit tokens", found, hits),
        equal(f"{prefix}tokens looked up = prompt tokens", grown["octavo_prefix_cache_query_tokens_total"], prompt),
        equal(f"{prefix}latencies of tokens = generated tokens", gaps, grown["octavo_generation_tokens_total"]),
    ]


def _idle(prefix: str, end: Metrics) -> list[Check]:
    blocks = end.by_label("octavo_kv_cache_blocks", "state")
    capacity, size = end["octavo_kv_cache_capacity_bytes"], sum(end.by_label("octavo_kv_cache_bytes", "state").values())
    return [
        equal(f"{prefix}referenced blocks", blocks["referenced"], 0),
        equal(f"{prefix}requests running or waiting", end["octavo_requests_running"] + end["octavo_requests_waiting"], 0),
        equal(f"{prefix}bytes referenced + cached + free = capacity", size, capacity),
    ]


def _calm(calm: Tally, grown: Metrics) -> list[Check]:
    reasons = grown.by_label("octavo_requests_total", "finish_reason")
    return [
        equal("calm: answered by the server = sent", reasons["stop"] + reasons["length"], calm.num_sent),
        equal("calm: requests by finish reason = sent", sum(reasons.values()), calm.num_sent),
        equal("calm: admissions = sent", grown["octavo_request_queue_seconds_count"], calm.num_sent),
        equal("calm: prompt tokens = sent", grown["octavo_prompt_tokens_total"], calm.num_prompt_tokens),
        equal("calm: hit tokens = the answers' cached_tokens", grown["octavo_prefix_cache_hit_tokens_total"],
              calm.num_cached_tokens),
        equal("calm: generated tokens = received", grown["octavo_generation_tokens_total"], calm.num_output_tokens),
    ]  # fmt: skip


def memory_check(memory: Memory, num_requests: int) -> Check:
    """After the warm-up: the last quarter of the samples against the first."""
    sizes = [size for ended, size in memory.samples if ended >= WARM_UP * num_requests]
    name = f"memory of the {memory.name} after the first {WARM_UP:.0%} (first / last / most)"
    if len(sizes) < 4:
        return Check(name, f"{len(sizes)} samples", "at least 4", False)
    quarter = len(sizes) // 4
    first, last = statistics.median(sizes[:quarter]), statistics.median(sizes[-quarter:])
    allowed = max(GROWTH_BYTES, GROWTH_SHARE * first)
    found = " / ".join(f"{size / 2**20:,.1f} MiB" for size in (first, last, max(sizes)))
    return Check(name, found, f"growth under {allowed / 2**20:,.0f} MiB", last - first <= allowed)


def table(checks: list[Check]) -> str:
    rows = [f"| {c.name} | {c.found} | {c.wanted} | {'yes' if c.holds else 'NO'} |" for c in checks]
    return "\n".join(["| what | found | wanted | holds |", "|---|---|---|---|", *rows])
