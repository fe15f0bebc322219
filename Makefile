# Two commands matter: `make serve` and `make test`. Everything is installed into .venv, from Python packages alone.
PYTHON ?= python3
MODEL ?= $(or $(OCTAVO_MODEL),smollm2-135m)
BIN := .venv/bin
PIP_FLAGS ?= --disable-pip-version-check --progress-bar on
# On a CPU-only machine the plain torch on the index may be a CUDA build of several GB; this version has a CPU build where Octavo is developed.
TORCH ?= torch==2.13.0

.PHONY: help install serve test check lint types bench tier-bench pressure-bench itl-bench kv-quality endless demo-train demo-ablation soak clean

help:
	@echo "make serve     install, fetch the default model, serve it on http://127.0.0.1:8000  (MODEL=, OCTAVO_PORT=, ...)"
	@echo "make test      install what the tests need and run them all"
	@echo "make check     ruff, mypy --strict, import layers, then the tests: what CI runs"
	@echo "make install   only make .venv; the command is .venv/bin/octavo"
	@echo "make kv-quality  bytes, perplexity and KL of every KV cache format, on 20,480 tokens of Moby Dick (needs npm; about half an hour)"
	@echo "make endless   20,000 tokens read and 20,000 drawn as one stream each: perplexity by bucket, blocks held (needs npm; about half an hour)"
	@echo "make bench     start a server and measure it with loadtest/ (a few minutes)"
	@echo "make pressure-bench  tokens computed twice when the cache is too small, by policy; no model (a few minutes)"
	@echo "make itl-bench  gaps in running streams without and with a 4,000-token prompt arriving"
	@echo "make tier-bench  time to the first token of a 2,000-token prompt: computed, and found on device, host, disk, after a restart"
	@echo "make demo-train  train the built-in octavo-tiny anew into engine/demo/octavo-tiny (needs npm and apt-get; about half an hour)"
	@echo "make demo-ablation  what each part of its block buys: 300 steps each, a Markdown table (about an hour)"
	@echo "make soak      10,000 short requests of which 30 % hang up: nothing leaks, memory stays flat, counters add up"

.venv/bin/python:
	@echo "creating .venv"
	@$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml | .venv/bin/python
	@echo "installing octavo and its dependencies into .venv (a few minutes the first time)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) --upgrade pip
	@$(BIN)/python -m pip install $(PIP_FLAGS) "$(TORCH)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) -e .
	@touch $@

.venv/.installed-dev: .venv/.installed
	@echo "installing what the tests need"
	@$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[dev,loadtest,demo]'
	@touch $@

install: .venv/.installed

serve: .venv/.installed
	@exec $(BIN)/octavo serve $(MODEL)

test: .venv/.installed-dev
	$(BIN)/python -m pytest -m "not all_cores" -n 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest -m all_cores

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed-dev
	$(BIN)/mypy

check: lint types test

bench: .venv/.installed-dev
	$(BIN)/python -m loadtest.bench --serve "$(BIN)/octavo serve smollm2-135m --kv-cache-memory 512MiB" \
		--weight-bytes 538e6 --cache-bytes 536870912 --reps 3 --json bench.json

soak: .venv/.installed-dev
	$(BIN)/python -m loadtest.soak --serve "$(BIN)/octavo serve smollm2-135m --kv-cache-memory 64MiB"

tier-bench: .venv/.installed-dev
	$(BIN)/python -m loadtest.tier_bench --serve "$(BIN)/octavo serve smollm2-135m" --kv-bytes-per-token 46080

kv-quality: .venv/.installed
	$(BIN)/python -m engine.evaluate.kv_quality --model $(MODEL)

endless: .venv/.installed
	$(BIN)/python -m engine.evaluate.endless --model $(MODEL)

.venv/.installed-demo: .venv/.installed
	@$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[demo]'
	@touch $@

# The checkpoint stays in build/, so that a run that was cut is taken up; what ships is what `octavo serve` and a reader need.
demo-train: .venv/.installed-demo
	$(BIN)/python -m engine.demo.train --out build/octavo-tiny
	mkdir -p engine/demo/octavo-tiny
	cd build/octavo-tiny && cp README.md config.json model.safetensors tokenizer.model tokenizer_config.json losses.json loss.png $(CURDIR)/engine/demo/octavo-tiny/

demo-ablation: .venv/.installed-demo
	$(BIN)/python -m engine.demo.ablation --tokenizer engine/demo/octavo-tiny/tokenizer.model

pressure-bench: .venv/.installed
	$(BIN)/python -m engine.evaluate.pressure

itl-bench: .venv/.installed-dev
	$(BIN)/python -m loadtest.itl_bench --serve "$(BIN)/octavo serve smollm2-135m"

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
