"""GPUs that ``cluster.device`` names, with the figures of their data sheets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from ray_ulysses.config.section import Section, refusal

_NVIDIA = "https://resources.nvidia.com/en-us-"
_WHITEPAPERS = "https://images.nvidia.com/aem-dam/Solutions/geforce"
_PCIE_4, _PCIE_5 = 32.0, 64.0
"""Bandwidth of 16 lanes in one direction, in GB/s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A GPU model and its figures, from its data sheet."""

    name: str
    tflops: float
    """Peak of dense bf16 products with fp32 sums, in TFLOP/s."""
    gib: float
    """Memory that CUDA reports, in GiB and rounded down. It is less than the nominal memory."""
    gbps: float
    """Memory bandwidth, in GB/s."""
    link_gbps: float = _PCIE_4
    """Bandwidth to another GPU of the node in one direction, in GB/s."""
    host_gbps: float = _PCIE_4
    """Bandwidth to host memory in one direction, in GB/s."""
    source: str = "cluster.device"
    """Address of the data sheet, or the setting that has the figures."""
    is_measured: bool = False
    """Whether measured steps on this GPU were compared with the predicted time."""


# Nvidia's data sheets print twice the dense rate ("with sparsity") and the sum of both directions of a link. The memory
# is what torch prints in out-of-memory errors; ECC takes a part of GDDR6. NVLink, where there is any, is that of SXM.
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="A100", tflops=312.0, gib=79.0, gbps=2039.0, link_gbps=300.0,
            source="https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
            "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
        ),
        Device(
            name="H100", tflops=989.4, gib=79.0, gbps=3350.0, link_gbps=450.0, host_gbps=_PCIE_5, is_measured=True,
            source=f"{_NVIDIA}tensor-core/nvidia-tensor-core-gpu-datasheet",
        ),
        Device(
            name="H200", tflops=989.4, gib=139.0, gbps=4800.0, link_gbps=450.0, host_gbps=_PCIE_5, is_measured=True,
            source=f"{_NVIDIA}data-center-overview-mc/en-us-data-center-overview/hpc-datasheet-sc23-h200",
        ),
        Device(  # with 96 GB of HBM3; its host memory is connected by NVLink-C2C
            name="GH200", tflops=989.4, gib=94.0, gbps=4000.0, link_gbps=450.0, host_gbps=450.0,
            source="https://nvdam.widen.net/content/tf2prbffgy/original/grace-hopper-superchip-datasheet-nvidia-2705455.pdf",
        ),
        Device(
            name="B200", tflops=2250.0, gib=178.0, gbps=8000.0, link_gbps=900.0, host_gbps=_PCIE_5,
            source=f"{_NVIDIA}blackwell-architecture",
        ),
        Device(name="L40S", tflops=362.05, gib=44.0, gbps=864.0, source=f"{_NVIDIA}l40s/l40s-datasheet-28413"),
        Device(
            name="A10G", tflops=70.0, gib=22.0, gbps=600.0,
            source="https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf",
        ),
        Device(
            name="RTX 4090", tflops=165.2, gib=23.5, gbps=1008.0,
            source=f"{_WHITEPAPERS}/ada/nvidia-ada-gpu-architecture.pdf",
        ),
        Device(
            name="RTX 5090", tflops=209.5, gib=31.0, gbps=1792.0, link_gbps=_PCIE_5, host_gbps=_PCIE_5,
            source=f"{_WHITEPAPERS}/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
        ),
    )
}  # fmt: skip
"""Known GPU models by name."""


def device_of(cuda_name: str) -> Device | None:
    """Return the known GPU model that a name from ``torch.cuda.get_device_name()`` contains, or None."""
    return next((device for name, device in DEVICES.items() if contains_words(cuda_name, name.split())), None)


def contains_words(cuda_name: str, words: Iterable[str]) -> bool:
    """Return whether a device's name contains all words. ``L4`` does not match ``L40S``, nor ``H20`` ``H200``."""
    return set(words) <= set(cuda_name.replace("-", " ").replace("_", " ").upper().split())


class DeviceSection(Section):
    """A GPU model: the name of a known one, or the figures of another."""

    short_form: ClassVar[str] = "".join(f"`{name}` \\| " for name in DEVICES)

    name: str = Field(min_length=1)
    """Name of the GPU in outputs."""

    tflops: float = Field(gt=0.0)
    """Peak of dense bf16 products, in TFLOP/s; data sheets often print twice this figure, "with sparsity"."""

    gib: float = Field(gt=0.0)
    """Memory that CUDA reports, in GiB."""

    gbps: float = Field(gt=0.0)
    """Memory bandwidth, in GB/s."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if isinstance(value, dict | cls):
            return value
        known = DEVICES.get(value) if isinstance(value, str) else None
        if known is None:
            figures = "{name: ..., tflops: ..., gib: ..., gbps: ...}"
            rule = f"is not a GPU whose figures are known: {', '.join(DEVICES)}"
            raise refusal(rule, f"use one of these, or the figures of its data sheet, {figures}")
        return {"name": known.name, "tflops": known.tflops, "gib": known.gib, "gbps": known.gbps}

    @model_serializer(mode="wrap")
    def _to_name(self, serialize: SerializerFunctionWrapHandler) -> Any:
        return self.name if self.figures.source != "cluster.device" else serialize(self)

    @property
    def figures(self) -> Device:
        """All figures. Links of a GPU that is not known are assumed to be PCIe 4.0."""
        given = Device(name=self.name, tflops=self.tflops, gib=self.gib, gbps=self.gbps)
        known = DEVICES.get(self.name, given)
        is_known = (known.tflops, known.gib, known.gbps) == (given.tflops, given.gib, given.gbps)
        return known if is_known else given

    def __str__(self) -> str:
        return self.name
