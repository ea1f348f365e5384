# Tools are those of the active environment: pip install -e ".[test]"

.PHONY: check test figures

check:
	ruff check .
	ruff format --check .
	mypy
	lint-imports --no-logo

test:
	pytest

# run by hand on an idle machine; nothing here is a test
figures: $(wildcard benchmarks/floor.py benchmarks/overhead.py)
	@test -n "$^" || { echo "no benchmarks/floor.py and no benchmarks/overhead.py here"; exit 1; }
	@for script in $^; do echo "python $$script"; python $$script || exit $$?; done
