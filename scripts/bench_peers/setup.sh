#!/usr/bin/env bash
# Makes .venv-peers beside .venv, with what the peers of scripts/bench.py run on. They stay apart:
# hysparse never imports torch. Arguments go to pip (say, --index-url of one with a CPU build).
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/venv.sh
make_venv .venv-peers
.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check \
  -r scripts/bench_peers/requirements.txt "$@"
.venv-peers/bin/python -c 'import torch, transformers
print(f"transformers {transformers.__version__} and torch {torch.__version__} in .venv-peers")'
