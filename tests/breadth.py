"""The breadth of a test: `make test` runs the representatives of many like cases, `make test-all` every one of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import pytest
from hypothesis import settings


def fast_only(values: Iterable[Any], *fast: Hashable) -> list[Any]:
    values = list(values)
    assert set(fast) <= set(values), f"{set(fast) - set(values)} are no values of the parameter"
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def fast_cases(cases: dict[str, tuple[Any, ...]], *fast: str) -> list[Any]:
    assert set(fast) <= cases.keys(), f"{set(fast) - cases.keys()} are no cases"
    return [
        pytest.param(*case, id=name, marks=() if name in fast else pytest.mark.slow) for name, case in cases.items()
    ]


def examples(count: int) -> int:
    return max(10, count * settings().max_examples // 100)


def is_fast() -> bool:
    """Return whether this is the fast set, in which random examples may be the same at every run."""
    return settings().max_examples < 100
