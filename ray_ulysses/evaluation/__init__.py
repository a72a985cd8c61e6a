"""Measures what a model makes of long contexts: held-out loss by position and context, and retrieval; no generation."""
