"""A small run of the real training loop on gloo ranks, without Ray: what the tests of recovery drive."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import ge
from pathlib import Path
from typing import Any

import torch

from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.fence import claim_attempt
from ray_ulysses.clock import SystemClock
from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.read.row_source import DirectSource
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.peer_memory import AgentAddresses, partners
from ray_ulysses.run.preflight import PreparedRun, check_resume, claim_directory, prepare_run
from ray_ulysses.run.requests import announce_session, request_save, request_stop
from ray_ulysses.run_names import NOTICE_FILE
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.history import RunHistory
from ray_ulysses.trainer import step as step_module
from ray_ulysses.trainer.loop import run_attempt
from ray_ulysses.trainer.worker import Worker
from tests.apart import losses_apart
from tests.distributed.harness import run_ranks, run_ranks_to_outcomes
from tests.local_preparation import prepare_local
from tests.polling import wait_until

TIMEOUT_S, _PACE_TIMEOUT_S = 200.0, 30.0
SMALL_FILES = ("bisect.py", "cmd.py", "copy.py")
MORE_FILES = ("difflib.py", "doctest.py", "enum.py", "fractions.py")
STDLIB_FILES = ("ast.py", "argparse.py", "bisect.py", "calendar.py", "cmd.py", "copy.py", "csv.py", "dis.py")


def make_corpus(folder: Path, files: tuple[str, ...] = STDLIB_FILES) -> Path:
    paths = tuple(str(Path(os.__file__).with_name(name)) for name in files)
    prepare_local(PrepareRequest(sources=SourceSpec(paths=paths), out=folder / "corpus"))
    return folder / "corpus"


def make_config(storage: Path, corpus: Path, stages: Sequence[Mapping[str, Any]] = (), **overrides: Any) -> Config:
    tree: dict[str, Any] = {
        # Nearly as long as a few steps: left out where it is not the subject.
        "run": {"name": "run", "storage": str(storage), "stop_step": 44, "self_test": False},
        "model": {
            "init": "random",
            "dtype": "fp32",
            "config": {
                "model_type": "llama", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64,
                "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
            },
        },
        "data": {"path": str(corpus), "context_tokens": 256, "rows_per_step": 6, "engine": "local"},
        "parallel": {"sp_size": 2},
        "optimizer": {"lr": 3e-4},
        "schedule": {"warmup_steps": 4, "horizon_steps": 60},
        "checkpoint": {"every_steps": 5},
        "tracking": {"enabled": False},
        # As users train: what a resume changes of the order of collectives meets what recomputation expects.
        "memory": {"gradient_checkpointing": True},
        "cluster": {"workers": 4},
        **({"stages": list(stages)} if stages else {}),
    }  # fmt: skip
    for path, value in overrides.items():
        section, name = path.split("__")
        tree.setdefault(section, {})[name] = value
    return parse_config(tree)


def claim_run(prepared: PreparedRun) -> None:
    """Store a run's configuration and plan, and claim an attempt: from then on both are fixed."""
    claim_directory(prepared)
    claim_attempt(prepared.run.store, 1)


def targets_of(plan: Plan, steps: range) -> Counter[tuple[int, int]]:
    """Return the tokens that some steps predict: documents, and places in them."""
    pieces = [piece for step in steps for row in plan.step_rows(step) for piece in plan.pieces(row)]
    return Counter((piece.document, piece.start + at + 1) for piece in pieces for at in range(piece.num_labels))


def prepare_attempt(config: Config, session: str, branch: bool = False) -> None:
    """Do what the driver does before its workers start."""
    prepared = prepare_run(config, Path("/"), branch=branch)
    prepared.report.raise_problems()
    check_resume(prepared)
    claim_directory(prepared)
    announce_session(config.run_dir, session)


def _take_storage_away(run_dir: Path) -> None:
    """Put a file where the checkpoints' folder was: every write and every read fails."""
    (run_dir / "checkpoints").rename(run_dir / "checkpoints.away")
    (run_dir / "checkpoints").write_text("")


def _bring_storage_back(run_dir: Path) -> None:
    (run_dir / "checkpoints").unlink()
    (run_dir / "checkpoints.away").rename(run_dir / "checkpoints")


def _overtake(run_dir: Path) -> None:
    """Do what another attempt does first, once there is a checkpoint."""
    store = LocalStore(run_dir)
    wait_until(lambda: committed_steps(store), "a checkpoint")
    assert claim_attempt(store, 99)


ACTIONS: dict[str, Callable[[Path], object]] = {
    "request save": request_save,
    "notice": lambda run_dir: (run_dir / NOTICE_FILE).touch(),
    "notice over": lambda run_dir: (run_dir / NOTICE_FILE).unlink(),
    "storage away": _take_storage_away,
    "storage back": _bring_storage_back,
    "overtaken": _overtake,
    "directory away": lambda run_dir: run_dir.rename(run_dir.with_name("moved")),
}


def run_worker(
    rank: int,
    world_size: int,
    config: Config,
    session: str,
    kill: tuple[int, str, int] | None = None,
    stop_at: int | None = None,
    actions: Mapping[int, str] | None = None,
    environment: Mapping[str, str] | None = None,
    peer_memory: tuple[Mapping[str, str], str] | None = None,
    poison: tuple[int, str] | None = None,
    watch: Callable[[str, int], object] = lambda name, step: None,
    device: str = "cpu",
    nodes: int = 1,
) -> tuple[str, int]:
    """Be one worker of an attempt.

    Args:
        kill: ``(rank, event, step)``: that rank is killed with SIGKILL at that event of the loop.
        stop_at: Rank 0 asks for a stop after this step.
        peer_memory: Addresses of two nodes' agents and their token; the first half of the ranks is on the first node.
        poison: ``(row, "loss" or "gradient")``: that becomes NaN where rank 0 trains the row.
        nodes: How many nodes the workers are on, as many on each.
        actions: What happens to the run's directory after a step, one of `ACTIONS`; rank 0 does it.
    """
    os.environ.update(environment or {})
    if poison is not None and rank == 0:
        _poison(*poison)

    def on_event(name: str, step: int) -> None:
        watch(name, step)
        # A state that is being kept in memory may make the next step pass by.
        is_due = kill is not None and (step >= kill[2] if name == "in memory" else step == kill[2])
        if kill is not None and kill[:2] == (rank, name) and is_due:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and name == "step" and step == stop_at:
            request_stop(config.run_dir, session)
        if rank == 0 and name == "step" and actions is not None and step in actions:
            ACTIONS[actions[step]](config.run_dir)

    def make_source(plan: Any, reader: Any, layout: Any, rank: int) -> Any:
        place = (layout.dp_rank(rank), layout.dp_size, layout.sp_rank(rank), layout.sp_size)
        return DirectSource(reader, plan, *place, ring_size=layout.ring_size)

    node, addresses = f"node-{rank * nodes // world_size}", None
    if peer_memory is not None:
        agents, token = peer_memory
        node = sorted(agents)[rank * len(agents) // world_size]
        partner = partners(dict.fromkeys(agents))[node]
        addresses = AgentAddresses(agents=agents, node=node, partner=partner, token=token)
    worker = Worker(
        rank=rank, local_rank=rank, world_size=world_size, node=node, device=torch.device(device), session=session,
        make_source=make_source, peer_memory=addresses, clock=SystemClock(), on_event=on_event,
    )  # fmt: skip
    end = run_attempt(config, worker)
    return end.status, end.step


def run_paced_worker(*arguments: Any, **options: Any) -> tuple[str, int]:
    """Be a worker whose steps last at least as long as a save or a copy to memory: one step at most passes meanwhile.

    A state is saved in the background. How many of a tiny model's steps pass meanwhile says how busy a machine is. A
    save of step 4 has ended, well or not, before an action or a death after step 5.
    """
    ended = threading.Condition()
    begun, done = {"save": 0, "memory": 0}, {"save": 0, "memory": 0}
    ends = {"saved": "save", "not saved": "save", "in memory": "memory"}

    def watch(name: str, step: int) -> None:
        with ended:
            if name in begun:
                begun[name] = step
            elif name in ends:
                done[ends[name]] = step
                ended.notify()
            elif name == "step":
                waited = ended.wait_for(lambda: all(map(ge, done.values(), begun.values())), _PACE_TIMEOUT_S)
                assert waited, f"after {_PACE_TIMEOUT_S} s: {begun} have begun, and {done} are done"

    return run_worker(*arguments, watch=watch, **options)


def train(
    config: Config, session: str = "one", *, branch: bool = False, worker: Any = run_worker, **options: Any
) -> tuple[str, int]:
    """Train an attempt on ranks of its own, and return how it has ended."""
    prepare_attempt(config, session, branch)
    ends: list[Any] = run_ranks(worker, config.cluster.workers.max, config, session, timeout_s=TIMEOUT_S, **options)
    assert len(set(ends)) == 1
    return ends[0]


def train_to_death(config: Config, session: str, kill: tuple[int, str, int], **options: Any) -> None:
    prepare_attempt(config, session)
    workers = config.cluster.workers.max
    outcomes = run_ranks_to_outcomes(
        run_paced_worker, workers, config, session, kill=kill, timeout_s=TIMEOUT_S, **options
    )
    assert outcomes[kill[0]].exit_code == -signal.SIGKILL
    assert not any(outcome.ok for outcome in outcomes)


def assert_same_run(ours: RunHistory, wanted: RunHistory) -> None:
    """Hold a run to law 2 and 3: the same rows and tokens in the same order, and the same losses."""
    assert [(step.rows, step.tokens) for step in ours.steps] == [(step.rows, step.tokens) for step in wanted.steps]
    assert ours.data_digest == wanted.data_digest
    assert losses_apart(ours, wanted) <= 1e-5


def _poison(row: int, kind: str) -> None:
    """Make the loss, or only its gradient, NaN where this process trains a row."""
    real_batch, real_loss, trained = step_module.batch_of, step_module.row_loss, [-1]

    def batch_of(one: Any, *arguments: Any) -> Any:
        trained[0] = one.row
        return real_batch(one, *arguments)

    def row_loss(*given: Any, **options: Any) -> Any:
        found = real_loss(*given, **options)
        if trained[0] != row:
            return found
        if kind == "loss":
            nan = float("nan")
            return found._replace(objective_sum=found.objective_sum * nan, loss_sum=found.loss_sum * nan)
        return found._replace(objective_sum=_BadGradient.apply(found.objective_sum))

    step_module.batch_of, step_module.row_loss = batch_of, row_loss


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Any) -> Any:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * float("nan")
