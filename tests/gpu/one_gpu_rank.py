"""Runs a script as one of several ranks that torchrun starts on one GPU: ``one_gpu_rank.py SCRIPT [ARGUMENT ...]``."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

# The script of a rank finds only its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ray_ulysses.parallel.gpu_environment import shared_gpu_environment


def main(arguments: list[str]) -> None:
    # All ranks use the first GPU, and each is alone on a host of its own, as NCCL sees it.
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", **shared_gpu_environment(f"rank-{os.environ['RANK']}"))
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
