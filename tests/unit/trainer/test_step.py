"""One optimizer step on one process: sums, digests, refusals, and steps that end an attempt."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ray_ulysses import apply_ulysses
from ray_ulysses.attention.batch import IGNORE_INDEX
from ray_ulysses.attention.documents import on_device
from ray_ulysses.config.running import ElasticSection
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.read.digest import add_digests, row_digest, slice_checksum
from ray_ulysses.data.read.reader import RowReader, RowSlice
from ray_ulysses.data.read.row_source import DirectSource
from ray_ulysses.engine.router_health import RouterWatch
from ray_ulysses.errors import FinalError, RunError
from ray_ulysses.parallel.layout import ParallelLayout
from ray_ulysses.parallel.mesh import SequenceMesh
from ray_ulysses.trainer.loop import _due, _padded
from ray_ulysses.trainer.source_loss import SourceLosses
from ray_ulysses.trainer.step import (
    BadStepError,
    Flags,
    StepGuard,
    StepResult,
    _seed_generators,
    batch_of,
    evaluate,
    read_back,
    train_step,
)
from tests.unit.attention.meshes import place
from tests.unit.attention.models import zoo_model
from tests.unit.data.corpora import MemoryStore
from tests.unit.data.plans import build_plan

DEVICE = torch.device("cpu")
VOCAB = 8


class SmallStore(MemoryStore):
    def read(self, document: int, start: int, length: int) -> Any:
        return (super().read(document, start, length) * 7 + document) % VOCAB


STORE = SmallStore([30, 12, 9, 41, 22, 17])
SETTINGS = PlanSettings(seed=1, context_tokens=24, pad_multiple=8, rows_per_step=3)
PLAN: Plan = build_plan(STORE.lengths, STORE.fingerprint, SETTINGS)
READER = RowReader(STORE, PLAN)


class FakeEngine:
    """A fake engine of one rank whose model is a table of logits."""

    def __init__(self, accumulation: int) -> None:
        torch.manual_seed(0)
        self.table = torch.randn(VOCAB, VOCAB, requires_grad=True)
        self.accumulation = accumulation
        self.micro_steps, self.norm, self.modes = 0, 1.5, list[str]()
        self.train, self.eval = partial(self.modes.append, "train"), partial(self.modes.append, "eval")
        self.get_global_grad_norm, self.zero_optimization_stage = lambda: self.norm, lambda: 3
        self.draws: list[float] = []

    def __call__(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        self.draws.append(float(torch.rand(())))
        return SimpleNamespace(logits=self.table[input_ids])

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.accumulation).backward()

    def step(self) -> None:
        self.micro_steps += 1


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
    planned: dict[str, Any] = {"rows": PLAN.step_rows(1), "tokens": PLAN.step_tokens(1), "seed": 5}
    return train_step(engine, slices, mesh=mesh, device=DEVICE, accumulation=len(slices), **planned | changes)


def assert_trained(engine: FakeEngine, found: StepResult, z_loss: float = 0.0) -> None:
    """Compare a step with the mean losses over all tokens of the first step and the gradient of their sum."""
    table = engine.table.detach().clone().requires_grad_()
    tokens, labels = (
        torch.from_numpy(np.concatenate([getattr(one, name) for one in slices_of(1)]))
        for name in ("input_ids", "labels")
    )
    loss = torch.nn.functional.cross_entropy(table[tokens], labels)
    z = z_loss * table[tokens].logsumexp(-1).square()[labels != IGNORE_INDEX].mean()
    (loss + z).backward()
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert found.z_loss == pytest.approx(float(z.detach()), rel=1e-6)
    assert table.grad is not None and engine.table.grad is not None
    assert (engine.table.grad - table.grad).norm() <= 1e-5 * table.grad.norm()


def test_the_loss_is_a_mean_over_all_tokens_of_the_step_and_its_gradient_that_of_the_mean(mesh: SequenceMesh) -> None:
    engine = FakeEngine(3)
    found = take(engine, mesh, slices_of(1), num_direct=lambda: engine.micro_steps)
    assert_trained(engine, found)
    assert found.tokens == PLAN.step_tokens(1)
    assert engine.micro_steps == 3 == found.direct_rows


def test_a_z_loss_is_trained_on_and_reported_beside_the_loss(mesh: SequenceMesh) -> None:
    engine = FakeEngine(4)
    assert_trained(engine, take(engine, mesh, [*slices_of(1), READER.filler(0, 1)], z_loss=0.1), 0.1)


def test_the_digest_is_that_of_the_rows_whatever_their_order_and_fillers_add_nothing(mesh: SequenceMesh) -> None:
    slices = slices_of(1)
    wanted = add_digests(*(row_digest(one.row, slice_checksum(one)) for one in slices))
    filled = [*slices[::-1], READER.filler(0, 1)]
    plain, padded = take(FakeEngine(3), mesh, slices), take(FakeEngine(4), mesh, filled)
    assert plain.digest == padded.digest == wanted
    assert padded.loss == pytest.approx(plain.loss, rel=1e-12)
    repeated = [slices[0], slices[0], slices[2]]
    received = sum(one.num_supervised for one in repeated)
    assert take(FakeEngine(3), mesh, repeated, tokens=received).digest != wanted


def test_random_draws_belong_to_the_row_not_its_place(mesh: SequenceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
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
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    for device, wanted in (("cpu", []), ("cuda:0", [5])):
        _seed_generators(5, torch.device(device))
        assert seeds == wanted and torch.initial_seed() == 5


def test_rows_that_bring_other_tokens_than_planned_end_the_run(mesh: SequenceMesh) -> None:
    planned = PLAN.step_tokens(1)
    with pytest.raises(RunError, match=rf"the plan expects {planned + 1}.*Restore data\.path"):
        take(FakeEngine(3), mesh, slices_of(1), tokens=planned + 1)


def test_a_row_whose_loss_is_not_finite_is_named(mesh: SequenceMesh) -> None:
    class BadSecondRow(FakeEngine):
        def __call__(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
            logits = super().__call__(input_ids, **inputs).logits
            return SimpleNamespace(logits=logits * float("nan") if len(self.draws) == 2 else logits)

    slices = slices_of(1)
    found = take(BadSecondRow(3), mesh, slices)
    assert (found.is_finite, found.bad_rows) == (False, (slices[1].row,))


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_seen_under_a_finite_loss(mesh: SequenceMesh, norm: float) -> None:
    engine = FakeEngine(3)
    engine.norm = norm
    found = take(engine, mesh, slices_of(1))
    assert (found.is_finite, found.bad_rows) == (False, ()) and found.loss < 5.0


@pytest.mark.parametrize("norm", [1.5, float("nan")])
def test_a_step_that_is_not_applied_changes_no_bias_of_a_router_and_its_tokens_do_not_count_later(
    mesh: SequenceMesh, norm: float
) -> None:
    model: Any = apply_ulysses(zoo_model("deepseek_v3", n_routed_experts=8), mesh)
    routers = RouterWatch(model, 0.25)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    before = [bias.clone() for bias in biases]

    class Mixture(FakeEngine):
        def __call__(self, *args: Any, **inputs: Any) -> Any:
            return model(*args, **inputs)

    engine = Mixture(3)
    engine.norm = norm
    found = take(engine, mesh, slices_of(1), routers=routers)
    is_changed = [not torch.equal(bias, old) for bias, old in zip(biases, before, strict=True)]
    assert is_changed == [math.isfinite(norm)] * len(biases) and biases
    assert len(found.routing) == len(biases)
    assert not torch.cat(routers.take()).any()
    # The sums of corpora travel with those of the routers.
    beside = RouterWatch(model, 0.25)
    for bias, old in zip(biases, before, strict=True):
        bias.copy_(old)
    with_corpora = take(engine, mesh, slices_of(1), routers=beside, sources=SourceLosses(PLAN, DEVICE))
    assert [not torch.equal(bias, old) for bias, old in zip(biases, before, strict=True)] == is_changed
    assert with_corpora.routing == found.routing
    (corpus,) = with_corpora.sources
    assert corpus.weight == PLAN.step_tokens(1)
    assert corpus.loss_sum / corpus.weight == pytest.approx(found.loss, rel=1e-6)


def test_the_weights_are_not_updated_before_the_copies_of_the_last_state_are_waited_for(mesh: SequenceMesh) -> None:
    """The call comes right before the engine's last micro-step, which updates the weights."""
    engine, seen = FakeEngine(3), []
    take(engine, mesh, slices_of(1), before_update=lambda: seen.append(engine.micro_steps))
    assert seen == [2]


def test_evaluation_trains_nothing_leaves_the_engine_in_training_and_has_no_router_loss(mesh: SequenceMesh) -> None:
    engine = FakeEngine(1)
    ((loss, tokens, *_),) = evaluate(engine, [*slices_of(1), READER.filler(0, 1)], mesh, DEVICE, ends=[3])
    assert loss == pytest.approx(take(FakeEngine(3), mesh, slices_of(1)).loss, rel=1e-6)
    assert tokens == PLAN.step_tokens(1)
    assert engine.modes == ["eval", "train"] and engine.table.grad is None and engine.micro_steps == 0
    model: Any = apply_ulysses(zoo_model("mixtral", output_router_logits=True), mesh)
    found = evaluate(model, slices_of(1), mesh, DEVICE, ends=[3])
    model.config.output_router_logits = False
    assert found == evaluate(model, slices_of(1), mesh, DEVICE, ends=[3])


def test_an_evaluation_sums_the_losses_of_each_set_of_rows(mesh: SequenceMesh) -> None:
    parts = [evaluate(FakeEngine(1), [one], mesh, DEVICE, ends=[3])[0] for one in slices_of(1)]
    slices = [READER.filler(0, 1), *reversed(slices_of(1))]
    first, others = evaluate(FakeEngine(1), slices, mesh, DEVICE, ends=[1, 3])
    assert first == parts[0]
    tokens = parts[1].tokens + parts[2].tokens
    loss_sum = parts[1].loss * parts[1].tokens + parts[2].loss * parts[2].tokens
    assert (others.loss, others.tokens) == (pytest.approx(loss_sum / tokens), tokens)


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


def place_on_ring(sp_rank: int, sp_size: int, ring_size: int) -> SequenceMesh:
    return SequenceMesh(sp_size=sp_size, sp_rank=sp_rank, ring_size=ring_size, world_size=sp_size)


@pytest.mark.parametrize("mesh_of_rank", [place(0, 2), place_on_ring(1, 2, 2)], ids=["rank", "ring"])
def test_the_slice_of_another_rank_or_ring_is_refused(mesh_of_rank: SequenceMesh) -> None:
    with pytest.raises(RunError, match=r"row 0 arrived as slice 1 of 2 \(ring 1\), but this rank"):
        batch_of(READER.read("train", 0, 1, 2), mesh_of_rank, DEVICE)


def test_what_is_done_every_so_many_steps_is_done_at_their_multiples() -> None:
    assert [step for step in range(1, 13) if _due(5, step)] == [5, 10]
    assert [step for step in range(1, 13) if _due(5, step, is_last=step == 12)] == [5, 10, 12]
    assert not _due(None, 12, is_last=True)


def test_a_source_is_read_to_the_end_of_a_step_so_that_it_goes_on_to_the_next() -> None:
    source = DirectSource(READER, PLAN, 0, 1, 0, 1)
    context = SimpleNamespace(run=SimpleNamespace(layout=ParallelLayout(world_size=1, sp_size=1)), rank=0)
    attempt: Any = SimpleNamespace(context=context, reader=READER, accumulation=6)
    aheads = set()
    for step in (1, 2):
        assert len(list(_padded(attempt, source.step(step)))) == 6
        aheads.add(id(source._ahead))
    source.close()
    assert len(aheads) == 1


NAN, INF = float("nan"), float("inf")


def result(loss: float, **fields: Any) -> StepResult:
    defaults: dict[str, Any] = {"grad_norm": 1.0, "is_finite": True, "bad_rows": (), "tokens": 9, "digest": 1}
    return StepResult(loss=loss, flags=Flags(), z_loss=0.0, router_loss=0.0, **{**defaults, **fields})


@pytest.mark.parametrize(
    ("bad_steps", "error", "fields", "words"),
    [
        ("stop", None, {"bad_rows": (14,)}, ("of row 14 in rows 12 to 17", "elastic.bad_steps: skip")),
        ("skip", None, {"bad_rows": (12, 13)}, ("2 rows (the first is row 12)", "without these rows")),
        ("stop", None, {"loss": 2.5, "grad_norm": INF}, ("gradient of rows 12 to 17", "2.5000")),
        # A journal that can't be written changes nothing of the error.
        ("stop", RunError("full"), {"bad_rows": (14,)}, ("of row 14 in rows 12 to 17",)),
    ],
    ids=["stop", "skip", "gradient", "unwritten"],
)
def test_a_step_that_is_not_finite_is_recorded_and_its_rows_named(
    bad_steps: Any, error: RunError | None, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    record, found = Mock(side_effect=error), result(**{"loss": NAN, "is_finite": False} | fields)
    with pytest.raises(BadStepError) as bad:
        StepGuard(ElasticSection(bad_steps=bad_steps), record).judge(7, range(12, 18), "p", found)
    text = str(bad.value)
    assert isinstance(bad.value, FinalError) and all(word in text for word in words)
    record.assert_called_once_with(7, range(12, 18), "p", ANY)
    assert text.startswith(record.call_args.args[3])


@pytest.mark.parametrize("mads", [None, 5.0], ids=["unset", "set"])
def test_a_spike_is_bad_only_where_it_is_asked_for(mads: float | None) -> None:
    record = Mock()
    guard = StepGuard(ElasticSection(loss_spike_mads=mads), record)
    for step in range(1, 30):
        guard.judge(step, range(6), "p", result(2.0 + 0.1 * (step % 3)))
    if mads is None:
        guard.judge(30, range(6), "p", result(99.0))
    else:
        with pytest.raises(BadStepError, match=r"elastic\.loss_spike_mads=5 of the last 29"):
            guard.judge(30, range(6), "p", result(3.0))
    assert record.call_count == (mads is not None)
