"""Every fused tensor equals what transformers saved, for each architecture, split or whole, in each element type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_files import assert_equals_state, load, tiny_model
from safetensors.torch import load_file, save_file

from engine.errors import DamagedModelError, ModelNotFoundError, UnsupportedModelError
from engine.model.weights import LayerWeights, load_weights, num_parameters, open_checkpoint

VARIANTS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
    ("mistral", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 32}),
    ("qwen3", {"head_dim": 16, "attention_bias": True}),
]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, change) -> None:
    """Apply ``change`` to the dict of tensors of a saved model."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def patch_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_fused_tensors_equal_the_state_dict(family: str, changes: dict[str, object], tmp_path: Path) -> None:
    model = tiny_model(family, **changes)
    model.save_pretrained(tmp_path)
    weights = load(tmp_path)
    assert_equals_state(weights, model.state_dict(), torch.float32)
    assert (weights.lm_head is weights.embed) == bool(changes.get("tie_word_embeddings"))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_element_types(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model("qwen2").to(stored)
    model.save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).config.dtype == str(stored).removeprefix("torch.")
    assert_equals_state(load(tmp_path, wanted), model.state_dict(), wanted)


def test_shards_equal_the_whole(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_equals_state(load(tmp_path), model.state_dict(), torch.float32)


def test_tensors_longer_than_a_chunk(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=3001, num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    assert_equals_state(load(tmp_path), model.state_dict(), torch.float32)


def test_parameters_and_bytes_count_a_tied_head_once(tmp_path: Path) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    weights = load(tmp_path, torch.bfloat16)
    assert weights.num_parameters == model.num_parameters() == num_parameters(open_checkpoint(tmp_path).config)
    assert weights.nbytes == 2 * weights.num_parameters


def test_layer_weights_are_all_counted(llama: Path) -> None:
    assert set(LayerWeights.__slots__) == set(LayerWeights.__dataclass_fields__)
    assert load(llama).num_parameters == tiny_model("llama").num_parameters()


def test_progress_rises_to_the_total(llama: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_weights(open_checkpoint(llama), dtype=torch.float32, device="cpu", progress=lambda *each: seen.append(each))
    total = 4 * tiny_model("llama").num_parameters()
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {of for _, of in seen} == {total}
    assert seen[-1] == (total, total)


def test_a_tied_head_that_is_stored_too(tmp_path: Path) -> None:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    weights = load(tmp_path)
    assert weights.lm_head is weights.embed
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight differs from the embedding"):
        open_checkpoint(tmp_path)


def test_a_tied_head_that_is_stored_alone(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert_equals_state(load(tmp_path), model.state_dict(), torch.float32)


def test_rotary_tables_of_old_checkpoints_are_not_needed(llama: Path) -> None:
    rewrite(llama, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert_equals_state(load(llama), tiny_model("llama").state_dict(), torch.float32)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "score.weight"])
def test_unknown_tensors_are_refused_by_name(llama: Path, name: str) -> None:
    rewrite(llama, lambda t: t.update({name: torch.ones(64)}))
    with pytest.raises(UnsupportedModelError, match=name):
        open_checkpoint(llama)


def test_missing_and_misshapen_tensors_are_named(llama: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(llama, lambda t: t.update({name: torch.ones(95, 64)}))
    with pytest.raises(DamagedModelError, match=r"up_proj\.weight has shape \[95, 64\], but the config implies \[96, 64\]"):
        open_checkpoint(llama)
    rewrite(llama, lambda t: t.pop(name))
    with pytest.raises(DamagedModelError, match=f"tensor {name} is missing"):
        open_checkpoint(llama)


def test_more_layers_than_stored_are_noticed_at_once(llama: Path) -> None:
    patch_config(llama, num_hidden_layers=10**15, layer_types=None)
    with pytest.raises(DamagedModelError, match=r"layers\.2\."):
        open_checkpoint(llama)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_other_element_types_are_refused(llama: Path, dtype: torch.dtype) -> None:
    rewrite(llama, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(dtype)}))
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight has type"):
        open_checkpoint(llama)


def test_truncation_anywhere_is_damage(llama: Path) -> None:
    path = llama / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 4, 8, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedModelError, match="damaged"):
            open_checkpoint(llama)


def test_truncation_after_opening_is_damage(llama: Path) -> None:
    checkpoint = open_checkpoint(llama)
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedModelError, match="truncated"):
        load_weights(checkpoint, dtype=torch.float32, device="cpu", progress=lambda done, total: None)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": 7, "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1e3], "data_offsets": [0, 4000]}}',
        b"\xff\xfe garbage",
    ],
)
def test_garbage_headers_are_damage(llama: Path, header: bytes) -> None:
    (llama / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(DamagedModelError, match="damaged") as error:
        open_checkpoint(llama)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", '{"a": ' + "[" * 100_000])
def test_a_config_that_is_no_object_is_damage(llama: Path, text: str) -> None:
    (llama / "config.json").write_text(text)
    with pytest.raises(DamagedModelError, match=r"config\.json is damaged"):
        open_checkpoint(llama)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    shard = index["weight_map"]["model.norm.weight"]
    for change, message in (
        ({"model.norm.weight": "../x.safetensors"}, "not the name of a shard"),
        ({"lm_head.bias": shard}, "tensor lm_head.bias, which .* places here, is missing"),
    ):
        index_path.write_text(json.dumps({"weight_map": {**index["weight_map"], **change}}))
        with pytest.raises(DamagedModelError, match=message):
            open_checkpoint(tmp_path)
    fewer = {name: file for name, file in index["weight_map"].items() if name != "model.norm.weight"}
    index_path.write_text(json.dumps({"weight_map": fewer}))
    with pytest.raises(DamagedModelError, match=r"model\.norm\.weight is not in"):
        open_checkpoint(tmp_path)
    index_path.write_text(json.dumps(index))
    (tmp_path / shard).unlink()
    with pytest.raises(ModelNotFoundError, match=shard):
        open_checkpoint(tmp_path)


def test_missing_files_are_named(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such model folder or file"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError, match="neither a folder nor"):
        open_checkpoint(llama / "config.json")
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no model\.safetensors"):
        open_checkpoint(llama)
    (llama / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"config\.json: No such file"):
        open_checkpoint(llama)
