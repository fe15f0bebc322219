"""Small real vocabularies, trained here, in every file format that Octavo reads."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import gguf
import sentencepiece
import tokenizers
from hypothesis import settings
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

quick = settings(max_examples=40, deadline=None)  # the machine is shared: no example is timed

TEXT = "hello world the cat sat  on naïve data code: x=1 über 日本 日本語 你好 été\tfoo() {bar} 🎉 don't I'll 2024 1,000 a  b"
WORDS = TEXT.split(" ")


def corpus(num_lines: int = 300) -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=8)) for _ in range(num_lines)]


def train_sentencepiece(**overrides: object) -> bytes:
    model = io.BytesIO()
    options: dict[str, object] = {
        "vocab_size": 380,
        "model_type": "bpe",
        "byte_fallback": True,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
        "character_coverage": 0.98,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(corpus()), model_writer=model, **(options | overrides))
    return model.getvalue()


def parse_proto(model: bytes) -> sentencepiece_model_pb2.ModelProto:
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    return proto


def write_sentencepiece_gguf(path: Path, model: bytes, **extra: bool) -> None:
    """``extra``: boolean tokenizer.ggml keys, such as add_space_prefix."""
    pieces = parse_proto(model).pieces
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.piece for piece in pieces])
    writer.add_token_scores([piece.score for piece in pieces])
    writer.add_token_types([piece.type for piece in pieces])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in extra.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    close(writer)


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_fallback_tokenizer(model: bytes) -> tokenizers.Tokenizer:
    """The SentencePiece vocabulary as a tokenizer.json has it (Llama 2's layout)."""
    pieces = [piece.piece for piece in parse_proto(model).pieces]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces[259:]
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in pieces[:3]])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """GPT-2's kind, with two special tokens and added tokens that show, some outside its alphabet."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus(), trainer)
    backend.add_tokens(["<tool>", "<two words>", "日"])
    return backend


def write_byte_level_gguf(path: Path, backend: tokenizers.Tokenizer, pre: str | None = "gpt-2", **extra: bool) -> None:
    content = json.loads(backend.to_str())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    size = backend.get_vocab_size()
    tokens = [backend.id_to_token(i) for i in range(size)]
    kinds = {token["id"]: 3 if token["special"] else 4 for token in content["added_tokens"]}
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(i, 1) for i in range(size)])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for key, value in extra.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    close(writer)


def metaspace_tokenizer() -> tokenizers.Tokenizer:
    """Whole pieces without bytes: the decoder that the windowed detokenizer serves."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>"], show_progress=False)
    backend.train_from_iterator(corpus(), trainer)
    return backend
