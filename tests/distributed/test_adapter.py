"""Law 1 for `model.adapter`: every trained gradient, at every layout, ZeRO stage and setting of memory."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.model import build_model
from tests.distributed.adapter_case import ADAPTERS, AdapterCase, AdapterResult, run_cases
from tests.distributed.harness import run_ranks
from tests.result_table import ResultTable
from tests.unit.config.trees import small_tree

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    folder = tmp_path_factory.mktemp("bases")
    for is_tied in (False, True):
        tree = small_tree(run__seed=5)
        tree["model"]["config"]["tie_word_embeddings"] = is_tied
        model: Any = build_model(parse_config(tree))
        model.save_pretrained(folder / str(is_tied))
    return {is_tied: str(folder / str(is_tied)) for is_tied in (False, True)}


def check(result: AdapterResult) -> None:
    """Hold one result to law 1."""
    case = result.case
    assert result.loss_error <= 1e-5, f"{case.label}: loss off by {result.loss_error:.2e}"
    assert result.norm_error <= 1e-5, f"{case.label}: gradient norm off by {result.norm_error:.2e}"
    assert result.gradient_error <= 1.0, (
        f"{case.label}: gradient of {result.worst_tensor} is off by {result.gradient_error:.2f} x the bound"
    )
    assert result.num_stepped == result.num_trained, (
        f"{case.label}: the optimizer steps {result.num_stepped} elements of {result.num_trained} trained ones"
    )


def test_the_gradients_of_every_trained_weight_equal_those_of_one_process(bases: dict[bool, str]) -> None:
    cases = [
        AdapterCase(adapter="linear", base=bases[False], ulysses_size=2),
        AdapterCase(adapter="linear", ring_size=2, zero_stage=2, accumulation=3),
        AdapterCase(adapter="linear", ulysses_size=2, is_lean=False),
        AdapterCase(adapter="extension", base=bases[True], is_tied=True, ulysses_size=2, accumulation=3),
        AdapterCase(adapter="extension", ulysses_size=2, zero_stage=1),
        AdapterCase(adapter="head", base=bases[False], ulysses_size=2),
        # Nothing before the first layer's MLP is trained, and nothing is checkpointed.
        AdapterCase(adapter="mlp", ulysses_size=2, is_lean=False, has_mlp_tiles=True),
    ]
    results = run_ranks(run_cases, 2, cases, timeout_s=600)[0]
    assert [result.case for result in results] == cases
    for result in results:
        check(result)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "granite", "mixtral", "phi3", "qwen3"])
def test_other_architectures_have_the_same_gradients_as_in_one_process(kind: str) -> None:
    options: dict[str, Any] = {"kind": kind, "ulysses_size": 2}
    cases = [
        AdapterCase(adapter="linear", accumulation=3, **options),
        AdapterCase(adapter="linear", zero_stage=2, is_lean=False, **options),
        AdapterCase(adapter="extension" if kind not in ("gpt2", "phi3") else "linear", **options),
    ]
    for result in run_ranks(run_cases, 2, cases, timeout_s=600)[0]:
        check(result)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_matrix_of_adapters_layouts_and_stages(bases: dict[bool, str], result_table: ResultTable) -> None:
    failures = []
    for ulysses_size, ring_size in product((1, 2), (1, 2)):
        cases = [
            AdapterCase(
                adapter=adapter, base=bases[is_tied] if is_loaded else "", is_tied=is_tied, is_lean=is_lean,
                ulysses_size=ulysses_size, ring_size=ring_size, zero_stage=stage, accumulation=accumulation,
            )
            for adapter, is_tied, stage, (is_loaded, is_lean, accumulation) in product(
                ADAPTERS,
                (False, True),
                (1, 2, 3),
                ((True, True, 3), (True, False, 1), (False, True, 1), (False, False, 3)),
            )
            # An adapter of a tied head is refused.
            if not (adapter == "head" and is_tied)
        ]  # fmt: skip
        for result in run_ranks(run_cases, ulysses_size * ring_size, cases, timeout_s=1200)[0]:
            result_table.add(
                {
                    "case": result.case.label,
                    "loss error": f"{result.loss_error:.1e}",
                    "worst gradient, share of its bound": f"{result.gradient_error:.3f}",
                    "norm error": f"{result.norm_error:.1e}",
                }
            )
            try:
                check(result)
            except AssertionError as error:
                failures.append(str(error))
    result_table.write("adapters", "Law 1 for `model.adapter`: one step against one process, fp32")
    assert not failures, "\n".join(failures)
