"""What a launcher imports before it forks children."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import os, sys
from ray_ulysses.supervision.launcher import _import_everything
_import_everything(has_mlflow={has_mlflow})
assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
assert "deepspeed.runtime.zero.stage3" in sys.modules and "transformers" in sys.modules
assert ("mlflow" in sys.modules) is {has_mlflow}
# Whoever needs it later has it.
from mlflow import MlflowClient
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_mlflow", [False, True])
def test_mlflow_is_imported_where_it_records_the_run_alone(has_mlflow: bool) -> None:
    subprocess.run([sys.executable, "-c", CODE.format(has_mlflow=has_mlflow)], check=True, timeout=120)
