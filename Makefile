MAKEFLAGS += --no-print-directory
PYTEST := .venv/bin/python -m pytest
ASCEND_PYTEST := PYTHONPATH=tests/ascend/stub .venv-ascend/bin/python -m pytest

.PHONY: help setup lint type test test-unit test-gpu test-npu test-ascend test-runner-v2 contract soak \
	demo docs clean
.DEFAULT_GOAL := help

help: ## print this list
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

setup: ## make .venv and all it needs; the other targets do this themselves
	@bash scripts/setup.sh

lint: setup ## check style, formatting, sizes, imports and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python scripts/check_size.py
	.venv/bin/lint-imports
	.venv/bin/pyright

type: setup ## check types only
	.venv/bin/pyright

test: setup test-unit ## run all tests: unit, then distributed, then real vLLM servers
	$(PYTEST) -m "distributed and not e2e and not gpu"
	$(PYTEST) -m "e2e and not gpu" --timeout=900

test-unit: setup ## run the tests that start no other process
	$(PYTEST) -m "not distributed and not e2e and not gpu"

test-ascend: ## run tests with vllm-ascend and its vLLM, on CPU tensors, in .venv-ascend
	@bash scripts/setup_ascend.sh
	$(ASCEND_PYTEST) tests/ascend --timeout=600
	$(ASCEND_PYTEST) tests/connectors -m "not distributed and not e2e"
	VLLM_PLUGINS=ascend,ascend_kv_connector $(ASCEND_PYTEST) tests/chaos/test_chaos.py \
		tests/chaos/test_pool_faults.py tests/chaos/test_multi_faults.py --timeout=600 \
		-k "(without_faults or everything_at_once) and not [sync] and not layerwise"

# Without setup: it runs in an environment with vLLM or torch for CUDA, which .venv is not.
test-gpu: ## run the tests that need CUDA devices, with PYTHON (python3); on one GPU or on several
	$${PYTHON:-python3} -m pytest tests/gpu -m gpu --timeout=900

test-npu: ## run the tests that need NPUs, with PYTHON (python3), where vllm-ascend is installed
	$${PYTHON:-python3} -m pytest tests/npu -m npu --timeout=1200

test-runner-v2: setup ## run real servers with model runner V2, its kernels in Triton's interpreter
	@bash scripts/setup_triton.sh
	$(PYTEST) tests/e2e/test_runner_v2.py --timeout=900

contract: ## read the newest vLLM (or VLLM=0.33.0) and the locked vllm-ascend: do the ledgers fit
	@$${PYTHON:-python3.11} scripts/contract.py --vllm "$(VLLM)"

soak: setup ## hurt P/D nodes, then a pool, on fresh seeds for SOAK_S seconds each (600), fuzz, then devices
	$(PYTEST) tests/chaos/test_soak.py -s --chaos-soak-s $${SOAK_S:-600}
	$(PYTEST) tests/chaos/test_pool_soak.py -s --chaos-soak-s $${SOAK_S:-600}
	$(PYTEST) tests/connectors/mooncake_v2/test_control_fuzz.py --hypothesis-profile=soak --timeout=1800
	$(PYTEST) tests/broadcast/test_asynchronous_device.py -k right_bytes_on_every_rank \
		--schedules $${SCHEDULES:-10000} --first-schedule $$(date +%s)00000

demo: setup ## run real vLLM servers with KVPP and check their tokens
	@.venv/bin/kvpp demo

docs: ## build the documentation pages; a warning is an error
	@bash scripts/docs.sh

clean: ## remove caches, generated models and logs (not .venv, .venv-ascend and .venv-triton)
	rm -rf .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info
	find kvpp_connect tests scripts -name __pycache__ -prune -exec rm -rf {} +
