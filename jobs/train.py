"""`ray job submit --working-dir . -- python jobs/train.py ...`: the same as `ray-ulysses train ...`."""

import sys

from ray_ulysses.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
