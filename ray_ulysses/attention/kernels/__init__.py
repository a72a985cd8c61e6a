"""Attention kernels, and the selection of a kernel for a layer."""

from ray_ulysses.attention.kernels.call import Demand, KernelCall, KernelEntry, Spans
from ray_ulysses.attention.kernels.table import KERNELS, KernelName, choose_kernel

__all__ = ["KERNELS", "Demand", "KernelCall", "KernelEntry", "KernelName", "Spans", "choose_kernel"]
