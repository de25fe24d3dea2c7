# Each target works as the first command on a fresh clone.
BIN := .venv/bin
PROMPT ?= A function definition

.PHONY: setup demo check test test-unit test-e2e format bench clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt .ci/setup
	.ci/setup

# The main job: two workers with nothing on disk get the embedded model over libp2p and write.
demo: setup
	$(BIN)/neurogrid-coordinator --local-workers 2 --prompt "$(PROMPT)" --max-tokens 80

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: test-unit test-e2e

test-unit: setup
	$(BIN)/python -m pytest tests/unit -q

test-e2e: setup
	$(BIN)/python -m pytest tests/e2e -q

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Prints ratios and writes a dated file under benchmarks/results/.
bench: setup
	$(BIN)/python benchmarks/decode.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
