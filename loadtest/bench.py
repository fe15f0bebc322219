"""Measures a completion server scenario by scenario and writes a table and a JSON file.

    python -m loadtest.bench --serve "octavo serve" --json ours.json
    python -m loadtest.bench --url http://127.0.0.1:8000 --pid 1234 --scenarios single,batch16 --reps 5

Exit status: 0 if every repetition was valid, 1 if one was not, 2 if nothing could be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.ceilings import Ceilings, measure_ceilings
from loadtest.client import CompletionRequest, Endpoint, complete
from loadtest.measure import MAX_FOREIGN_CORES, Repetition, Summary, repeat_once, summarize
from loadtest.proc import MemoryUse, memory_use, process_tree
from loadtest.report import FORMAT, markdown
from loadtest.server import ServerError, ServerUnderTest, serving
from loadtest.stream import StreamError
from loadtest.workload import SCENARIOS, WorkloadSource

VOCAB_SIZE = 32_000
"""Ids below this are valid for every Llama, Mistral, Qwen and SmolLM2 vocabulary."""


class BenchError(Exception):
    """Nothing can be measured; one line says why."""


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    repetitions: tuple[Repetition, ...]
    summary: Summary


@dataclass(frozen=True, slots=True)
class RunResult:
    """Everything that one run of the bench found. ``memory`` and the loads are None if the server's process is not known."""

    label: str
    started_at: str
    command: str | None
    model: str
    source: WorkloadSource
    ready_in_s: float | None
    ceilings: Ceilings
    scenarios: dict[str, ScenarioResult]
    memory: MemoryUse | None

    @property
    def is_valid(self) -> bool:
        return not any(result.summary.num_invalid for result in self.scenarios.values())

    def as_json(self) -> dict[str, Any]:
        scenarios = {name: _scenario_json(result) for name, result in self.scenarios.items()}
        return {"format": FORMAT, "max_foreign_cores": MAX_FOREIGN_CORES} | asdict(self) | {"scenarios": scenarios}


def _scenario_json(result: ScenarioResult) -> dict[str, Any]:
    summary = asdict(result.summary) | {"is_disturbed": result.summary.is_disturbed}
    return {"summary": summary, "repetitions": [asdict(r) | {"is_disturbed": r.is_disturbed} for r in result.repetitions]}


def run(options: argparse.Namespace) -> RunResult:
    """Raises BenchError, ServerError, or StreamError if the first, untimed request fails."""
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    with _server(options) as server:
        endpoint = Endpoint(server.url, options.model or _first_model(server.url, options.api_key), options.api_key)
        source = WorkloadSource(options.vocab_size, options.seed, options.salt)
        asyncio.run(_warm_up(endpoint, source))
        ceilings = measure_ceilings()
        with _progress() as progress:
            task = progress.add_task("", total=len(options.scenarios) * options.reps)

            def on_start(name: str) -> None:
                progress.update(task, description=name)

            scenarios = {}
            for name in options.scenarios:
                repetitions = asyncio.run(
                    _repeat(endpoint, source, name, options.reps, server.pid, on_start, lambda: progress.advance(task))
                )
                scenarios[name] = ScenarioResult(repetitions, summarize(repetitions))
        memory = memory_use(server.pid) if server.pid is not None else None
    return RunResult(
        label=options.label,
        started_at=started_at,
        command=options.serve,
        model=endpoint.model,
        source=source,
        ready_in_s=server.ready_in_s,
        ceilings=ceilings,
        scenarios=scenarios,
        memory=memory,
    )


async def _repeat(
    endpoint: Endpoint,
    source: WorkloadSource,
    name: str,
    num_repetitions: int,
    server_pid: int | None,
    on_start: Callable[[str], None],
    on_end: Callable[[], None],
) -> tuple[Repetition, ...]:
    scenario, done = SCENARIOS[name], []
    for index in range(num_repetitions):
        on_start(name)
        done.append(await repeat_once(endpoint, scenario, source.build(scenario, index), index, server_pid))
        on_end()
    return tuple(done)


async def _warm_up(endpoint: Endpoint, source: WorkloadSource) -> None:
    """One untimed, short request. What a server first does for longer prompts or batches falls into their first repetition."""
    (prompt,) = source.build(SCENARIOS["single"], repetition=-1).requests
    await complete(endpoint, CompletionRequest(prompt.prompt, 8))


def _server(options: argparse.Namespace) -> AbstractContextManager[ServerUnderTest]:
    if options.serve is not None:
        return serving(options.serve, options.ready_timeout)
    if options.pid is not None and not process_tree(options.pid):
        raise BenchError(f"there is no process {options.pid}")
    return nullcontext(ServerUnderTest(options.url.rstrip("/"), options.pid, None))


def _first_model(url: str, api_key: str | None) -> str:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=headers), timeout=30) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (urllib.error.URLError, ConnectionError, TimeoutError) as exc:
        raise BenchError(f"{url}/v1/models: {exc}") from exc
    except (ValueError, LookupError, TypeError) as exc:
        raise BenchError(f"{url}/v1/models lists no model; name one with --model") from exc


def _progress() -> Progress:
    columns: Iterable[Any] = (TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--url", help="root of a running server")
    target.add_argument(
        "--serve", metavar="COMMAND", help="start this with --port N appended, wait for /health, stop it at the end"
    )
    parser.add_argument("--pid", type=int, help="with --url: the server's process, for memory and CPU load")
    parser.add_argument("--ready-timeout", type=float, default=600.0, help="with --serve: seconds to wait (default 600)")
    parser.add_argument("--model", help="name in requests (default: the first that /v1/models lists)")
    parser.add_argument("--api-key")
    parser.add_argument(
        "--scenarios", type=_scenario_names, default=tuple(SCENARIOS), help=f"comma-separated (default {','.join(SCENARIOS)})"
    )
    parser.add_argument("--reps", type=_positive, default=3, help="repetitions of each scenario (default 3)")
    parser.add_argument(
        "--vocab-size", type=_positive, default=VOCAB_SIZE, help=f"prompt ids are below this (default {VOCAB_SIZE})"
    )
    parser.add_argument("--seed", type=int, default=1, help="of lengths and ids (default 1)")
    parser.add_argument(
        "--salt", type=int, default=None, help="of ids only (default: random, so that no earlier run is in the server's cache)"
    )
    parser.add_argument("--label", default="server", help="name of this run in tables")
    parser.add_argument(
        "--weight-bytes", type=float, help="bytes of weights that a decode step reads, to show the share of the ceiling"
    )
    parser.add_argument(
        "--cache-bytes", type=float, help="bytes of the KV cache, if the scenarios fill it, to show what memory goes to neither"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
    return parser


def _scenario_names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in SCENARIOS]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    return names


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.salt is None:
        options.salt = secrets.randbits(32)
    try:
        result = run(options)
    except (BenchError, ServerError, StreamError) as exc:
        print(f"bench: {exc}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as exc:
        print(f"bench: the machine's ceilings could not be measured:\n{exc.stderr}", file=sys.stderr)
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps(result.as_json(), indent=1) + "\n")
    print(markdown([result.as_json()], weight_bytes=options.weight_bytes, cache_bytes=options.cache_bytes))
    return 0 if result.is_valid else 1


if __name__ == "__main__":
    sys.exit(main())
