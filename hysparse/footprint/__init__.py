"""What a model's attention state costs, counted from its config; imports neither jax nor a device.

python -m hysparse.footprint config.json    # of any family that is counted (families.py)
python -m hysparse.footprint --config=configs/tiny.py --config.model.main_kv=bf16
"""

from hysparse.footprint.count import Footprint, footprint
from hysparse.footprint.read import read
from hysparse.footprint.text import draw, render

__all__ = ["Footprint", "draw", "footprint", "read", "render"]
