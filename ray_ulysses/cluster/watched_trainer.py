"""Starts Ray Train's workers with a controller of ours, and watches while they run.

It is apart from what runs in Ray's processes, since `TorchTrainer` brings PyTorch along: seconds, and memory, that no
controller and no supervisor of a worker needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from ray._raylet import RAY_NODE_ID_KEY  # type: ignore[attr-defined]
from ray.exceptions import RayError
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.constants import get_env_vars_to_propagate

from ray_ulysses.cluster.controller import StopWatch, SupervisedController

if TYPE_CHECKING:
    from ray_ulysses.cluster.failures import FailureBook
    from ray_ulysses.cluster.scaling import WorkerScaling
    from ray_ulysses.run.settings import ResolvedRun

_LOOK_EVERY_S = 0.2


class WatchedTrainer(TorchTrainer):
    """A `TorchTrainer` whose workers are coordinated by us, and whose wait for them may be ended.

    Args:
        run: The run.
        book: Judges failures.
        scaling: Starts workers in place of lost ones; decides how many workers of an elastic run start, and on which
            nodes, while Ray finds room for a fixed number.
        look: Called a few times a second by the thread that called ``fit``; an error that it raises ends ``fit``, and
            the workers end with the connection to Ray. No thread of ours is then left in a call to Ray, which would
            crash when the connection is shut down.
        arguments: Other arguments of `TorchTrainer`.
    """

    def __init__(
        self,
        *arguments: Any,
        run: ResolvedRun,
        book: FailureBook,
        scaling: WorkerScaling,
        look: Callable[[], object],
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._run, self._book, self._scaling, self._look = run, book, scaling, look

    def _initialize_and_run_controller(self, **kwargs: Any) -> Any:
        """Do what Ray's method does, but look meanwhile, and leave SIGINT alone: Ray's handler loses the last steps."""
        actor = ray.remote(
            num_cpus=0,
            label_selector={RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()},
            runtime_env={"env_vars": get_env_vars_to_propagate()},
        )(SupervisedController)
        controller: Any = actor.remote(**kwargs, run=self._run, book=self._book, scaling=self._scaling)
        asked, running = controller.process.remote(), controller.run.remote()
        watch: StopWatch | None = None
        while not ray.wait([running], timeout=_LOOK_EVERY_S)[0]:
            self._look()
            if watch is not None:
                watch.look()
            elif ray.wait([asked], timeout=0)[0]:
                # If it is dead already, `run` has ended too.
                with contextlib.suppress(RayError):
                    watch = StopWatch(*ray.get(asked))
        ray.get(running)
        return ray.get(controller.get_result.remote())
