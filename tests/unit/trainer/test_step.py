"""One optimizer step on one process: what it brings together, what it refuses, and that no layout enters it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ray_ulysses import apply_ulysses
from ray_ulysses.attention.batch import IGNORE_INDEX
from ray_ulysses.attention.documents import on_device
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.read.digest import add_digests, row_digest, slice_checksum
from ray_ulysses.data.read.reader import RowReader, RowSlice
from ray_ulysses.data.read.row_source import DirectSource
from ray_ulysses.errors import RunError
from ray_ulysses.parallel.layout import ParallelLayout
from ray_ulysses.parallel.mesh import SequenceMesh
from ray_ulysses.run.preflight import claim_directory, prepare_run
from ray_ulysses.run_names import PLAN_FOLDER
from ray_ulysses.trainer.loop import _due, _padded, open_rows
from ray_ulysses.trainer.step import Flags, StepResult, _seed_generators, batch_of, evaluate, read_back, train_step
from tests.distributed.run_case import make_config, make_corpus
from tests.unit.attention.meshes import place
from tests.unit.attention.models import zoo_model
from tests.unit.data.corpora import MemoryStore
from tests.unit.data.plans import build_plan

DEVICE = torch.device("cpu")
VOCAB = 8


class SmallStore(MemoryStore):
    """Documents of a few token values."""

    def read(self, document: int, start: int, length: int) -> Any:
        return (super().read(document, start, length) * 7 + document) % VOCAB


STORE = SmallStore([30, 12, 9, 41, 22, 17])
PLAN: Plan = build_plan(
    STORE.lengths,
    STORE.fingerprint,
    PlanSettings(seed=1, context_tokens=24, pad_multiple=8, rows_per_step=3),
)
READER = RowReader(STORE, PLAN)


class FakeEngine:
    """A table of logits as the model; sums gradients as an engine of one rank does."""

    def __init__(self, accumulation: int) -> None:
        torch.manual_seed(0)
        self.table = torch.randn(VOCAB, VOCAB, requires_grad=True)
        self.accumulation = accumulation
        self.micro_steps, self.norm = 0, 1.5
        self.training = True
        self.draws: list[float] = []

    def __call__(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        self.draws.append(float(torch.rand(())))
        return SimpleNamespace(logits=self.table[input_ids])

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.accumulation).backward()

    def step(self) -> None:
        self.micro_steps += 1

    def get_global_grad_norm(self) -> float:
        return self.norm

    def zero_optimization_stage(self) -> int:
        return 3

    def train(self) -> None:
        self.training = True

    def eval(self) -> None:
        self.training = False


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SequenceMesh]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield SequenceMesh.from_group(None)
    dist.destroy_process_group()


def slices_of(step: int) -> list[RowSlice]:
    source = DirectSource(READER, PLAN, 0, 1, 0, 1, prefetch_rows=0)
    slices = list(source.step(step))
    source.close()
    return slices


def take(engine: FakeEngine, mesh: SequenceMesh, slices: list[RowSlice], **changes: Any) -> StepResult:
    arguments: dict[str, Any] = {
        "rows": PLAN.step_rows(1),
        "tokens": PLAN.step_tokens(1),
        "mesh": mesh,
        "device": DEVICE,
        "accumulation": len(slices),
        "seed": 5,
    }
    return train_step(engine, slices, **{**arguments, **changes})


def test_rows_that_were_read_directly_are_counted_at_the_end_of_the_step(mesh: SequenceMesh) -> None:
    engine = FakeEngine(3)
    assert take(engine, mesh, slices_of(1), num_direct=lambda: engine.micro_steps).direct_rows == 3
    assert take(FakeEngine(3), mesh, slices_of(1)).direct_rows == 0


def test_the_loss_is_a_mean_over_all_tokens_of_the_step_and_its_gradient_that_of_the_mean(mesh: SequenceMesh) -> None:
    engine = FakeEngine(3)
    result = take(engine, mesh, slices_of(1))
    table = engine.table.detach().clone().requires_grad_()
    tokens = np.concatenate([one.input_ids for one in slices_of(1)])
    labels = np.concatenate([one.labels for one in slices_of(1)])
    wanted = torch.nn.functional.cross_entropy(table[torch.from_numpy(tokens)], torch.from_numpy(labels))
    wanted.backward()
    assert result.loss == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert result.tokens == PLAN.step_tokens(1)
    assert engine.micro_steps == 3
    assert table.grad is not None and engine.table.grad is not None
    assert (engine.table.grad - table.grad).norm() <= 1e-5 * table.grad.norm()


def test_a_z_loss_is_trained_on_and_reported_beside_the_loss(mesh: SequenceMesh) -> None:
    engine, plain = FakeEngine(4), FakeEngine(3)
    slices = slices_of(1)
    # A filler has no label, and no part in either.
    result = take(engine, mesh, [*slices, READER.filler(0, 1)], z_loss=0.1)
    wanted = take(plain, mesh, slices)
    assert wanted.z_loss == 0 and result.loss == pytest.approx(wanted.loss, rel=1e-6)
    table = engine.table.detach().clone().requires_grad_()
    tokens = torch.from_numpy(np.concatenate([one.input_ids for one in slices]))
    labels = torch.from_numpy(np.concatenate([one.labels for one in slices]))
    is_counted = labels != IGNORE_INDEX
    z_loss = 0.1 * table[tokens].logsumexp(-1).square()[is_counted].mean()
    (torch.nn.functional.cross_entropy(table[tokens], labels) + z_loss).backward()
    assert result.z_loss == pytest.approx(float(z_loss.detach()), rel=1e-6)
    assert table.grad is not None and engine.table.grad is not None
    assert (engine.table.grad - table.grad).norm() <= 1e-5 * table.grad.norm()


def test_the_digest_is_that_of_the_rows_whatever_their_order_and_fillers_add_nothing(mesh: SequenceMesh) -> None:
    slices = slices_of(1)
    wanted = add_digests(*(row_digest(one.row, slice_checksum(one)) for one in slices))
    filled = [*slices[::-1], READER.filler(0, 1)]
    assert take(FakeEngine(3), mesh, slices).digest == wanted
    assert take(FakeEngine(4), mesh, filled).digest == wanted
    assert take(FakeEngine(4), mesh, filled).loss == pytest.approx(take(FakeEngine(3), mesh, slices).loss, rel=1e-12)


def test_random_draws_belong_to_the_row_and_not_to_its_place(mesh: SequenceMesh) -> None:
    slices = slices_of(1)
    forward, backward = FakeEngine(3), FakeEngine(3)
    take(forward, mesh, slices)
    torch.manual_seed(77)
    take(backward, mesh, slices[::-1])
    assert forward.draws == backward.draws[::-1]
    assert len(set(forward.draws)) == 3
    other_seed = FakeEngine(3)
    take(other_seed, mesh, slices, seed=6)
    assert other_seed.draws != forward.draws


def test_random_draws_of_a_gpu_belong_to_the_row_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    for device, wanted in (("cpu", []), ("cuda:0", [5])):
        _seed_generators(5, torch.device(device))
        assert seeds == wanted
        assert torch.initial_seed() == 5


def test_rows_that_bring_other_tokens_than_planned_end_the_run(mesh: SequenceMesh) -> None:
    slices = slices_of(1)
    planned = PLAN.step_tokens(1)
    with pytest.raises(
        RunError, match=rf"rows 0 to 2 contained {planned} supervised tokens, the plan has {planned + 1}"
    ):
        take(FakeEngine(3), mesh, slices, tokens=planned + 1)


def test_a_repeated_row_ends_the_run_or_changes_its_digest(mesh: SequenceMesh) -> None:
    slices = slices_of(1)
    repeated = [slices[0], slices[0], slices[2]]
    received = sum(one.num_supervised for one in repeated)
    if received != PLAN.step_tokens(1):
        with pytest.raises(RunError, match=r"the corpus was changed during the run\. Restore data\.path and resume"):
            take(FakeEngine(3), mesh, repeated)
    right = take(FakeEngine(3), mesh, slices).digest
    assert take(FakeEngine(3), mesh, repeated, tokens=received).digest != right


def test_a_row_whose_loss_is_not_finite_is_named(mesh: SequenceMesh) -> None:
    class BadSecondRow(FakeEngine):
        def __call__(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
            logits = super().__call__(input_ids, **inputs).logits
            return SimpleNamespace(logits=logits * float("nan") if len(self.draws) == 2 else logits)

    slices = slices_of(1)
    result = take(BadSecondRow(3), mesh, slices)
    assert (result.is_finite, result.bad_rows) == (False, (slices[1].row,))


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_seen_under_a_finite_loss(mesh: SequenceMesh, norm: float) -> None:
    engine = FakeEngine(3)
    assert take(engine, mesh, slices_of(1)).is_finite
    engine.norm = norm
    result = take(engine, mesh, slices_of(1))
    assert (result.is_finite, result.bad_rows) == (False, ()) and result.loss < 5.0


def test_a_request_to_stop_reaches_the_result(mesh: SequenceMesh) -> None:
    assert take(FakeEngine(3), mesh, slices_of(1), flags=lambda: Flags(stop=True)).flags == Flags(stop=True)
    assert take(FakeEngine(3), mesh, slices_of(1)).flags == Flags()


def test_the_weights_are_not_updated_before_the_copies_of_the_last_state_are_waited_for(mesh: SequenceMesh) -> None:
    """Once a step, right before the engine's last micro-batch, which is the one that changes the weights."""
    engine, seen = FakeEngine(3), []
    take(engine, mesh, slices_of(1), before_update=lambda: seen.append(engine.micro_steps))
    assert seen == [2]


def test_too_few_micro_batches_are_our_own_mistake(mesh: SequenceMesh) -> None:
    with pytest.raises(AssertionError, match=r"2 micro-batches instead of 3"):
        take(FakeEngine(3), mesh, slices_of(1)[:2], accumulation=3)


def test_evaluation_trains_nothing_and_leaves_the_engine_in_training(mesh: SequenceMesh) -> None:
    engine = FakeEngine(1)
    loss, tokens = evaluate(engine, [*slices_of(1), READER.filler(0, 1)], mesh, DEVICE)
    assert loss == pytest.approx(take(FakeEngine(3), mesh, slices_of(1)).loss, rel=1e-6)
    assert tokens == PLAN.step_tokens(1)
    assert engine.training and engine.table.grad is None and engine.micro_steps == 0


def test_an_evaluation_has_no_router_loss(mesh: SequenceMesh) -> None:
    model: Any = apply_ulysses(zoo_model("mixtral", output_router_logits=True), mesh)
    loss, _ = evaluate(model, slices_of(1), mesh, DEVICE)
    model.config.output_router_logits = False
    assert loss == evaluate(model, slices_of(1), mesh, DEVICE)[0]


@pytest.mark.parametrize(("sp_size", "ring_size"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (4, 4)])
def test_the_checksum_is_of_the_tensors_that_the_model_is_given(sp_size: int, ring_size: int) -> None:
    for rank in range(sp_size):
        one = READER.read("train", 0, rank, sp_size, ring_size)
        batch = batch_of(one, place_on_ring(rank, sp_size, ring_size), DEVICE)
        assert read_back(batch)() == slice_checksum(one)
        batch.input_ids_BL[0, -1] += 1
        assert read_back(batch)() != slice_checksum(READER.read("train", 0, rank, sp_size, ring_size))


def test_a_batch_goes_to_a_gpu_from_pinned_memory_and_without_a_wait() -> None:
    host, asked = Mock(), Mock()
    host.pin_memory.return_value = asked
    assert on_device(host, "cuda:1") is asked.to.return_value
    asked.to.assert_called_once_with("cuda:1", non_blocking=True)
    assert on_device(torch.arange(3), "cpu").tolist() == [0, 1, 2]


def test_the_slice_for_another_ring_is_refused() -> None:
    one = READER.read("train", 0, 1, 4, 2)
    with pytest.raises(RunError, match=r"slice 1 of 4 \(ring 2\), but this rank trains slice 1 of 4 \(ring 4\)"):
        batch_of(one, place_on_ring(1, 4, 4), DEVICE)


def place_on_ring(sp_rank: int, sp_size: int, ring_size: int) -> SequenceMesh:
    """Return the mesh of one rank without process groups."""
    return SequenceMesh(sp_size=sp_size, sp_rank=sp_rank, ring_size=ring_size, world_size=sp_size)


def test_the_slice_of_another_rank_is_refused() -> None:
    one = READER.read("train", 0, 1, 2)
    with pytest.raises(
        RunError, match=r"row 0 arrived as slice 1 of 2 \(ring 1\), but this rank trains slice 0 of 2 \(ring 1\); the"
    ):
        batch_of(one, place(0, 2), DEVICE)


def test_what_is_done_every_so_many_steps_is_done_at_their_multiples() -> None:
    assert [step for step in range(1, 13) if _due(5, step)] == [5, 10]
    assert [step for step in range(1, 13) if _due(5, step, is_last=step == 12)] == [5, 10, 12]
    assert not any(_due(None, step, is_last=True) for step in range(1, 13))


def test_a_source_is_read_to_the_end_of_a_step_so_that_it_goes_on_to_the_next(tmp_path: Path) -> None:
    config = make_config(tmp_path / "runs", make_corpus(tmp_path))
    claim_directory(prepare_run(config, Path("/")))
    plan = load_plan(config.run_dir / PLAN_FOLDER)
    reader = open_rows(config, plan)
    source = DirectSource(reader, plan, 0, 1, 0, 1)
    run = SimpleNamespace(layout=ParallelLayout(world_size=1, sp_size=1))
    context = SimpleNamespace(run=run, rank=0)
    attempt: Any = SimpleNamespace(context=context, reader=reader, accumulation=6)
    aheads = set()
    for step in (1, 2, 3):
        assert len(list(_padded(attempt, source.step(step)))) == 6
        aheads.add(id(source._ahead))
    source.close()
    assert len(aheads) == 1
