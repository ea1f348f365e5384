# Tools are those of the active environment: pip install -e ".[test]"

.PHONY: check test docs figures screens lock

check: docs
	ruff check .
	ruff format --check .
	mypy
	lint-imports --no-logo

test:
	pytest

# the site goes to site/; a broken link is an error (with --quiet it is not)
docs:
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

# run by hand on an idle machine; nothing here is a test
figures: $(wildcard benchmarks/floor.py benchmarks/overhead.py)
	@test -n "$^" || { echo "no benchmarks/floor.py and no benchmarks/overhead.py here"; exit 1; }
	@for script in $^; do echo "python $$script"; python $$script || exit $$?; done

# pictures of the first screens and of the first command, on an idle machine; needs chromium and chromedriver
screens:
	python docs/screens.py
	python docs/first_answer.py

# requirements-lock.txt keeps its versions; make lock UPGRADE=--upgrade takes the newest.
# torch is named in a comment: it has a build for each platform, and these packages come with one
TORCH = 2.13.0
OF_TORCH = torch triton cuda-bindings cuda-pathfinder cuda-toolkit $(addprefix nvidia-, cublas \
	cuda-cupti cuda-nvrtc cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse \
	cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)
LOCKED_EXTRAS = transports ring-attention-pytorch transformers
define LOCK_HEAD
# Made by `make lock`, which needs uv. The versions of the last published figures. To install them:
#   pip install torch==$(TORCH)
#   pip install --no-deps --require-hashes -r requirements-lock.txt
#   pip install --no-deps -e .
endef
export LOCK_HEAD
lock:
	echo 'torch==$(TORCH)' | uv pip compile --quiet pyproject.toml --constraint - \
		--universal --python-version 3.11 --generate-hashes --no-annotate --no-header $(UPGRADE) \
		$(addprefix --extra ,$(LOCKED_EXTRAS)) $(addprefix --no-emit-package ,$(OF_TORCH)) \
		--output-file requirements-lock.txt
	{ echo "$$LOCK_HEAD"; cat requirements-lock.txt; } > requirements-lock.new
	mv requirements-lock.new requirements-lock.txt
