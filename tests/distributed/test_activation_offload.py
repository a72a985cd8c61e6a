"""Activations in host memory change no bit of a step, in the budget that `plan` counts, nor of a whole run."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.attention.recompute import KeptOutput
from ray_ulysses.tracking.history import read_history
from tests.distributed.activation_offload_case import OffloadCase, counted_run, differences
from tests.distributed.harness import run_ranks
from tests.distributed.run_case import make_config, make_corpus, prepare_attempt
from tests.distributed.test_hybrids import OF_EACH_KIND
from tests.result_table import ResultTable

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

KEPT: tuple[KeptOutput, ...] = ("both", "kernel")
FAST = [
    OffloadCase(tied=False),
    OffloadCase(ulysses_size=2, keep="kernel", kinds=("attention_outputs",), dtype="bf16"),
    OffloadCase(ring_size=2, zero_stage=1),
    OffloadCase(ulysses_size=2, head_groups=2),
]


@pytest.mark.slow
def test_no_bit_of_two_steps_changes() -> None:
    for rank in run_ranks(differences, 2, FAST, timeout_s=150):
        assert rank == [[]] * len(FAST)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ulysses_size", [1, 2])
def test_what_is_planned_is_enough_for_layers_that_carry_state(ulysses_size: int) -> None:
    cases = [
        OffloadCase(architecture=name, ulysses_size=ulysses_size, keep=keep) for name in OF_EACH_KIND for keep in KEPT
    ]
    for rank in run_ranks(differences, max(2, ulysses_size), cases, timeout_s=1200):
        assert rank == [[]] * len(cases)


def test_a_run_with_activations_in_host_memory_is_the_run_without(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "data")
    model = make_config(tmp_path, corpus).model_dump(mode="json")["model"]["config"]
    histories = []
    for name, kinds in (("device", []), ("host", ["layer_inputs", "attention_outputs"])):
        config = make_config(
            tmp_path / name, corpus, run__stop_step=3, cluster__workers=2, data__rows_per_step=3,
            data__eval_fraction=0.05, run__eval_every_steps=2, memory__offload_activations=kinds,
            model__config=model | {"num_hidden_layers": 4},
        )  # fmt: skip
        prepare_attempt(config, name)
        # Input, output in two layouts and log-sum-exp of 4 layers, in 3 micro-batches of 3 steps; two layers stay.
        counts = (3 * 3 * 4 * 4, 3 * 3 * 2 * 4) if kinds else (0, 0)
        assert run_ranks(counted_run, 2, config, name, timeout_s=200) == [counts] * 2
        histories.append(read_history(config.run_dir))
    without, ours = ([(step.loss, step.grad_norm) for step in history.steps] for history in histories)
    assert len(ours) == 3
    assert ours == without


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_matrix_of_layouts_stages_and_what_is_kept(result_table: ResultTable) -> None:
    failures = []
    for ulysses_size, ring_size in product((1, 2), (1, 2)):
        cases = [
            OffloadCase(
                ulysses_size=ulysses_size, ring_size=ring_size, zero_stage=stage, keep=keep, dtype=dtype, kinds=kinds
            )
            for stage, dtype in product((1, 2, 3), ("fp32", "bf16"))
            for keep, kinds in (
                ("both", ("layer_inputs", "attention_outputs")),
                ("kernel", ("attention_outputs",)),
                ("none", ("layer_inputs",)),
            )
        ]
        found: list[Any] = run_ranks(differences, max(2, ulysses_size * ring_size), cases, timeout_s=1200)
        for case, *ranks in zip(cases, *found, strict=True):
            result_table.add(
                {
                    "sp": str(case.sp_size), "ring": str(ring_size), "ZeRO": str(case.zero_stage), "type": case.dtype,
                    "in host memory": " + ".join(case.kinds), "attention output": case.keep,
                    "tensors that differ": str(sum(map(len, ranks))),
                }
            )  # fmt: skip
            failures += [(case, names) for names in ranks if names]
    result_table.write("activation_offload", "Activations in host memory: two steps against the same without, by bits")
    assert failures == []
