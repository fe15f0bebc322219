"""What is found where, what its files may say, and how broken ones are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import sentencepiece
import tokenizers
import vocab_builders as build
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, processors
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from engine.errors import DamagedModelError, InvalidRequestError, ModelNotFoundError, StartupError, UnsupportedModelError
from engine.tokenizer import Tokenizer, load_tokenizer
from engine.tokenizer.pretokenizers import recipe_for

texts = st.text(st.sampled_from("ab helo wrd\n\t日本語🎉é’{}=1"), max_size=30)


@build.quick
@given(text=texts)
def test_a_sentencepiece_vocabulary_encodes_alike_from_every_file(
    loaded: dict[str, Tokenizer], spm_model: bytes, text: str
) -> None:
    expected = sentencepiece.SentencePieceProcessor(model_proto=spm_model).encode(text)
    for kind in ("sentencepiece", "sentencepiece_gguf", "byte_fallback_json"):
        assert loaded[kind].encode(text, add_special_tokens=False) == expected
        assert loaded[kind].encode(text) == [1, *expected]


@build.quick
@given(text=texts | st.sampled_from(["<|begin|>a<|end|> <tool>", "<tool"]))
def test_a_byte_level_vocabulary_encodes_alike_from_every_file(
    loaded: dict[str, Tokenizer], backends: dict[str, tokenizers.Tokenizer], text: str
) -> None:
    expected = backends["byte_level_json"].encode(text).ids
    assert loaded["byte_level_json"].encode(text) == expected
    assert loaded["byte_level_gguf"].encode(text) == expected


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece_gguf", "byte_fallback_json"])
def test_the_text_of_a_special_token_is_that_token(loaded: dict[str, Tokenizer], kind: str) -> None:
    hello = loaded[kind].encode("hello", add_special_tokens=False)
    assert loaded[kind].encode("hello</s>hello<s>", add_special_tokens=False) == [*hello, 2, *hello, 1]
    assert loaded[kind].decode([1, *hello, 2], skip_special_tokens=False) == "<s> hello</s>"


def test_special_ids_and_sizes(loaded: dict[str, Tokenizer], backends: dict[str, tokenizers.Tokenizer]) -> None:
    size = backends["byte_level_json"].get_vocab_size()
    for kind in ("sentencepiece", "sentencepiece_gguf"):
        assert (loaded[kind].bos_token_id, loaded[kind].eos_token_id, loaded[kind].vocab_size) == (1, 2, 380)
        assert [i for i in range(500) if loaded[kind].is_special(i)] == [0, 1, 2]
    for kind in ("byte_level_json", "byte_level_gguf"):
        assert (loaded[kind].bos_token_id, loaded[kind].eos_token_id, loaded[kind].vocab_size) == (0, 1, size)
        assert [i for i in range(500) if loaded[kind].is_special(i)] == [0, 1]
    assert (loaded["metaspace_json"].bos_token_id, loaded["metaspace_json"].eos_token_id) == (None, None)


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffc", "日\udc80"])
def test_a_lone_surrogate_is_the_callers_error(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate U\\+D") as raised:
        tokenizer.encode(text)
    assert raised.value.param == "prompt"


@pytest.mark.parametrize("kind", ["sentencepiece", "byte_fallback_json", "byte_level_json"])
def test_long_texts_come_back(loaded: dict[str, Tokenizer], kind: str) -> None:
    for text in ("a" * 100_000, " " * 100_000, "hello world " * 8_000):
        assert loaded[kind].decode(loaded[kind].encode(text)) == text


# --- what the files beside a vocabulary say ---


def test_tokenizer_json_comes_before_tokenizer_model(model_paths: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(model_paths["sentencepiece"] / "tokenizer.model", tmp_path)
    shutil.copy(model_paths["byte_level_json"] / "tokenizer.json", tmp_path)
    assert load_tokenizer(tmp_path).encode("<|end|>") == [1]


@pytest.mark.parametrize(("config", "around"), [({}, [1, 2]), ({"add_bos_token": True}, [1]), ({"add_bos_token": False}, [])])
def test_a_flag_overrules_the_post_processor(
    spm_model: bytes, tmp_path: Path, config: dict[str, bool], around: list[int]
) -> None:
    backend = build.byte_fallback_tokenizer(spm_model)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<s>"}))
    assert [i for i in load_tokenizer(tmp_path).encode("hello") if i < 3] == around


@pytest.mark.parametrize(("config", "ids"), [({}, [1]), ({"add_bos_token": False}, []), ({"add_eos_token": True}, [1, 2])])
def test_flags_of_a_sentencepiece_folder(spm_model: bytes, tmp_path: Path, config: dict[str, bool], ids: list[int]) -> None:
    (tmp_path / "tokenizer.model").write_bytes(spm_model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).encode("") == ids


def test_tokens_added_beside_a_sentencepiece_model(spm_model: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(spm_model)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": 381}))
    config = {"added_tokens_decoder": {"380": {"content": "<|im_end|>", "special": True}}, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("hello<tool><|im_end|>", add_special_tokens=False)
    assert ids[-2:] == [381, 380]
    assert tokenizer.decode(ids) == "hello<tool>"
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (380, 382)


def test_truncation_and_padding_in_a_tokenizer_json_are_off(tmp_path: Path) -> None:
    backend = build.byte_level_tokenizer()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("ab" * 20)) == len(load_tokenizer(tmp_path).encode("ab" * 10)) * 2


@pytest.mark.parametrize(("flag", "text"), [(True, "a"), (False, " a")])
def test_add_space_prefix_of_a_gguf(spm_model: bytes, tmp_path: Path, flag: bool, text: str) -> None:
    build.write_sentencepiece_gguf(tmp_path / "m.gguf", spm_model, add_space_prefix=flag)
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    a, space_a = (loaded_id(spm_model, piece) for piece in ("a", "▁a"))
    assert tokenizer.encode("a", add_special_tokens=False) == [space_a if flag else a]
    assert tokenizer.decode([space_a]) == text


def loaded_id(model: bytes, piece: str) -> int:
    return int(sentencepiece.SentencePieceProcessor(model_proto=model).piece_to_id(piece))


@pytest.mark.parametrize(("flag", "before"), [(True, [0]), (False, [])])
def test_add_bos_token_of_a_gguf(spm_model: bytes, tmp_path: Path, flag: bool, before: list[int]) -> None:
    build.write_byte_level_gguf(tmp_path / "b.gguf", build.byte_level_tokenizer(), add_bos_token=flag)
    assert load_tokenizer(tmp_path / "b.gguf").encode("") == before
    build.write_sentencepiece_gguf(tmp_path / "s.gguf", spm_model, add_bos_token=flag)
    assert load_tokenizer(tmp_path / "s.gguf").encode("") == ([1] if flag else [])


def test_user_defined_pieces_of_a_gguf_are_cut_out_first(tmp_path: Path) -> None:
    """As llama.cpp does. SentencePiece itself puts its space before them, which tokenizer.model therefore keeps."""
    model = build.train_sentencepiece(user_defined_symbols=["<tool>"])
    build.write_sentencepiece_gguf(tmp_path / "m.gguf", model)
    (tmp_path / "tokenizer.model").write_bytes(model)
    tool, space = loaded_id(model, "<tool>"), loaded_id(model, "▁")
    assert load_tokenizer(tmp_path / "m.gguf").encode("<tool>", add_special_tokens=False) == [tool]
    assert load_tokenizer(tmp_path).encode("<tool>", add_special_tokens=False) == [space, tool]
    assert load_tokenizer(tmp_path).decode([space, tool]) == "<tool>"


@pytest.mark.parametrize(("pre", "ids"), [("llama-bpe", [4]), ("gpt-2", [3, 2])])
def test_llama3_takes_a_word_that_is_a_token_without_merging(tmp_path: Path, pre: str, ids: list[int]) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["a", "b", "c", "ab", "abc"])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    build.close(writer)
    assert load_tokenizer(tmp_path / "m.gguf").encode("abc", add_special_tokens=False) == ids


def test_dummy_prefix_and_whitespace_rules_of_a_sentencepiece_model(tmp_path: Path) -> None:
    model = build.train_sentencepiece(remove_extra_whitespaces=True, user_defined_symbols=["▁▁q"])
    (tmp_path / "tokenizer.model").write_bytes(model)
    library, tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model), load_tokenizer(tmp_path)
    space, two_spaces = library.piece_to_id("▁"), library.piece_to_id("▁▁q")
    assert library.id_to_piece(two_spaces) == "▁▁q"
    for ids in (
        [two_spaces],
        [space, two_spaces],
        [space, space, *library.encode("hello")],
        [space],
        [library.piece_to_id("<0x20>"), space],
        [1, space, space],
    ):
        assert tokenizer.decode(ids) == library.decode([i for i in ids if i > 2])
        detokenizer = tokenizer.detokenizer(ids[:1])
        assert tokenizer.decode(ids[:1]) + "".join(map(detokenizer.push, ids[1:])) == tokenizer.decode(ids)


# --- pre-tokenizers of GGUF vocabularies ---

pre_texts = st.text(st.sampled_from("aBé 1٣\n\r\t'sLl日🎉.,_!—\u0301"), max_size=25)


@build.quick
@given(text=pre_texts)
@pytest.mark.parametrize(
    ("pre", "regex"), [("qwen2", PRETOKENIZE_REGEX), ("llama-bpe", TikTokenConverter(vocab_file=None).pattern)]
)
def test_splits_as_the_models_own_tokenizers_do(pre: str, regex: str, text: str) -> None:
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(regex), behavior="isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    expected = tokenizers.pre_tokenizers.Sequence([split, level]).pre_tokenize_str(text)
    assert recipe_for(pre).split().pre_tokenize_str(text) == expected


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("default", ["I", "'", "LL", " pay", " ", "123", "45", "."]),
        ("gpt-2", ["I", "'", "LL", " pay", " 12345", "."]),
        ("smollm", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", "."]),
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "45", "."]),
        ("qwen2", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", "."]),
        ("tekken", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", "."]),
    ],
)
def test_words_of_each_pre_tokenizer(pre: str, words: list[str]) -> None:
    pieces = [word.replace("Ġ", " ") for word, _ in recipe_for(pre).split().pre_tokenize_str("I'LL pay 12345.")]
    assert pieces == words


def test_llama3_takes_whole_words_and_adds_bos_and_qwen2_composes() -> None:
    assert recipe_for("llama-bpe").ignore_merges
    assert recipe_for("llama-bpe").add_bos_token
    assert not recipe_for("qwen2").add_bos_token
    normalizer = recipe_for("qwen2").normalizer
    assert normalizer is not None
    assert normalizer().normalize_str("e\u0301") == "é"


# --- refusals ---


def refuse(path: Path, kind: type[StartupError], words: str) -> None:
    with pytest.raises(kind, match=words) as raised:
        load_tokenizer(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


def refusal(path: Path) -> str:
    """The message that refuses a model, or "" if it opens and works."""
    try:
        load_tokenizer(path).encode("hello")
    except StartupError as error:
        return str(error)
    return ""


def test_nothing_there(tmp_path: Path) -> None:
    refuse(tmp_path / "missing", ModelNotFoundError, "no model at")
    refuse(tmp_path, ModelNotFoundError, r"neither tokenizer\.json nor tokenizer\.model")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", b"{", "not JSON"),
        ("tokenizer.json", b"\xff\xfe", "not JSON"),
        ("tokenizer.json", b"[]", "not a JSON object"),
        ("tokenizer.json", b"{}", "not a usable tokenizer"),
        ("tokenizer.model", b"not a protobuf at all", "SentencePiece"),
        ("tokenizer.model", b"", "SentencePiece"),
    ],
)
def test_broken_files_in_a_folder(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    refuse(tmp_path, DamagedModelError, words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bos_token": "<nowhere>"}, "'<nowhere>'.*not in the vocabulary"),
        ({"add_bos_token": "yes"}, "neither true nor false"),
        ({"added_tokens_decoder": {"x": {}}}, "added tokens"),
    ],
)
def test_contradictions_in_tokenizer_config(spm_model: bytes, tmp_path: Path, config: dict[str, object], words: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(spm_model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    refuse(tmp_path, DamagedModelError, words)


@pytest.mark.parametrize("decoder", [decoders.WordPiece(cleanup=True), decoders.CTC(), decoders.Sequence([decoders.Fuse()])])
def test_decoders_that_rewrite_or_are_unknown_are_refused_by_name(tmp_path: Path, decoder: decoders.Decoder) -> None:
    backend = build.byte_level_tokenizer()
    backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    refuse(tmp_path, UnsupportedModelError, "decoder (WordPiece|CTC|Sequence of Fuse) is not supported")


@pytest.mark.parametrize(("pre", "words"), [("viking", "pre-tokenizer 'viking'"), (None, "names no pre-tokenizer")])
def test_unknown_pre_tokenizers_are_refused_by_name(tmp_path: Path, pre: str | None, words: str) -> None:
    build.write_byte_level_gguf(tmp_path / "m.gguf", build.byte_level_tokenizer(), pre=pre)
    refuse(tmp_path / "m.gguf", UnsupportedModelError, words)


def no_tokens(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")


def bert(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("bert")
    writer.add_token_list(["a"])


def no_scores(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "a"])
    writer.add_token_types([2, 1])


def no_unknown(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a"])
    writer.add_token_scores([0.0])


def duplicates(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "a", "a"])
    writer.add_token_scores([0.0, 0.0, 0.0])
    writer.add_token_types([2, 1, 1])


def broken_byte_token(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "zz"])
    writer.add_token_scores([0.0, 0.0])
    writer.add_token_types([2, 6])


def eos_out_of_range(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a"])
    writer.add_eos_token_id(7)


def short_types(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a", "b"])
    writer.add_token_types([1])


def no_merges(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a"])


def foreign_merges(writer: gguf.GGUFWriter) -> None:
    no_merges(writer)
    writer.add_token_merges(["x y"])


@pytest.mark.parametrize(
    ("fill", "kind", "words"),
    [
        (no_tokens, DamagedModelError, "no vocabulary"),
        (bert, UnsupportedModelError, "tokenizer 'bert'"),
        (no_scores, DamagedModelError, "scores is missing"),
        (no_unknown, DamagedModelError, "no unknown token"),
        (duplicates, DamagedModelError, "not a usable SentencePiece vocabulary"),
        (broken_byte_token, DamagedModelError, "not a usable SentencePiece vocabulary"),
        (eos_out_of_range, DamagedModelError, "eos_token_id is 7, outside the 1 tokens"),
        (short_types, DamagedModelError, "1 entries for 2 tokens"),
        (no_merges, DamagedModelError, "merges is missing"),
        (foreign_merges, DamagedModelError, "merges: "),
    ],
)
def test_vocabularies_that_cannot_be_are_refused(
    tmp_path: Path, fill: Callable[[gguf.GGUFWriter], None], kind: type[StartupError], words: str
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    fill(writer)
    build.close(writer)
    refuse(tmp_path / "m.gguf", kind, words)


ONE_KEY = b"GGUF\x03\x00\x00\x00" + bytes(8) + b"\x01" + bytes(7) + b"\x01" + bytes(7) + b"a"


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"", DamagedModelError, "is damaged|the file is empty"),
        (b"version https://git-lfs", DamagedModelError, "is damaged"),
        (b"GGUF\x01\x00\x00\x00" + bytes(16), UnsupportedModelError, "GGUF version 1"),
        (b"GGUF\x00\x00\x00\x03" + bytes(16), UnsupportedModelError, "GGUF version"),
        (b"GGUF\x03\x00\x00\x00" + bytes(8) + b"\xff" * 8, DamagedModelError, "is damaged|the file is empty"),
        (
            b"GGUF\x03\x00\x00\x00" + bytes(8) + b"\x01" + bytes(7) + b"\xff" * 8,
            DamagedModelError,
            "is damaged|the file is empty",
        ),
        (ONE_KEY + b"\x08\x00\x00\x00" + b"\x09" + bytes(7) + b"short", DamagedModelError, "its header needs byte"),
        (ONE_KEY + b"\x09\x00\x00\x00\x04\x00\x00\x00" + b"\xff" * 8, DamagedModelError, "its header needs byte"),
        (ONE_KEY + b"\x09\x00\x00\x00\x08\x00\x00\x00" + b"\xff" * 8, DamagedModelError, "its header needs byte"),
        (ONE_KEY + b"\x63\x00\x00\x00", DamagedModelError, "unknown value type 99"),
    ],
)
def test_files_that_are_not_gguf(tmp_path: Path, content: bytes, kind: type[StartupError], words: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    refuse(tmp_path / "m.gguf", kind, words)


def test_every_cut_of_a_gguf_header_is_refused_in_one_line(model_paths: dict[str, Path], tmp_path: Path) -> None:
    content = model_paths["sentencepiece_gguf"].read_bytes()
    for length in range(0, len(content) - 64, 97):
        (tmp_path / "m.gguf").write_bytes(content[:length])
        refuse(tmp_path / "m.gguf", DamagedModelError, "is damaged|the file is empty")


@build.quick
@given(position=st.integers(0, 400), byte=st.integers(0, 255))
def test_a_flipped_byte_is_refused_or_harmless_never_a_crash(
    model_paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    content = bytearray(model_paths["sentencepiece_gguf"].read_bytes())
    content[position] = byte
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(content)
    assert "\n" not in refusal(path)
