"""The reason why a picture can't be drawn."""

from __future__ import annotations


class NothingToDrawError(ValueError):
    """A run has nothing to draw in a picture; its text is shown in the picture's place."""
