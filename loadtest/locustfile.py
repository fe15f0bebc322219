"""A locust user that streams completions, with random prompts that no cache knows.

    locust -f loadtest/locustfile.py --headless -u 8 -r 8 -t 60s --host http://127.0.0.1:8000

Closed loop: a user sends its next request when the last one has ended, so a slow server is asked less. Each request gives
one POST entry (end-to-end, its "size" the output tokens that the server counted) and, if it succeeded, one TTFT entry and
one ITL entry for each gap between chunks; the Aggregated row mixes these and means nothing. A cut, empty or incomplete
stream is a failed POST. To be run from the folder that holds ``loadtest``.
"""

from __future__ import annotations

import random
import time
from http.client import HTTPException

from geventhttpclient.response import HTTPSocketResponse
from locust import FastHttpUser, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from loadtest.client import CompletionRequest, completion_body
from loadtest.stream import CompletionRecord, FailureKind, StreamError, StreamFold


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_options(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("completions")
    group.add_argument("--model", default="smollm2-135m", help="name in requests")
    group.add_argument("--vocab-size", type=int, default=32_000, help="prompt ids are below this")
    group.add_argument("--prompt-tokens", type=int, default=128)
    group.add_argument("--output-tokens", type=int, default=64)


class CompletionUser(FastHttpUser):
    """Streams one completion after another, without a pause."""

    connection_timeout = 60.0
    network_timeout = 300.0

    @task
    def complete(self) -> None:
        options = self.environment.parsed_options
        prompt = tuple(random.choices(range(options.vocab_size), k=options.prompt_tokens))
        body = completion_body(options.model, CompletionRequest(prompt, options.output_tokens))
        sent_at = time.perf_counter()
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(response.error or f"HTTP {response.status_code}: {str(response.text)[:400]}")
                return
            try:
                record = read_stream(response.stream, sent_at)
                check_tokens(record, len(prompt), options.output_tokens)
            except StreamError as exc:
                response.request_meta["response_time"] = (time.perf_counter() - sent_at) * 1e3
                response.failure(exc)
                return
            response.request_meta["response_time"] = record.e2e * 1e3
            response.request_meta["response_length"] = record.usage.completion_tokens
        report_timings(self.environment, record)


def read_stream(stream: HTTPSocketResponse, sent_at: float) -> CompletionRecord:
    """Read line by line, since a line is handed on as soon as it is there. Raises StreamError."""
    fold = StreamFold(sent_at)
    try:
        while line := stream.readline(b"\n"):
            fold.feed(line, time.perf_counter())
    except (HTTPException, OSError) as exc:
        raise StreamError(FailureKind.CUT, f"the connection ended inside the answer ({exc})") from exc
    return fold.finish(time.perf_counter())


def check_tokens(record: CompletionRecord, prompt_tokens: int, output_tokens: int) -> None:
    """Raises StreamError unless the server counted what was sent and asked for."""
    counted, wanted = (record.usage.prompt_tokens, record.usage.completion_tokens), (prompt_tokens, output_tokens)
    if counted != wanted:
        raise StreamError(FailureKind.MALFORMED, f"(prompt, output) tokens are {counted} instead of {wanted}")


def report_timings(environment: Environment, record: CompletionRecord) -> None:
    for kind, seconds in (("TTFT", record.ttft), *(("ITL", gap) for gap in record.itl)):
        environment.events.request.fire(  # type: ignore[no-untyped-call]
            request_type=kind,
            name="/v1/completions",
            response_time=seconds * 1e3,
            response_length=0,
            exception=None,
            context={},
        )
