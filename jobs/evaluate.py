"""`ray job submit --working-dir . -- python jobs/evaluate.py ...`: the same as `ray-ulysses evaluate ...`."""

import sys

from ray_ulysses.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
