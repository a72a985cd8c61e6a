"""Every test of this folder needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them before tests are chosen by their markers."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))
