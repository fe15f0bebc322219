"""Who calls: named API keys, compared in constant time, and the cache salt that keeps callers' blocks apart.

Keys come in and never go out: names are for logs and answers, digests are for comparing. Knows HTTP only as one header.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import ConfigError

DEFAULT_NAME = "default"  # of the one key that --api-key gives
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SALT_LABEL = b"octavo cache salt 1\0"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key and the name under which logs and operators know it.

    Raises:
        ConfigError: a name that is not 1 to 64 of A-Z a-z 0-9 . _ -, or an empty key.
    """

    name: str
    key: str = field(repr=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"not a name for an API key: {self.name[:64]!r} (1 to 64 of A-Z a-z 0-9 . _ -)")
        if not self.key.strip():
            raise ConfigError(f"the API key {self.name!r} must not be empty; leave it out to serve without it")


def read_api_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file of lines ``name: key``; blank lines and lines that begin with # are skipped.

    Raises:
        ConfigError: the file cannot be read, has no keys, or has a line of another form. No message shows a key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the API keys in {path}: {getattr(exc, 'strerror', None) or 'not UTF-8 text'}") from None
    keys = tuple(_parse_line(path, number, line.strip()) for number, line in enumerate(lines, start=1) if _is_entry(line))
    if not keys:
        raise ConfigError(f"{path} holds no API keys; write lines of the form name: key")
    return keys


def _is_entry(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _parse_line(path: Path, number: int, line: str) -> ApiKey:
    name, colon, key = line.partition(":")
    if not colon or not _NAME.fullmatch(name.strip()) or not key.strip():
        raise ConfigError(f"{path}, line {number}: not of the form name: key (a name is 1 to 64 of A-Z a-z 0-9 . _ -)")
    return ApiKey(name.strip(), key.strip())


def check_keys(keys: Iterable[ApiKey], admin_key: str | None) -> None:
    """Raises ConfigError when two names or two keys are the same, or the admin key is empty or one of the others."""
    names: set[str] = set()
    by_key: dict[str, str] = {}
    for key in keys:
        if key.name in names:
            raise ConfigError(f"two API keys have the name {key.name!r}")
        if key.key in by_key:
            raise ConfigError(f"the API keys {by_key[key.key]!r} and {key.name!r} are the same")
        names.add(key.name)
        by_key[key.key] = key.name
    if admin_key is not None and not admin_key.strip():
        raise ConfigError("the admin key must not be empty; leave it out to serve without one")
    if admin_key in by_key:
        raise ConfigError(f"the admin key and the API key {by_key[admin_key]!r} are the same")


def derive_salt(secret: str, client_salt: str | None) -> str:
    """The cache namespace of a caller: HMAC-SHA-256 in hex over the client's own salt, keyed by its API key.

    "" when there is neither. Nobody reaches another's namespace without its key, and a salt does not give the key away.
    """
    if not secret and client_salt is None:
        return ""
    return hmac.new(secret.encode(), _SALT_LABEL + (client_salt or "").encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. ``name`` is None for callers without a key, where none is asked for."""

    name: str | None = None
    is_admin: bool = False
    _secret: str = field(default="", repr=False)

    def cache_salt(self, client_salt: str | None) -> str:
        return derive_salt(self._secret, client_salt)

    def tenant(self, client_salt: str | None) -> str:
        """With whom its requests take turns: a key's with all of that key; without keys, a salt is all there is to tell by."""
        return derive_salt(self._secret, None if self._secret else client_salt)


ANONYMOUS = Caller()
ADMIN_NAME = "admin"


class Keyring:
    """All keys of a server."""

    def __init__(self, keys: Iterable[ApiKey], admin_key: str | None) -> None:
        self._callers = {key.name: Caller(key.name, _secret=key.key) for key in keys}
        self._entries = [(_digest(key.key.strip().encode()), self._callers[key.name]) for key in keys]
        self.needs_key = bool(self._entries)
        self.has_admin = admin_key is not None
        if admin_key is not None:
            self._entries.append((_digest(admin_key.strip().encode()), Caller(ADMIN_NAME, True, admin_key)))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the API keys; the admin key has none."""
        return tuple(self._callers)

    def caller(self, name: str) -> Caller | None:
        """The caller whose API key has this name."""
        return self._callers.get(name)

    def identify(self, authorization: bytes) -> Caller | None:
        """Who the value of the Authorization header stands for; None when a key is needed and it is none of ours.

        Takes the same time for every key of ours and for any other: all are compared, as digests of one length.
        """
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip() if scheme.lower() == b"bearer" else b"")
        found = None if self.needs_key else ANONYMOUS
        for digest, caller in self._entries:
            if hmac.compare_digest(given, digest):
                found = caller
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
