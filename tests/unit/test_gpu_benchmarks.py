"""The programme for a lent GPU and its benchmarks: what a page says, and that every item runs tiny on a CPU."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.gpu import bench_recipe, bench_step, clocks, one_step, pinned, programme, recipe_rank, recovery_gpu
from benchmarks.gpu.bench_recipe import RECIPE, whole_model
from benchmarks.gpu.case_runs import case_name, in_words, joined, run, tiny, wire_s
from benchmarks.gpu.kernel_classes import by_class, kernel_class
from benchmarks.gpu.programme import ITEMS, Lease, run_item
from tests.distributed.harness import run_ranks
from tests.unit.tracking.journals import event

NVLINK = {"131k": 0.013, "524k": 0.0045, "1M": 0.0024}
"""Share of a step's time, by the issue that asked for it."""


def found(case: dict[str, Any], script: str, limit_s: float) -> dict[str, Any]:
    """Stand in for a process with a GPU."""
    return {
        **case, "seconds": [2.0, 4.0, 3.0][: case["steps"]], "warm_up_s": 9.0, "mfu": 0.4, "peak_gib": 5.0,
        "tokens_per_s": 1.0, "planned": {"device_gib": 6.0}, "predicted": {"device_gib": 6.0},
        "clocks": {"clocks.sm": [1200.0, 1700.0, 1980.0]},
    }  # fmt: skip


def lease(out: Path | None = None, **changes: Any) -> Lease:
    def call(command: Sequence[str], variables: Mapping[str, str], limit_s: float) -> tuple[int, str]:
        return 0, "2 ranks, self-test: passed\n5 passed in 1.00s\n"

    options: dict[str, Any] = {"measure": found, "call": call, "ends": time.monotonic() + 60.0, **changes}
    return Lease(out=out, commit="abc", is_tiny=True, **options)


def test_long_rows_are_timed_at_least_twice_after_a_warm_up_over_a_row_of_the_same_length() -> None:
    by_context: dict[int, list[dict[str, Any]]] = {}
    for case in RECIPE.cases:
        assert sum(case["warm_up"]) == sum(case["documents"]) == case["context"]
        by_context.setdefault(case["context"], []).append(case)
    assert all(case["steps"] >= 2 for context in (1 << 17, 1 << 19) for case in by_context[context])
    layers = {(case["model"]["num_hidden_layers"], case["steps"]) for case in by_context[1 << 20]}
    assert layers == {(12, 2), (36, 1)}, "a third of the layers twice, beside one whole step"
    assert [case["model"]["num_hidden_layers"] for case in by_context[1 << 21]] == [12]


def test_a_page_of_steps_says_what_was_timed_and_adds_the_wire() -> None:
    record = run(RECIPE, ["--tiny", "--commit", "abc"], found)
    page = bench_recipe.markdown(record)
    assert "the seconds hold **no wire**" in page and "MFU is that of the median" in page
    line = next(line for line in page.splitlines() if line.startswith("| 131k, kept in host memory: ours"))
    assert "| 3.0 (2.0 to 4.0, 3 steps) |" in line and "| 1700 (1200 to 1980) |" in line
    assert next(line for line in page.splitlines() if line.startswith("| 1M, kept")).count("2.0, a single step") == 1
    assert "may have drawn the weights" not in bench_step.markdown(run(bench_step.STEP, ["--tiny"], found))


def test_stored_pages_are_those_of_their_figures_and_name_first_steps() -> None:
    results = Path(bench_step.__file__).parents[1] / "results"
    recipe, step = bench_recipe.markdown, bench_step.markdown
    for name, page in (("recipe_gpu", recipe), ("h200/recipe_gpu", recipe), ("step_gpu", step)):
        record = json.loads((results / f"{name}.json").read_text())
        assert (results / f"{name}.md").read_text() == page(record) + "\n", "generate it again"
    page = (results / "recipe_gpu.md").read_text()
    assert "| 524k, kept in host memory: deepspeed | 108.2, a single first step |" in page
    assert "may have drawn the weights of the next case" in (results / "step_gpu.md").read_text()


@pytest.mark.parametrize("title", NVLINK)
def test_the_modelled_wire_is_a_small_share_of_a_step(title: str) -> None:
    record = json.loads((Path(bench_step.__file__).parents[1] / "results" / "recipe_gpu.json").read_text())
    one = next(one for one in record["found"] if case_name(one) == f"{title}, kept in host memory: ours")
    step_s = min(one["seconds"] or one["first_seconds"])
    assert wire_s(recipe_rank.make_config(one), one) / step_s == pytest.approx(NVLINK[title], rel=0.05)


def test_steps_of_some_layers_are_scaled_by_the_operations_of_all() -> None:
    case = next(case for case in RECIPE.cases if "1M, 12 of 36 layers" in case["title"])
    whole = float(whole_model({**case, "seconds": [100.0]}))
    # The output head is there once in both.
    assert 295 <= whole < 300
    assert whole_model({**RECIPE.cases[0], "seconds": [100.0]}) == ""


def test_steps_of_two_runs_of_one_commit_are_joined() -> None:
    before, new = ({"commit": "abc", "seconds": [seconds], "title": "t", "side": "s"} for seconds in (1.0, 3.0))
    assert joined(before, new)["seconds"] == [1.0, 3.0]
    assert joined({**before, "commit": "old"}, new)["seconds"] == [3.0]
    assert joined({**before, "failure": "it broke"}, new)["seconds"] == joined(None, new)["seconds"] == [3.0]
    assert in_words({"seconds": [], "first_seconds": [78.36]}, 1) == "78.4, a single first step"


def test_no_process_draws_weights_while_another_is_timed() -> None:
    case = {**tiny(bench_step.STEP.cases[0]), "turn": "a file"}
    with (
        mock.patch.object(one_step, "wait_for_turn", side_effect=InterruptedError) as waited,
        mock.patch.object(one_step, "build_model") as drawn,
        pytest.raises(InterruptedError),
    ):
        one_step.build(case)
    assert waited.call_args.args == ("a file",) and not drawn.called


def test_clocks_are_logged_until_the_end_and_absent_without_a_driver() -> None:
    lines = "1980, 2619, 640.10, 60\\n1500, 2619, 700.00, 70\\n[N/A], 2619"
    with clocks.logged(["printf", lines]) as logged:
        time.sleep(0.2)
    assert logged["clocks.sm"] == [1500.0, 1740.0, 1980.0] and logged["temperature.gpu"][2] == 70.0
    with clocks.logged(["no-such-driver"]) as logged:
        pass
    assert logged == {} and clocks.in_words(logged) == ""


def test_kernels_are_told_apart_by_class() -> None:
    names = {
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": "attention",
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "matrix products",
        "void at::native::reduce_kernel<512, 1, MeanOps<float>>": "reductions",
        "void at::native::vectorized_elementwise_kernel<8, silu>": "element-wise",
        "Memcpy DtoH (Device -> Pinned)": "copies",
        "multi_tensor_apply_kernel<adam>": "optimizer",
    }
    assert {name: kernel_class(name) for name in names} == names
    assert by_class([("aten::mm", 1.0), ("aten::bmm", 2.0), ("?", 0.5)]) == {"matrix products": 3.0, "other": 0.5}


def test_the_time_from_a_kill_is_to_the_next_attempts_first_step() -> None:
    step = {"event": "step", "step": 20, "loss": 1.0, "tokens": 1, "rows": (19, 20), "digest": "1", "seconds": 1.0}
    events = [
        event({"event": "attempt_started", "time": 0.0}),
        event({**step, "time": 1.0}),
        event({"event": "attempt_started", "time": 4.0, "attempt": 2, "resumed_step": 19}),
        event({**step, "time": 5.5, "attempt": 2}),
    ]
    assert recovery_gpu.timeline(events, 1.5) == {"loaded_s": 2.5, "next_step_s": 4.0, "step_s": 1.0, "lost_steps": 1}


@pytest.mark.parametrize("item", [name for name in ITEMS if name != "P4"])
def test_an_item_stores_its_page_and_says_whether_it_holds(item: str, tmp_path: Path) -> None:
    with mock.patch.object(programme.bench_kernels, "main", return_value={"found": [{"side": "ours: cudnn"}]}):
        record = run_item(item, lease(tmp_path))
    assert record["parts"] and all(one["holds"] for one in record["parts"])
    page = (tmp_path / f"programme_{item.lower()}.md").read_text()
    assert "commit abc" in page and "a trial on CPUs" in page and f"make gpu ITEM={item}" in page
    stored = json.loads((tmp_path / f"programme_{item.lower()}.json").read_text())
    assert stored["parts"] == json.loads(json.dumps(record["parts"]))
    if item.startswith("P3"):
        assert "2 ranks, self-test: passed" in page, "the output is stored"


def test_a_part_that_fails_does_not_keep_the_next_from_its_minutes(tmp_path: Path) -> None:
    def breaks(command: Sequence[str], variables: Mapping[str, str], limit_s: float) -> tuple[int, str]:
        raise OSError("no pytest")

    record = run_item("P1a", lease(tmp_path, call=breaks))
    assert [one["holds"] for one in record["parts"]] == [False, True, True]
    assert not run_item("P3a", lease(call=lambda *_: (0, "5 skipped in 1.00s")))["parts"][0]["holds"]


def test_element_wise_work_is_measured_in_another_tree_and_in_this_one() -> None:
    scripts = []

    def measure(case: dict[str, Any], script: str, limit_s: float) -> dict[str, Any]:
        scripts.append(script)
        return found(case, script, limit_s)

    parts = run_item("P5", lease(before=Path("/before"), measure=measure))["parts"]
    assert [one["what"].partition(":")[0] for one in parts] == ["before", "after"] * 2
    assert scripts[0] == "/before/benchmarks/gpu/one_step.py" and Path(scripts[1]).exists()


def _measured(rank: int, world_size: int, case: dict[str, Any], script: str) -> dict[str, Any]:
    module = recipe_rank if "recipe" in script else one_step
    return {**case, **module.measure(case)}


def in_a_fork(case: dict[str, Any], script: str, limit_s: float) -> dict[str, Any]:
    """Measure a case really, in a process that has imported everything."""
    return dict(run_ranks(_measured, 1, case, script, process_group=False)[0])


@pytest.mark.distributed
@pytest.mark.parametrize("item", ["P1a", "P1b", "P1c", "P5", "P6a", "P6b", "P6c"])
def test_an_item_of_steps_runs_on_a_cpu(item: str) -> None:
    record = run_item(item, lease(measure=in_a_fork))
    cases = [one["case"] for one in record["parts"] if "case" in one]
    assert cases and all(one["holds"] for one in record["parts"]), record["parts"]
    assert all(len(case["seconds"]) == case["steps"] for case in cases)
    if item == "P1a":
        assert cases[0]["classes"]["matrix products"] > 0


def test_kernels_run_on_a_cpu() -> None:
    (one,) = run_item("P2", lease())["parts"]
    assert one["holds"] and one["result"].startswith("8 measured")


def test_a_process_with_much_memory_is_killed() -> None:
    one = pinned.measure(0.01, 0.0, "cpu", limit_s=30.0)
    assert one["taken_s"] > 0 and one["gone_s"] > 0 and one["free_s"] is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_training_process_is_followed_by_a_step() -> None:
    assert recovery_gpu.recover(is_tiny=True)["lost_steps"] <= 1
