"""What each part of the block buys: the same short run with one part exchanged at a time, as a Markdown table.

``python -m engine.demo.ablation``. Finished rows are kept in a JSON file, so that a run that was cut goes on. 300 steps of 1,024 tokens do
not train a model; they show differences of early training, on one seed.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import sentencepiece
import torch

from engine.capacity.shape import kv_bytes_per_token
from engine.demo.data import load_corpus
from engine.demo.model import Attention, DemoModel, demo_config, learned
from engine.demo.tokens import Batches, TokenStreams, encode_corpus, held_out_rows, train_tokenizer
from engine.demo.train import Recipe, held_out_loss, losses, make_optimizer, train_steps
from engine.model_config import ModelConfig

HELD_OUT_ROWS = 32


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    config: ModelConfig
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class Sweep:
    """Learning rates, rising; each is held to by a run of its own."""

    rates: tuple[float, ...] = (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
    steps: int = 60
    warm_up: int = 20


@dataclass(frozen=True, slots=True)
class Result:
    """``log_z_drift`` is the mean log Z of the last 20 steps less that of the 20 steps after the warm-up; ``highest_rate`` None: the
    lowest of the sweep diverged. ``loss_beyond`` is the loss behind the trained context, unscaled, where there are positions."""

    name: str
    loss: float
    parameters: int
    kv_bytes: int
    loss_beyond: float | None
    largest_logit: float
    log_z_drift: float
    highest_rate: float | None


def variants(base: ModelConfig, recipe: Recipe) -> list[Variant]:
    """The recipe, then each of its parts exchanged alone, then all of them. An MLP without a gate is wider, for the same size."""
    biases = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
    gelu = {"mlp": "gelu", "intermediate_size": 4 * base.hidden_size}
    layernorm = {"norm": "layernorm", "norm_bias": True}
    rope = {"rope": learned(base)}
    changes: dict[str, dict[str, Any]] = {
        "the recipe": {},
        "layernorm": layernorm,
        "post-norm": {"is_post_norm": True},
        "learned positions": rope,
        "gelu, 4 d": gelu,
        f"MHA ({base.num_heads} KV heads)": {"num_kv_heads": base.num_heads},
        "MQA (1 KV head)": {"num_kv_heads": 1},
        "biases": biases,
        "no QK-norm": {"qk_norm": False},
        "all of GPT-2's": {**layernorm, **rope, **gelu, **biases, "num_kv_heads": base.num_heads, "qk_norm": False},
    }
    found = [Variant(name, replace(base, **change), recipe) for name, change in changes.items()]
    return [*found, Variant("no z-loss", base, replace(recipe, z_loss=0.0))]


def measure(
    variant: Variant, batches: Callable[[int], torch.Tensor], streams: TokenStreams, sweep: Sweep | None = None
) -> Result:
    config, recipe = variant.config, variant.recipe
    model = DemoModel(config, recipe.seed)
    records = list(train_steps(model, make_optimizer(model, recipe), batches, recipe))
    rows = held_out_rows(streams.held_out, config.max_position_embeddings, HELD_OUT_ROWS)
    early = records[recipe.warm_up : recipe.warm_up + 20]
    return Result(
        name=variant.name,
        loss=held_out_loss(model, rows),
        parameters=model.num_parameters,
        kv_bytes=kv_bytes_per_token(config, "float16"),
        loss_beyond=None if config.has_learned_positions else _loss_beyond(model, streams),
        largest_logit=largest_attention_logit(model, rows[:, :-1]),
        log_z_drift=mean(record.log_z for record in records[-20:]) - mean(record.log_z for record in early),
        highest_rate=_highest_rate(variant, batches, sweep or Sweep()),
    )


@torch.inference_mode()
def _loss_beyond(model: DemoModel, streams: TokenStreams) -> float:
    """Nats per token from once to twice the trained context."""
    trained = model.config.max_position_embeddings
    rows = held_out_rows(streams.held_out, 2 * trained, HELD_OUT_ROWS // 2)
    return losses(model(rows[:, :-1]), rows[:, 1:])[0][:, trained:].mean().item()


@torch.inference_mode()
def largest_attention_logit(model: DemoModel, token_ids: torch.Tensor) -> float:
    """The largest |q k| / sqrt(head_dim) of any head and layer, over the pairs that the causal mask leaves."""
    found = [0.0]

    def look(attention: torch.nn.Module, arguments: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        assert isinstance(attention, Attention)
        q, k, _ = attention.heads(*arguments)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        found[0] = max(found[0], logits.tril().abs().max().item())

    hooks = [module.register_forward_pre_hook(look) for module in model.modules() if isinstance(module, Attention)]
    model.eval()
    model(token_ids)
    for hook in hooks:
        hook.remove()
    return found[0]


def _highest_rate(variant: Variant, batches: Callable[[int], torch.Tensor], sweep: Sweep) -> float | None:
    """Up to the first that diverges."""
    highest = None
    for rate in sweep.rates:
        recipe = replace(variant.recipe, learning_rate=rate, steps=sweep.steps, warm_up=sweep.warm_up)
        if diverges(variant.config, recipe, batches):
            break
        highest = rate
    return highest


def diverges(config: ModelConfig, recipe: Recipe, batches: Callable[[int], torch.Tensor]) -> bool:
    """A loss that is not finite or, over 5 steps after the warm-up, worse than guessing, which costs log(vocab_size)."""
    model = DemoModel(config, recipe.seed)
    seen: list[float] = []
    for record in train_steps(model, make_optimizer(model, recipe), batches, recipe):
        seen.append(record.loss)
        is_judged = len(seen) >= recipe.warm_up + 5
        if not math.isfinite(record.loss) or (is_judged and mean(seen[-5:]) > math.log(config.vocab_size)):
            return True
    return False


def table(results: Sequence[Result], trained_len: int) -> str:
    lines = [
        f"| | loss | parameters | KV bytes per token | longest context (loss from {trained_len} to {2 * trained_len})"
        " | largest attention logit | drift of log Z | highest rate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        beyond = f"{trained_len}, the table" if each.loss_beyond is None else f"no wall ({each.loss_beyond:.2f})"
        rate = "none of the sweep" if each.highest_rate is None else f"{each.highest_rate:g}"
        lines.append(
            f"| {each.name} | {each.loss:.3f} | {each.parameters:,} | {each.kv_bytes:,} | {beyond}"
            f" | {each.largest_logit:.1f} | {each.log_z_drift:+.2f} | {rate} |"
        )
    return "\n".join(lines)


def run(todo: Sequence[Variant], path: Path, batches: Callable[[int], torch.Tensor], streams: TokenStreams) -> list[Result]:
    """Results in the order of ``todo``; those that ``path`` holds are not measured again."""
    done = {values["name"]: Result(**values) for values in json.loads(path.read_text())} if path.exists() else {}
    for variant in todo:
        if variant.name not in done:
            print(f"{variant.name} ...", flush=True)
            done[variant.name] = measure(variant, batches, streams)
            path.write_text(json.dumps([asdict(result) for result in done.values()], indent=1))
    return [done[variant.name] for variant in todo]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.model to use; trained anew if left out")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument(
        "--out", type=Path, default=Path("build/ablation.json"), help="finished rows, of the same --steps and --rows"
    )
    args = parser.parse_args(arguments)
    base, recipe = demo_config(), Recipe(steps=args.steps, rows=args.rows, warm_up=max(1, args.steps // 10))
    corpus = load_corpus()
    with tempfile.TemporaryDirectory() as temporary:
        path = args.tokenizer or Path(temporary) / "tokenizer.model"
        if args.tokenizer is None:
            train_tokenizer(corpus, path, base.vocab_size)
        tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(path))
    streams = encode_corpus(tokenizer, corpus)
    source = Batches(streams.train, tokenizer, base.max_position_embeddings, recipe.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results = run(variants(base, recipe), args.out, lambda step: source.batch(step, recipe.rows), streams)
    print(table(results, base.max_position_embeddings))


if __name__ == "__main__":
    main()
