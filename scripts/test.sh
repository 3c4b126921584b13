#!/usr/bin/env bash
# Installs hysparse and the test tools into .venv and runs all tests; arguments go to pytest
# (scripts/test.sh -m "not slow" runs the everyday part).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
install_into_venv '.[dev]'
exec .venv/bin/python -m pytest -n 2 "$@"
