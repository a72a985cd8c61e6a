"""Runs ``ray-ulysses`` as ``python -m ray_ulysses``."""

from ray_ulysses.cli import main

if __name__ == "__main__":
    main()
