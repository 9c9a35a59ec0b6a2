# Every target runs in the project's own environment through uv. ARGS goes to the benchmark: make bench-engine ARGS=--quick

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install test lint format bench bench-engine bench-serve bench-memory bench-kernels bench-metal bench-decode bench-kv-quality bench-drafts bench-gpu experiment compare docs clean

UV_RUN := uv run
ARGS ?=

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install:  ## the environment: .venv with everything, development tools included
	uv sync

test:  ## the tests that need no accelerator and no network
	$(UV_RUN) pytest

lint:  ## style, types and the direction of imports
	$(UV_RUN) ruff check .
	$(UV_RUN) ruff format --check .
	$(UV_RUN) mypy
	$(UV_RUN) lint-imports

format:  ## rewrite the code in the house style
	$(UV_RUN) ruff check --fix .
	$(UV_RUN) ruff format .

bench: bench-engine bench-serve bench-memory  ## all benchmarks, one after the other

bench-engine:  ## in-process throughput against mlx-lm's BatchGenerator, into bench-results/engine.json
	$(UV_RUN) python -m loadtest.bench_engine $(ARGS)

bench-serve:  ## over HTTP against in process, cached prefixes, long prompts, into bench-results/serve.json
	$(UV_RUN) python -m loadtest.bench_serve $(ARGS)

bench-memory:  ## memory and KV blocks around 600 requests, into bench-results/memory.json
	$(UV_RUN) python -m loadtest.bench_memory $(ARGS)

bench-kernels bench-metal:  ## on a GPU: the paged-attention kernels, right and how fast, into bench-results/kernels.json
	$(UV_RUN) python -m loadtest.bench_kernels $(ARGS)

bench-decode:  ## on a GPU: our ways to run a step, the same tokens and how fast, into bench-results/decode.json
	$(UV_RUN) python -m loadtest.bench_decode $(ARGS)

bench-kv-quality:  ## perplexity and greedy outputs with K/V in 8 bits, into bench-results/kv-quality.json
	$(UV_RUN) python -m loadtest.bench_kv_quality $(ARGS)

bench-drafts:  ## answers that repeat their prompt and free ones, with a drafter and without, into bench-results/drafts.json
	$(UV_RUN) python -m loadtest.bench_drafts $(ARGS)

bench-gpu:  ## on a GPU: against vLLM and mlx-lm, decode, prefill and mixed traffic, into bench-results/gpu.json
	$(UV_RUN) python -m loadtest.bench_gpu $(ARGS)

# NAME is not taken from the environment: some systems set it to the machine's name.
NAME = all
experiment:  ## a figure of the original experiment, NAME=batching and so on or all of them; docs/experiments.md
	$(UV_RUN) python -m loadtest.experiments $(NAME) $(ARGS)

compare:  ## against vLLM, llama.cpp and mlx-lm on this machine's CPU, into bench-results/compare
	$(UV_RUN) python -m loadtest.compare $(ARGS)

docs:  ## write the README's tables from the code
	$(UV_RUN) python -m deployments.reference README.md

clean:  ## caches and build products; not .venv, not bench-results
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
