"""Law 1 and isolation for layers that carry state along the sequence, and isolation for attention."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, shard_batch, unshard
from ray_ulysses.attention import exchange
from ray_ulysses.attention.kernels import KERNELS
from ray_ulysses.attention.mixers import find_mixers
from ray_ulysses.attention.recompute import KeptOutput
from tests.distributed.harness import run_calls, run_ranks
from tests.distributed.seam_case import ROWS, SeamCase, checkpointed
from tests.distributed.test_recompute import counted_exchanges
from tests.distributed.test_seam_parity import hold
from tests.unit.attention.models import HYBRIDS, VOCAB, magnified, tiny_model, zoo_model

# No document but the first begins at a slice's border, and one is shorter than a convolution.
LENGTHS = (11, 17, 1, 9)
ROW_TOKENS = 48
CHANGED = slice(11, 28)


def _row() -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, ROW_TOKENS), generator=torch.Generator().manual_seed(5))


def leaks(model: Any, mesh: SequenceMesh, layers: dict[str, Any]) -> tuple[list[str], float]:
    """Change the tokens of the second document.

    Return which of the layers' outputs and the logits differ by a bit outside it, and how far the logits are apart.
    """
    outputs: dict[str, list[torch.Tensor]] = {"logits": []}
    for name, module in layers.items():
        module.register_forward_hook(
            lambda module, args, out, name=name: outputs.setdefault(name, []).append(
                out[0] if isinstance(out, tuple) else out
            )
        )
    before = _row()
    after = before.clone()
    after[:, CHANGED] = (after[:, CHANGED] + 7) % VOCAB
    for ids in (before, after):
        batch = shard_batch(ids, None, LENGTHS, mesh)
        with torch.no_grad():
            outputs["logits"].append(model(**batch.model_inputs()).logits)
    others = torch.ones(sum(LENGTHS), dtype=torch.bool)
    others[CHANGED] = False
    whole = {name: [unshard(out, batch) for out in pair] for name, pair in outputs.items()}
    assert not any(torch.equal(one[:, ~others], other[:, ~others]) for one, other in whole.values())
    found = [name for name, (one, other) in whole.items() if not torch.equal(one[:, others], other[:, others])]
    one, other = (part[:, others].double() for part in whole["logits"])
    return found, float((one - other).norm() / one.norm())


def leaks_of_hybrids(rank: int, world_size: int, architectures: Sequence[str]) -> dict[str, list[str]]:
    """Return by architecture the layers that carry state and leak."""
    mesh, found = SequenceMesh.from_group(dist.group.WORLD), {}
    for architecture in architectures:
        model = apply_ulysses(zoo_model(architecture), mesh)
        layers = {name: module for name, module, _ in find_mixers(model)}
        assert layers
        found[architecture] = [name for name in leaks(model, mesh, layers)[0] if name != "logits"]
    return found


def attention_leaks(
    rank: int, world_size: int, ring_size: int, kind: str, kernel: Any, changes: dict[str, Any]
) -> tuple[list[str], float]:
    mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
    model = apply_ulysses(magnified(tiny_model(kind, **changes)), mesh, attention=kernel)
    return leaks(model, mesh, {"attention": model.model.layers[0].self_attn})


def dense_leaks(rank: int, world_size: int, ring_size: int) -> dict[str, list[str]]:
    """Return what differs by a bit in dense models, by kernel and kind of layer."""
    kinds: dict[str, dict[str, Any]] = {"llama": {}, "mistral": {"sliding_window": 5}}
    return {
        f"{kernel}-{kind}": attention_leaks(rank, world_size, ring_size, kind, kernel, changes)[0]
        for kernel in ON_CPU
        for kind, changes in kinds.items()
    }


def exchanges_by_kept(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    mesh = SequenceMesh.from_group(dist.group.WORLD)
    kept: tuple[KeptOutput | None, ...] = (None, "both", "kernel", "none")
    return {one or "plain": _exchanges(mesh, one) for one in kept}


def traffic(rank: int, world_size: int, architectures: Sequence[str]) -> dict[str, tuple[int, list[int]]]:
    mesh, start = SequenceMesh.from_group(dist.group.WORLD), exchange._exchanged
    found: dict[str, tuple[int, list[int]]] = {}
    for name in architectures:
        sent: list[int] = []

        def counted(payload_UBLC: torch.Tensor, group: str, sent: list[int] = sent) -> torch.Tensor:
            sent.append(payload_UBLC.numel() - payload_UBLC[mesh.ulysses_rank].numel())
            return start(payload_UBLC, group)

        with mock.patch.object(exchange, "_exchanged", counted):
            exchanges, _ = _exchanges(mesh, "both", name)
        found[name] = (exchanges, sent)
    return found


def sums_by_documents(rank: int, world_size: int, lengths: dict[str, list[int]]) -> dict[str, tuple[list[int], int]]:
    mesh = SequenceMesh.from_group(dist.group.WORLD)
    plain, summed = dist.all_reduce, []

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        summed.append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    found = {}
    for name, documents in lengths.items():
        summed.clear()
        with mock.patch.object(dist, "all_reduce", counted):
            exchanges, _ = _exchanges(mesh, "both", "jamba", documents)
        found[name] = (list(summed), exchanges)
    return found


def _exchanges(
    mesh: SequenceMesh, kept: KeptOutput | None, architecture: str = "qwen3_next", lengths: Sequence[int] = LENGTHS
) -> tuple[int, int]:
    model = checkpointed(apply_ulysses(zoo_model(architecture), mesh), kept)
    sent: list[tuple[int, int]] = []
    with counted_exchanges(sent):
        loss_sum, _ = causal_lm_loss(model, shard_batch(_row(), None, lengths, mesh))
        loss_sum.backward()
    return len(sent), sum(elements for _, elements in sent)


CONVOLUTION_TOKENS = 3
"""Tokens before a token that the shortest convolution of the zoo reads; Mamba's and the delta nets' read one more."""


@pytest.mark.parametrize("ulysses_size", [2, 4])
def test_documents_end_inside_the_convolution_on_both_sides_of_a_border_of_slices(ulysses_size: int) -> None:
    distances = set()
    for tokens, lengths in ROWS:
        slice_tokens = -(-tokens // ulysses_size)
        ends = accumulate(lengths)
        distances.update(end - rank * slice_tokens for end in ends for rank in range(1, ulysses_size))
    near = {distance for distance in distances if abs(distance) < CONVOLUTION_TOKENS}
    assert near >= {-1, 0, 1}
    assert any(1 in lengths for _, lengths in ROWS) and any(sum(lengths) < tokens for tokens, lengths in ROWS)
    assert any(len(lengths) == 1 for _, lengths in ROWS)


FAST = ("lfm2", "qwen3_next", "jamba")
OF_EACH_KIND = ("lfm2", "qwen3_next", "kimi_linear", "minimax", "jamba", "nemotron_h")
DOCUMENTS = {"one": [ROW_TOKENS], "packed": list(LENGTHS)}


@pytest.fixture(scope="module")
def measured() -> dict[str, list[Any]]:
    calls = {
        "leaks": (leaks_of_hybrids, FAST),
        "traffic": (traffic, OF_EACH_KIND),
        "kept": (exchanges_by_kept,),
        "sums": (sums_by_documents, DOCUMENTS),
        "dense": (dense_leaks, 1),
    }
    on_a_ring = {"dense on a ring": (dense_leaks, 2), "experts": (attention_leaks, 2, "mixtral", "auto", EXPERTS)}
    return run_calls(2, calls, timeout_s=240) | run_calls(4, on_a_ring)


@pytest.mark.parametrize(
    ("ulysses_size", "names", "num_rows"),
    [
        # Among them a row with padding, a border inside of the convolution and one on that of slices.
        (2, FAST, 4),
        pytest.param(2, tuple(HYBRIDS), len(ROWS), marks=pytest.mark.slow),
        pytest.param(4, tuple(HYBRIDS), len(ROWS), marks=pytest.mark.slow),
    ],
    ids=["2-each-kind", "2", "4"],
)
def test_every_hybrid_equals_one_process_on_each_document(
    ulysses_size: int, names: tuple[str, ...], num_rows: int
) -> None:
    hold([SeamCase(architecture=name, ulysses_size=ulysses_size, accumulation=num_rows) for name in names], 300)


def test_no_bit_of_a_document_reaches_another(measured: dict[str, list[Any]]) -> None:
    assert measured["leaks"] == [{name: [] for name in FAST}] * 2


@pytest.mark.slow
def test_no_bit_of_a_document_reaches_another_in_any_model() -> None:
    found = run_ranks(leaks_of_hybrids, 4, tuple(HYBRIDS), timeout_s=240)
    assert found == [{name: [] for name in HYBRIDS}] * 4


TRAFFIC = {
    # Layers that carry state and layers of attention, and per token what one of the former sends to the other of two
    # ranks: of its projections' results, and of its output. Half of the channels of each, and of Mamba's states all
    # that belong to a group that both ranks have heads of.
    "lfm2": (1, 1, 3 * 32 // 2, 32 // 2),
    "qwen3_next": (1, 1, (2 * 24 + 2 * 40 + 2 * 8) // 2, 40 // 2),
    "kimi_linear": (1, 1, (5 * 24 + 4) // 2, 24 // 2),
    "minimax": (1, 1, 3 * 24 // 2, 24 // 2),
    "jamba": (1, 1, 2 * 64 // 2, 64 // 2),
    "nemotron_h": (1, 1, (64 + 2 * 4 * 5 + 8) // 2, 64 // 2),
}


def test_a_layer_sends_each_channel_to_the_rank_of_its_head_and_no_more(measured: dict[str, list[Any]]) -> None:
    """Forward, recomputation and backward of all layers, the output kept in both layouts."""
    for counts in measured["traffic"]:
        assert counts.keys() == set(OF_EACH_KIND)
        for name, (exchanges, sent) in counts.items():
            mixers, attention, gathered, scattered = TRAFFIC[name]
            assert exchanges == 5 * (mixers + attention), name
            sizes = [ROW_TOKENS // 2 * width for width in (gathered,) * 3 + (scattered,) * 2]
            assert sorted(sent) == sorted(sizes * mixers), name


def test_a_layer_that_carries_state_takes_as_many_collectives_as_attention(measured: dict[str, list[Any]]) -> None:
    """Forward, recomputation and backward: with the output kept, the exchange after the layer is not repeated."""
    expected = {"plain": (4, 2, 2), "both": (5, 3, 2), "kernel": (6, 3, 3), "none": (6, 3, 3)}
    for counts in measured["kept"]:
        assert counts.keys() == expected.keys()
        for kept, (exchanges, gathers, scatters) in expected.items():
            # Per key head 2 * 6 of queries and keys, 2 * 2 * 5 of values and gates, 2 * 2 of strengths and decays; half
            # of the heads go to the other rank, and half of the 8 * 5 channels of the output.
            mixer = ROW_TOKENS // 2 * (gathers * 4 * (12 + 20 + 4) + scatters * 40) // 2
            # Attention has 4 query heads and 2 KV heads of 8.
            attention = ROW_TOKENS // 2 * 8 * (exchanges * 4 + gathers * 2 * 2) // 2
            assert counts[kept] == (2 * exchanges, mixer + attention), kept


def test_time_steps_and_states_of_all_channels_take_one_sum_whatever_the_documents(
    measured: dict[str, list[Any]],
) -> None:
    """Forward, recomputation and backward; beside the exchanges that other layers take."""
    for counts in measured["sums"]:
        # A time step of 4 values, and 5 each of the two states.
        assert counts == dict.fromkeys(DOCUMENTS, ([ROW_TOKENS * 14] * 3, 2 * 5))


ON_CPU = [entry.name for entry in KERNELS if entry.runs_on("cpu")]
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}


@pytest.mark.parametrize("layout", ["dense", "dense on a ring"])
def test_logits_of_a_dense_model_are_bitwise_alone(measured: dict[str, list[Any]], layout: str) -> None:
    for found in measured[layout]:
        assert not any(found.values()), found
        assert len(found) == 2 * len(ON_CPU) == 4


def test_attention_of_a_mixture_is_bitwise_alone_and_its_logits_within_law_1(measured: dict[str, list[Any]]) -> None:
    """An expert's batch holds other documents' tokens, which changes the order of its sums."""
    for found, error in measured["experts"]:
        assert "attention" not in found
        assert error <= 1e-5


def test_every_kernel_of_the_table_is_either_probed_here_or_on_a_gpu() -> None:
    assert ON_CPU == ["sdpa", "math"]
    assert {entry.name for entry in KERNELS} - set(ON_CPU) == {
        "flash_attn_4",
        "flash_attn_3",
        "flash_attn",
        "cudnn",
        "varlen",
    }
