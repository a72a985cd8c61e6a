"""Host memory for copies of tensors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ray_ulysses.parallel.device import reserve_host


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
def test_reserved_memory_asks_for_huge_pages() -> None:
    """They are taken, pinned and freed many times faster."""
    reserved = reserve_host(8 << 20)
    maps = Path("/proc/self/smaps").read_text()
    found = re.finditer(r"(?m)^([0-9a-f]+)-([0-9a-f]+) .*\n(?:[A-Z].*\n)*?VmFlags: (.*)$", maps)
    (flags,) = (one[3] for one in found if int(one[1], 16) <= reserved.data_ptr() < int(one[2], 16))
    assert "hg" in flags.split()
