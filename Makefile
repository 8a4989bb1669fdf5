# make demo   a hub on http://127.0.0.1:8000 to try out
# make test   every test, with real parts (ARGS="-k name" for some)
# make check  style, types, layers, known weaknesses, secrets
# make bench  every benchmark (TRACE=jobs.csv for those that replay one)
# make soak   the long races and kill loops at full count
# make labextension   builds images/common/lab anew from images/labextension (Node)
# make env    the Python environment in .venv, for working on gpuspawner

PY := .venv/bin/python
# Most tests wait for real parts most of the time: some processes share the files among them.
SHARED ?= -n 4 --dist loadfile --no-loadscope-reorder

.PHONY: demo test check bench soak labextension env parts

demo:
	@scripts/bootstrap.sh demo
	@$(PY) scripts/demo.py

test: parts
	@PY=$(PY) scripts/test.sh $(SHARED) --durations=30 $(ARGS)

check: env
	@scripts/check.sh

bench: parts
	@set -e; for file in benchmarks/[a-z]*.py; do echo "== $$file"; \
		case "$$file" in *queue_replay*|*queue_estimates*) $(PY) "$$file" $(if $(TRACE),--trace "$(TRACE)");; \
		*) $(PY) "$$file";; esac; done

soak: parts
	GPUSPAWNER_SOAK=1 $(PY) -m pytest -m soak $(ARGS)

labextension:
	cd images/labextension && npm install --no-save --ignore-scripts && npm run build

env:
	@scripts/bootstrap.sh all

parts: env
	@scripts/test_parts.sh
