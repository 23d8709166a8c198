# Everything from a fresh clone: a virtual environment, the install, the run.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without a GPU a fixed version of torch keeps pip from fetching a CUDA build of a newer one.
TORCH := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo 'torch>=2.11' || echo 'torch==2.13.0')

.PHONY: parity test lint types gpu readme clean

parity: $(VENV)/.installed
	$(BIN)/workbench sweep

test: $(VENV)/.installed
	$(BIN)/python -m pytest

gpu: $(VENV)/.installed
	$(BIN)/python -m pytest -m gpu

readme: $(VENV)/.installed
	$(BIN)/python -m parity.render.readme

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
