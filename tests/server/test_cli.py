"""The command line: flags and environment, sizes, progress, and errors of one line with exit status 2."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from engine.config import CacheConfig, SchedulerConfig
from engine.errors import ConfigError
from server import __version__, cli
from server.auth import ApiKey
from server.progress import LineProgress
from server.serve import bind, curl_line
from server.settings import Settings
from server.units import format_bytes, parse_bytes, parse_share_or_bytes
from tests.fakes import fake_info

ROOT = Path(__file__).parents[2]


def octavo(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "server.cli", *args], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=30
    )


@pytest.fixture
def parsed(monkeypatch) -> list[Settings]:
    """What ``serve`` would have run with."""
    settings: list[Settings] = []
    monkeypatch.setattr(cli, "run_server", settings.append)
    return settings


def run_in_process(monkeypatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["octavo", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0


def test_serve_without_flags_takes_the_defaults(parsed, monkeypatch) -> None:
    run_in_process(monkeypatch, "serve")
    assert parsed == [Settings()]
    assert parsed[0].model == "smollm2-135m"
    assert parsed[0].shutdown_timeout == 30


EXPECTED = Settings(
    model="folder/model",
    dtype="bfloat16",
    device="cuda",
    max_model_len=4096,
    cache=CacheConfig(
        block_size=32,
        memory_bytes=4 * 2**30,
        fraction=0.7,
        kv_dtype="int8",
        host_bytes=2**31,
        disk_path="folder/blocks",
        disk_bytes=10**9,
        pin_budget_fraction=0.1,
    ),
    scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=99),
    host="0.0.0.0",
    port=9000,
    served_model_name="name",
    api_key="key",
    admin_key="other key",
    shutdown_timeout=2.5,
)
VALUES = {
    "dtype": "bfloat16",
    "device": "cuda",
    "max-model-len": "4096",
    "block-size": "32",
    "kv-cache-memory": "4GiB",
    "kv-cache-fraction": "0.7",
    "host-cache": "2GiB",
    "disk-cache": "folder/blocks",
    "disk-cache-size": "1GB",
    "pin-budget": "10%",
    "kv-cache-dtype": "int8",
    "max-num-seqs": "5",
    "max-num-batched-tokens": "99",
    "host": "0.0.0.0",
    "port": "9000",
    "served-model-name": "name",
    "api-key": "key",
    "admin-key": "other key",
    "shutdown-timeout": "2.5",
}


def test_every_flag_arrives(parsed, monkeypatch) -> None:
    run_in_process(monkeypatch, "serve", "folder/model", *(f"--{name}={value}" for name, value in VALUES.items()))
    assert parsed == [EXPECTED]


def test_every_flag_is_an_environment_variable_too(parsed, monkeypatch) -> None:
    monkeypatch.setenv("OCTAVO_MODEL", "folder/model")
    for name, value in VALUES.items():
        monkeypatch.setenv(f"OCTAVO_{name.replace('-', '_').upper()}", value)
    run_in_process(monkeypatch, "serve")
    assert parsed == [EXPECTED]


def test_files_of_keys_and_public_prefixes_are_read(parsed, monkeypatch, tmp_path) -> None:
    keys, first, second = (tmp_path / name for name in ("keys", "first", "second"))
    keys.write_text("# people\n\nalice: secret: with colon\n bob :b\n")
    first.write_text("You are kind.\n")
    second.write_text("Be brief.")
    run_in_process(monkeypatch, "serve", f"--api-key-file={keys}", f"--public-prefix={first}", f"--public-prefix={second}")
    assert parsed[0].api_keys == (ApiKey("alice", "secret: with colon"), ApiKey("bob", "b"))
    assert parsed[0].public_prefixes == ("You are kind.\n", "Be brief.")


def test_a_flag_wins_over_the_environment(parsed, monkeypatch) -> None:
    monkeypatch.setenv("OCTAVO_PORT", "9000")
    run_in_process(monkeypatch, "serve", "--port", "9001")
    assert parsed[0].port == 9001


def test_the_key_is_not_in_the_repr() -> None:
    settings = Settings(
        api_key="hush-1", api_keys=(ApiKey("alice", "hush-2"),), admin_key="hush-3", public_prefixes=("hush-4",)
    )
    assert "hush" not in repr(settings)
    assert "alice" in repr(settings)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--dtype", "int3"], "int3"),
        (["--kv-cache-memory", "lots"], "lots"),
        (["--kv-cache-memory", "0"], "'0'"),
        (["--kv-cache-fraction", "1.5"], "1.5"),
        (["--kv-cache-fraction", "nan"], "nan"),
        (["--host-cache", "0"], "'0'"),
        (["--disk-cache", ""], "folder"),
        (["--disk-cache-size", "much"], "much"),
        (["--block-size", "0"], "0"),
        (["--pin-budget", "101%"], "101%"),
        (["--pin-budget", "some"], "some"),
        (["--max-num-seqs", "0"], "0"),
        (["--max-num-batched-tokens", "0"], "0"),
        (["--max-model-len", "1"], "1"),
        (["--port", "70000"], "70000"),
        (["--shutdown-timeout", "-1"], "-1"),
        (["--shutdown-timeout", "nan"], "nan"),
        (["--api-key", " "], "key"),
        (["--admin-key", ""], "admin key"),
        (["--api-key", "same", "--admin-key", "same"], "admin key"),
        (["--api-key-file", "/no/such/file"], "/no/such/file"),
        (["--public-prefix", "/no/such/file"], "/no/such/file"),
        (["--served-model-name", ""], "name"),
    ],
)
def test_a_setting_out_of_range_is_one_line(parsed, monkeypatch, capsys, args, words) -> None:
    monkeypatch.setattr(sys, "argv", ["octavo", "serve", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo: error: ")
    assert words in line
    assert parsed == []


def test_a_port_in_use_is_one_line_and_status_2() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        result = octavo("serve", OCTAVO_PORT=port)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line == f"octavo: error: cannot listen on 127.0.0.1:{port}: Address already in use"
    assert result.stdout == ""


def test_an_address_that_is_not_ours_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        bind("192.0.2.1", 0)


def test_version_is_the_package_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    result = octavo("--version")
    assert (result.returncode, result.stdout) == (0, f"octavo {__version__}\n")


def test_a_flag_of_the_wrong_type_is_a_usage_error_without_traceback() -> None:
    result = octavo("serve", "--port", "abc")
    assert result.returncode == 2
    assert "--port" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_server_process_is_free_of_torch_and_numba() -> None:
    code = "import server.app, server.cli, sys; print([m for m in ('torch', 'numba', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (result.returncode, result.stdout, result.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 2**20),
        ("512MiB", 512 * 2**20),
        ("4GiB", 4 * 2**30),
        ("4Gi", 4 * 2**30),
        ("4 gib", 4 * 2**30),
        ("2G", 2 * 10**9),
        ("2GB", 2 * 10**9),
        ("1.5KiB", 1536),
        ("10B", 10),
        ("1TiB", 2**40),
    ],
)
def test_sizes(text, size) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "0", "1e9", "4 Gigs", "GiB4", "1iB", "nan", "4GiBB", "0.1", "1" * 40])
def test_what_is_no_size(text) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "value"), [("0.25", 0.25), ("25%", 0.25), ("0", 0.0), ("1", 1.0), ("100 %", 1.0), ("2", 2), ("64MiB", 64 * 2**20)]
)
def test_a_budget_is_a_share_or_a_size(text, value) -> None:
    parsed = parse_share_or_bytes(text)
    assert (parsed, type(parsed)) == (value, type(value))


def test_sizes_are_printed_in_the_largest_fitting_unit() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 46080, 3 * 2**30, 2**50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "45.0 KiB",
        "3.0 GiB",
        "1024.0 TiB",
    ]


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]")]
)
def test_the_curl_line_names_an_address_that_can_be_reached(host, shown) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with bind(host, 0) as sock:
        line = curl_line(fake_info(), Settings(), sock)
        assert line.startswith(f"curl http://{shown}:{sock.getsockname()[1]}/v1/completions ")


def test_progress_lines_are_few_and_say_each_stage() -> None:
    stream = io.StringIO()
    progress = LineProgress(stream)
    for i in range(1001):
        progress.update("fetching", i / 1000)
    progress.update("loading", None)
    progress.update("loading", None)
    assert stream.getvalue().splitlines() == ["octavo: fetching", "octavo: fetching: 100%", "octavo: loading"]
