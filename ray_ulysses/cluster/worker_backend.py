"""Tells Ray Train that workers that supervise need no setup; each worker imports this, without PyTorch."""

from __future__ import annotations

from typing import Literal

from ray.train.backend import Backend, BackendConfig


class _SupervisorBackend(Backend):
    """Sets nothing up in the workers, whose children join process groups of their own."""

    share_cuda_visible_devices = True


class SupervisedTorchConfig(BackendConfig):
    """What `TorchTrainer` asks of its configuration, for workers that supervise.

    Args:
        backend: PyTorch's backend in the children.
    """

    def __init__(self, backend: Literal["nccl", "gloo"]) -> None:
        self.backend = backend

    @property
    def backend_cls(self) -> type[Backend]:
        """Ray's setup of the workers."""
        return _SupervisorBackend
