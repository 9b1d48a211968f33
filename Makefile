# Everything a contributor runs. Tools come from the `dev` extra: pip install -e ".[dev]"
PYTHON ?= python
CODE = src tests training benchmarks examples

SEED ?= 1
REFERENCE = docs/reference
SITE ?= $(CURDIR)/out/site

.PHONY: lowest check format lint types test gpu gpu-alone gpu-ranks bench nightly mutation docs site errors pythons wheel proto

# mypy has one thread, which would leave the other core idle.
check: lint
	$(MAKE) -j2 types test

format:
	$(PYTHON) -m ruff format $(CODE)
	$(PYTHON) -m ruff check --fix $(CODE)

lint:
	$(PYTHON) -m ruff format --check $(CODE)
	$(PYTHON) -m ruff check $(CODE)

types:
	$(PYTHON) -m mypy

# One thread a worker: workers that each use every core spend their time waiting for each other. Three workers on two
# cores: a sixth of the time a test waits, for a process to start or a timeout to pass.
test:
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(or $(WORKERS),3) --dist worksteal --durations=30

# On a machine with a GPU: the folders that have tests of it, since others import packages that it may lack. Workers are
# spread over several GPUs: 8 to 16 for each of them. Ranks come afterwards, a few at a time: each has a process for
# every GPU whose kernels wait for the others', and those of many workers take turns on a GPU. Last and alone come tests that
# take all of a GPU's memory, or compare what is free.
gpu: gpu-alone gpu-ranks

gpu-alone:
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(or $(WORKERS),8) --dist worksteal -m "gpu and not nightly" tests/ops tests/executors tests/weights tests/surface tests/test_mtp.py

gpu-ranks:
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(or $(RANK_WORKERS),6) --dist worksteal -m "gpu and not nightly" tests/assembly/test_gpu_ranks.py
	$(PYTHON) -m pytest -m "gpu and not nightly" tests/contract/test_gpu_ranks.py tests/contract/test_gpu_split.py

bench:
	$(PYTHON) -m quire bench engine --requests 1000

# Hours on two cores: PART=3/8 runs the third of eight parts. A line for each test, and at the end the slowest.
nightly:
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -vv -n $(or $(WORKERS),2) --dist worksteal --durations=50 --hypothesis-profile anew -m nightly --part $(or $(PART),1/1)

# Minutes to hours: --paths, --count and --seconds bound it.
mutation:
	OMP_NUM_THREADS=1 $(PYTHON) -m tests.mutation --seed $(SEED) --count 100 --jobs 2

docs:
	$(PYTHON) -m tools.options_page > $(REFERENCE)/new && mv $(REFERENCE)/new $(REFERENCE)/configuration.md
	$(PYTHON) -m tools.requests_page > $(REFERENCE)/new && mv $(REFERENCE)/new $(REFERENCE)/requests.md
	$(PYTHON) -m tools.metrics_page > $(REFERENCE)/new && mv $(REFERENCE)/new $(REFERENCE)/metrics.md
	$(PYTHON) -m tools.parsers_page > $(REFERENCE)/new && mv $(REFERENCE)/new $(REFERENCE)/parsers.md
	$(PYTHON) -m tools.vllm_page > $(REFERENCE)/new && mv $(REFERENCE)/new $(REFERENCE)/vllm.md
	$(PYTHON) -m tools.other_servers_page > $(REFERENCE)/new && mv $(REFERENCE)/new $(REFERENCE)/other-servers.md
	$(PYTHON) -m tools.clients_page > docs/new && mv docs/new docs/clients.md

# The documentation site, as a folder of files.
site:
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet --site-dir $(SITE)

# Tables of errors in docs/guides/{models,quantization}.md: not part of `docs`, since their last digits depend on the machine.
errors:
	$(PYTHON) -m tests.models.errors

# The oldest versions of dependencies that pyproject.toml allows, before those installed.
LOWEST := $(or $(TMPDIR),/tmp)/quire-lowest
lowest:
	rm -rf $(LOWEST) && $(PYTHON) -m tests.lowest > $(LOWEST).txt
	$(PYTHON) -m pip install -q --no-deps --target $(LOWEST) -r $(LOWEST).txt
	PYTHONPATH=$(LOWEST):$(CURDIR)/src OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n 2 tests/server tests/frontend tests/structured_output tests/tokenization tests/cli tests/test_config.py tests/test_serving.py

# The package, built, installed and asked by each supported Python that is on this machine.
pythons:
	for python in python3.11 python3.12 python3.13 python3.14; do \
	  if command -v $$python >/dev/null; then PYTHON=$$python .ci/package || exit 1; else echo "no $$python here"; fi; done

wheel:
	$(PYTHON) -m pip wheel --no-deps --wheel-dir dist .

# The wire contract's messages, from proto/.
proto:
	$(PYTHON) -m grpc_tools.protoc -Iproto --python_out=src --pyi_out=src proto/quire/executors/contract/executor.proto
