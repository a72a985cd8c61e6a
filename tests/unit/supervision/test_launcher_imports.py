"""What a launcher imports before it forks children."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import os, sys
from ray_ulysses.supervision.launcher import _import_everything
_import_everything()
assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
assert "deepspeed.runtime.zero.stage3" in sys.modules and "transformers" in sys.modules
assert "mlflow" not in sys.modules
# Whoever needs it later has it.
from mlflow import MlflowClient
"""


@pytest.mark.slow
def test_mlflow_is_not_imported() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120)
