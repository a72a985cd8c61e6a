"""Conversion of other tools' configurations to ours: one table per tool in ``tables/``, and one writer for all."""
