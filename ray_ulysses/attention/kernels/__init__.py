"""The attention kernels as a table: what each needs, what it can do, and which one a layer gets."""

from ray_ulysses.attention.kernels.call import Demand, Kernel, KernelCall, KernelEntry, Spans
from ray_ulysses.attention.kernels.table import KERNELS, KernelName, choose_kernel

__all__ = ["KERNELS", "Demand", "Kernel", "KernelCall", "KernelEntry", "KernelName", "Spans", "choose_kernel"]
