"""Keeps functions out of `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F, *, recursive: bool = True) -> F:
    """Exclude a function from compilation, as `torch.compiler.disable` does.

    That decorator imports ``torch._dynamo`` at once, which takes two seconds of each command's start. PyTorch's own
    modules use this private one (2.11 to 2.13), which imports it when the function is first called.
    """
    return cast("F", cast("Any", torch)._disable_dynamo(function, recursive))
