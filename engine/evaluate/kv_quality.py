"""``python -m engine.evaluate.kv_quality``: a table of what each KV format costs in bytes and in quality, on Moby Dick."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from engine.config import KV_DTYPES
from engine.errors import OctavoError
from engine.evaluate.quality import BASE, Quality, measure, open_readers
from engine.evaluate.texts import moby_dick
from engine.model.hub import resolve
from engine.model.weights import open_checkpoint
from engine.tokenizer import load_tokenizer


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        qualities = run(options)
    except OctavoError as error:
        print(f"kv_quality: error: {error}", file=sys.stderr)
        return 2
    print(table(qualities))
    print()
    print(json.dumps([asdict(quality) for quality in qualities]))
    return 0


def run(options: argparse.Namespace) -> list[Quality]:
    model = resolve(options.model, progress=lambda done, total: None)
    text = options.text.read_text(encoding="utf-8") if options.text is not None else moby_dick()
    ids = load_tokenizer(model.path).encode(text[: 16 * options.tokens])
    num_windows = min(options.tokens, len(ids)) // options.window
    windows = [ids[index * options.window : (index + 1) * options.window] for index in range(num_windows)]
    if not windows:
        raise OctavoError(f"the text has {len(ids):,} tokens: fewer than one window of {options.window:,}")
    names = [BASE, *(name for name in options.formats.split(",") if name != BASE)]
    checkpoint = open_checkpoint(model.path)
    readers = open_readers(checkpoint, names, options.window, options.block_size, options.attention_backend)
    chunks = len(windows) * -(-options.window // options.chunk) * len(readers)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(f"{len(windows)} windows of {options.window:,} tokens, {len(readers)} formats", total=chunks)
        return measure(readers, windows, options.chunk, lambda: bar.advance(task))


def table(qualities: Sequence[Quality]) -> str:
    lines = [
        "| KV cache | bytes per token | of bfloat16 | perplexity | change | KL to float32 | same greedy token |",
        "|---|---|---|---|---|---|---|",
    ]
    for q in qualities:
        lines.append(
            f"| {q.kv_dtype} | {q.bytes_per_token:,.0f} | {q.ratio:.3f} | {q.perplexity:.3f} | {q.change:+.2%} | {q.kl:.1e}"
            f" | {q.agreement:.1%} |"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kv_quality", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="as for octavo serve")
    parser.add_argument("--formats", default=",".join(KV_DTYPES), help="comma-separated; float32 always comes first")
    parser.add_argument("--tokens", type=int, default=20_480, help="read whole windows, up to so many tokens")
    parser.add_argument("--window", type=int, default=2_048)
    parser.add_argument("--chunk", type=int, default=512, help="tokens in a step")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--attention-backend", default="auto", choices=("auto", "reference", "cpu"))
    parser.add_argument("--text", type=Path, help="a UTF-8 file in place of Moby Dick")
    return parser


if __name__ == "__main__":
    sys.exit(main())
