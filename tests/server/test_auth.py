"""Keys and callers: files of keys, who is who, and salts that keep tenants apart without giving keys away."""

from __future__ import annotations

import hmac
import logging

import pytest

from engine.errors import ConfigError, RequestFailedError
from server import auth
from server.auth import ApiKey, Keyring, derive_salt, read_api_keys
from server.settings import Settings
from tests.fakes import FakeEngine

URL = "/v1/completions"
ALICE, BOB = ApiKey("alice", "a-key"), ApiKey("bob", "b-key")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no API keys"),
        ("# only a comment\n", "holds no API keys"),
        ("alice: hush\nhush-hush\n", "line 2"),
        ("alice:\n", "line 1"),
        (": hush\n", "line 1"),
        ("al ice: hush\n", "line 1"),
        ("x" * 65 + ": hush\n", "line 1"),
    ],
)
def test_a_bad_file_of_keys_is_refused_without_showing_a_key(tmp_path, text, words) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        read_api_keys(path)
    assert "hush" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"api_keys": (ALICE, ApiKey("alice", "other"))}, "two API keys have the name 'alice'"),
        ({"api_keys": (ALICE, ApiKey("carol", "a-key"))}, "'alice' and 'carol' are the same"),
        ({"api_keys": (ApiKey("default", "x"),), "api_key": "y"}, "'default'"),
        ({"api_keys": (ALICE,), "admin_key": "a-key"}, "admin key and the API key 'alice'"),
    ],
)
def test_names_and_keys_are_unique(settings, words) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        Settings(**settings)
    assert "a-key" not in str(error.value)


def test_every_key_is_compared_whoever_calls(monkeypatch) -> None:
    """No early end: how long it takes says neither whether a key is right nor which one it is."""
    compared: list[int] = []
    compare = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append(len(a) + len(b))
        return compare(a, b)

    keyring = Keyring((ALICE, BOB), "root")
    monkeypatch.setattr(auth.hmac, "compare_digest", counting)
    names = {}
    for key in ("a-key", "b-key", "root", "", "x" * 500):
        compared.clear()
        caller = keyring.identify(b"Bearer " + key.encode())
        names[key] = caller and (caller.name, caller.is_admin)
        assert compared == [64, 64, 64]
    assert names == {
        "a-key": ("alice", False),
        "b-key": ("bob", False),
        "root": ("admin", True),
        "": None,
        "x" * 500: None,
    }


def test_without_keys_everybody_is_anonymous_but_the_admin() -> None:
    keyring = Keyring((), "root")
    assert keyring.identify(b"") == keyring.identify(b"Bearer wrong") == auth.ANONYMOUS
    admin = keyring.identify(b"Bearer root")
    assert admin is not None
    assert admin.is_admin
    assert "root" not in repr(admin)


def test_salts_differ_by_key_and_by_client_salt_and_are_stable() -> None:
    assert derive_salt("", None) == ""
    salts = {derive_salt(key, salt) for key in ("", "a", "b") for salt in (None, "x", "y")}
    assert len(salts) == 9
    assert all(len(salt) == 64 for salt in salts - {""})
    assert derive_salt("a", "x") == derive_salt("a", "x")


async def test_the_salt_of_a_request_comes_from_its_key_and_its_cache_salt(client) -> None:
    engine = FakeEngine()
    async with client(engine, api_keys=(ALICE, BOB), api_key="c-key") as http:
        for key in ("a-key", "b-key", "c-key"):
            for fields in ({}, {"cache_salt": "x"}, {"cache_salt": None}):
                answer = await http.post(URL, json={"prompt": "a"} | fields, headers=bearer(key))
                assert answer.status_code == 200
        assert (await http.post(URL, json={"prompt": "a"}, headers=bearer("d-key"))).status_code == 401
    assert engine.salts == [derive_salt(key, salt) for key in ("a-key", "b-key", "c-key") for salt in (None, "x", None)]


async def test_without_keys_only_the_clients_own_salt_counts(client) -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        await http.post(URL, json={"prompt": "a"}, headers=bearer("whatever"))
        await http.post(URL, json={"prompt": "a", "cache_salt": "x"})
    assert engine.salts == ["", derive_salt("", "x")]


async def test_logs_name_the_key_and_never_show_it(client, caplog) -> None:
    engine = FakeEngine(failure=RequestFailedError("boom"))
    async with client(engine, api_keys=(ALICE,)) as http:
        for stream in (False, True):
            await http.post(URL, json={"prompt": "a", "stream": stream}, headers=bearer("a-key"))
    records = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(records) == 2
    assert all(" of alice failed" in record.message for record in records)
    assert "a-key" not in caplog.text
