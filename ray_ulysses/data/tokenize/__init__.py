"""Turns the content of documents into token ids and label spans."""
