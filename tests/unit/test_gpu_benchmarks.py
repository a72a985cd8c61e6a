"""The programme for a lent GPU and its benchmarks: what a page says, and that every item runs tiny on a CPU."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from benchmarks.gpu import bench_recipe, bench_step, floor, one_step, pinned, programme, recipe_rank, recovery_gpu
from benchmarks.gpu.programme import ITEMS, Lease, run_item
from tests.breadth import fast_only
from tests.distributed.harness import run_ranks


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


def test_stored_pages_are_those_of_their_figures_and_name_first_steps() -> None:
    results = Path(bench_step.__file__).parents[1] / "results"
    recipe, step = bench_recipe.markdown, bench_step.markdown
    for name, page in (("recipe_gpu", recipe), ("h200/recipe_gpu", recipe), ("step_gpu", step)):
        record = json.loads((results / f"{name}.json").read_text())
        assert (results / f"{name}.md").read_text() == page(record) + "\n", "generate it again"
    page = (results / "recipe_gpu.md").read_text()
    assert "| 524k, kept in host memory: deepspeed | 108.2, a single first step |" in page
    assert "may have drawn the weights of the next case" in (results / "step_gpu.md").read_text()


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


def _measured(rank: int, world_size: int, case: dict[str, Any], script: str) -> dict[str, Any]:
    module = recipe_rank if "recipe" in script else one_step
    return {**case, **module.measure(case)}


def in_a_fork(case: dict[str, Any], script: str, limit_s: float) -> dict[str, Any]:
    """Measure a case really, in a process that has imported everything."""
    return dict(run_ranks(_measured, 1, case, script, process_group=False)[0])


@pytest.mark.distributed
@pytest.mark.parametrize("item", fast_only(["P1a", "P1b", "P1c", "P5", "P6a", "P6b", "P6c"], "P1a", "P5"))
def test_an_item_of_steps_runs_on_a_cpu(item: str) -> None:
    record = run_item(item, lease(measure=in_a_fork))
    cases = [one["case"] for one in record["parts"] if "case" in one]
    assert cases and all(one["holds"] for one in record["parts"]), record["parts"]
    assert all(len(case["seconds"]) == case["steps"] for case in cases)
    if item == "P1a":
        assert cases[0]["classes"]["matrix products"] > 0
        floor_s = cases[0]["floor"]["attention_s"] + cases[0]["floor"]["products_s"]
        assert cases[0]["floor"]["s"] == floor_s > 0 and "floor" not in cases[1]
        assert " of the floor" in record["parts"][1]["result"]


@pytest.mark.parametrize("item", ITEMS)
def test_the_tests_of_an_item_exist(item: str) -> None:
    """A test that was renamed would cost a lent GPU's minutes."""
    asked: list[str] = []

    def call(command: Sequence[str], variables: Mapping[str, str], limit_s: float) -> tuple[int, str]:
        asked.extend(one for one in command if one.startswith("tests/"))
        return 0, "1 passed in 1.00s\n"

    with (
        mock.patch.object(programme.bench_kernels, "main", return_value={"found": []}),
        mock.patch.object(recovery_gpu, "recover", side_effect=TimeoutError("no GPU")),
    ):
        run_item(item, lease(call=call))
    for path, _, name in (one.partition("::") for one in asked):
        assert not name or f"def {name}(" in (Path(programme.REPOSITORY) / path).read_text(), path
    assert bool(asked) == (item in ("P1a", "P3a", "P3b", "P4", "P5"))


def test_a_command_of_an_item_keeps_its_output_and_ends_with_its_children(tmp_path: Path) -> None:
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('measured 7'); print(child.pid, file=open('PID', 'w')); sys.stdout.flush()\n"
        "sys.stderr.write('a warning of a rank\\n'); sys.stderr.flush()\n"
    ).replace("PID", str(tmp_path / "pid"))
    code, text = programme.call([sys.executable, "-c", script + "os.kill(child.pid, 9)\n"], {}, 60.0)
    assert code == 0 and text == "a warning of a rank\nmeasured 7\n", "stdout is last, whose end says how tests ended"
    code, text = programme.call([sys.executable, "-c", script + "time.sleep(600)"], {}, 8.0)
    assert code == 124 and "measured 7" in text and text.endswith("not within 8 s")
    child = int((tmp_path / "pid").read_text())
    psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [], timeout=30)
    assert not psutil.pid_exists(child)


def test_a_page_in_another_folder_keeps_the_cases_that_are_stored(tmp_path: Path) -> None:
    with mock.patch.object(programme, "run_item", return_value={"parts": []}):
        programme.main(["P1b", "--out", str(tmp_path), "--tiny"])
    stored = json.loads((tmp_path / "recipe_gpu.json").read_text())["found"]
    assert stored == json.loads((programme.RESULTS / "recipe_gpu.json").read_text())["found"]


def test_the_floor_of_a_step_is_that_of_the_stored_figures() -> None:
    """At 131k, steps took 1.5 s more than attention at its stored rate and products at 790 TFLOP/s."""
    recipe = json.loads((programme.RESULTS / "h200/recipe_gpu.json").read_text())["found"][0]
    kernels = json.loads((programme.RESULTS / "h200/kernels_gpu.json").read_text())["found"]
    (one,) = (one for one in kernels if one["row"] == "131k, one document, 1 of sp 8" and one["side"] == "ours: cudnn")
    attention_s = 36 * sum(statistics.median(one[f"{phase}_ms"]) / 1e3 for phase in ("forward", "backward"))
    floor_s = attention_s + floor.products_s(recipe["model"], recipe["context"] // 8)
    assert statistics.median(recipe["seconds"]) - floor_s == pytest.approx(1.5, abs=0.1)


def test_kernels_run_on_a_cpu() -> None:
    (one,) = run_item("P2", lease())["parts"]
    assert one["holds"] and one["result"].startswith("8 measured")


def test_a_process_with_much_memory_is_killed() -> None:
    one = pinned.measure(0.01, 0.0, "cpu", limit_s=30.0)
    assert one["taken_s"] > 0 and one["gone_s"] > 0 and one["free_s"] is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_training_process_is_followed_by_a_step() -> None:
    found = recovery_gpu.recover(is_tiny=True, limit_s=500.0)
    assert found["lost_steps"] <= 1 and found["resumed_step"] > 0
    assert found["is_forked"] and found["launcher_survived"], "the training process was killed, not its launcher"
