"""`ray job submit --working-dir . -- python jobs/inspect_run.py ...`: the same as `ray-ulysses inspect ...`."""

import sys

from ray_ulysses.cli import main

if __name__ == "__main__":
    main(["inspect", *sys.argv[1:]])
