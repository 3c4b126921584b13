# Sourced by scripts that need a virtual environment.

# The first Python that the project supports; $PYTHON overrides it.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
      2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: needs Python 3.11, 3.12 or 3.13; name one with PYTHON=/path/to/python" >&2
  return 1
}

# Makes the virtual environment $1 if there is none.
make_venv() {
  local python
  if [ ! -x "$1/bin/python" ]; then
    python=$(find_python)
    echo "making $1 with $("$python" --version)"
    "$python" -m venv "$1"
  fi
}

# Makes .venv if there is none and installs $1 (for example '.[dev]') unless nothing has changed.
install_into_venv() {
  local stamp
  make_venv .venv
  stamp=".venv/.installed-$(printf '%s' "$1" | tr -c 'a-z\n' '-')"
  if [ ! "$stamp" -nt setup.py ]; then
    echo "installing $1"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e "$1"
    touch "$stamp"
  fi
}
