# Each target works as the first command on a fresh clone.
BIN := .venv/bin
PROMPT ?= A function definition

.PHONY: setup setup-tests demo check test test-unit test-e2e test-commands test-networks format docs bench clean

# What runs NeuroGrid, and nothing that only its tests need.
setup: .venv/.ready

setup-tests: .venv/.peers-ready

REQUIREMENTS := packaging/requirements

.venv/.ready: pyproject.toml constraints.txt .ci/setup $(REQUIREMENTS)/transport.txt $(REQUIREMENTS)/inference.txt
	.ci/setup python

.venv/.dev-ready: .venv/.ready $(REQUIREMENTS)/dev.txt $(REQUIREMENTS)/otel.txt
	.ci/setup dev

# Peers in other languages.
.venv/.peers-ready: .venv/.dev-ready tests/e2e/interop/js/package-lock.json
	.ci/setup peers

# The main job: two workers with nothing on disk get the embedded model over libp2p and write.
demo: .venv/.ready
	$(BIN)/neurogrid-coordinator --local-workers 2 --prompt "$(PROMPT)" --max-tokens 80

check: .venv/.dev-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: test-unit
	$(MAKE) -j2 --output-sync=line test-e2e

# Without sockets: also what the network in memory shows of the suite that all networks pass.
test-unit: .venv/.dev-ready
	$(BIN)/python -m pytest tests/unit -q
	$(BIN)/python -m pytest tests/conformance -q -k memory

# With real processes and sockets, one beside the other where make may run two: the second waits more than it works.
test-e2e: test-commands test-networks

# What runs beside the commands: peers in other languages, transfers, and what breaks the protocol.
PEER_TESTS := tests/e2e/interop tests/e2e/transfers tests/e2e/bad_input_peer

test-commands: .venv/.peers-ready
	$(BIN)/python -m pytest tests/e2e $(PEER_TESTS:%=--ignore=%) -q --durations=20

test-networks: .venv/.peers-ready
	$(BIN)/python -m pytest tests/conformance -q -k libp2p
	$(BIN)/python -m pytest $(PEER_TESTS) -q

format: .venv/.dev-ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The reference, from the docstrings and the parsers, and the rooms, from the imports; tests hold that they are new.
docs: .venv/.ready
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_architecture.py

# Prints ratios and writes a dated file under benchmarks/results/.
bench: .venv/.ready
	$(BIN)/python benchmarks/decode.py

clean:
	rm -rf .venv tests/e2e/interop/js/node_modules build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
