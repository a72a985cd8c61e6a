"""The parts of the benchmarks that decide what a page says, and that both sides still fit their layers."""

from __future__ import annotations

import bisect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import (
    bench_longest,
    bench_memory,
    bench_memory_model,
    bench_train,
    best_fit_decreasing,
    checkpoint_report,
    data_report,
    imbalance_report,
    long_run_report,
    packing_report,
    random_reads,
    resume_report,
)
from benchmarks.attention_report import markdown, ratios, relative, slowest
from benchmarks.attention_sides import Case, reference
from benchmarks.bench_attention import count_rank, error_rank, parse
from benchmarks.bench_checkpoint import parse as parse_checkpoint
from benchmarks.bench_imbalance import case, random_imbalance, row_costs
from benchmarks.bench_long_run import PARTS
from benchmarks.bench_packing import TRL_BATCH, trl_documents
from benchmarks.bench_peer_memory import BLOCK, pairs_of
from benchmarks.checkpoint_estimate import estimate_text, large_manifest, llama_8b
from benchmarks.checkpoint_phases import save_rank
from benchmarks.checkpoint_sides import SIZES, Trained, load_ours
from benchmarks.dcp_side import load_dcp
from benchmarks.document_lengths import LONGEST, log_normal, mixed, near_context, write_log_normal
from benchmarks.fresh_process import run_fresh
from benchmarks.stored_result import RESULTS
from benchmarks.synthetic_corpus import write_corpus
from ray_ulysses.checkpoint import Manifest, newest_committed
from ray_ulysses.checkpoint.intervals import check_cover
from ray_ulysses.data.plan.steps import balance_windows, step_times
from ray_ulysses.storage import LocalStore
from tests.distributed.harness import run_ranks
from tests.unit.data.corpora import check_content, text_corpus, varied_texts


def test_a_pair_is_the_slowest_ranks_wall_time_and_the_mean_ranks_cpu_time() -> None:
    assert slowest([[[1.0, 8.0, 1.0, 2.0]], [[3.0, 6.0, 3.0, 4.0]]]) == [[3.0, 8.0, 2.0, 3.0]]


def test_a_ratio_is_of_pairs_not_of_medians() -> None:
    pairs = [[1.0, 2.0, 1.0, 1.0], [10.0, 15.0, 1.0, 3.0], [4.0, 4.0, 1.0, 2.0]]
    assert ratios(pairs) == (1.5, 1.0, 2.0)
    assert ratios(pairs, 2) == (2.0, 1.0, 3.0)


def test_an_error_is_norm_wise_over_all_ranks() -> None:
    assert relative([[(9.0, 50.0)], [(16.0, 50.0)]]) == [0.5]


def test_the_reference_keeps_documents_apart() -> None:
    case = Case(sp=2, tokens=8, heads=2, kv_heads=1)
    one, two = (reference(case, lengths) for lengths in ([16], [6, 10]))
    torch.testing.assert_close(one[0][:, :6], two[0][:, :6])
    assert (one[0][:, 6:] - two[0][:, 6:]).abs().max() > 0.1


def test_a_page_names_what_was_not_measured_and_what_failed() -> None:
    phases = {"collectives": 2.0, "bytes": 2.0**20}
    case = {
        "sp": 2, "tokens": 512, "heads": 8, "kv_heads": 2, "head_size": 64, "bound_s": 0.001,
        "exchange, checkpointed": [[0.002, 0.004, 0.001, 0.002]], "layer, checkpointed": None,
        "exchange": [[0.002, 0.003, 0.001, 0.002]], "layer": None, "failures": {},
        "memory": {"stub ours": [1024.0**2], "stub theirs": [2 * 1024.0**2]},
        "traffic": {side: {"forward": phases, "backward": phases} for side in ("ours", "theirs")},
    }  # fmt: skip
    failed = case | {"exchange": [], "failures": {"exchange": "it broke"}}
    page = markdown(
        {
            "date": "a day", "commit": "abc+dirty", "hardware": "a machine", "versions": {}, "link": {2: 1e9},
            "options": {"head_size": 64, "repetitions": 1}, "command": "c", "cases": [case, failed], "errors": [],
            "load_average": (1.0, 2.0, 3.0),
        }
    )  # fmt: skip
    assert "**1.50** (1.50 to 1.50)" in page
    assert "not yet measured" in page
    assert "Failed: sp 2, 512 tokens a rank, 8/2 heads: it broke" in page
    assert "| 1.0 MiB (1.0) | 2.0 MiB (2.0) | **2.00** |" in page


def test_quick_stores_nothing_by_default() -> None:
    assert parse(["--quick"]).out is None
    assert parse([]).out is not None


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


def test_lengths_are_what_their_names_say(tmp_path: Path) -> None:
    lengths = log_normal(200_000)
    # The mean of 200,000 draws whose deviation is 2.9 means is known to 0.7%; clipping takes another half.
    assert abs(lengths.mean() / 6500 - 1) < 0.03
    assert lengths.max() <= LONGEST
    near = near_context(1000, 131_072)
    assert near.min() * 2 > 131_072
    assert near.max() <= 0.9 * 131_072
    both = mixed(20_000, 131_072)
    assert abs(both[both < 0.55 * 131_072].sum() / both.sum() - 0.5) < 0.2
    write_log_normal(tmp_path / "lengths.npy", 3000)
    assert np.array_equal(np.load(tmp_path / "lengths.npy"), log_normal(3000))


def test_trl_gets_whole_batches_and_at_least_one() -> None:
    assert trl_documents(np.full(5500, 2_000_000, dtype=np.uint32)).size == TRL_BATCH
    assert trl_documents(np.full(5500, 2, dtype=np.uint32)).size == 5000


def test_a_plans_fill_is_judged_by_its_worst_run() -> None:
    assert packing_report.points_behind([0.99, 0.95], [0.99, 0.97]) == pytest.approx(2.0)


def test_a_packing_page_names_what_was_not_measured_and_what_is_not_met() -> None:
    plan = {
        "wall_s": [1.0], "cpu_s": [1.0], "fill": [0.99], "offline_fill": [0.995], "offline_wall_s": [0.5],
        "num_rows": 7, "fill_bound": 0.999,
    }  # fmt: skip
    found = {"corpus": "c", "context_tokens": 8, "num_documents": 3_000_000, "ours": plan, "trl": {"failure": "no TRL"}}
    large = {
        "num_documents": 10**8, "num_rows": 1, "fill": 1.0, "load_s": 1.0, "wall_s": 61.0, "cpu_s": 1.0,
        "peak_rss_bytes": 10**9 - 1, "lengths_bytes": 1, "rss_before_bytes": 1, "plan_bytes": 1,
    }  # fmt: skip
    record = {
        "date": "a day", "commit": "abc", "hardware": "a machine", "versions": {}, "command": "c",
        "options": {"repetitions": 1}, "cases": [found], "large": [large],
        "half": {"best_fit": {**plan, "num_pieces": 10**6}, "wide_fit": {**plan, "num_pieces": 10**6}},
    }  # fmt: skip
    page = packing_report.markdown(record)
    assert "| 3.00 (3.00 to 3.00) | **not met** |" in page
    assert "| 0.500 | **not met** |" in page
    assert "not yet measured: no TRL" in page
    assert "1.0 + 61.0 s | 1.0 s | 1.64 | **not met** |" in page
    assert "| 0 MiB | met | 0 MiB |" in page
    assert "| best_fit | 7 | 99.000% | 99.500% |  | 1.00 (1.00 to 1.00) |" in page
    assert "| wide_fit | 7 | 99.000% | 99.500% | **not met** | 1.00 (1.00 to 1.00) |" in page


def test_random_dealing_waits_for_the_dearest_of_neighbours() -> None:
    costs = np.asarray([4, 1, 1, 2, 8], dtype=np.int64)
    # Steps of 4 rows on 2 groups: max(4, 1) + max(1, 2), then 8 alone.
    assert random_imbalance(costs, 4, 2) == (4 + 2 + 8) * 2 / 16
    assert step_times(costs, 4, 2).imbalance == (4 + 1 + 8) * 2 / 16


def test_rows_exchanged_among_steps_are_those_of_the_planner() -> None:
    lengths = log_normal(3000)
    costs = row_costs(lengths, 32_768, 1000, (16, 1))
    planned = row_costs(lengths, 32_768, 1000, (16, 4))
    assert np.array_equal(costs[balance_windows(costs, 16, 4)], planned)
    assert case(costs, 16, 4)["balanced"]["imbalance"] == step_times(planned, 16, 4).imbalance


def test_an_imbalance_goal_that_is_not_met_says_why() -> None:
    def found(imbalance: float, bound: float) -> dict[str, Any]:
        level = {"imbalance": imbalance, "bound": bound}
        cases = [{"rows_per_step": 64, "dp_size": 8, "random": 2.0, "sorted": level, "balanced": level}]
        return {"cases": cases, "dearest_row": 9.5}

    assert imbalance_report.verdict(found(1.2, 1.0))[-3:] == ["met", "met", ""]
    assert "the bound would allow it" in imbalance_report.verdict(found(1.3, 1.1))[-1]
    assert "no dealing can: one row costs up to 9.5 times" in imbalance_report.verdict(found(1.4, 1.3))[-1]


def test_a_skip_rate_is_of_the_skipped_documents_alone() -> None:
    def runs(seconds: float) -> list[dict[str, float]]:
        return [{"seconds": seconds}]

    assert resume_report.skip_rate({"0": runs(2.0), "500": runs(9.0), "1000": runs(4.0)}) == 500.0
    assert resume_report.skip_rate({"0": runs(2.0), "1000": runs(1.5)}) is None


def test_the_synthetic_corpus_is_a_valid_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.synthetic_corpus.SHARD_DOCUMENTS", 10)
    corpus = write_corpus(tmp_path / "corpus", 300)
    check_content(corpus)
    assert corpus.lengths.sum() == corpus.info.num_tokens
    for document in (0, 150, 299):
        length = int(corpus.lengths[document])
        assert corpus.read(document, 0, length).size == length
    assert corpus.source(299).offset == 299


def test_amplification_counts_every_block_of_a_read(tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path, [*varied_texts(30), "x" * 200_000])
    whole = random_reads.whole_documents(corpus, np.arange(corpus.num_documents))
    longest = max(whole, key=lambda token_range: token_range[2])
    read = random_reads.blocks_read(corpus, [longest])
    assert read["asked_tokens"] == 200_001
    # Two bytes per token, in blocks of 2,048 tokens, of which the first and the last hold others too.
    assert 200_001 <= read["decoded_tokens"] <= 200_001 + 2 * 2048
    assert read["unpacked_bytes"] == 2 * read["decoded_tokens"]
    once, twice = (random_reads.blocks_read(corpus, [whole[0]] * count) for count in (1, 2))
    assert twice == {name: 2 * value for name, value in once.items()}


def test_a_page_of_the_engines_has_every_process_and_the_worst_ranks_waits() -> None:
    alone = {"tokens": 2_000_000, "seconds": 1.0, "cpu_s": 0.5, "waits_s": [0.25, 0.1], "peak_rss_bytes": 2**20}
    run = {
        "num_rows": 4, "tokens": 4_000_000, "seconds": 2.0, "cpu_s": 0.08, "cpu_of_s": {"consumers": 0.08},
        "start_cpu_s": 1.5, "first_s": 0.75, "second_s": 0.5, "max_blocks": 7, "waits_s": [[0.001, 0.003], [0.0, 0.1]],
        "rss": {"consumers": 2**21},
    }  # fmt: skip
    runs = [{"engine": engine, **run} for engine in ("direct", "ray")]
    read = {"ms": [1.0, 3.0, 2.0], "decoded_tokens": 6, "asked_tokens": 2, "unpacked_bytes": 24, "asked_bytes": 4}
    corpus = dict.fromkeys(("num_documents", "num_tokens", "num_shards", "num_bytes", "num_rows"), 1)
    record = {
        "date": "a day", "commit": "abc", "hardware": "a machine", "versions": {}, "command": "c", "world_size": 2,
        "step_s": 1.0, "rows_per_step": 2, "corpus": corpus | {"dtype": "uint16"}, "hidden": runs, "runs": runs,
        "alone": [alone | {"rss_before_bytes": 0}], "reads": dict.fromkeys(("documents", "pieces", "default"), read),
    }  # fmt: skip
    page = data_report.markdown(record)
    assert "| 2.0 (2.0 to 2.0) | 20.0 (20.0 to 20.0) ms | consumers 20.0 | 1.5 (1.5 to 1.5) s | 0.750" in page
    # Two steps of 1 s; the second rank waited 0.1 s in them.
    assert "| Ray Data, windows of 7 blocks | 2 | 0.750 s | 0.500 s | 2.00 ms | 100.0 ms | 5.000% | 20.0 ms |" in page
    assert "| 2.00 (1.00 to 3.00) ms | **3.0** | **6.0** |" in page


def _checkpoint_world(theirs_load: dict[str, Any] | None) -> dict[str, Any]:
    """A world of two ranks, of which the second is slower."""

    def use(seconds: float) -> dict[str, float]:
        return {
            "seconds": seconds, "cpu_s": 0.5, "read_bytes": 3.5 * 2**20, "written_bytes": 2.0**20,
            "grown_bytes": 2.0**21, "peak_bytes": 2.0**22,
        }  # fmt: skip

    def saves(slow: float) -> dict[str, Any]:
        ours = use(1.0) | {"stall_s": 0.1 * slow, "stall_cpu_s": 0.05, "save_s": 1.0, "write_s": 0.5, "source_s": 0.01}
        ours |= {"check_s": 0.2, "commit_s": 0.1} if slow == 1.0 else {}
        beside = ours | {"quiet_steps_s": [1.0, 1.0, 9.0], "beside_steps_s": [1.5, 1.25]}
        theirs = use(2.0 * slow) | {"sync_s": 1.0, "num_bytes": 1}
        bounds = {"num_bytes": 2**20, "copy_s": 0.5, "fresh_copy_s": 1.0, "write_s": 2.0}
        one = {"ours": ours, "beside": beside, "theirs": theirs, "bounds": bounds}
        first = one | {"beside": None, "theirs": use(0.5) | {"sync_s": 1.0}}
        return {
            "rounds": [first, one, one], "reserved": use(3.0), "buffer_bytes": 2**20, "state_bytes": 2**20,
            "num_parameters": 7, "digest": 11, "weight_decays": [0.1, 0.0],
        }  # fmt: skip

    ours = use(2.0) | {"returned_bytes": 3 * 2**20, "verified_bytes": 2**20, "digest": 11, "weight_decays": [0.1, 0.0]}
    conversion = {"failure": "it broke"} if theirs_load is None else use(6.0)
    theirs = None if theirs_load is None else use(2.0) | theirs_load
    load = {
        "is_cold": False,
        "bounds": {"num_bytes": 1, "read_s": 1.0},
        "ours": ours,
        "conversion": conversion,
        "theirs": theirs,
    }
    loads = [{"rounds": [load], "needed_bytes": 3 * 2**20}]
    return {"world_size": 2, "saves": [saves(1.0), saves(2.0)], "loads": loads}


def test_a_stall_is_the_slowest_ranks_over_the_slowest_ranks_save_of_the_same_round() -> None:
    world = _checkpoint_world({"digest": 11, "weight_decays": [0.1, 0.1]})
    assert checkpoint_report.stall_ratios(world, "ours") == pytest.approx([0.2 / 4.0] * 2)
    assert checkpoint_report.stall_cpu_ratios(world) == pytest.approx([0.05 / 0.5] * 2)
    # Two steps of 1.5 s and 1.25 s where the median step takes 1 s.
    assert checkpoint_report.slowed_s(world["saves"][0]["rounds"][1]["beside"]) == pytest.approx(0.75)


def test_a_page_of_checkpoints_names_what_failed_and_what_is_not_met() -> None:
    estimate = {
        "world_size": 64, "ranks_a_node": 8, "step_s": 10.0, "pcie_bytes_s": 1e9, "storage_bytes_s": 1e9,
        "num_parameters": 1, "num_tensors": 1, "num_intervals": 1, "rank_bytes": 10**9, "sums_bytes": 1,
        "manifest_bytes": 1, "manifest_s": {}, "num_batches": 1, "read_bytes": 1, "staging_s": 1.0, "save_s": 1.0,
        "load_s": 1.0, "theirs_read_bytes": 1, "theirs_conversion_bytes": 1,
    }  # fmt: skip
    assert "| copy/step | assumed step of 10 s | **10.00%**" in estimate_text(estimate)
    good = _checkpoint_world({"digest": 12, "weight_decays": [0.1, 0.1]})
    record = {
        "date": "a day", "commit": "abc", "hardware": "a machine", "versions": {}, "command": "c",
        "size": {"layers": 1, "hidden": 1, "tokens": 1}, "worlds": [good], "estimate": estimate,
    }  # fmt: skip
    page = checkpoint_report.markdown(record)
    assert "| **4.0 (4.0 to 4.0)** | met |" in page
    assert "| 2 → 1 | theirs | **differs** | 0.1, 0.1 | 0.1, 0.0 |" in page
    assert "| 2 → 1 | ours | bitwise | 0.1, 0.0 | 0.1, 0.0 |" in page
    good["saves"][1]["rounds"][2]["beside"]["stall_s"] = good["saves"][1]["rounds"][1]["beside"]["stall_s"] = 2.0
    assert "| **50.0% (50.0% to 50.0%)** | **not met** |" in checkpoint_report.markdown(record)
    assert "## Beside torch's `async_save` and `load`\n\nnot yet measured." in page
    for rank in good["saves"]:
        for one in rank["rounds"]:
            one["dcp"] = one["ours"] | {"stall_s": 0.4, "stall_cpu_s": 0.1, "save_s": 2.0}
    good["loads"][0]["rounds"][0]["dcp"] = good["loads"][0]["rounds"][0]["ours"] | {"seconds": 4.0, "digest": 12}
    page = checkpoint_report.markdown(record)
    # The stall is the slower rank's, 0.2 s.
    assert "| 2 | 0.200 (0.200 to 0.200) s / 0.400 (0.400 to 0.400) s | 0.50 (0.50 to 0.50) |" in page
    assert "| 2.000 (2.000 to 2.000) s / 4.000 (4.000 to 4.000) s | 0.50 (0.50 to 0.50) |" in page
    assert "after its load is **not the same** as was saved" in page
    failed = checkpoint_report.markdown(record | {"worlds": [_checkpoint_world(None)]})
    assert "Theirs failed: it broke" in failed
    assert "| 2 → 1, warm | 1 | not yet measured |" in failed


def test_a_checkpoint_benchmark_of_a_world_without_a_half_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_checkpoint(["--world", "3"])
    assert "give even numbers" in capsys.readouterr().err
    assert parse_checkpoint(["--quick"]).out is None
    assert parse_checkpoint([]).out is not None


def test_the_calculated_manifest_is_one_that_would_be_loaded() -> None:
    shapes = llama_8b()
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B: the sum of its safetensors' parameters.
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 8_030_261_248
    manifest = large_manifest({name: shapes[name] for name in list(shapes)[1:12]}, 5)
    read = Manifest.from_bytes(manifest.to_bytes())
    assert read == manifest
    sizes = {key: spec.num_elements for key, spec in read.state.tensors.items()}
    check_cover(sizes, [stored.interval for shard in read.shards for stored in shard.intervals])


def _reloaded(rank: int, world_size: int, folder: str) -> list[int]:
    trained = Trained(SIZES["small"])
    digests = []
    manifest = newest_committed(LocalStore(Path(folder) / "ours")).manifest
    assert manifest is not None
    for load in (
        lambda: load_ours(trained, Path(folder) / "ours"),
        lambda: load_dcp(trained, manifest.state, Path(folder) / "dcp"),
    ):
        trained.forget()
        digests.append(trained.digest())
        load()
        digests.append(trained.digest())
    return digests


@pytest.mark.distributed
def test_all_sides_save_and_what_ours_and_torch_load_on_another_world_is_what_was_saved(tmp_path: Path) -> None:
    saves = run_ranks(save_rank, 2, SIZES["small"], str(tmp_path), 2)
    forgotten, loaded, forgotten_again, loaded_by_torch = run_ranks(_reloaded, 1, str(tmp_path))[0]
    assert loaded == loaded_by_torch == saves[0]["digest"] == saves[1]["digest"]
    assert loaded not in (forgotten, forgotten_again)
    for rank in saves:
        first, later = rank["rounds"]
        assert first["beside"] is None
        assert 0 < later["beside"]["stall_s"] < later["beside"]["save_s"]
        assert 0 < later["ours"]["write_s"] < later["ours"]["save_s"]
        assert later["beside"]["beside_steps_s"]
    # Twelve bytes a parameter, and what pickles add.
    assert saves[0]["rounds"][1]["theirs"]["num_bytes"] >= 12 * saves[0]["num_parameters"]
    assert sum(rank["state_bytes"] for rank in saves) == 14 * saves[0]["num_parameters"]


def test_a_page_of_a_long_run_says_what_is_met() -> None:
    took = {"seconds": 4.0, "cpu_s": 2.0, "peak_bytes": 100 * 2**20}
    after = {name: [took, took] for name in PARTS} | {"inspect": [took | {"cpu_s": 10.5}]}
    record = {
        "date": "a day", "commit": "abc", "hardware": "a machine", "versions": {}, "command": "c", "before": None,
        "run": {
            "num_steps": 10, "journal_bytes": 2**20, "num_checkpoints": 3, "num_shards": 2, "manifest_bytes": 2**10
        },
        "after": after,
    }  # fmt: skip
    page = long_run_report.markdown(record)
    assert "| `inspect` | not yet measured | 10.5 CPU s, 4.0 s, 100 MiB | **not met** |" in page
    assert "| the progress view's first look | not yet measured | 2.0 CPU s, 4.0 s, 100 MiB | met |" in page
    before = {name: [took, took] for name in PARTS}
    assert "| an attempt's first | 2.0 CPU s, 4.0 s, 100 MiB |" in long_run_report.markdown(record | {"before": before})


def test_a_pair_of_peer_memory_compares_the_counted_steps_of_two_blocks() -> None:
    """Steps of 1 s without and 1.02 s with it, of which each kept one stops the slower of two ranks for 5 ms."""
    ranks: list[list[dict[str, float]]] = [[], []]
    at = cpu_s = agents_s = 0.0
    for step in range(4 * BLOCK):
        is_kept = step // BLOCK % 2 == 1
        for number, rank in enumerate(ranks):
            stall_s = 0.005 - 0.001 * number if is_kept else 0.0
            own = {"copying_s": agents_s / 5, "saving_s": agents_s / 2, "agents_s": 0.0 if number else agents_s}
            rank.append({"at": at, "cpu_s": cpu_s, "stall_s": stall_s, **own})
        at += 1.02 if is_kept else 1.0
        cpu_s += 0.51 if is_kept else 0.5
        agents_s += 0.01 if is_kept else 0.0
    (pair,) = pairs_of(ranks)
    assert pair["step_ratio"] == pytest.approx(1.02) and pair["stall_share"] == pytest.approx(0.005)
    assert pair["cpu_ratio"] == pytest.approx(1.03) and pair["cpu_s"] == pytest.approx(0.03)
    assert pair["kept"] == 1.0
    # Agents are counted once, threads of each rank.
    assert pair["own_share"] == pytest.approx(0.01 + 2 * 0.002 + 2 * 0.005)


@pytest.mark.parametrize(("each_kb", "word"), [(10, "met"), (16, "**not met**")])
def test_the_slope_of_memory_is_the_growth_of_the_peak_per_token(each_kb: int, word: str) -> None:
    found = [
        {
            "side": side,
            "tokens": tokens,
            "cpu_s": 1.0,
            "peak_bytes": tokens * 1000 * (each_kb if side == "tiled" else 90),
        }
        for side in bench_memory.SIDES
        for tokens in bench_memory.TOKENS
    ]
    assert bench_memory.slope_kb(found, "tiled") == pytest.approx(each_kb)
    record = {
        "date": "2026-01-01", "commit": "abc", "hardware": "two cores", "versions": {"torch": "2"}, "command": "python",
        "found": found, "estimates": [{**one, "bytes": 2**20} for one in found],
    }  # fmt: skip
    page = bench_memory.page(record)
    assert page.endswith(f"the slope is at most 15 KB per token: {word}.")
    assert "at most 0.2 of Transformers': met;" in page


@pytest.mark.parametrize("each", [400_000, 12_000, 9_000])
@pytest.mark.parametrize("square", [0, 1e-2])
def test_the_longest_context_that_fits_is_found_by_a_few_steps(each: int, square: float) -> None:
    measured: dict[int, int] = {}

    def peak_of(tokens: int) -> int:
        assert tokens not in measured
        measured[tokens] = max(250_000_000, int(50_000_000 + each * tokens + square * tokens**2))
        return measured[tokens]

    low, high = bench_longest.longest(peak_of, 2**30, 2048)
    assert len(measured) <= 9
    assert measured[low] <= 2**30 < measured[high]
    assert high <= low * bench_longest.CLOSE + bench_longest.STEP


def test_a_limit_that_nothing_fits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^1024 tokens do not fit into 5 bytes$"):
        bench_longest.longest(lambda tokens: 6, 5, 2048)


@pytest.mark.parametrize(("ours", "words"), [(12_000, ["met", "met"]), (5_000, ["**not met**", "**not met**"])])
def test_the_longest_context_is_held_to_every_peer(ours: int, words: list[str]) -> None:
    tokens = {"transformers": 1000, "deepspeed": 8000, "ours, none": ours}
    found = {side: {"longest": most, "too_long": most + 256, "points": {most: 2**30}} for side, most in tokens.items()}
    record = {
        "date": "2026-01-01", "commit": "abc", "hardware": "two cores", "versions": {"torch": "2"}, "command": "python",
        "model": {}, "limit_mib": 1024, "found": found,
    }  # fmt: skip
    page = bench_longest.page(record)
    assert page.endswith(f"6 times Transformers' context: {words[0]}; more than every peer: {words[1]}.")


@pytest.mark.parametrize(("ours_s", "word"), [(0.1, "met"), (0.16, "**not met**")])
def test_cpu_time_of_training_is_held_to_its_neighbour(ours_s: float, word: str) -> None:
    sides = {"transformers": [{"cpu_s": 0.1}, {"cpu_s": 0.2}, {"cpu_s": 0.1}]}
    sides |= {side: [{"cpu_s": ours_s}, {"cpu_s": 2 * ours_s}, {"cpu_s": ours_s}] for side in bench_train.OURS[1]}
    record = {
        "date": "2026-01-01", "commit": "abc", "hardware": "two cores", "versions": {"torch": "2"}, "command": "python",
        "cases": [{"context": 512, "rows": "packed", "sp_size": 1, "sides": sides}],
    }  # fmt: skip
    lines = bench_train.page(record).splitlines()[-len(sides) + 1 :]
    ratio = f"{ours_s / 0.1:.2f}"
    for line, side in zip(lines, bench_train.OURS[1], strict=True):
        assert f"| {side} |" in line and line.endswith(f"| {ratio} ({ratio} to {ratio}) | 1.5 | {word} | abc |")


@pytest.mark.slow
def test_a_step_of_8k_tokens_takes_a_fifth_of_the_memory_that_transformers_takes() -> None:
    script = str(Path(bench_memory.__file__))
    found = [
        {"side": side, "tokens": n, **run_fresh([script, "--side", side, "--tokens", str(n)], 600.0)}
        for side, n in (("transformers", 8192), ("tiled", 8192))
    ]
    (peer,), (ours,) = (bench_memory.peaks(found, side, 8192) for side in ("transformers", "tiled"))
    assert ours <= bench_memory.GOAL_PEAK * peer
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-5)


def test_the_planner_s_memory_is_within_a_tenth_of_the_stored_measurements() -> None:
    record = json.loads((RESULTS / "memory_model.json").read_text())
    assert len(record["found"]) >= 12 and len(record["tokens"]) == 4
    for one in record["found"]:
        # The formulas of today, not those of the day of the measurement.
        terms = [bench_memory_model.estimated(one["case"], tokens) for tokens in record["tokens"]]
        slope, total = bench_memory_model.compared({**one, "terms": terms})
        assert abs(slope - 1) <= bench_memory_model.GOAL, one["case"]
        assert abs(total - 1) <= bench_memory_model.GOAL, one["case"]


def test_a_model_of_memory_that_is_off_is_said_to_be() -> None:
    record = json.loads((RESULTS / "memory_model.json").read_text())
    page = bench_memory_model.page(record)
    assert page.count("| met |") == len(record["found"])
    wrong = {**record["found"][0], "peaks": [peak * 1.2 for peak in record["found"][0]["peaks"]]}
    page = bench_memory_model.page({**record, "found": [wrong, *record["found"][1:]]})
    assert "**not met**" in page and f"outside: {wrong['case']}." in page
