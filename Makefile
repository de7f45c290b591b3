PYTHON ?= python3
RUN = .venv/bin/python
MODELS = learned binary16 gf2

# On a CPU: threads that spin only briefly, since beside one busy process long spinning made a run
# ten times slower; and freed memory that is kept, where glibc would give back every large block.
export GOMP_SPINCOUNT = 1000
export MALLOC_MMAP_MAX_ = 0
export MALLOC_TRIM_THRESHOLD_ = 100000000000

.PHONY: smoke test lint

# Three small models on the standard library's own text, then their table and picture.
smoke: .venv/ready
	$(RUN) prepare.py --val_share 0.05
	trap 'exit 130' INT; for model in $(MODELS); do \
		$(RUN) train.py configs/$$model.py configs/smoke.py --resume || exit; \
	done
	$(RUN) evaluate.py $(MODELS:%=out/%-smoke)

test: lint
	$(RUN) -m pytest -q tests

lint: .venv/ready
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .

.venv/ready: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install -q --disable-pip-version-check -r requirements.txt
	touch .venv/ready
