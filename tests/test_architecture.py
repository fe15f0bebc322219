"""The layers of the house: a file imports only from lower ones. The package docstrings say what each does not know."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Lowest first. A module belongs to the longest prefix that it has; it may import its own layer and lower ones.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("engine.errors",),
    ("engine.config", "engine.queue_bound", "engine.request", "engine.stats", "engine.model_config", "engine.model_fields",
     "engine.hf_config", "engine.hf_keys", "engine.gpt2_config", "engine.octavo_config", "engine.gguf_config", "engine.gguf_file", "engine.rope_config", "engine.rope_classes", "engine.kernel_cache"),
    ("engine.kv", "engine.attention.metadata", "engine.tokenizer"),
    ("engine.sched", "engine.attention"),
    ("engine.model",),
    ("engine.runner",),
    ("engine.context_plan", "engine.core", "engine.control", "engine.memory", "engine.tier_setup", "engine.load",
     "engine.capacity"),
    ("engine.messages", "engine.process", "engine.engine_process", "engine.async_engine", "engine.llm",
     "engine.evaluate", "engine.demo"),
    ("server",),
)  # fmt: skip
LEVELS = {prefix: level for level, prefixes in enumerate(LAYERS) for prefix in prefixes}
PACKAGE_MARKERS = {"engine", "server"}

# Who may not import what, at any depth: the reasons are in design.md and in the packages' docstrings.
FORBIDDEN = {
    "engine.kv": {"torch", "numba", "fastapi", "zmq"},
    "engine.sched": {"torch", "numba", "fastapi", "zmq"},
    "engine": {"fastapi", "uvicorn", "prometheus_client", "locust", "typer"},
    "engine.capacity": {"torch", "numba"},
    "engine.tokenizer": {"torch", "transformers"},
    "server": {"torch", "numba", "locust", "transformers"},
    "loadtest": {"engine", "server", "torch"},
}
EXCEPTIONS = {("engine.kv.storage", "torch"), ("engine.kv.offload", "torch")}


def modules() -> Iterator[tuple[str, Path]]:
    for package in ("engine", "server", "loadtest"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def level(module: str) -> int | None:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        found = LEVELS.get(".".join(parts[:length]))
        if found is not None:
            return found
    return None


MODULES = dict(modules())


@pytest.mark.parametrize(
    "module", [name for name in MODULES if not name.startswith("loadtest") and name not in PACKAGE_MARKERS]
)
def test_imports_go_down(module: str) -> None:
    own = level(module)
    assert own is not None, f"{module} is in no layer: add it to LAYERS"
    for imported in imports(MODULES[module]):
        if imported.split(".")[0] in PACKAGE_MARKERS and imported not in PACKAGE_MARKERS:
            other = level(imported)
            assert other is not None, f"{module} imports {imported}, which is in no layer"
            assert other <= own, f"{module} (layer {own}) imports {imported} (layer {other})"


@pytest.mark.parametrize("module", MODULES)
def test_nobody_imports_what_it_must_not_know(module: str) -> None:
    for prefix, forbidden in FORBIDDEN.items():
        if module == prefix or module.startswith(prefix + "."):
            for imported in imports(MODULES[module]):
                top = imported.split(".")[0]
                assert top not in forbidden or (module, top) in EXCEPTIONS, f"{module} must not import {imported}"


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is_and_stays_small(module: str) -> None:
    text = MODULES[module].read_text()
    assert ast.get_docstring(ast.parse(text)), f"{module} has no docstring"
    assert len(text.splitlines()) <= 400, f"{module} is over 400 lines: look for the missing type"
