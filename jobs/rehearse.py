"""`ray job submit --working-dir . -- python jobs/rehearse.py ... --yes`: the same as `ray-ulysses rehearse ...`."""

import sys

from ray_ulysses.cli import main

if __name__ == "__main__":
    main(["rehearse", *sys.argv[1:]])
