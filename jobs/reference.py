"""`ray job submit --working-dir . -- python jobs/reference.py ...`: the same as `ray-ulysses reference ...`."""

import sys

from ray_ulysses.cli import main

if __name__ == "__main__":
    main(["reference", *sys.argv[1:]])
