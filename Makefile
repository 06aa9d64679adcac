# make serve [ARGS="--port 9000 ..."]   serve the default model on http://127.0.0.1:8000
# make test                             checks and tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: serve test check install install-test clean

serve: $(VENV)/.installed
	@exec $(BIN)/millstream serve $(ARGS)

test: $(VENV)/.installed-test
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check
	$(BIN)/python -m pytest -q $(ARGS)

check: $(VENV)/.installed-test
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

install: $(VENV)/.installed

install-test: $(VENV)/.installed-test

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# the lock file has the versions that the project is tested with
$(VENV)/.installed: pyproject.toml requirements.lock | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml requirements.lock | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[test]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist
