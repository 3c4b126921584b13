#!/usr/bin/env bash
# Installs hysparse into .venv, trains configs/tiny.py on the source files of this Python's standard
# library, and prints what it learnt beside its baselines. Arguments go to scripts/train.py.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
install_into_venv '.[train]'
.venv/bin/python scripts/train.py --config=configs/tiny.py --workdir=runs/demo "$@"
.venv/bin/python scripts/footprint.py --config=configs/tiny.py
