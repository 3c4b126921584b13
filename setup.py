"""Packages hysparse (the framework) and hysparse_kernels (its device operations).

`pip install -e .` is enough to count footprints and run models; the extras add the rest:
train (data, tokenizers, metrics, plots), tiers (persistent stores), notebooks, gpu, tpu, and dev
(train + tiers + notebooks + everything the tests need).
"""

from pathlib import Path

from setuptools import find_packages, setup

CORE = [
  "jax>=0.10.2,<0.13",
  "flax>=0.12.8,<0.13",
  "optax>=0.2.8",
  "orbax-checkpoint>=0.12",
  "absl-py>=2.1",
  "ml_collections>=1.0",
  "jaxtyping>=0.3",
  "safetensors>=0.5",
]
TRAIN = [
  "grain>=0.2.12",
  "tokenizers>=0.21",
  "tensorboardX>=2.6",
  "matplotlib>=3.9",
  "pyarrow>=18",
]
TIERS = ["lmdb>=1.5", "redis>=5", "google-crc32c>=1.6"]
NOTEBOOKS = ["ipykernel>=6.29", "nbformat>=5.10", "pandas>=2.2", "matplotlib>=3.9"]
TESTS = [
  "pytest>=8",
  "pytest-xdist>=3.6",
  "hypothesis>=6.100",
  "nbmake>=1.5",
  "ruff==0.17.6",
  "triton>=3.5; platform_system == 'Linux'",
]

setup(
  name="hysparse",
  version="0.1.0",
  description="Language models whose KV cache is the design goal, in JAX",
  long_description=Path("README.md").read_text(encoding="utf-8"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  python_requires=">=3.11,<3.14",
  packages=[
    *find_packages(include=["hysparse", "hysparse.*"]),
    *find_packages("kernels", include=["hysparse_kernels", "hysparse_kernels.*"]),
  ],
  package_data={"hysparse_kernels": ["*/tuning.json"]},
  package_dir={"hysparse": "hysparse", "hysparse_kernels": "kernels/hysparse_kernels"},
  install_requires=CORE,
  extras_require={
    "train": TRAIN,
    "tiers": TIERS,
    "notebooks": NOTEBOOKS,
    "gpu": ["jax[cuda12]>=0.10.2,<0.13", "jax-triton>=0.3.1"],
    "tpu": ["jax[tpu]>=0.10.2,<0.13"],
    "dev": [*TRAIN, *TIERS, *NOTEBOOKS, *TESTS],
  },
)
