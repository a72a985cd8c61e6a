"""`ray job submit --working-dir . -- python jobs/prepare.py ...`: the same as `ray-ulysses prepare ...`."""

import sys

from ray_ulysses.cli import main

if __name__ == "__main__":
    main(["prepare", *sys.argv[1:]])
