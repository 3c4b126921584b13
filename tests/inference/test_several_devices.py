"""Serving on several devices gives the tokens of one."""

import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_four_devices_serve_what_one_does():
  here = pathlib.Path(__file__).parent
  flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
  helpers = os.pathsep.join(map(str, (here.parent, here.parent / "nn")))
  env = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": helpers}
  command = [sys.executable, here / "several_devices.py"]
  done = subprocess.run(command, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert done.stdout == "same tokens\n"
