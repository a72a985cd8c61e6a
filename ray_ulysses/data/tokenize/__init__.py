"""Converts documents to token ids and label spans."""
