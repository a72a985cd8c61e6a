"""Law 1 on one process, for every architecture of the zoo: packed rows against each document alone, eager."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, shard_batch, unshard
from tests.breadth import fast_only
from tests.distributed.seam_case import ROWS, gradient_error, make_row, reference_step, relative_error
from tests.unit.attention.models import ARCHITECTURES, VOCAB, zoo_model


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads slow models of this size down: 12 s per model on a busy machine with two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "architecture",
    fast_only(ARCHITECTURES, "llama", "gemma2", "gemma4_text", "gpt_oss", "deepseek_v3", "gpt_neox", "llama4_text"),
)
def test_packed_documents_train_as_each_does_alone(architecture: str) -> None:
    mesh = SequenceMesh.from_group(None)
    model = apply_ulysses(zoo_model(architecture), mesh)
    wanted = reference_step(architecture, len(ROWS), torch.float64)
    own = reference_step(architecture, len(ROWS), torch.float32)
    batches = [shard_batch(*make_row(index), mesh) for index in range(len(ROWS))]
    with torch.no_grad():
        for row, batch in enumerate(batches):
            error = relative_error(unshard(model(**batch.model_inputs()).logits, batch).double(), wanted.logits[row])
            # Law 1's bound, for logits: the floor, or twice what rounding alone does to one process.
            bound = max(1e-5, 2 * relative_error(own.logits[row].double(), wanted.logits[row]))
            assert error <= bound, f"logits of row {row} are off by {error:.1e}"
    sums, counts = zip(*(causal_lm_loss(model, batch) for batch in batches), strict=True)
    loss = torch.stack(sums).sum() / torch.stack(counts).sum()
    loss.backward()
    assert abs(loss.item() - wanted.loss) <= 1e-5 * wanted.loss
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    error, worst = gradient_error(gradients, own.gradients, wanted.gradients)
    assert error <= 1.0, f"the gradient of {worst} is off by {error:.2f} x the bound"


@pytest.mark.parametrize(
    ("architecture", "without"),
    [
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"sliding_window": 200}),
        ("granite", {"attention_multiplier": 8**-0.5}),
        ("gpt_oss", {"sinks": None}),
        ("llama4_text", {"attention_chunk_size": 200}),
        ("llama4_text", {"attn_temperature_tuning": False}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_a_missing_feature_of_an_architecture_would_show(architecture: str, without: dict[str, object]) -> None:
    ids = torch.randint(1, VOCAB, (1, 20), generator=torch.Generator().manual_seed(0))
    model = zoo_model(architecture)
    other = zoo_model(architecture, **{name: value for name, value in without.items() if name != "sinks"})
    with torch.no_grad():
        if "sinks" in without:
            for layer in other.model.layers:
                layer.self_attn.sinks.fill_(-100.0)
        last, changed = (each(input_ids=ids, use_cache=False).logits[0, -1] for each in (model, other))
    assert relative_error(changed, last) > 1e-3
