"""`ray job submit --working-dir . -- python jobs/export.py ...`: the same as `ray-ulysses export ...`."""

import sys

from ray_ulysses.cli import main

if __name__ == "__main__":
    main(["export", *sys.argv[1:]])
