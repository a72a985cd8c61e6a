"""A step that runs out of memory reports the plan, the measurement, the largest terms and settings that help."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from ray_ulysses.config import Config, parse_config
from ray_ulysses.config.schema import with_settings
from ray_ulysses.config.stages import stage_config
from ray_ulysses.elastic.causes import raised, root_cause
from ray_ulysses.planner.memory import configured_memory
from ray_ulysses.planner.memory_terms import GIB
from ray_ulysses.planner.problems import WORKER_BYTES
from ray_ulysses.run.early_stopping import EarlyStopping
from ray_ulysses.run.start_point import RunPosition
from ray_ulysses.trainer import diagnostics, loop
from tests.unit.planner.runs import LLAMA_3_8B, make_config, make_shape


@dataclass(frozen=True)
class Run:
    config: Config
    shape: Any


def run_of(**memory: Any) -> Run:
    config = make_config(
        LLAMA_3_8B,
        data={"path": "/corpus", "context_tokens": 262_144, "rows_per_step": 8},
        parallel={"sp_size": 8},
        cluster={"workers": 8, "gpus_per_worker": 1},
        memory={"attention_output": "both", "device_gib": 79.0} | memory,
    )
    return Run(config, make_shape(config))


def fails_with(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


CUDA = fails_with(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB"))
HOST = fails_with(MemoryError())


def allocation(*_: object) -> None:
    """Make torch raise its own error, by requesting more memory than any machine has."""
    torch.empty(1 << 52)


def attempt_of(run: Run, device: str, snapshot: Any = None, *, stage: int = 0) -> Any:
    written = MagicMock(device=torch.device(device))
    written.leave_snapshot = lambda step, state: f"memory/step-{step:08d}.pickle" if state == "state" else None
    own = Run(stage_config(run.config, stage), run.shape)
    part = SimpleNamespace(ends_the_run=True, run_config=run.config, number=stage)
    context = MagicMock(run=own, diagnostics=written)
    memory, stopping = SimpleNamespace(snapshot=snapshot), EarlyStopping(None)
    return SimpleNamespace(context=context, plan=None, stage=part, memory=memory, stopping=stopping)


@pytest.fixture
def failed_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def step(run: Run, fail: Any, peak_gib: float, device: str = "cuda", **options: Any) -> str:
        monkeypatch.setattr(loop, "_take_step", lambda *_: fail())
        monkeypatch.setattr(diagnostics, "peak_memory_gib", lambda _: peak_gib)
        monkeypatch.setattr(loop, "last_step_of", lambda *_: 10)
        with pytest.raises(diagnostics.OutOfMemoryError) as error:
            loop._train(attempt_of(run, device, **options), None, RunPosition(step=6))  # type: ignore[arg-type]
        return str(error.value)

    return step


def with_the_proposal(run: Run, text: str) -> Config:
    options = text.partition(": --set ")[2]
    return parse_config(run.config.model_dump(mode="json"), shlex.split(options.replace("--set ", "")))


@pytest.mark.parametrize("fail", [allocation, HOST], ids=["torch", "python"])
def test_a_full_host_is_measured_against_its_own_plan(failed_step: Callable[..., str], fail: Any) -> None:
    run = run_of(offload_activations=["layer_inputs", "attention_outputs"])
    planned = configured_memory(run.config, run.shape).host_bytes / GIB
    text = failed_step(run, fail, 200.0, snapshot="state")
    assert text.startswith(f"step 7 ran out of memory: 200 GiB were resident at the peak, and {planned:.3g} GiB were ")
    assert configured_memory(with_the_proposal(run, text), run.shape).host_bytes / GIB <= 0.9 * planned
    # Without peer memory and buffers, activations may return to the device.
    lean = with_settings(run.config, {"elastic.peer_memory": False, "checkpoint.host_buffers": 1})
    assert failed_step(Run(lean, run.shape), fail, 200.0).endswith("--set 'memory.offload_activations=[]'")


def test_a_step_that_runs_out_of_memory_says_all_there_is_to_know(failed_step: Callable[..., str]) -> None:
    run = run_of()
    planned = configured_memory(run.config, run.shape).device_bytes / GIB
    text = failed_step(run, CUDA, 78.5, snapshot="state")
    assert text.startswith("step 7 ran out of memory (snapshot: memory/step-00000007.pickle): 78.5 GiB were allocated ")
    assert f"{planned:.3g} GiB were planned (largest: attention outputs, kept 16.1, layer inputs" in text
    assert configured_memory(with_the_proposal(run, text), run.shape).device_bytes / GIB <= 0.9 * planned
    cause = root_cause([raised(3, diagnostics.OutOfMemoryError(text))])
    assert (cause.kind, cause.rank) == ("raised", 3)
    assert cause.reason.endswith(text), "nothing of it is cut off"
    assert "`ray-ulysses plan CONFIG --fit`" in cause.hint


def test_what_was_there_is_the_limit_where_the_plan_needs_more(failed_step: Callable[..., str]) -> None:
    run = run_of(device_gib=None)
    changed = with_the_proposal(run, failed_step(run, CUDA, 24.0))
    assert configured_memory(changed, run.shape).device_bytes <= 24.0 * GIB


def staged(*stages: dict[str, Any], **memory: Any) -> Run:
    config = run_of(**memory).config
    tree = config.model_dump(mode="json", exclude_unset=True) | {"stages": list(stages)}
    return Run(parse_config(tree), make_shape(config))


LEAN = {
    "attention_output": "none", "offload_activations": ["layer_inputs"], "offload_optimizer": "cpu",
    "offload_param": "cpu", "attention_head_groups": 4, "mlp_tile": "auto", "loss_tile": "auto", "device_gib": None,
}  # fmt: skip


@pytest.mark.parametrize("memory", [{}, LEAN], ids=["memory", "ranks"])
def test_what_is_proposed_to_a_stage_changes_that_stage(failed_step: Callable[..., str], memory: Any) -> None:
    """The stage's sp_size overrides the run's, and other stages are not the cause."""
    wide = {"name": "wide", "steps": 9, "sp_size": 1, "context_tokens": 131_072}
    run = staged(wide, {"name": "phase.1", "steps": 9, "sp_size": 2}, {"name": "c"}, **memory)
    planned = configured_memory(stage_config(run.config, 1), run.shape).device_bytes / GIB
    text = failed_step(run, CUDA, planned, stage=1)
    assert f"{planned:.3g} GiB were planned" in text
    before, _, options = text.partition(": --set ")
    assert "parallel." not in options and "workers" not in options
    assert ("stages.1.sp_size=4" in options) == bool(memory) == ("(--branch)" in before)
    changed = stage_config(with_the_proposal(run, text), 1)
    assert configured_memory(changed, run.shape).device_bytes / GIB <= 0.9 * planned
    hopeless = failed_step(staged({"name": "a", "steps": 9}, {"name": "b", "sp_size": 2}, **LEAN), CUDA, 1.0, stage=1)
    assert "--set" not in hopeless and "stages.b.context_tokens" in hopeless


def test_a_process_that_trains_on_a_cpu_is_held_against_device_and_host_terms(failed_step: Callable[..., str]) -> None:
    config = run_of(device_gib=None).config
    cluster = config.cluster.model_copy(update={"gpus_per_worker": 0})
    run = Run(config.model_copy(update={"cluster": cluster}), make_shape(config))

    def taken(one: Config) -> float:
        memory = configured_memory(one, run.shape)
        return (WORKER_BYTES + memory.device_bytes + memory.host_bytes) / GIB

    text = failed_step(run, allocation, 200.0, device="cpu")
    assert f"200 GiB were resident at the peak, and {taken(run.config):.3g} GiB were planned (largest: peer " in text
    assert taken(with_the_proposal(run, text)) <= 0.9 * taken(run.config)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), RuntimeError("gloo: connection closed by peer")])
def test_other_errors_stay_as_they_are(error: RuntimeError, failed_step: Callable[..., str]) -> None:
    with pytest.raises(RuntimeError) as found:
        failed_step(run_of(), fails_with(error), 1.0)
    assert found.value is error


def test_a_model_that_does_not_fit_while_it_is_built_leaves_its_snapshot_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "peak_memory_gib", lambda _: 78.5)
    attempt = attempt_of(run_of(), "cuda", "state")
    written, run = attempt.context.diagnostics, attempt.context.run
    with (
        pytest.raises(diagnostics.OutOfMemoryError, match=r"outside a training step .*step-00000000"),
        diagnostics.memory_explained(run, attempt.stage, written, attempt.memory, None),
    ):
        CUDA()


@pytest.mark.parametrize("snapshot", [None, "a full disk"], ids=["none", "unwritten"])
def test_a_snapshot_that_was_not_written_is_not_named(failed_step: Callable[..., str], snapshot: Any) -> None:
    assert "snapshot" not in failed_step(run_of(), CUDA, 78.5, snapshot=snapshot)
