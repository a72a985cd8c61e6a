"""`ray job submit --working-dir . -- python jobs/plan.py ...`: the same as `ray-ulysses plan ...`."""

import sys

from ray_ulysses.cli import main

if __name__ == "__main__":
    main(["plan", *sys.argv[1:]])
