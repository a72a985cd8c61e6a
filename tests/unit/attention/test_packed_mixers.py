"""Kernels that separate packed documents are called once for all documents; others are called per document.

No kernel package is installed, so stand-ins with the same arguments run Transformers' PyTorch code per document.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations import hub_kernels

from ray_ulysses import apply_ulysses, shard_batch
from ray_ulysses.attention.mixers import _package_functions, find_mixers
from tests.breadth import fast_only
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import HYBRIDS, VOCAB, zoo_model

LENGTHS = (11, 1, 2, 23, 3)
PACKED: dict[str, tuple[str, ...]] = {
    "lfm2": ("causal_conv1d_fn",),
    "lfm2_moe": ("causal_conv1d_fn",),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"),
        ("causal_conv1d_fn", "chunk_gated_delta_rule"),
    ),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), ("causal_conv1d_fn", "chunk_kda")),
    **dict.fromkeys(
        ("bamba", "granitemoehybrid", "nemotron_h", "falcon_h1", "falcon_h1-norm", "zamba2"),
        ("causal_conv1d_fn", "mamba_chunk_scan_combined"),
    ),
}
ARGUMENT = {"causal_conv1d_fn": "seq_idx", "mamba_chunk_scan_combined": "seq_idx"}


def stand_in(own: Callable[..., Any], argument: str | None, calls: list[str], name: str) -> Callable[..., Any]:
    """Return a function that takes the additional ``argument``, and splits rows by it like the packages."""

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        tables = kwargs.pop(argument, None) if argument else None
        if tables is None:
            return own(*args, **kwargs)
        is_index = argument == "seq_idx"
        lengths = torch.unique_consecutive(tables[0], return_counts=True)[1] if is_index else tables.diff()
        assert tables.dtype == torch.int32 and int(lengths.sum()) == sum(LENGTHS) and len(lengths) == len(LENGTHS)
        dim = 2 if name == "causal_conv1d_fn" else 1

        def pieces(value: Any) -> list[Any]:
            is_row = isinstance(value, torch.Tensor) and value.dim() > dim and value.shape[dim] == sum(LENGTHS)
            return list(value.split(lengths.tolist(), dim=dim)) if is_row else [value] * len(lengths)

        cut, named = [pieces(value) for value in args], {key: pieces(value) for key, value in kwargs.items()}
        results = [
            own(*(value[number] for value in cut), **{key: value[number] for key, value in named.items()})
            for number in range(len(lengths))
        ]
        if isinstance(results[0], tuple):
            return torch.cat([result[0] for result in results], dim=dim), None
        return torch.cat(results, dim=dim)

    known = [one for one in inspect.signature(own).parameters.values() if one.kind != one.VAR_KEYWORD]
    added = [inspect.Parameter(argument, inspect.Parameter.KEYWORD_ONLY, default=None)] if argument else []
    call.__signature__ = inspect.Signature([*known, *added])  # type: ignore[attr-defined]
    return call


def install(monkeypatch: pytest.MonkeyPatch, architecture: str, *, forgetful: str = "") -> list[str]:
    """Install stand-ins for kernel packages. The function ``forgetful`` lacks the argument for documents."""
    calls: list[str] = []
    model = zoo_model(architecture)
    (_, mixer, _), *_ = find_mixers(model)
    code = importlib.import_module(type(mixer).__module__)
    for name, function in list(vars(code).items()):
        if not (inspect.isfunction(function) and "is_new_implementation" in function.__code__.co_freevars):
            continue
        facts = inspect.getclosurevars(function).nonlocals
        entry = facts["func_name"]
        if entry not in PACKED[architecture]:
            continue
        argument = None if entry == forgetful else ARGUMENT.get(entry, "cu_seqlens")
        kernel = stand_in(facts["torch_function"], argument, calls, entry)
        package, path = facts["package"], hub_kernels._KERNELS_INTERNAL_PATH_MAPPINGS.get(entry)
        root: Any = ModuleType(package)
        inner: Any = SimpleNamespace(**{entry: kernel})
        for part in reversed(path.split(".")) if path else ():
            inner = SimpleNamespace(**{part: inner})
        vars(root).update(vars(inner))
        monkeypatch.setitem(sys.modules, package, root)
        decorate = hub_kernels.use_kernel_func_from_hub_with_fallback(entry, package)
        monkeypatch.setattr(code, name, decorate(facts["torch_function"]))
    return calls


def step(architecture: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = apply_ulysses(zoo_model(architecture), ALONE)
    ids = torch.randint(0, VOCAB, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
    logits = model(**shard_batch(ids, None, LENGTHS, ALONE).model_inputs()).logits
    logits.square().mean().backward()
    return logits.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("architecture", fast_only(PACKED, "lfm2", "qwen3_next", "kimi_linear", "bamba"))
def test_one_call_of_kernels_that_keep_documents_apart_does_for_all(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, gradients = step(architecture)
    calls = install(monkeypatch, architecture)
    packed, packed_gradients = step(architecture)
    mixers = len(list(find_mixers(zoo_model(architecture))))
    assert sorted(calls) == sorted(PACKED[architecture] * mixers)
    assert float((packed - logits).norm() / logits.norm()) <= 1e-6
    whole = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for name, gradient in gradients.items():
        assert float((packed_gradients[name] - gradient).norm()) <= 1e-5 * max(float(gradient.norm()), 1e-3 * whole), (
            name
        )


@pytest.mark.parametrize("forgetful", ["causal_conv1d_fn", "chunk_gated_delta_rule"])
def test_a_kernel_that_does_not_take_the_tables_is_called_for_each_document(
    forgetful: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, _ = step("qwen3_next")
    calls = install(monkeypatch, "qwen3_next", forgetful=forgetful)
    assert torch.equal(step("qwen3_next")[0], logits)
    assert sorted(calls) == sorted(PACKED["qwen3_next"] * len(LENGTHS))


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_transformers_still_describes_its_kernels(architecture: str) -> None:
    """Canary of Transformers 5.23: otherwise every document would silently take its own call."""
    (_, mixer, _), *_ = find_mixers(zoo_model(architecture))
    functions = list(_package_functions(mixer))
    assert all({"func_name", "is_new_implementation", "applicable_params"} <= one.keys() for one in functions)
    assert {one["func_name"] for one in functions} >= set(PACKED.get(architecture, ()))
