#!/usr/bin/env bash
# Makes .venv-aot beside .venv, with hysparse and what compiles it for chips that are not here. They
# stay apart, so that the tests run on the CPU whatever this has installed. Arguments go to pip.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/venv.sh
make_venv .venv-aot
.venv-aot/bin/python -m pip install --quiet --disable-pip-version-check \
  -r scripts/aot/requirements.txt -e . "$@"
.venv-aot/bin/python -c 'from importlib.metadata import version
names = ("jax", "libtpu", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12", "jax-triton", "triton")
print(".venv-aot has", ", ".join(f"{name} {version(name)}" for name in names))'
