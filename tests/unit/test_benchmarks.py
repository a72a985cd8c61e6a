"""The benchmarks' runner, the peers that we wrote ourselves, and that both attention layers are exact."""

from __future__ import annotations

import argparse
import bisect
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import bench_memory_model, best_fit_decreasing
from benchmarks.bench_attention import Case, count_rank, error_rank, reference, relative, slowest
from benchmarks.bench_imbalance import random_imbalance
from benchmarks.bench_memory import GOAL_PEAK, MODEL, take_step
from benchmarks.document_lengths import LONGEST, log_normal, mixed, near_context
from benchmarks.runner import RESULTS, Benchmark, Record, fresh, header, main, met
from benchmarks.synthetic_corpus import write_corpus
from ray_ulysses.data.plan.steps import step_times
from tests.distributed.harness import run_ranks
from tests.unit.data.corpora import check_content

_SCRIPTS = sorted(path.stem for path in (Path(__file__).parents[2] / "benchmarks").glob("bench_*.py"))


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    return {"sum": options.one + sum(options.several)}


def _page(record: Record) -> str:
    return header("A sum", record, str(record["sum"]))


_SUM = Benchmark(
    name="sum",
    about="A sum.",
    measure=_measure,
    page=_page,
    packages=("numpy",),
    hardware="idle",
    options={"one": (1, "a number"), "several": ([2, 3], "numbers")},
    quick={"one": 10},
)


def test_a_page_is_stored_with_its_figures_and_where_they_come_from(tmp_path: Path) -> None:
    main(_SUM, ["--several", "5", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "sum.json").read_text())
    assert record["sum"] == 6
    assert {"date", "commit", "hardware", "versions", "command", "load_before", "load_average"} <= set(record)
    assert record["commit"] in (tmp_path / "sum.md").read_text()


def test_quick_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.runner.RESULTS", tmp_path)
    assert main(_SUM, ["--quick"])["sum"] == 15
    assert list(tmp_path.iterdir()) == []


def test_a_part_in_a_fresh_process_returns_its_result_or_what_it_failed_at() -> None:
    assert fresh(met, False) == "**not met**"
    with pytest.raises(RuntimeError, match="TypeError"):
        fresh(met)


@pytest.mark.parametrize("script", _SCRIPTS)
def test_every_benchmark_has_a_quick_case(script: str) -> None:
    found = [one for one in vars(import_module(f"benchmarks.{script}")).values() if isinstance(one, Benchmark)]
    assert found
    for one in found:
        assert one.quick and set(one.quick) <= set(one.options)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["checkpoints", "plan"])
def test_a_small_case_of_a_scale_benchmark_meets_its_goals(script: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.scale.{script}", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=RESULTS.parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    # The goals in seconds depend on what else the machine does.
    untimed = re.sub(r"(Resume within a second|holds the interpreter's lock[^:]*): [*a-z ]+\.", "", done.stdout)
    assert "| --- |" in untimed and "met" in untimed and "**not met**" not in untimed
    assert untimed != done.stdout


def test_a_pair_is_the_slowest_ranks_wall_time_and_the_mean_ranks_cpu_time() -> None:
    assert slowest([[[1.0, 8.0, 1.0, 2.0]], [[3.0, 6.0, 3.0, 4.0]]]) == [[3.0, 8.0, 2.0, 3.0]]


def test_the_reference_keeps_documents_apart() -> None:
    case = Case(sp=2, tokens=8, heads=2, kv_heads=1)
    one, two = (reference(case, lengths) for lengths in ([16], [6, 10]))
    torch.testing.assert_close(one[0][:, :6], two[0][:, :6])
    assert (one[0][:, 6:] - two[0][:, 6:]).abs().max() > 0.1


def _measured(rank: int, world_size: int, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    lengths = [case.sp * case.tokens]
    errors = {side: error_rank(rank, world_size, side, case, lengths) for side in ("ours", "theirs")}
    return errors, count_rank(rank, world_size, "ours", case)


@pytest.mark.distributed
def test_both_layers_are_exact_on_one_document_and_ours_is_two_collectives_each_way() -> None:
    ranks = run_ranks(_measured, 2, Case(sp=2, tokens=16, heads=4, kv_heads=2))
    for side in ("ours", "theirs"):
        # fp32 sums of 32 terms against fp64: a few roundings.
        assert max(relative([errors[side] for errors, _ in ranks])) < 2e-6
    traffic = ranks[0][1]
    assert [traffic[phase]["collectives"] for phase in ("forward", "backward")] == [2, 2]
    # Half of the 4 + 2 + 2 + 4 heads of 64 of 16 tokens, in fp32, leaves this rank.
    assert traffic["forward"]["bytes"] == traffic["backward"]["bytes"] == 12 * 64 * 16 * 4 / 2


def _rows_by_the_textbook(lengths: list[int], capacity: int) -> int:
    rooms: list[int] = []
    num_rows = 0
    for length in sorted(lengths, reverse=True):
        place = bisect.bisect_left(rooms, length)
        num_rows += place == len(rooms)
        left = (rooms.pop(place) if place < len(rooms) else capacity) - length
        if left:
            bisect.insort(rooms, left)
    return num_rows


def test_the_offline_peer_is_best_fit_decreasing_to_the_row() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        capacity = int(rng.integers(1, 9000))
        lengths = rng.integers(1, capacity + 1, int(rng.integers(0, 300)))
        assert best_fit_decreasing.num_rows(lengths, capacity) == _rows_by_the_textbook(lengths.tolist(), capacity)


def test_lengths_are_what_their_names_say() -> None:
    lengths = log_normal(200_000)
    # The mean of 200,000 draws whose deviation is 2.9 means is known to 0.7%; clipping takes another half.
    assert abs(lengths.mean() / 6500 - 1) < 0.03
    assert lengths.max() <= LONGEST
    near = near_context(1000, 131_072)
    assert near.min() * 2 > 131_072
    assert near.max() <= 0.9 * 131_072
    both = mixed(20_000, 131_072)
    assert abs(both[both < 0.55 * 131_072].sum() / both.sum() - 0.5) < 0.2


def test_random_dealing_waits_for_the_largest_of_neighbors() -> None:
    costs = np.asarray([4, 1, 1, 2, 8], dtype=np.int64)
    # Steps of 4 rows on 2 groups: max(4, 1) + max(1, 2), then 8 alone.
    assert random_imbalance(costs, 4, 2) == (4 + 2 + 8) * 2 / 16
    assert step_times(costs, 4, 2).imbalance == (4 + 1 + 8) * 2 / 16


@pytest.mark.slow
def test_a_step_of_8k_tokens_takes_a_fifth_of_the_memory_that_transformers_takes() -> None:
    peer, ours = (fresh(take_step, side, MODEL, 8192)["peak_bytes"] for side in ("transformers", "tiled"))
    assert ours <= GOAL_PEAK * peer


def test_the_planner_s_memory_is_within_a_tenth_of_the_stored_measurements() -> None:
    record = json.loads((RESULTS / "memory_model.json").read_text())
    assert len(record["found"]) >= 12 and tuple(record["tokens"]) == bench_memory_model.TOKENS
    for one in record["found"]:
        # The formulas of today, not those of the day of the measurement.
        terms = [bench_memory_model.planned(one, tokens) for tokens in record["tokens"]]
        slope, total = bench_memory_model.compared({**one, "terms": terms})
        assert max(abs(slope - 1), abs(total - 1)) <= bench_memory_model.GOAL, one["case"]


def test_the_synthetic_corpus_is_a_valid_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.synthetic_corpus.SHARD_DOCUMENTS", 10)
    corpus = write_corpus(tmp_path / "corpus", 300)
    check_content(corpus)
    assert corpus.lengths.sum() == corpus.info.num_tokens
    for document in (0, 150, 299):
        length = int(corpus.lengths[document])
        assert corpus.read(document, 0, length).size == length
    assert corpus.source(299).offset == 299
