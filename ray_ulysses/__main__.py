"""``python -m ray_ulysses`` is ``ray-ulysses``."""

from ray_ulysses.cli import main

if __name__ == "__main__":
    main()
