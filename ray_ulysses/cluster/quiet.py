"""Ray without progress bars, banners and dumps of its logs in the terminal: a run has a view of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import ray._private.worker
import ray.data
from ray.util.debug import log_once


def quiet(dataset: ray.data.Dataset) -> ray.data.Dataset:
    """Silence one data set, and what Ray Data tells this process's console about it."""
    context = dataset.context
    context.enable_progress_bars = False
    context.enable_operator_progress_bars = False
    context.enable_rich_progress_bars = False
    context.print_on_execution_start = False
    context.enable_auto_log_stats = False
    quiet_process()
    return dataset


def quiet_process() -> None:
    """Keep Ray Data's messages below a warning out of this process's console; its log file still gets all."""
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.WARNING)
    # Ray 2.60 warns once a process that progress bars are off, which is what was asked for.
    log_once("ray_data_progress_manager_disabled")


@contextmanager
def quiet_errors() -> Iterator[None]:
    """Keep what Ray's nodes report out of this process's output: dumps of logs that the session's directory has.

    Ray 2.60 prints them whatever ``log_to_driver`` says; this is its debugger's switch, private to it (a canary test
    stands beside it).
    """
    before = ray._private.worker._worker_logs_enabled
    ray._private.worker._worker_logs_enabled = False
    try:
        yield
    finally:
        ray._private.worker._worker_logs_enabled = before
