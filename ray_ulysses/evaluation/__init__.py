"""Evaluates models at long context: held-out loss by position and by context, and retrieval. No text is generated."""
