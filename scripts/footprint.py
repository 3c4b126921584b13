"""What a cache costs: the schedule as a picture, bytes by component, and what would change them.

python scripts/footprint.py configs/v41_flash.py --context=1048576 --batch=8
python scripts/footprint.py --config=configs/tiny.py --config.model.main_kv=bf16
python scripts/footprint.py configs/v41_flash.py --compare=deepseek-v3.json,llama.json --plot=c.png
python scripts/footprint.py configs/v41_flash.py --devices=16 --hbm=80e9 --html=flash.html
"""

from hysparse.analysis.command import run

if __name__ == "__main__":
  run()
