# Every target makes .venv first; nothing else has to be installed but Python 3.11 or newer with its venv module.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
ARGS ?=
# Environments of engines, routers and clients of others, made when first needed.
PEERS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/expediter/peers

.PHONY: setup demo serve test test-vllm test-engines test-clients check bench clean

setup: .venv/.complete

.venv/.complete: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer with ensurepip is needed (Debian: apt-get install python3-venv)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[engine,dev]'
	@touch $@

demo: setup  ## Serve SmolLM2 on two replicas, replay a slice of a real trace, compare with the simulator, ask a question
	$(BIN)/expediter replay --start --replicas 2 --trace demo --ask "What is the capital of France?" $(ARGS)

serve: setup  ## Serve SmolLM2 on http://127.0.0.1:8000
	$(BIN)/expediter serve $(ARGS)

test: setup  ## All tests
	$(BIN)/python -m pytest $(ARGS)

test-vllm: setup  ## The gateway before two real vLLM servers; vLLM takes 4 GB of disk, once, and 7 GB of memory
	$(BIN)/python -m benchmarks.peers.environments --cache $(PEERS) vllm
	EXPEDITER_PEERS=$(PEERS) $(BIN)/python -m pytest tests/vllm $(ARGS)

test-engines: setup  ## The gateway before real llama.cpp servers, and before `transformers serve`; 2 GB of disk, once
	$(BIN)/python -m benchmarks.peers.environments --cache $(PEERS) llama-cpp transformers
	EXPEDITER_PEERS=$(PEERS) $(BIN)/python -m pytest tests/engines $(ARGS)

test-clients: setup  ## LangChain, AIPerf and GuideLLM against a server and through the gateway; 3 GB of disk, once
	$(BIN)/python -m benchmarks.peers.environments --cache $(PEERS) langchain aiperf guidellm
	EXPEDITER_PEERS=$(PEERS) $(BIN)/python -m pytest tests/clients $(ARGS)

check: setup  ## Lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup  ## Benchmarks; tables on the terminal, JSON in out/
	@mkdir -p out
	$(BIN)/python -m benchmarks.step --json out/step.json
	$(BIN)/python -m benchmarks.prefix --json out/prefix.json
	$(BIN)/python -m benchmarks.sequences --json out/sequences.json
	$(BIN)/python -m benchmarks.fairness --json out/fairness.json
	$(BIN)/python -m benchmarks.simulator --sizes quick --json out/simulator.json

clean:
	rm -rf .venv out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
