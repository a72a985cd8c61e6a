"""Prepares sources into a committed corpus, unit by unit and resumable."""
