"""The ``octavo`` command: flags and environment to Settings, Settings to a running server. Imports the engine only to run it.

Whatever keeps octavo from starting is one line on stderr and exit status 2.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Annotated, NoReturn

import typer

from engine.config import CacheConfig, SchedulerConfig
from engine.errors import OctavoError
from server import __version__
from server.engine_client import RunnableEngine
from server.metrics import Metrics
from server.progress import ProgressView, open_progress
from server.serve import bind, serve
from server.settings import DEFAULT_MODEL, Settings
from server.threads import CancelToken, run_in_thread
from server.units import parse_bytes

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
    host: Annotated[str, typer.Option(envvar="OCTAVO_HOST", help="Address to listen on.")] = _SETTINGS.host,
    port: Annotated[int, typer.Option(envvar="OCTAVO_PORT", help="Port to listen on; 0 for any free one.")] = _SETTINGS.port,
    served_model_name: Annotated[
        str | None, typer.Option(envvar="OCTAVO_SERVED_MODEL_NAME", help="Name of the model in the API; its own if left out.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OCTAVO_API_KEY", help="Ask for this key on all but /health, /version and /metrics.")
    ] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(envvar="OCTAVO_SHUTDOWN_TIMEOUT", help="Seconds that running requests may take after SIGTERM.")
    ] = _SETTINGS.shutdown_timeout,
) -> None:
    """Serve MODEL over HTTP until SIGTERM or Ctrl-C."""
    memory = parse_bytes(kv_cache_memory) if kv_cache_memory is not None else None
    settings = Settings(
        model=model,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        cache=CacheConfig(block_size=block_size, memory_bytes=memory, fraction=kv_cache_fraction, kv_dtype=kv_cache_dtype),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
        host=host,
        port=port,
        served_model_name=served_model_name,
        api_key=api_key,
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

    def prepare(token: CancelToken) -> tuple[hub.ResolvedModel, Tokenizer]:
        def on_bytes(done: int, total: int) -> None:
            token.check()
            view.update(f"fetching {settings.model}", _share(done, total))

        model = hub.resolve(settings.model, progress=on_bytes)
        token.check()
        view.update("reading the tokenizer", None)
        return model, load_tokenizer(model.path)

    model, tokenizer = await run_in_thread(prepare)
    config = settings.engine_config(model_path=str(model.path), model_name=model.name)
    return AsyncEngine(config, tokenizer, metrics, view.update)


def _share(done: int, total: int) -> float | None:
    """None while nobody knows the total."""
    return done / total if total else None


def _announce(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
