"""``octavo longcontext MODEL``: how far past its trained length a model reads, by RoPE scaling. Writes JSON, a table and plots.

A run that was cut is taken up by the same command: each finished cell is in ``report.json``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine.demo.data import load_corpus
from engine.demo.export import require_matplotlib
from engine.errors import ConfigError
from engine.evaluate.longcontext_report import plot, table
from engine.evaluate.rope_study import PasskeyCell, PerplexityCell, Reader, Scaling, passkey_prompt, scalings
from engine.model.hub import resolve
from engine.model.weights import open_checkpoint
from engine.rope_classes import RopeClass
from engine.tokenizer import load_tokenizer

REPORT = "report.json"
Cells = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """``multiples`` of the trained length; ``tokens`` of text read in each cell, whole windows of it; ``passkeys`` documents for each
    of ``depths``; ``text`` None is what octavo-tiny was not trained on (fetched once)."""

    model: str
    out: Path
    multiples: tuple[int, ...] = (1, 2, 4, 8)
    tokens: int = 32_768
    passkeys: int = 2
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    text: Path | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    """One cell: what it is called in the report, what it costs in tokens, and how it is computed."""

    key: str
    num_tokens: int
    run: Callable[[Callable[[int], None]], PerplexityCell | PasskeyCell]


class Study:
    """A study whose finished cells are kept in a folder."""

    def __init__(self, options: StudyOptions) -> None:
        model = resolve(options.model, progress=lambda done, total: None)
        config = open_checkpoint(model.path).config
        self.trained = config.max_position_embeddings
        self.rows = scalings(config, options.multiples)
        self._options, self._path = options, model.path
        self._tokenizer = load_tokenizer(model.path)
        text = _text(options.text)
        self._ids = self._tokenizer.encode(text[: 16 * options.tokens])[: options.tokens]
        self.settings: dict[str, Any] = {
            "model": model.name,
            "trained_length": self.trained,
            "multiples": list(options.multiples),
            "tokens": options.tokens,
            "passkeys": options.passkeys,
            "depths": list(options.depths),
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
        self.cells: Cells = _read_cells(options.out / REPORT, self.settings)

    def run(self, console: Console) -> None:
        """Compute what is missing. Each cell is written when it is done."""
        longest = max(self._options.multiples) * self.trained
        if len(self._ids) < longest:
            raise ConfigError(f"the text has {len(self._ids):,} tokens: fewer than one window of {longest:,}; raise --tokens")
        classes = list(dict.fromkeys(rope_class for row in self.rows for rope_class in row.classes.values()))
        reader = Reader(self._path, classes, longest)
        jobs = list({job.key: job for job in self._jobs(reader) if job.key not in self.cells}.values())  # rows share cells
        columns = (
            TextColumn("{task.description:30}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=sum(job.num_tokens for job in jobs))
            for job in jobs:
                bar.update(task, description=job.key)
                self.cells[job.key] = asdict(job.run(lambda count: bar.advance(task, count)))
                self._save()

    def _jobs(self, reader: Reader) -> Iterator[_Job]:
        yield from self._perplexity_jobs(reader)
        yield from self._passkey_jobs(reader)

    def _perplexity_jobs(self, reader: Reader) -> Iterator[_Job]:
        for row in self.rows:
            for multiple, rope_class in row.classes.items():
                length = multiple * self.trained
                windows = [self._ids[i : i + length] for i in range(0, len(self._ids) - length + 1, length)]
                yield _Job(
                    perplexity_key(rope_class, length),
                    len(windows) * length,
                    lambda advance, c=rope_class, w=windows: reader.perplexity(c, w, advance),  # type: ignore[misc]
                )

    def _passkey_jobs(self, reader: Reader) -> Iterator[_Job]:
        for row in self.rows:
            for multiple, rope_class in row.classes.items():
                for depth in self._options.depths:
                    length = multiple * self.trained
                    yield _Job(
                        passkey_key(rope_class, length, depth),
                        self._options.passkeys * length,
                        lambda advance, c=rope_class, n=length, d=depth: self._passkeys(reader, c, n, d, advance),  # type: ignore[misc]
                    )

    def _passkeys(
        self, reader: Reader, rope_class: RopeClass, length: int, depth: float, advance: Callable[[int], None]
    ) -> PasskeyCell:
        ranks = []
        for seed in range(self._options.passkeys):
            prompt, keys = passkey_prompt(self._tokenizer, length, depth, seed)
            ranks.append(reader.passkey_rank(rope_class, prompt, keys, advance))
        return PasskeyCell(tuple(ranks))

    def _save(self) -> None:
        self._options.out.mkdir(parents=True, exist_ok=True)
        part = self._options.out / f"{REPORT}.part"
        part.write_text(json.dumps({"settings": self.settings, "cells": self.cells}, indent=1) + "\n")
        os.replace(part, self._options.out / REPORT)


def perplexity_key(rope_class: RopeClass, length: int) -> str:
    return f"perplexity {rope_class.name} {length}"


def passkey_key(rope_class: RopeClass, length: int, depth: float) -> str:
    return f"passkey {rope_class.name} {length} {depth:g}"


def _text(path: Path | None) -> str:
    """The held-out documents in an order of their own, so that addresses, chapters and psalms alternate."""
    if path is not None:
        return path.read_text(encoding="utf-8")
    documents = list(load_corpus().held_out)
    random.Random(0).shuffle(documents)
    return "\n\n".join(documents)


def _read_cells(path: Path, settings: dict[str, Any]) -> Cells:
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    if found["settings"] != settings:
        raise ConfigError(f"{path} is of a study with other settings; give --out another folder")
    cells: Cells = found["cells"]
    return cells


def longcontext(options: StudyOptions, console: Console) -> str:
    """Run the study to its end and write everything; returns the Markdown.

    Raises:
        OctavoError: the model cannot be read or has no unscaled rotary positions, the text is too short, matplotlib is missing.
    """
    require_matplotlib()
    study = Study(options)
    study.run(console)
    text = table(study.settings, _figures(study.rows, study))
    (options.out / "report.md").write_text(text)
    plot(study.settings, _figures(study.rows, study), options.out)
    return text


def _figures(rows: Sequence[Scaling], study: Study) -> dict[str, dict[int, dict[str, Any]]]:
    """For each row and multiple: ``perplexity``, ``by_position`` (perplexities), and ``ranks`` by depth."""
    figures: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        for multiple, rope_class in row.classes.items():
            length = multiple * study.trained
            cell = study.cells[perplexity_key(rope_class, length)]
            depths = study.settings["depths"]
            figures.setdefault(row.name, {})[multiple] = {
                "perplexity": math.exp(cell["nll"]),
                "by_position": [math.exp(nll) for nll in cell["by_position"]],
                "ranks": [study.cells[passkey_key(rope_class, length, depth)]["ranks"] for depth in depths],
            }
    return figures
