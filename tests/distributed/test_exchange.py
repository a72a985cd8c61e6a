"""The Ulysses exchange over ranks: groups, what arrives where, its gradients, and how many collectives it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ray_ulysses import apply_ulysses, shard_batch, unshard
from ray_ulysses.attention.exchange import QKV, gather_heads, scatter_heads, split_heads
from ray_ulysses.errors import UserError
from ray_ulysses.parallel.collectives import Circulation, gather_sequence
from ray_ulysses.parallel.layout import ParallelLayout, RankHeads, assign_heads
from ray_ulysses.parallel.mesh import SequenceMesh
from tests.apart import worst
from tests.distributed.harness import run_calls, run_ranks
from tests.unit.attention.models import magnified, tiny_model
from tests.unit.attention.test_rope import KINDS

TOKENS, HEAD_SIZE, VALUE_SIZE = 24, 4, 6


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeReport:
    wrong: tuple[str, ...]
    forward_collectives: dict[str, int]
    backward_collectives: dict[str, int]


def exchange_equals_slicing(
    rank: int, world_size: int, num_heads: int, num_kv_heads: int, num_rows: int
) -> ExchangeReport:
    """Exchange heads, do something that is not linear to them, exchange back; hold it to slices of whole tensors."""
    torch.manual_seed(0)
    shapes = [(num_heads, HEAD_SIZE), (num_kv_heads, HEAD_SIZE), (num_kv_heads, VALUE_SIZE)]
    whole = [torch.randn(num_rows, heads, TOKENS, size, requires_grad=True) for heads, size in shapes]
    upstream = torch.randn(num_rows, TOKENS, num_heads, VALUE_SIZE)
    local_tokens = TOKENS // world_size
    mine = slice(rank * local_tokens, (rank + 1) * local_tokens)
    local = [tensor.detach()[:, :, mine].contiguous().requires_grad_() for tensor in whole]

    group: Any = dist.group.WORLD
    heads = assign_heads(num_heads, num_kv_heads, world_size).ranks[rank]
    with profile(activities=[ProfilerActivity.CPU]) as forward:
        payload_PBLF = gather_heads(*local, group.group_name)
        features_BSF = payload_PBLF.transpose(0, 1).flatten(1, 2)
        gathered = split_heads(features_BSF, heads, QKV, (HEAD_SIZE, HEAD_SIZE, VALUE_SIZE))
        out = scatter_heads(_stand_in(*gathered, heads), num_heads, num_kv_heads, group.group_name)
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        out.backward(upstream[:, mine])

    all_heads = assign_heads(num_heads, num_kv_heads, 1).ranks[0]
    wanted_out = _stand_in(*(tensor.transpose(1, 2) for tensor in whole), all_heads)
    wanted_out.backward(upstream)
    wrong = []
    kv = slice(heads.first_kv, heads.stop_kv)
    for name, ours, full, own in zip("qkv", gathered, whole, (slice(heads.first, heads.stop), kv, kv), strict=True):
        if not torch.equal(ours.detach(), full.detach()[:, own].transpose(1, 2)):
            wrong.append(f"{name} is not the whole sequence of this rank's heads")
    if not torch.equal(out.detach(), wanted_out.detach()[:, mine]):
        wrong.append("output is not this rank's slice of every head")
    for name, one, full in zip("qkv", local, whole, strict=True):
        truth = full.grad[:, :, mine]
        # fp32; the gradients of KV copies are added in another order.
        if not (one.grad - truth).norm() <= 1e-6 * truth.norm():
            wrong.append(f"the gradient of {name}")
    return ExchangeReport(
        wrong=tuple(wrong), forward_collectives=_collectives(forward), backward_collectives=_collectives(backward)
    )


def copied_gradients_are_added_in_fp32(rank: int, world_size: int) -> bool:
    group: Any = dist.group.WORLD
    width = HEAD_SIZE + HEAD_SIZE + VALUE_SIZE
    random = torch.Generator().manual_seed(rank)
    payload_PBLF = torch.randn(world_size, 1, TOKENS, width, generator=random).bfloat16()
    _, *ours = torch.ops.ray_ulysses.gather_heads_backward(
        payload_PBLF, world_size, 1, HEAD_SIZE, VALUE_SIZE, group.group_name
    )
    payloads = [torch.empty(payload_PBLF.shape) for _ in range(world_size)]
    dist.all_gather(payloads, payload_PBLF.float())
    total_LF = torch.zeros(TOKENS, width)
    for each in payloads:
        total_LF += each[rank, 0]
    parts = total_LF.bfloat16()[:, HEAD_SIZE:].split([HEAD_SIZE, VALUE_SIZE], dim=1)
    return all(torch.equal(one[0, 0], part) for one, part in zip(ours, parts, strict=True))


def _stand_in(
    query_BShD: torch.Tensor, key_BSkD: torch.Tensor, value_BSkE: torch.Tensor, heads: RankHeads
) -> torch.Tensor:
    """Mix tokens and heads as attention does, without its cost: each query head with its KV head."""
    places = torch.tensor([place for place, (_, count) in enumerate(heads.groups) for _ in range(count)])
    key_BShD, value_BShE = key_BSkD[:, :, places], value_BSkE[:, :, places]
    weights_BSh = (query_BShD * key_BShD.cumsum(dim=1)).sum(dim=-1).tanh()
    return weights_BSh.unsqueeze(-1) * value_BShE.cumsum(dim=1)


def circulated(rank: int, world_size: int) -> list[list[float]]:
    """Send two tensors round a ring at once, all the way; return what came at each step."""
    group: Any = dist.group.WORLD
    held = [torch.full((3,), float(rank)), torch.full((5,), 100.0 + rank)]
    seen = []
    for _ in range(world_size):
        under_way = [Circulation(tensor, group, tag) for tag, tensor in enumerate(held)]
        held = [circulation.wait() for circulation in reversed(under_way)][::-1]
        seen.append([float(tensor.unique()) for tensor in held])
    return seen


def _collectives(profiler: Any) -> dict[str, int]:
    return {event.key: event.count for event in profiler.key_averages() if event.key.startswith("c10d::")}


def gathered_sequence(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    local = (torch.arange(6.0).view(2, 3) + 10 * rank).requires_grad_()
    group: Any = dist.group.WORLD
    whole = gather_sequence(local, group)
    weights = torch.arange(float(whole.numel())).view_as(whole) * (rank + 1)
    (whole * weights).sum().backward()
    return whole.detach(), local.grad


def rope_error(rank: int, world_size: int, kind: str, tokens: int) -> tuple[float, float]:
    mesh = SequenceMesh.from_group(dist.group.WORLD)
    model: Any = apply_ulysses(magnified(tiny_model(**KINDS[kind])), mesh)
    row = torch.arange(tokens).unsqueeze(0) * 7 % 61
    with torch.no_grad():
        for other in (60, 12):
            model(**shard_batch(torch.arange(other) % 61, None, None, mesh).model_inputs())
    batch = shard_batch(row, None, None, mesh)
    logits = unshard(model(**batch.model_inputs()).logits, batch)
    # Every rank computes the whole loss from the gathered logits: it counts once a rank.
    (logits.float() ** 2).sum().div(world_size).backward()
    eager = magnified(tiny_model(**KINDS[kind]))
    wanted = eager(input_ids=row, use_cache=False).logits
    (wanted.float() ** 2).sum().backward()
    errors = []
    for ours, truth in zip(model.parameters(), eager.parameters(), strict=True):
        dist.all_reduce(ours.grad)
        errors.append(float((ours.grad - truth.grad).norm() / truth.grad.norm()))
    return float(((logits - wanted).norm() / wanted.norm()).detach()), worst(errors)


# (ranks, query heads, KV heads)
GROUPS = {
    "kv-heads-divide": (2, 4, 2),
    "ranks-share-a-kv-head": (4, 8, 2),
    "one-kv-head-for-all": (2, 4, 1),
    "a-group-cut-in-two": (2, 6, 3),
    "heads-do-not-divide": (3, 4, 2),
    "14-and-2-on-4": (4, 14, 2),
}


# (kind of scaling, tokens of the row)
ROPES = [(kind, tokens) for kind in ("longrope", "dynamic") for tokens in (12, 40)]


def blocks(exchanges: int, ranks: int) -> dict[str, int]:
    return {"c10d::send": exchanges * (ranks - 1), "c10d::recv_": exchanges * (ranks - 1)}


@pytest.fixture(scope="module")
def reports() -> dict[str, list[Any]]:
    """What each call returned, by rank; all calls of a number of ranks are made by the same processes."""
    calls: dict[int, dict[str, tuple[Any, ...]]] = {
        2: {
            "gathered": (gathered_sequence,),
            **{f"{kind}-{tokens}": (rope_error, kind, tokens) for kind, tokens in ROPES},
        },
        3: {"circulated": (circulated,)},
        4: {"copied": (copied_gradients_are_added_in_fp32,)},
    }
    for name, (ranks, heads, kv_heads) in GROUPS.items():
        calls[ranks][name] = (exchange_equals_slicing, heads, kv_heads, 2)
    for source, ring_size in (("group", 2), ("layout", 2), ("group", 1), ("layout", 4), ("part", 2)):
        calls[4][f"{source}-{ring_size}"] = (facts_of, source, ring_size)
    # The last one, after which ranks belong to unequally many groups.
    calls[4]["refused"] = (refused,)
    return {name: report for ranks, one in calls.items() for name, report in run_calls(ranks, one).items()}


@pytest.mark.parametrize("name", GROUPS)
def test_the_exchange_is_plain_slicing_forward_and_backward(reports: dict[str, list[Any]], name: str) -> None:
    ranks = GROUPS[name][0]
    assert len(reports[name]) == ranks
    for report in reports[name]:
        assert report.wrong == ()
        # A block to each other rank and one from it, there and back, and nothing else; the backward is the same two.
        assert report.forward_collectives == blocks(2, ranks)
        assert report.backward_collectives == blocks(2, ranks)


def test_gradients_of_a_copied_head_are_added_in_fp32(reports: dict[str, list[Any]]) -> None:
    assert reports["copied"] == [True] * 4


def test_what_goes_round_a_ring_comes_from_the_rank_before(reports: dict[str, list[Any]]) -> None:
    assert len(reports["circulated"]) == 3
    for rank, seen in enumerate(reports["circulated"]):
        assert seen == [[(rank - step) % 3, 100 + (rank - step) % 3] for step in (1, 2, 3)]


def test_a_gathered_sequence_is_in_order_and_its_gradient_is_summed_over_ranks(reports: dict[str, list[Any]]) -> None:
    assert len(reports["gathered"]) == 2
    for rank, (whole, gradient) in enumerate(reports["gathered"]):
        assert whole.tolist() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]
        assert torch.equal(gradient, 3 * torch.arange(12.0).view(2, 6)[:, 3 * rank : 3 * rank + 3])


@pytest.mark.parametrize(("kind", "tokens"), ROPES)
def test_length_dependent_rope_on_two_ranks_equals_one_process(
    reports: dict[str, list[Any]], kind: str, tokens: int
) -> None:
    """A row below and one beyond the original length, after rows of other lengths. fp32, law 1's floor."""
    errors = [error for errors in reports[f"{kind}-{tokens}"] for error in errors]
    assert len(errors) == 4 and all(error <= 1e-5 for error in errors), errors


ULYSSES = [[0, 1], [0, 1], [2, 3], [2, 3]]
RINGS = [[0, 2], [1, 3], [0, 2], [1, 3]]


def facts_of(rank: int, world_size: int, source: str, ring_size: int) -> dict[str, object]:
    if source == "group":
        mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
    elif source == "part":
        parts = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        mesh = SequenceMesh.from_group(parts[rank // 2], ring_size=ring_size)
    else:
        mesh = SequenceMesh.from_layout(ParallelLayout(world_size=world_size, sp_size=world_size, ring_size=ring_size))
    facts: dict[str, object] = {"place": (mesh.sp_rank, mesh.ulysses_rank, mesh.ring_rank, mesh.ulysses_size)}
    for role in sorted(mesh.groups):
        group = mesh.group(role)
        total = torch.tensor([rank])
        dist.all_reduce(total, group=group)
        facts[role] = members = dist.get_process_group_ranks(group)
        assert total.item() == sum(members)
        assert dist.get_rank(group) == members.index(rank)
    return facts


@pytest.mark.parametrize("source", ["group", "layout"])
def test_ulysses_groups_are_neighbours_and_rings_reach_over_them(reports: dict[str, list[Any]], source: str) -> None:
    for rank, mesh in enumerate(reports[f"{source}-2"]):
        assert mesh["place"] == (rank, rank % 2, rank // 2, 2)
        assert (mesh["ulysses"], mesh["ring"]) == (ULYSSES[rank], RINGS[rank])
        assert mesh["sp"] == mesh["loss"] == mesh["shard"] == [0, 1, 2, 3]


def test_a_mesh_of_one_kind_has_no_group_of_the_other(reports: dict[str, list[Any]]) -> None:
    kinds = (reports[name] for name in ("group-1", "layout-4", "part-2"))
    for rank, (ulysses, ring, part) in enumerate(zip(*kinds, strict=True)):
        assert ulysses["place"] == (rank, rank, 0, 4) and "ring" not in ulysses
        assert ring["place"] == (rank, 0, rank, 1) and "ulysses" not in ring
        # Each part of the world has a ring of its own.
        assert part["ring"] == part["sp"] == [rank // 2 * 2, rank // 2 * 2 + 1] and "ulysses" not in part


def late_parts(rank: int, world_size: int) -> list[int]:
    """Make the groups of the last four ranks only: the others take no part."""
    parts = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3, 4, 5])]
    if rank < 2:
        return []
    mesh = SequenceMesh.from_group(parts[1], ring_size=2)
    return dist.get_process_group_ranks(mesh.group("ring"))


def test_one_sp_group_makes_its_rings_without_the_others() -> None:
    assert run_ranks(late_parts, 6) == [[], [], [2, 4], [3, 5], [2, 4], [3, 5]]


def refused(rank: int, world_size: int) -> tuple[str, str]:
    """Return how a ring that does not divide the group is refused, and ranks of which one is in fewer groups."""
    texts = []
    for ring_size in (3, 2):
        try:
            SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
        except UserError as error:
            texts.append(str(error))
        dist.new_group([0, 1, 2])
    return texts[0], texts[1]


def test_a_mesh_that_can_not_be_is_refused_before_any_rank_waits(reports: dict[str, list[Any]]) -> None:
    for ring, groups in reports["refused"]:
        assert "parallel.ring_size=3 does not divide parallel.sp_size=4" in ring
        assert "a ring requires the same number on all ranks; create the mesh before" in groups
