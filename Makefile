# Each target works as the first command on a fresh clone.
BIN := .venv/bin
PROMPT ?= A function definition

.PHONY: setup setup-tests kernels demo demo-train check test test-unit test-e2e test-long format docs bench wheels clean

# What runs NeuroGrid, and nothing that only its tests need.
setup: .venv/.ready

setup-tests: .venv/.peers-ready kernels

REQUIREMENTS := packaging/requirements

.venv/.ready: pyproject.toml constraints.txt .ci/setup $(REQUIREMENTS)/transport.txt $(REQUIREMENTS)/inference.txt
	.ci/setup python

.venv/.dev-ready: .venv/.ready $(REQUIREMENTS)/dev.txt $(REQUIREMENTS)/otel.txt $(REQUIREMENTS)/training.txt
	.ci/setup dev

# Peers in other languages, and clients with an environment of their own.
.venv/.peers-ready: .venv/.dev-ready tests/e2e/interop/js/package-lock.json $(REQUIREMENTS)/clients.txt
	.ci/setup peers

# Setup makes them where it finds a compiler, and goes on without; who asks for them here is told why there are none.
# Tests ask: what they test would otherwise be torch's own products.
KERNELS := neurogrid/model/kernels/kernels

kernels: $(KERNELS).so

$(KERNELS).so: $(KERNELS).c $(addprefix $(dir $(KERNELS)),attention.c layer.c layer.h) setup.py | .venv/.ready
	NEUROGRID_BUILD_KERNELS=required $(BIN)/python setup.py --quiet build_ext --inplace || \
		{ echo "make kernels: it takes gcc and the headers of C (Debian: apt-get install gcc libc6-dev)" >&2; exit 1; }

# The main job: two workers with nothing on disk get the embedded model over libp2p and write.
demo: .venv/.ready
	$(BIN)/neurogrid-coordinator --local-workers 2 --prompt "$(PROMPT)" --max-tokens 80

# Training: three uneven workers teach a small model the Python reference, one is killed on the way; 3 minutes on 2 cores.
demo-train: .venv/.ready
	$(BIN)/python -m tools.demo_train

check: .venv/.dev-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: test-unit test-e2e

# Processes that share the tests, file by file: one more than cores, since a third of the time tests wait.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

# Without sockets: also what the network in memory shows of the suite that all networks pass. What pytest loads for
# tests of an HTTP server by its document takes each of its processes a second.
test-unit: .venv/.dev-ready kernels
	$(PYTEST) -p no:schemathesis tests/unit
	$(PYTEST) -p no:schemathesis tests/conformance -k memory

# With real processes, sockets and peers in other languages.
test-e2e: .venv/.peers-ready kernels
	$(PYTEST) tests/conformance -k libp2p
	$(PYTEST) tests/e2e --no-loadscope-reorder --durations=20

# What proves over minutes what a test of the others proves in seconds.
test-long: .venv/.peers-ready kernels
	$(BIN)/python -m pytest tests -q -m long

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

# The source distribution and the wheels, into dist/.
wheels: .venv/.dev-ready
	PYTHON=$(BIN)/python packaging/build_wheels.sh dist

clean:
	rm -rf .venv $(KERNELS).so tests/e2e/interop/js/node_modules build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
