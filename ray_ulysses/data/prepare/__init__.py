"""Prepares a committed corpus from sources, unit by unit. An interrupted preparation can be resumed."""
