"""The training run: its schedule and losses, that a cut run goes on as if uncut, and that what it leaves is served."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece
import torch

import engine.demo
from engine.config import CacheConfig
from engine.demo.ablation import Result, Sweep, diverges, largest_attention_logit, measure, table, variants
from engine.demo.data import Corpus
from engine.demo.model import DemoModel, demo_config
from engine.demo.tokens import Batches, TokenStreams, encode_corpus, train_tokenizer
from engine.demo.train import Recipe, Run, StepRecord, learning_rate, losses, make_optimizer, train, train_steps
from engine.errors import ModelNotFoundError
from engine.llm import LLM
from engine.model.hub import PACKAGED, ResolvedModel, pull, resolve
from engine.request import SamplingParams
from engine.tokenizer import load_tokenizer
from tests.demo.test_data import corpus
from tests.tiny_folder import one_thread

__all__ = ["corpus", "one_thread"]

TINY = replace(demo_config(vocab_size=400, context_len=256, num_layers=1), hidden_size=32, intermediate_size=48, num_heads=4)
RECIPE = Recipe(steps=6, rows=2, warm_up=2)


def test_octavo_tiny_has_the_shape_of_the_recipe() -> None:
    config = demo_config()
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (8, 2, 32, 256)
    assert config.intermediate_size == 8 * config.hidden_size // 3
    assert (config.norm, config.mlp, config.rope.theta) == ("rmsnorm", "swiglu", 1e4)
    assert config.qk_norm
    assert config.tie_word_embeddings
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (False, False, False)
    assert not config.is_post_norm
    parameters = DemoModel(config, seed=0).num_parameters
    assert 2e6 <= parameters <= 4e6
    assert parameters * 2 < 8e6


def test_the_rate_rises_and_falls() -> None:
    recipe = Recipe(steps=110, warm_up=10, learning_rate=1.0)
    assert [learning_rate(recipe, step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert [learning_rate(recipe, step) for step in (10, 60, 110)] == pytest.approx([1.0, 0.55, 0.1])


def test_the_loss_is_torchs_and_log_z_is_what_its_penalty_pulls_to_0() -> None:
    logits, targets = torch.randn(2, 3, 7), torch.randint(0, 7, (2, 3))
    loss, log_z = losses(logits, targets)
    torch.testing.assert_close(loss.mean(), torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    torch.testing.assert_close(log_z, logits.exp().sum(-1).log())
    tokens = torch.randint(3, 400, (2, 33), generator=torch.Generator().manual_seed(0))

    def last(z_loss: float) -> StepRecord:
        recipe = replace(RECIPE, steps=40, z_loss=z_loss, learning_rate=1e-2)
        model = DemoModel(TINY, seed=1)
        return list(train_steps(model, make_optimizer(model, recipe), lambda step: tokens, recipe))[-1]

    without, with_penalty = last(0.0), last(1.0)
    assert without.loss < math.log(400) - 1
    assert abs(with_penalty.log_z) < abs(without.log_z) / 2


def test_a_run_that_was_cut_goes_on_as_if_it_had_not_been(corpus: Corpus, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", corpus, TINY, RECIPE, save_every=3)
    cut = Run.open(tmp_path / "whole", TINY, RECIPE)
    assert [record.step for record in cut.records] == list(range(6))
    _cut_after(4, tmp_path / "cut", corpus)
    again = train(tmp_path / "cut", corpus, TINY, RECIPE, save_every=3)
    assert [r.loss for r in again.records] == [r.loss for r in whole.records]
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(SystemExit, match="another recipe"):
        train(tmp_path / "cut", corpus, TINY, replace(RECIPE, seed=9), save_every=3)


def _cut_after(num_steps: int, folder: Path, corpus: Corpus) -> None:
    """A run of the same recipe that dies after so many steps; its checkpoint is that of step 3."""

    class Cut(Exception):
        """As a power cut would."""

    def die(record: StepRecord) -> None:
        if record.step + 1 == num_steps:
            raise Cut

    folder.mkdir()
    train_tokenizer(corpus, folder / "tokenizer.model", TINY.vocab_size)
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    batches = Batches(encode_corpus(tokenizer, corpus).train, tokenizer, 256, RECIPE.seed)
    with pytest.raises(Cut):
        Run.open(folder, TINY, RECIPE).advance(lambda step: batches.batch(step, RECIPE.rows), 3, die)
    assert len(Run.open(folder, TINY, RECIPE).records) == 3


def test_a_built_in_folder_is_served_with_no_network(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "octavo-tiny"
    run = train(folder, corpus, TINY, RECIPE, save_every=100)
    packaged = {"octavo-tiny": folder}
    monkeypatch.setenv("PATH", "")  # no pip, no npm
    found = resolve("octavo-tiny", progress=lambda done, total: None, home=tmp_path / "home", packaged=packaged)
    assert found == ResolvedModel(folder, "octavo-tiny")
    assert not (tmp_path / "home").exists()
    text = "the whale of the sea, 1851"
    assert load_tokenizer(folder).decode(load_tokenizer(folder).encode(text)) == text
    llm = LLM(str(folder), cache=CacheConfig(memory_bytes=1 << 20))
    assert llm.info.num_parameters == run.model.num_parameters
    (completion,) = llm.generate([text], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
    rounded = DemoModel(TINY, seed=0)
    rounded.load_state_dict({name: weight.half().float() for name, weight in run.model.state_dict().items()})
    ids = load_tokenizer(folder).encode(text)
    for _ in range(5):
        ids.append(int(rounded(torch.tensor([ids]))[0, -1].argmax()))
    assert list(completion.token_ids) == ids[-5:]
    card = (folder / "README.md").read_text()
    assert f"{run.model.num_parameters:,} parameters" in card
    assert len(json.loads((folder / "losses.json").read_text())["steps"]) == 6


def test_missing_files_of_a_built_in_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match=r"octavo-tiny .* lacks model\.safetensors, tokenizer\.model.*demo-train"):
        pull("octavo-tiny", progress=lambda done, total: None, packaged={"octavo-tiny": tmp_path})


def test_octavo_tiny_lies_in_the_package() -> None:
    assert PACKAGED["octavo-tiny"] == Path(engine.demo.__file__).parent / "octavo-tiny"


def test_the_largest_attention_logit_is_that_of_the_formula() -> None:
    model, tokens = DemoModel(TINY, seed=1), torch.randint(0, 400, (2, 9))
    attention = model.model.layers[0].self_attn
    seen = []
    hook = attention.register_forward_pre_hook(lambda module, arguments: seen.append(arguments))
    with torch.no_grad():
        model(tokens)
        hook.remove()
        q, k, _ = attention.heads(*seen[0])
    expected = max(
        abs(float(q[b, h, i] @ k[b, h // 2, j])) / 32**0.5
        for b in range(2) for h in range(4) for i in range(9) for j in range(i + 1)
    )  # fmt: skip
    assert largest_attention_logit(model, tokens) == pytest.approx(expected, rel=1e-4)


def test_divergence_is_told_from_learning() -> None:
    tokens = torch.randint(3, 400, (2, 33), generator=torch.Generator().manual_seed(0))
    recipe = replace(RECIPE, steps=20)
    assert not diverges(TINY, recipe, lambda step: tokens)
    assert diverges(TINY, replace(recipe, learning_rate=1e4, clip=1e9), lambda step: torch.roll(tokens, step, 1))


def test_a_row_of_the_comparison_for_every_switch() -> None:
    found = variants(TINY, RECIPE)
    assert len({variant.name for variant in found}) == len(found) == 11
    assert len({(variant.config, variant.recipe) for variant in found}) == 11
    stream = (torch.arange(3000) * 7919 % 397 + 3).numpy().astype("uint16")
    tokens = torch.from_numpy(stream[:514].astype("int64")).view(2, 257)
    learned_row = next(variant for variant in found if variant.name == "learned positions")
    rows = [
        measure(each, lambda step: tokens, TokenStreams(stream, stream), Sweep((1e-3,), steps=2, warm_up=1))
        for each in (found[0], learned_row)
    ]
    assert rows[0].kv_bytes == 2 * 2 * 32 * 2
    assert rows[0].loss_beyond is not None
    assert rows[1].loss_beyond is None
    assert rows[0].highest_rate == 1e-3
    text = table([*rows, Result("x", 1.0, 5, 6, None, 7.0, -0.5, None)], 256)
    assert text.splitlines()[-1] == "| x | 1.000 | 5 | 6 | 256, the table | 7.0 | -0.50 | none of the sweep |"
