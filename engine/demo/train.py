"""Trains octavo-tiny: ``python -m engine.demo.train --out FOLDER``. A run that was cut is taken up by the same command.

The loop itself, ``train_steps``, knows neither files nor progress bars: the comparison of parts (ablation) uses it too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from engine.demo.data import Corpus, load_corpus, passkey_document
from engine.demo.export import export, plot_losses, require_matplotlib, write_card
from engine.demo.model import DemoModel, demo_config
from engine.demo.tokens import BOS, Batches, encode_corpus, held_out_rows, train_tokenizer
from engine.model_config import ModelConfig

TOKENIZER, CHECKPOINT = "tokenizer.model", "checkpoint.pt"
HELD_OUT_ROWS, PASSKEYS = 128, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """``rows`` sequences a step. The rate rises linearly for ``warm_up`` steps, then falls as a cosine to a tenth."""

    steps: int = 2400
    rows: int = 8
    learning_rate: float = 3e-3
    warm_up: int = 100
    weight_decay: float = 0.1
    beta2: float = 0.95
    clip: float = 1.0
    z_loss: float = 1e-4
    seed: int = 1


@dataclass(frozen=True, slots=True)
class StepRecord:
    """``loss`` is the cross-entropy alone, in nats per token; ``log_z`` the mean log of the softmax's sum."""

    step: int
    loss: float
    log_z: float
    grad_norm: float
    learning_rate: float


def train_steps(
    model: DemoModel, optimizer: torch.optim.Optimizer, batches: Callable[[int], torch.Tensor], recipe: Recipe, start: int = 0
) -> Iterator[StepRecord]:
    """Yields after each step. The loss is cross-entropy + z_loss * logsumexp^2 (PaLM, arXiv 2204.02311, section 5)."""
    model.train()
    for step in range(start, recipe.steps):
        rate = learning_rate(recipe, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens = batches(step)
        loss, log_z = losses(model(tokens[:, :-1]), tokens[:, 1:])
        torch.autograd.backward(loss.mean() + recipe.z_loss * log_z.square().mean())
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield StepRecord(step, loss.mean().item(), log_z.mean().item(), grad_norm.item(), rate)


def losses(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [B, T, V], targets int64 [B, T] -> cross-entropy and log Z of every token, [B, T] each."""
    log_z = logits.logsumexp(-1)
    return log_z - logits.gather(-1, targets[..., None]).squeeze(-1), log_z


def learning_rate(recipe: Recipe, step: int) -> float:
    if step < recipe.warm_up:
        return recipe.learning_rate * (step + 1) / recipe.warm_up
    done = (step - recipe.warm_up) / max(1, recipe.steps - recipe.warm_up)
    return recipe.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Matrices decay, norms and biases do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, recipe.beta2), fused=True)


@torch.inference_mode()
def held_out_loss(model: DemoModel, rows: torch.Tensor) -> float:
    """Nats per token."""
    model.eval()
    found = [losses(model(part[:, :-1]), part[:, 1:])[0].mean(1) for part in torch.split(rows, 8)]
    return torch.cat(found).mean().item()


@torch.inference_mode()
def passkeys_found(model: DemoModel, tokenizer: sentencepiece.SentencePieceProcessor) -> float:
    """The share of PASSKEYS new passkey documents, of all lengths that fit, of which every digit is the likeliest token."""
    rng, limit, found = random.Random("passkeys"), model.config.max_position_embeddings, 0
    model.eval()
    for index in range(PASSKEYS):
        num_fillers = index % 4
        document = passkey_document(rng, num_before := rng.randint(0, num_fillers), num_fillers - num_before)
        ids = [BOS, *tokenizer.encode(f"{document.text} {document.key}")][-limit:]
        num_digits = len(document.key)
        likeliest = model(torch.tensor([ids]))[0, -num_digits - 1 : -1].argmax(-1).tolist()
        found += likeliest == ids[-num_digits:]
    return found / PASSKEYS


@dataclass
class Run:
    """A training run in a folder: the model, its optimizer and what has been seen so far. Its sole writer is ``advance``."""

    folder: Path
    recipe: Recipe
    model: DemoModel
    optimizer: torch.optim.AdamW
    records: list[StepRecord]
    seconds: float

    @classmethod
    def open(cls, folder: Path, config: ModelConfig, recipe: Recipe) -> Run:
        """As the folder's checkpoint says, or from the start. Raises SystemExit where the checkpoint is of another recipe."""
        model = DemoModel(config, recipe.seed)
        run = cls(folder, recipe, model, make_optimizer(model, recipe), [], 0.0)
        if (folder / CHECKPOINT).exists():
            run._restore(torch.load(folder / CHECKPOINT, weights_only=True))
        return run

    def advance(self, batches: Callable[[int], torch.Tensor], save_every: int, on_step: Callable[[StepRecord], None]) -> None:
        began = time.monotonic() - self.seconds
        for record in train_steps(self.model, self.optimizer, batches, self.recipe, start=len(self.records)):
            if not math.isfinite(record.loss):
                raise SystemExit(f"the loss is {record.loss} at step {record.step}: a lower --learning-rate is needed")
            self.records.append(record)
            self.seconds = time.monotonic() - began
            if len(self.records) % save_every == 0 or len(self.records) == self.recipe.steps:
                self._save()
            on_step(record)

    def _save(self) -> None:
        state = {
            "recipe": asdict(self.recipe),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "records": [asdict(record) for record in self.records],
            "seconds": self.seconds,
        }
        part = self.folder / f"{CHECKPOINT}.part"
        torch.save(state, part)
        os.replace(part, self.folder / CHECKPOINT)

    def _restore(self, state: dict[str, Any]) -> None:
        if state["recipe"] != asdict(self.recipe):
            raise SystemExit(f"{self.folder / CHECKPOINT} is of another recipe, {state['recipe']}; give another --out")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.records = [StepRecord(**record) for record in state["records"]]
        self.seconds = state["seconds"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser, defaults = argparse.ArgumentParser(description=__doc__), Recipe()
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint and, in the end, of the model")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--rows", type=int, default=defaults.rows)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    args = parser.parse_args(arguments)
    recipe = Recipe(steps=args.steps, rows=args.rows, learning_rate=args.learning_rate, seed=args.seed)
    require_matplotlib()  # not at the end of half an hour
    run = train(args.out, load_corpus(), demo_config(), recipe, args.save_every)
    plot_losses([(record.step, record.loss) for record in run.records], args.out / "loss.png")


def train(folder: Path, corpus: Corpus, config: ModelConfig, recipe: Recipe, save_every: int) -> Run:
    """Train, or go on training, and leave in ``folder`` the model as the engine takes it, its card and losses.json."""
    folder.mkdir(parents=True, exist_ok=True)
    run = Run.open(folder, config, recipe)
    if not (folder / TOKENIZER).exists():
        train_tokenizer(corpus, folder / TOKENIZER, config.vocab_size)
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(folder / TOKENIZER))
    streams = encode_corpus(tokenizer, corpus)
    batches = Batches(streams.train, tokenizer, config.max_position_embeddings, recipe.seed)
    print(f"{run.model.num_parameters:,} parameters; {len(streams.train):,} tokens to learn from", flush=True)
    with _progress() as bar:
        task = bar.add_task("training", total=recipe.steps, completed=len(run.records), loss=math.nan)

        def show(record: StepRecord) -> None:
            bar.update(task, completed=record.step + 1, loss=record.loss)
            if (record.step + 1) % save_every == 0:  # a log file has no bar
                bar.console.print(f"step {record.step + 1}: loss {record.loss:.3f}, {run.seconds:.0f} s")

        run.advance(lambda step: batches.batch(step, recipe.rows), save_every, show)
    _finish(run, tokenizer, held_out_rows(streams.held_out, config.max_position_embeddings, HELD_OUT_ROWS))
    return run


def _finish(run: Run, tokenizer: sentencepiece.SentencePieceProcessor, held_out: torch.Tensor) -> None:
    """Measure, export, describe."""
    final, found = held_out_loss(run.model, held_out), passkeys_found(run.model, tokenizer)
    print(
        f"held-out loss {final:.3f} nats per token, {found:.0%} of passkeys, after {run.seconds / 60:.1f} minutes", flush=True
    )
    export(run.model, run.folder)
    summary: dict[str, Any] = {
        "recipe": asdict(run.recipe),
        "held_out_loss": final,
        "passkeys": found,
        "minutes": run.seconds / 60,
    }
    steps = [asdict(record) for record in run.records]
    (run.folder / "losses.json").write_text(json.dumps({**summary, "steps": steps}))
    last_losses = [record.loss for record in run.records[-100:]]
    write_card(run.folder, run.model.config, {**summary, "parameters": run.model.num_parameters, "last_losses": last_losses})


def _progress() -> Progress:
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"))


if __name__ == "__main__":
    main()
