"""Loading streams: the peak is little more than the loaded weights, from either format."""

from __future__ import annotations

from pathlib import Path

from checkpoint_files import peak_ratios, tiny_model, write_gguf
from gguf import GGMLQuantizationType


def test_peak_memory_while_loading(tmp_path: Path) -> None:
    # 123 MB, most of it one tensor: a loader that holds a whole decoded tensor beside its place would need twice that.
    model = tiny_model("llama", vocab_size=120_000, hidden_size=256, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "folder")
    write_gguf(tmp_path / "m.gguf", model, "llama", GGMLQuantizationType.Q8_0)
    for ratio in peak_ratios(tmp_path / "folder", tmp_path / "m.gguf"):
        assert 0.9 < ratio < 1.3
