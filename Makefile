# Every target sets up what it needs (tools/bootstrap.sh); a second run starts at once.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint format bench notebooks oracle lock clean

bin := .venv/bin
# Another checkout on a shell's PYTHONPATH would be run in place of this one.
unexport PYTHONPATH
# Two workers, one test file each at a time: a file's fixtures (a model, say) are then made once.
workers ?= 2

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' Makefile | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

setup:  ## find a Python, make .venv, install the locked packages and the project
	@sh tools/bootstrap.sh

demo: setup  ## a real model, plain and speculative, in bf16 and FP8, every figure measured
	@$(bin)/mtpjax demo

# The fast tests spend their time compiling small loops, so XLA is told to optimise less; the slow ones run as a user does.
test: export XLA_FLAGS := --xla_backend_optimization_level=0 $(XLA_FLAGS)
test: setup  ## the fast tests
	@$(bin)/python -m pytest -n $(workers) --dist loadfile

test-slow: setup  ## the slow tests: real models, notebooks, studies, kills
	@$(bin)/python -m pytest -n $(workers) --dist loadfile -m slow

test-all: setup oracle  ## every test that this machine can run, slow ones and oracles too
	@$(bin)/python -m pytest -n $(workers) --dist loadfile -m "not accelerator"

lint: setup  ## ruff, pyrefly, the layers of the package
	@$(bin)/ruff check .
	@$(bin)/ruff format --check .
	@$(bin)/pyrefly check
	@$(bin)/lint-imports --no-logo

format: setup  ## let ruff mend what it can
	@$(bin)/ruff check --fix .
	@$(bin)/ruff format .

bench: setup  ## speed without FP8: {f32, bf16} at depths 0 and 3, 96 tokens
	@$(bin)/mtpjax demo 'precisions=[f32, bf16]' max_new_tokens=96 --runs runs/bench

notebooks: setup  ## execute the notebooks anew and write them with their outputs
	@$(bin)/python notebooks/build.py

oracle:  ## make .venv-oracle (torch, transformers) for the tests marked oracle
	@sh tools/bootstrap.sh oracle

lock:  ## write the lock files anew (needs uv)
	@sh tools/lock.sh

clean:  ## remove the environments and caches; results under runs/ stay
	@rm -rf .venv .venv-oracle .venv-uv .venv-python .venv.lock .venv-oracle.lock
	@rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache .jax_cache dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
