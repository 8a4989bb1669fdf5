# make demo   a hub on http://127.0.0.1:8000 to try out
# make test   every test, with real parts (ARGS="-k name" for some)
# make check  style, types, layers
# make bench  every benchmark
# make soak   the long races and kill loops at full count
# make env    the Python environment in .venv, for working on gpuspawner

PY := .venv/bin/python

.PHONY: demo test check bench soak env parts

demo:
	@scripts/bootstrap.sh demo
	@$(PY) scripts/demo.py

test: parts
	$(PY) -m pytest $(ARGS)

check: env
	@scripts/check.sh

bench: parts
	@set -e; for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(PY) "$$file"; done

soak: parts
	GPUSPAWNER_SOAK=1 $(PY) -m pytest -m soak $(ARGS)

env:
	@scripts/bootstrap.sh all

parts: env
	@scripts/test_parts.sh
