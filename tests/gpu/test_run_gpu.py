"""The real training loop on one GPU: it trains what a CPU trains, and goes on from storage and from peer memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.config import Config
from ray_ulysses.tracking.events import AttemptStarted, StepDone
from tests.distributed.agent_process import AgentProcess
from tests.distributed.run_case import make_config, make_corpus
from tests.unit.tracking.journals import read_events

MODEL = {
    "model_type": "llama", "vocab_size": 264, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
STEPS = 12
# The slow kernel sums in one order: what is trained again has the same bits.
EXACT = {"model__attention": "math", "model__config": MODEL, "model__dtype": "fp32"}
WAYS: dict[str, dict[str, Any]] = {
    "zero-3": {"memory__zero_stage": 3},
    "weights-on-the-cpu": {"memory__offload_optimizer": "cpu", "memory__offload_param": "cpu"},
    "activations-on-the-cpu": {
        "memory__offload_activations": ["layer_inputs", "attention_outputs"], "memory__attention_output": "both",
        "memory__loss_tile": 48, "memory__mlp_tile": 48, "memory__zero_stage": 3,
    },
    "bf16-zero-1": {"model__dtype": "bf16", "memory__zero_stage": 1},
    "adapter": {"model__adapter": {"rank": 4}, "memory__zero_stage": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture
def agents() -> Iterator[dict[str, str]]:
    """Vault agents of two nodes."""
    started = {name: AgentProcess.start({}) for name in ("a", "b")}
    yield {name: agent.address for name, agent in started.items()}
    for agent in started.values():
        agent.kill()


def config_of(folder: Path, corpus: Path, **overrides: Any) -> Config:
    changes = {
        **EXACT, "run__stop_step": STEPS, "parallel__sp_size": 1, "cluster__workers": 1, "data__rows_per_step": 2,
        "data__epochs": 8, "checkpoint__every_steps": 4, **overrides,
    }  # fmt: skip
    return make_config(folder, corpus, **changes)


def trained(config: Config, folder: Path, may_die: bool = False, **order: Any) -> dict[str, Any]:
    """Run an attempt in a process of its own."""
    out = folder / "out.json"
    order = {"config": config.model_dump(mode="json"), "session": f"session-{len(losses(config))}", **order}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.one_run", json.dumps({**order, "out": str(out)})],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "LOCAL_RANK": "0"},
    )  # fmt: skip
    assert may_die or done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return {} if may_die else dict(json.loads(out.read_text()))


def losses(config: Config) -> dict[int, float]:
    if not config.run_dir.exists():
        return {}
    return {event.step: event.loss for event in read_events(config.run_dir) if isinstance(event, StepDone)}


def starts(config: Config) -> list[int]:
    return [event.resumed_step for event in read_events(config.run_dir) if isinstance(event, AttemptStarted)]


def assert_same(ours: Mapping[int, float], wanted: Mapping[int, float], bound: float) -> None:
    assert ours.keys() == wanted.keys() and len(wanted) == STEPS
    assert {step: ours[step] / wanted[step] - 1 for step in wanted} == pytest.approx(
        dict.fromkeys(wanted, 0.0), abs=bound
    )


def test_a_gpu_trains_what_a_cpu_trains(corpus: Path, tmp_path: Path) -> None:
    on_gpu, on_cpu = (config_of(tmp_path / device, corpus) for device in ("cuda", "cpu"))
    trained(on_gpu, tmp_path)
    trained(on_cpu, tmp_path, device="cpu")
    # fp32 on both; sums in another order, carried through twelve updates.
    assert_same(losses(on_gpu), losses(on_cpu), 2e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_stopped_goes_on_as_if_it_had_not(corpus: Path, tmp_path: Path, way: str) -> None:
    whole, parts = (config_of(tmp_path / name, corpus, **WAYS[way]) for name in ("whole", "parts"))
    trained(whole, tmp_path)
    assert trained(parts, tmp_path, stop_at=6)["end"][0] == "stopped"
    trained(parts, tmp_path)
    first, second = starts(parts)
    assert first == 0 and 6 <= second < STEPS
    assert_same(losses(parts), losses(whole), 1e-6)


def test_a_killed_run_goes_on_from_peer_memory(corpus: Path, tmp_path: Path, agents: dict[str, str]) -> None:
    whole, killed = (config_of(tmp_path / name, corpus, checkpoint__every_steps=100) for name in ("whole", "killed"))
    trained(whole, tmp_path)
    order = {"peer_memory": (agents, "token")}
    trained(killed, tmp_path, may_die=True, kill=(0, "in memory", 5), **order)
    trained(killed, tmp_path, **order)
    first, second = starts(killed)
    assert first == 0 and second >= 4, "storage has no checkpoint"
    assert_same(losses(killed), losses(whole), 1e-6)
