"""The ``octavo`` command: flags and environment to Settings, Settings to a running server. Imports the engine only to run it.

Whatever keeps octavo from starting is one line on stderr and exit status 2.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from engine.config import CacheConfig, SchedulerConfig
from engine.errors import ConfigError, OctavoError
from server import __version__
from server.auth import read_api_keys
from server.engine_client import RunnableEngine
from server.metrics import Metrics
from server.progress import ProgressView, open_progress
from server.serve import bind, serve
from server.settings import DEFAULT_MODEL, Settings
from server.threads import CancelToken, run_in_thread
from server.units import parse_bytes, parse_share_or_bytes

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)

_CACHE, _SCHEDULER, _SETTINGS = CacheConfig(), SchedulerConfig(), Settings()


def main() -> NoReturn:
    logging.basicConfig(level=logging.WARNING, format="octavo: %(levelname)s: %(message)s", stream=sys.stderr)
    try:
        app()
    except OctavoError as exc:
        print(f"octavo: error: {' '.join(str(exc).split())}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def octavo(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """An inference serving engine for Llama-style models whose subject is the KV cache."""


@app.command(name="serve")
def serve_command(
    model: Annotated[
        str, typer.Argument(envvar="OCTAVO_MODEL", help="Folder in Hugging Face layout, .gguf file, hub id or built-in name.")
    ] = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(envvar="OCTAVO_DTYPE", help="auto, float32, bfloat16 or float16.")] = _SETTINGS.dtype,
    device: Annotated[str, typer.Option(envvar="OCTAVO_DEVICE", help="cpu or cuda.")] = _SETTINGS.device,
    max_model_len: Annotated[
        int | None,
        typer.Option(envvar="OCTAVO_MAX_MODEL_LEN", help="Tokens of prompt and output together; the model's own if left out."),
    ] = None,
    rope_scaling: Annotated[
        str | None,
        typer.Option(
            envvar="OCTAVO_ROPE_SCALING",
            help='JSON that replaces the model\'s RoPE scaling, as in a config.json: \'{"rope_type": "yarn", "factor": 4}\'.',
        ),
    ] = None,
    rope_policy: Annotated[
        str,
        typer.Option(
            envvar="OCTAVO_ROPE_POLICY",
            help="static: one scaling for all; ladder: each request the least its length needs; auto: the ladder where you extend the context.",
        ),
    ] = _SETTINGS.rope_policy,
    attention_sinks: Annotated[
        int | None,
        typer.Option(envvar="OCTAVO_ATTENTION_SINKS", help="With --window: the first tokens that stay; 4 if left out."),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            envvar="OCTAVO_WINDOW",
            help="Endless requests: those of more tokens than sinks and window read the first and the last ones only.",
        ),
    ] = None,
    block_size: Annotated[
        int, typer.Option(envvar="OCTAVO_BLOCK_SIZE", help="Tokens in a KV cache block.")
    ] = _CACHE.block_size,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(
            envvar="OCTAVO_KV_CACHE_MEMORY", help="Size of the KV cache: bytes, 512MiB, 4GiB, 2G. Wins over the fraction."
        ),
    ] = None,
    kv_cache_fraction: Annotated[
        float, typer.Option(envvar="OCTAVO_KV_CACHE_FRACTION", help="Share of the memory free after loading the weights.")
    ] = _CACHE.fraction,
    host_cache: Annotated[
        str | None,
        typer.Option(
            envvar="OCTAVO_HOST_CACHE", help="Keep evicted blocks in this much host memory: 4GiB, 512MiB; off if left out."
        ),
    ] = None,
    disk_cache: Annotated[
        str | None,
        typer.Option(envvar="OCTAVO_DISK_CACHE", help="Folder that keeps blocks over restarts; off if left out."),
    ] = None,
    disk_cache_size: Annotated[
        str, typer.Option(envvar="OCTAVO_DISK_CACHE_SIZE", help="Most bytes in that folder; the least recently used go first.")
    ] = "10GiB",
    pin_budget: Annotated[
        str, typer.Option(envvar="OCTAVO_PIN_BUDGET", help="Most of the KV cache that pins may hold: 0.25, 25% or a size.")
    ] = str(_CACHE.pin_budget_fraction),
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            envvar="OCTAVO_KV_CACHE_DTYPE",
            help="Type of the KV cache: auto (as computed), float32, bfloat16, float16, fp8, int8, k8v4 or int4.",
        ),
    ] = _CACHE.kv_dtype,
    max_num_seqs: Annotated[
        int, typer.Option(envvar="OCTAVO_MAX_NUM_SEQS", help="Most requests in one step.")
    ] = _SCHEDULER.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, typer.Option(envvar="OCTAVO_MAX_NUM_BATCHED_TOKENS", help="Most tokens in one step.")
    ] = _SCHEDULER.max_num_batched_tokens,
    max_prefill_beside_decodes: Annotated[
        int | None,
        typer.Option(
            envvar="OCTAVO_MAX_PREFILL_BESIDE_DECODES",
            help="Most prompt tokens in a step that also decodes: fewer, smoother streams. If left out, 64 on a CPU, else no bound.",
        ),
    ] = _SCHEDULER.max_prefill_beside_decodes,
    max_queue: Annotated[
        int, typer.Option(envvar="OCTAVO_MAX_QUEUE", help="Most requests that may wait for their first step; more get a 429.")
    ] = _SCHEDULER.max_queue,
    host: Annotated[str, typer.Option(envvar="OCTAVO_HOST", help="Address to listen on.")] = _SETTINGS.host,
    port: Annotated[int, typer.Option(envvar="OCTAVO_PORT", help="Port to listen on; 0 for any free one.")] = _SETTINGS.port,
    served_model_name: Annotated[
        str | None, typer.Option(envvar="OCTAVO_SERVED_MODEL_NAME", help="Name of the model in the API; its own if left out.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OCTAVO_API_KEY", help="Ask for this key on all but /health, /version and /metrics.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(envvar="OCTAVO_API_KEY_FILE", help="More keys, one a line: name: key. # starts a comment.")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="OCTAVO_ADMIN_KEY", help="The key that opens /v1/cache and /reset_prefix_cache.")
    ] = None,
    public_prefix: Annotated[
        list[Path] | None,
        typer.Option(envvar="OCTAVO_PUBLIC_PREFIX", help="A text file whose cached blocks all keys share; may be repeated."),
    ] = None,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            envvar="OCTAVO_SHUTDOWN_TIMEOUT", help="Seconds after SIGTERM for running requests; the rest, for the disk cache."
        ),
    ] = _SETTINGS.shutdown_timeout,
) -> None:
    """Serve MODEL over HTTP until SIGTERM or Ctrl-C."""
    cache = CacheConfig(
        block_size=block_size,
        memory_bytes=parse_bytes(kv_cache_memory) if kv_cache_memory is not None else None,
        fraction=kv_cache_fraction,
        kv_dtype=kv_cache_dtype,
        host_bytes=parse_bytes(host_cache) if host_cache is not None else 0,
        disk_path=disk_cache,
        disk_bytes=parse_bytes(disk_cache_size),
    )
    settings = Settings(
        model=model,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        rope_scaling=rope_scaling,
        rope_policy=rope_policy,
        attention_sinks=attention_sinks,
        window=window,
        cache=_with_pin_budget(cache, parse_share_or_bytes(pin_budget)),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_prefill_beside_decodes=max_prefill_beside_decodes,
            max_queue=max_queue,
        ),
        host=host,
        port=port,
        served_model_name=served_model_name,
        api_key=api_key,
        api_keys=read_api_keys(api_key_file) if api_key_file is not None else (),
        admin_key=admin_key,
        public_prefixes=tuple(read_public_prefix(path) for path in public_prefix or ()),
        shutdown_timeout=shutdown_timeout,
    )
    run_server(settings)


@app.command()
def pull(name: Annotated[str, typer.Argument(help="Built-in name or hub id.")]) -> None:
    """Fetch a model into the cache folder (OCTAVO_HOME, by default ~/.cache/octavo)."""
    from engine.model import hub

    with open_progress() as view:
        path = hub.pull(name, progress=lambda done, total: view.update(f"fetching {name}", _share(done, total)))
    print(path)


@app.command()
def longcontext(
    model: Annotated[str, typer.Argument(help="As for serve.")] = "octavo-tiny",
    out: Annotated[
        Path, typer.Option(help="Folder for report.json, report.md and the plots; a run that was cut goes on there.")
    ] = Path("longcontext"),
    multiples: Annotated[str, typer.Option(help="Lengths to try, as multiples of the trained one.")] = "1,2,4,8",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of text in each cell.")] = 32_768,
    passkeys: Annotated[int, typer.Option(min=1, help="Passkey documents at each depth and length.")] = 2,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to read; by default what octavo-tiny was not trained on.")
    ] = None,
) -> None:
    """Perplexity and passkey retrieval past the trained length, for each RoPE scaling: a table, plots and JSON."""
    from rich.console import Console

    from engine.evaluate.longcontext import StudyOptions
    from engine.evaluate.longcontext import longcontext as study

    options = StudyOptions(
        model=model, out=out, multiples=_parse_multiples(multiples), tokens=tokens, passkeys=passkeys, text=text
    )
    print(study(options, Console(stderr=True)), end="")


def _parse_multiples(value: str) -> tuple[int, ...]:
    parts = value.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"multiples must be whole numbers above 0, such as 1,2,4; got {value!r}")
    return tuple(sorted({int(part) for part in parts}))


def run_server(settings: Settings) -> None:
    """Serve until a signal. After a second signal the process ends here and now, whatever a thread is still at."""
    sock = bind(settings.host, settings.port)
    with sock, open_progress() as view:
        status = asyncio.run(serve(settings, sock, lambda metrics: make_engine(settings, metrics, view), _announce))
    if status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


async def make_engine(settings: Settings, metrics: Metrics, view: ProgressView) -> RunnableEngine:
    """Find or fetch the model, read its tokenizer, and make the engine: what must not happen on the event loop, does not."""
    from engine.async_engine import AsyncEngine
    from engine.model import hub
    from engine.tokenizer import Tokenizer, load_tokenizer

    def prepare(token: CancelToken) -> tuple[hub.ResolvedModel, Tokenizer, list[list[int]]]:
        def on_bytes(done: int, total: int) -> None:
            token.check()
            view.update(f"fetching {settings.model}", _share(done, total))

        model = hub.resolve(settings.model, progress=on_bytes)
        token.check()
        view.update("reading the tokenizer", None)
        tokenizer = load_tokenizer(model.path)
        return model, tokenizer, [tokenizer.encode(text) for text in settings.public_prefixes]

    model, tokenizer, public_prefixes = await run_in_thread(prepare)
    config = settings.engine_config(model_path=str(model.path), model_name=model.name)
    return AsyncEngine(config, tokenizer, metrics, view.update, public_prefixes)


def _with_pin_budget(cache: CacheConfig, budget: float | int) -> CacheConfig:
    if isinstance(budget, int):
        return replace(cache, pin_budget_bytes=budget)
    return replace(cache, pin_budget_fraction=budget)


def read_public_prefix(path: Path) -> str:
    """The whole text, to the last line break. Raises ConfigError when it cannot be read or is empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"cannot read the public prefix {path}: {getattr(exc, 'strerror', None) or 'not UTF-8 text'}"
        ) from None
    if not text or "\0" in text:
        raise ConfigError(f"the public prefix {path} {'holds the NUL character' if text else 'is empty'}")
    return text


def _share(done: int, total: int) -> float | None:
    """None while nobody knows the total."""
    return done / total if total else None


def _announce(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
