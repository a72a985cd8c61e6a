"""Silences Ray's progress bars, banners and dumps of logs in the terminal, where a run has a view of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import ray._private.worker
import ray.data
from ray.util.debug import log_once


def quiet(dataset: ray.data.Dataset) -> ray.data.Dataset:
    """Silence a dataset, and Ray Data's messages below a warning on this process's console."""
    context = dataset.context
    context.enable_progress_bars = False
    context.enable_operator_progress_bars = False
    context.enable_rich_progress_bars = False
    context.print_on_execution_start = False
    context.enable_auto_log_stats = False
    # Its log file still gets all.
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.WARNING)
    # Ray 2.60 warns once per process that progress bars are off, as they are meant to be.
    log_once("ray_data_progress_manager_disabled")
    return dataset


@contextmanager
def quiet_errors() -> Iterator[None]:
    """Keep the reports of Ray's nodes out of this process's output: they are in the session's log directory.

    Ray 2.60 prints them regardless of ``log_to_driver``; this is its debugger's switch, private to it (a canary test
    covers it).
    """
    before = ray._private.worker._worker_logs_enabled
    ray._private.worker._worker_logs_enabled = False
    try:
        yield
    finally:
        ray._private.worker._worker_logs_enabled = before
