"""The model that comes with the package: small, described, and of a mind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import engine.demo
from engine.llm import LLM
from engine.request import SamplingParams
from engine.sched.plan import ScheduledSequence, StepPlan
from tests.tiny_folder import one_thread

__all__ = ["one_thread"]

FOLDER = Path(engine.demo.__file__).parent / "octavo-tiny"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("octavo-tiny")


def mean_nll(llm: LLM, text: str) -> float:
    ids = llm.tokenizer.encode(text)
    table = tuple(range(-(-len(ids) // llm.info.block_size)))
    logits = llm._engine.runner.score(StepPlan((ScheduledSequence("", tuple(ids), 0, table, 0, None, None),)))
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])))


def test_it_is_small_and_says_where_it_comes_from() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 8 << 20
    card = (FOLDER / "README.md").read_text()
    for word in ("Licence", "CC0", "seed", "python -m engine.demo.train", "held-out", "nats per token"):
        assert word in card, f"the model card says nothing of {word}"
    losses = json.loads((FOLDER / "losses.json").read_text())
    assert losses["held_out_loss"] < 0.6 * losses["steps"][0]["loss"]


def test_it_has_learned_to_read(llm: LLM) -> None:
    """Not one of these sentences as such, but the language of its texts; and against words in disorder."""
    sentence = "And the LORD said unto Moses, Go in unto Pharaoh, and speak unto the children of Israel."
    disorder = " ".join(sorted(sentence.split()))
    assert mean_nll(llm, sentence) < 3.0 < mean_nll(llm, disorder)


def test_it_writes(llm: LLM) -> None:
    (answer,) = llm.generate(["The Congress of the United States"], SamplingParams(max_tokens=40, temperature=0.0))
    assert len(answer.text.split()) > 15
    assert answer.text.isascii()
