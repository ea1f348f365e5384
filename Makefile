# Tools are those of the active environment: pip install -e ".[test]"

.PHONY: check test docs figures screens

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

# pictures of the first screens for README and docs; needs chromium and chromedriver
screens:
	python docs/screens.py
