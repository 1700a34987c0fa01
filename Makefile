# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

test-explore: export HODIFF_HYPOTHESIS_PROFILE = explore
test-explore: SEED := $(or $(SEED),$(shell date +%s))

# Without bytecode that is kept, each of the many processes that the tests start would compile all of hodiff again.
unexport PYTHONDONTWRITEBYTECODE

# On virtual machines the first touch of a page may cost more than what is computed in it. Freed memory is kept, and new
# memory comes in large pages, for Python's objects too: the tests took 0.6 of their time on such a machine.
docs lint notebooks papers-quick test test-slow: export PYTHONMALLOC := malloc
docs lint notebooks papers-quick test test-slow: export GLIBC_TUNABLES := glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=4294967296:glibc.malloc.top_pad=67108864:glibc.malloc.mmap_threshold=33554432

# `make bench-gpu small`: `small` is an argument.
.PHONY: bench-gpu test-gpu small demo docs test test-slow test-all test-explore test-doors test-doors-quick lint format wheel release notebooks bench bench-peers papers papers-quick clean

demo: $(INSTALLED)
	$(BIN)/python examples/digits_hessian.py

# The site, without network: build/site/html/index.html. A warning is an error.
docs: $(INSTALLED)
	PYTHONPATH=docs $(BIN)/python -m site_builder

# Three to seven minutes on two cores; tests of more than a second are slow ones.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 30 -m "not slow and not papers"

# The audits: torch's whole operator database, third order of every Function, examples, among others.
test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 30 -m slow

test-all: test test-slow

# Property tests with new examples; the seed is printed, and SEED=... repeats a run.
test-explore: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m hypothesis --hypothesis-seed $(SEED)

# hodiff inside other programs, each in an environment of its own; DOOR=lightning tests one. Writes docs/reference/doors.md.
test-doors: $(INSTALLED)
	$(BIN)/python tests/doors/run_doors.py $(DOOR)

# Two programs that install within a minute, without their slow tests.
test-doors-quick: $(INSTALLED)
	$(BIN)/python tests/doors/run_doors.py --quick laplace lightning

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: $(INSTALLED)
	$(BIN)/python -m build

# dist/: the sdist, and a manylinux wheel for each of these, used in an empty environment without a compiler.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13
release: $(INSTALLED)
	$(BIN)/python tests/release.py $(PYTHONS)

# Runs examples/notebooks/*.py, and writes the notebooks with their outputs; a cell that raises or warns makes it fail.
notebooks: $(INSTALLED)
	$(BIN)/python examples/notebooks/build.py

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks

# On a CUDA device, within eight minutes; results go to benchmarks/results/gpu/. `make bench-gpu small` needs no GPU.
bench-gpu: $(INSTALLED)
	$(BIN)/python -m benchmarks.gpu $(filter small,$(MAKECMDGOALS))

small:
	@:

# The tests that a GPU can change; without one, in Triton's interpreter.
test-gpu: $(INSTALLED)
	@$(BIN)/python -c "import torch; torch.cuda.is_available() or print('test-gpu: torch finds no CUDA device; tests run in the interpreter of Triton, or are skipped.')"
	$(BIN)/python -m pytest -n 0 -m gpu tests/kernels tests/functions

# Other libraries race in an environment of their own, as they clash with the pinned torch; `make bench` adds rows.
bench-peers: .venv-bench/installed
	.venv-bench/bin/python -m benchmarks.peers

# Every published claim, again; minutes.
papers: $(INSTALLED)
	$(BIN)/python -m papers

# Every reproduction on a small problem, and what its numbers have to show; a minute on two cores.
papers-quick: $(INSTALLED)
	$(BIN)/python -m pytest -n 0 -m papers tests/papers

clean:
	rm -rf .venv .venv-bench .venv-doors build dist *.egg-info

$(INSTALLED): pyproject.toml constraints.txt setup.py $(wildcard kernels/fused*.py kernels/*.cpp kernels/*/*.cpp kernels/*/*.inc kernels/attention/problem.py)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

.venv-bench/installed: pyproject.toml
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --editable ".[bench]"
	touch $@
