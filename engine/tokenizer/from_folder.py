"""A tokenizer from a folder in Hugging Face layout: tokenizer.json, else tokenizer.model, and the JSON files beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import DamagedModelError, ModelNotFoundError
from engine.tokenizer.base import Affixes, Tokenizer
from engine.tokenizer.library import LibraryTokenizer, token_bytes_for
from engine.tokenizer.naming import errors_naming
from engine.tokenizer.spm import AddedToken, SentencePieceTokenizer, parse_model


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    if (folder / "tokenizer.json").is_file():
        return _from_tokenizer_json(folder / "tokenizer.json", FolderConfig(folder))
    if (folder / "tokenizer.model").is_file():
        return _from_tokenizer_model(folder / "tokenizer.model", FolderConfig(folder))
    raise ModelNotFoundError(f"{folder} holds neither tokenizer.json nor tokenizer.model")


class FolderConfig:
    """tokenizer_config.json, special_tokens_map.json and added_tokens.json; each may be absent."""

    def __init__(self, folder: Path) -> None:
        self._config = _optional_json(folder / "tokenizer_config.json")
        self._map = _optional_json(folder / "special_tokens_map.json")
        self._added = _optional_json(folder / "added_tokens.json")

    def token(self, name: str) -> str | None:
        """The content of "bos_token" or "eos_token", None where no file names one."""
        for source in (self._config, self._map):
            value = source.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                return content
        return None

    def flag(self, name: str) -> bool | None:
        value = self._config.get(name)
        if value is not None and not isinstance(value, bool):
            raise DamagedModelError(f"tokenizer_config.json: {name} is {value!r}, neither true nor false")
        return value

    def added_tokens(self) -> dict[int, AddedToken]:
        """Tokens by id; those that only added_tokens.json lists are not special."""
        declared = self._config.get("added_tokens_decoder", {})
        try:
            added = {int(i): AddedToken(str(content), special=False) for content, i in self._added.items()}
            for token_id, token in declared.items():
                added[int(token_id)] = AddedToken(str(token["content"]), special=token.get("special") is True)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedModelError(f"added tokens in the files beside it: {error!r}") from None
        return added


def _from_tokenizer_json(path: Path, config: FolderConfig) -> Tokenizer:
    with errors_naming(path):
        content = _read_json(path)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise DamagedModelError(f"not a usable tokenizer: {error}") from None
        bos, eos = (_named_id(backend.token_to_id, config.token(name)) for name in ("bos_token", "eos_token"))
        return LibraryTokenizer(
            backend,
            token_bytes_for(backend, content.get("decoder")),
            affixes=_declared_affixes(config, bos, eos),
            bos_token_id=bos,
            eos_token_id=eos,
        )


def _declared_affixes(config: FolderConfig, bos: int | None, eos: int | None) -> Affixes | None:
    """A flag in tokenizer_config.json overrules the post-processor in tokenizer.json, as in transformers."""
    add_bos, add_eos = config.flag("add_bos_token"), config.flag("add_eos_token")
    return None if add_bos is None and add_eos is None else _affixes(add_bos is True, bos, add_eos is True, eos)


def _affixes(add_bos: bool, bos: int | None, add_eos: bool, eos: int | None) -> Affixes:
    """A token that is asked for but that no file names is not added, as in transformers."""
    return Affixes((bos,) if add_bos and bos is not None else (), (eos,) if add_eos and eos is not None else ())


def _from_tokenizer_model(path: Path, config: FolderConfig) -> Tokenizer:
    with errors_naming(path):
        model = parse_model(path.read_bytes())
        added = config.added_tokens()
        ids = {piece.piece: i for i, piece in enumerate(model.pieces)} | {token.content: i for i, token in added.items()}
        bos = _named_or_own_id(ids, config.token("bos_token"), model.trainer_spec.bos_piece)
        eos = _named_or_own_id(ids, config.token("eos_token"), model.trainer_spec.eos_piece)
        affixes = _affixes(config.flag("add_bos_token") is not False, bos, config.flag("add_eos_token") is True, eos)
        return SentencePieceTokenizer(model, affixes=affixes, bos_token_id=bos, eos_token_id=eos, added=added)


def _named_or_own_id(ids: dict[str, int], named: str | None, own: str) -> int | None:
    """A SentencePiece model always gives its BOS and EOS piece a name; it may have none of them."""
    return ids.get(own) if named is None else _named_id(ids.get, named)


def _named_id(id_of: Callable[[str], int | None], token: str | None) -> int | None:
    if token is None:
        return None
    token_id = id_of(token)
    if token_id is None:
        raise DamagedModelError(f"the token {token!r} that tokenizer_config.json names is not in the vocabulary")
    return token_id


def _optional_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with errors_naming(path):
        return _read_json(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedModelError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DamagedModelError("not a JSON object")
    return value
