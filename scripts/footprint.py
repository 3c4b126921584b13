"""Prints the schedule and the bytes of the attention state of a config.

python scripts/footprint.py --config=configs/tiny.py --config.model.main_kv=bf16
python scripts/footprint.py config.json --json
"""

from hysparse.footprint.__main__ import run

if __name__ == "__main__":
  run()
