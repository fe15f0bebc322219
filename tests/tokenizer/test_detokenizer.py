"""Joined deltas equal the whole decode, and the whole decode equals the libraries' own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from vocab_builders import quick

from engine.tokenizer import Tokenizer, load_tokenizer
from engine.tokenizer.detokenizer import ByteDetokenizer, Utf8Decoder, join_tokens

MAX_ID = 450  # beyond every vocabulary here: ids without a meaning are among them
token_lists = st.lists(st.integers(0, MAX_ID), max_size=12)
texts = st.text(st.sampled_from("ab helo wrd\n\t日本語🎉é’{}=1"), max_size=20)
byte_tokens = st.lists(
    st.sampled_from([0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0x8E, 0x89, 0x20, 0x41, 0xED, 0xA0, 0xC0, 0x80]), max_size=8
)


def stream(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int]) -> str:
    detokenizer = tokenizer.detokenizer(prompt)
    return "".join([detokenizer.push(token_id) for token_id in output]) + detokenizer.finish()


def complete_text(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join(detokenizer.push(token_id) for token_id in prompt)


@quick
@given(output=token_lists)
def test_an_output_without_prompt_streams_to_its_whole_decode(tokenizer: Tokenizer, output: list[int]) -> None:
    assert stream(tokenizer, [], output) == tokenizer.decode(output)


@quick
@given(text=texts, output=token_lists)
def test_an_output_continues_its_text_prompt(tokenizer: Tokenizer, text: str, output: list[int]) -> None:
    prompt = tokenizer.encode(text)
    assert tokenizer.decode(prompt) + stream(tokenizer, prompt, output) == tokenizer.decode(prompt + output)


@quick
@given(prompt=token_lists, output=token_lists)
def test_a_prompt_may_end_inside_a_character(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> None:
    joined = complete_text(tokenizer, prompt) + stream(tokenizer, prompt, output)
    assert joined == tokenizer.decode(prompt + output)


@quick
@given(prompt=byte_tokens, output=byte_tokens)
def test_characters_of_single_bytes_cut_anywhere(loaded: dict[str, Tokenizer], prompt: list[int], output: list[int]) -> None:
    tokenizer, byte_0 = loaded["sentencepiece"], 3
    prompt, output = [byte_0 + byte for byte in prompt], [byte_0 + byte for byte in output]
    joined = complete_text(tokenizer, prompt) + stream(tokenizer, prompt, output)
    assert joined == tokenizer.decode(prompt + output)


@quick
@given(text=texts)
def test_text_comes_back_from_its_tokens_as_soon_as_it_is_complete(loaded: dict[str, Tokenizer], text: str) -> None:
    for kind in ("sentencepiece", "sentencepiece_gguf", "byte_fallback_json", "byte_level_json", "byte_level_gguf"):
        tokenizer = loaded[kind]
        detokenizer = tokenizer.detokenizer()
        deltas = [detokenizer.push(token_id) for token_id in tokenizer.encode(text)]
        assert "".join(deltas) == text
        assert detokenizer.finish() == ""


@quick
@given(ids=token_lists, tail=byte_tokens)
def test_pieces_decode_as_sentencepiece_does(
    loaded: dict[str, Tokenizer], spm_model: bytes, ids: list[int], tail: list[int]
) -> None:
    library = sentencepiece.SentencePieceProcessor(model_proto=spm_model)
    ids = [i for i in ids + [3 + byte for byte in tail] if i < library.vocab_size()]
    visible = [i for i in ids if not loaded["sentencepiece"].is_special(i)]
    assert loaded["sentencepiece"].decode(ids) == library.decode(visible)
    assert loaded["sentencepiece_gguf"].decode(ids) == library.decode(visible)
    assert loaded["byte_fallback_json"].decode(ids) == library.decode(visible)


@quick
@given(ids=token_lists, skip=st.booleans())
def test_byte_level_decodes_as_the_tokenizers_library_does(
    loaded: dict[str, Tokenizer], backends: dict[str, tokenizers.Tokenizer], ids: list[int], skip: bool
) -> None:
    expected = backends["byte_level_json"].decode(ids, skip_special_tokens=skip)
    assert loaded["byte_level_json"].decode(ids, skip) == expected
    assert loaded["byte_level_gguf"].decode(ids, skip) == expected


@quick
@given(ids=token_lists, skip=st.booleans())
def test_valid_byte_fallback_decodes_as_the_tokenizers_library_does(
    loaded: dict[str, Tokenizer], backends: dict[str, tokenizers.Tokenizer], ids: list[int], skip: bool
) -> None:
    expected = backends["byte_fallback_json"].decode(ids, skip_special_tokens=skip)
    byte_space = 3 + 0x20  # the library strips it where a text begins, SentencePiece does not
    if "\ufffd" not in expected and byte_space not in ids:
        assert loaded["byte_fallback_json"].decode(ids, skip) == expected


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece_gguf", "byte_fallback_json"])
def test_an_output_keeps_its_leading_space_behind_a_prompt_only(loaded: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    world = tokenizer.encode("world", add_special_tokens=False)
    assert stream(tokenizer, tokenizer.encode("hello"), world) == " world"
    assert stream(tokenizer, [1], world) == "world"
    assert stream(tokenizer, [], world) == "world"


def test_nothing_is_shown_of_a_character_until_it_is_complete(loaded: dict[str, Tokenizer]) -> None:
    detokenizer = loaded["sentencepiece"].detokenizer()
    assert [detokenizer.push(3 + byte) for byte in "🎉".encode()] == ["", "", "", "🎉"]


def test_special_tokens_inside_a_character_do_not_break_it(loaded: dict[str, Tokenizer]) -> None:
    head, *tail = [3 + byte for byte in "日".encode()]
    assert stream(loaded["sentencepiece"], [], [head, 2, *tail]) == "日"


@pytest.mark.parametrize("num_in_prompt", [1, 2, 3, 4])
@pytest.mark.parametrize("specials", [[], [2], [1, 2]])
def test_a_character_begun_in_the_prompt_ends_in_the_output(
    loaded: dict[str, Tokenizer], num_in_prompt: int, specials: list[int]
) -> None:
    ids = [3 + byte for byte in "🎉".encode()]
    before, after = ids[:num_in_prompt], ids[num_in_prompt:]
    text = stream(loaded["sentencepiece"], [4, *before, *specials], [*after, 3 + ord("x")])
    assert text == ("🎉x" if after else "x")


@pytest.mark.parametrize(("each_byte", "shown"), [(True, "\ufffd\ufffd"), (False, "\ufffd")])
def test_incomplete_bytes_are_flushed_as_the_whole_decode_shows_them(each_byte: bool, shown: str) -> None:
    decoder = Utf8Decoder(each_byte)
    assert decoder.decode(b"\xe6\x97") + decoder.decode(b"", final=True) == shown


@quick
@given(data=st.binary(max_size=20), cuts=st.lists(st.integers(0, 20)), each_byte=st.booleans())
def test_utf8_does_not_depend_on_the_cuts(data: bytes, cuts: list[int], each_byte: bool) -> None:
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    decoder = Utf8Decoder(each_byte)
    parts = [decoder.decode(data[a:b]) for a, b in pairwise(bounds)]
    assert "".join(parts) + decoder.decode(b"", final=True) == Utf8Decoder(each_byte).decode(data, final=True)


class CountingBytes:
    """One letter for each token; counts how often it is asked."""

    replace_each_byte = False

    def __init__(self) -> None:
        self.num_asked = 0

    def inner(self, token_id: int) -> bytes:
        self.num_asked += 1
        return b"x"

    first = inner

    def begins_text(self, token_id: int) -> bool:
        return True


def test_a_token_costs_the_same_however_long_prompt_and_output_are() -> None:
    source = CountingBytes()
    detokenizer = ByteDetokenizer(source, lambda _: False, [0] * 5000)
    assert source.num_asked <= 3
    source.num_asked = 0
    assert "".join(detokenizer.push(0) for _ in range(1000)) == join_tokens(CountingBytes(), [0] * 1000)
    assert source.num_asked == 1000


def test_a_decoder_with_suffixes_streams_through_the_window(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("suffixes")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a</w>": 0, "b": 1, "c</w>": 2}, unk_token="b"))
    backend.decoder = tokenizers.decoders.BPEDecoder()
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(backend.to_str())))
    assert stream(load_tokenizer(folder), [0], [1, 2, 0, 1]) == " bc a b"
