# make demo   a hub on http://127.0.0.1:8000 to try out
# make check  style, types, layers, known weaknesses, secrets; that tests can be collected
# make quick  the tests that start no part but one hub: rules, repositories on SQLite, services
# make test   every test with real parts, kill loops at a tenth (ARGS="-k name" for some)
# make soak   every test at full count, all images, each benchmark once: before a release
# make matrix the tests of make quick, and those with hubs or PostgreSQL, with other versions (nox)
# make audit  known vulnerabilities in what is installed (needs the network)
# make bench  every benchmark (TRACE=jobs.csv for those that replay one)
# make golden records anew what tests/golden compares with: help, pages, schema, settings and so on
# make release  everything of a release up to the upload, into dist/, from the last commit (network)
# make docs   builds the documentation into docs/_build, checks its prose, and that each page that
#             moved since the last release has a redirect
# make screenshots  takes the pictures of the documentation anew, from the demo (Chromium)
# make labextension   rebuilds images/common/lab from images/labextension (Node)
# make constraints  rewrites constraints.txt from the newest versions that setup.cfg allows
# make env    the Python environment in .venv, for working on gpuspawner

PY := .venv/bin/python
PYTEST := $(PY) -m pytest --durations=30
# Most tests wait for real parts most of the time: some processes share the files among them.
SHARED ?= -n 5 --dist loadfile --no-loadscope-reorder

.PHONY: demo check quick test soak matrix audit bench golden docs screenshots labextension constraints env parts release

demo:
	@scripts/bootstrap.sh demo
	@$(PY) scripts/demo.py

check: env
	@scripts/check.sh

quick: env
	@GPUSPAWNER_TEST_TIER=quick $(PYTEST) -m quick -n 2 $(ARGS)

test: parts
	@GPUSPAWNER_TEST_TIER=test $(PYTEST) -m "not soak" $(SHARED) $(ARGS)

soak: parts
	@GPUSPAWNER_TEST_TIER=soak $(PYTEST) --timeout 7200 $(SHARED) $(ARGS)

matrix: parts
	@.venv/bin/nox $(ARGS)

audit: env
	@$(PY) scripts/audit_dependencies.py

bench: parts
	@set -e; for file in benchmarks/[a-z]*.py; do echo "== $$file"; \
		case "$$file" in *queue_replay*|*queue_estimates*) $(PY) "$$file" $(if $(TRACE),--trace "$(TRACE)");; \
		*) $(PY) "$$file";; esac; done

golden: parts
	@rm -rf tests/golden/recorded
	@GPUSPAWNER_RECORD_GOLDENS=1 $(PY) -m pytest tests/golden -q
	@git status --short tests/golden/recorded

release: env
	@scripts/release.sh

docs:
	@scripts/bootstrap.sh docs
	@rm -rf docs/_build
	@$(PY) docs/check_prose.py
	@$(PY) -m sphinx -E -W -q -b html docs docs/_build
	@tag=$$(git describe --tags --abbrev=0 --match 'v[0-9]*' 2> /dev/null); [ -z "$$tag" ] || \
	    $(PY) -m sphinx -q -b rediraffecheckdiff -D "rediraffe_branch=$$tag" -d docs/_build/.doctrees docs docs/_build
	@echo "The documentation is in docs/_build/index.html."

screenshots: parts
	@$(PY) scripts/screenshots.py

labextension:
	cd images/labextension && npm version --no-git-tag-version --allow-same-version \
		"$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' ../../gpuspawner/__init__.py)"
	cd images/labextension && npm install --no-save --ignore-scripts && npm run build

constraints: env
	@.venv/bin/uv pip compile setup.cfg --all-extras --universal --python-version 3.11 --upgrade \
		--no-emit-package pip --no-annotate --custom-compile-command "make constraints" \
		--quiet --output-file constraints.txt
	@git --no-pager diff --stat constraints.txt

env:
	@scripts/bootstrap.sh all

parts: env
	@scripts/test_parts.sh
