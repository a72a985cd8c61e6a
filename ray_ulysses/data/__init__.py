"""The data plane: corpus format and preparation, packing plan, cursor, and the rows a rank receives."""

from ray_ulysses.data.corpus import Corpus
from ray_ulysses.data.cursor import Cursor
from ray_ulysses.data.digest import row_digest, slice_checksum
from ray_ulysses.data.plan import Plan, PlanSettings, build_plan
from ray_ulysses.data.plan_files import load_plan, save_plan
from ray_ulysses.data.reader import IGNORE_INDEX, RowReader, RowSlice
from ray_ulysses.data.row_source import DirectSource, RowSource

__all__ = [
    "IGNORE_INDEX",
    "Corpus",
    "Cursor",
    "DirectSource",
    "Plan",
    "PlanSettings",
    "RowReader",
    "RowSlice",
    "RowSource",
    "build_plan",
    "load_plan",
    "row_digest",
    "save_plan",
    "slice_checksum",
]
