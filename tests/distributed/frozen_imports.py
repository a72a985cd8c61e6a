"""Imported last by the server that ranks are forked from: the collector of garbage leaves its objects alone.

A collection in a rank would write to each of half a million objects, and so copy the server's memory (0.5 s of CPU).
"""

from __future__ import annotations

import gc

from ray_ulysses.tracking.events import event_adapter

# Made once for all ranks: half a second of CPU.
event_adapter()
gc.collect()
gc.freeze()
