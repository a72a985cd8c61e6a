"""`ray job submit --working-dir . -- python jobs/check.py ...`: the same as `ray-ulysses check ...`."""

import sys

from ray_ulysses.cli import main

if __name__ == "__main__":
    main(["check", *sys.argv[1:]])
