"""Byte counts as people write and read them."""

from __future__ import annotations

import re

from engine.errors import ConfigError

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_SHARE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*(%?)")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(text: str) -> int:
    """``1048576``, ``512MiB``, ``4Gi`` (powers of 1024), ``2G`` or ``2GB`` (powers of 1000).

    Raises:
        ConfigError: not such a size, or less than one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"not a size in bytes: {text[:40]!r} (write 1048576, 512MiB, 4GiB or 2G)")
    number, unit, binary = match.groups()
    size = int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.upper()]) if unit else int(float(number))
    if size < 1 or (binary and not unit):
        raise ConfigError(f"not a size in bytes: {text[:40]!r} (write 1048576, 512MiB, 4GiB or 2G)")
    return size


def parse_share_or_bytes(text: str) -> float | int:
    """A share of something as a float: ``0.25``, ``25%``, ``0``, ``1``; else a size in bytes, as ``parse_bytes`` reads it.

    Raises:
        ConfigError: neither, or a share above 1.
    """
    share = _SHARE.fullmatch(text.strip())
    if share is None:
        return parse_bytes(text)
    number, percent = share.groups()
    value = float(number) / (100 if percent else 1)
    if percent and value > 1:
        raise ConfigError(f"not a share: {text[:40]!r} is more than all of it")
    return value if percent or value <= 1 else parse_bytes(text)


def format_bytes(size: float) -> str:
    """Three significant places in the largest binary unit that leaves at least 1: ``45.0 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
