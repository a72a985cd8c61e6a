"""Supervises one worker in a process of its own, as a Ray Train worker does."""

from __future__ import annotations

import os
import pickle
import signal
import sys

from ray_ulysses.logging import configure_logging
from ray_ulysses.supervision.order import Job
from ray_ulysses.supervision.supervisor import Announcement, Supervisor


def main(order: str) -> None:
    configure_logging()
    # A signal to the test ends the supervisors through their pipes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    announcement, worker, node, config, session = pickle.loads(bytes.fromhex(order))
    assert isinstance(announcement, Announcement)
    job = Job(
        config=config, session=session, command_started=None, workers_asked=None, node=node,
        local_rank=worker, device="cpu",
    )  # fmt: skip
    supervisor = Supervisor(
        announcement, worker=worker, cluster_node=node, host="127.0.0.1", job=job, make_streams=None,
        launcher="tests.distributed.faulty_launcher",
    )  # fmt: skip
    sys.stdout.write(f"status {supervisor.run()}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
