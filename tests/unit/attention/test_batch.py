from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses import shard_batch, unshard
from ray_ulysses.attention.batch import IGNORE_INDEX, ShardedBatch
from ray_ulysses.errors import UserError
from tests.breadth import examples
from tests.unit.attention.meshes import ALONE, place


def sharded(
    input_ids: torch.Tensor, labels: torch.Tensor | None, lengths: Any, sp_size: int
) -> tuple[list[ShardedBatch], dict[str, torch.Tensor]]:
    """Return every rank's batch and the concatenated rows."""
    batches = [shard_batch(input_ids, labels, lengths, place(rank, sp_size)) for rank in range(sp_size)]
    names = ("input_ids_BL", "labels_BL", "position_ids_BL")
    return batches, {name: torch.cat([getattr(batch, name) for batch in batches], dim=1) for name in names}


@pytest.mark.parametrize("sp_size", [1, 3, 8])
def test_a_label_is_the_next_token_of_the_same_document_even_across_a_shard_border(sp_size: int) -> None:
    lengths = (5, 1, 7, 3)
    input_ids = torch.arange(100, 116)
    wanted, start = [], 0
    for length in lengths:
        wanted += [*range(100 + start + 1, 100 + start + length), IGNORE_INDEX]
        start += length
    _, whole = sharded(input_ids, None, lengths, sp_size)
    assert whole["labels_BL"][0, :16].tolist() == wanted
    assert (whole["labels_BL"][0, 16:] == IGNORE_INDEX).all()


@pytest.mark.parametrize("sp_size", [1, 3, 8])
def test_an_unshifted_label_stays_at_its_token_and_padding_has_none(sp_size: int) -> None:
    input_ids, weights = torch.arange(100, 116), torch.arange(16) / 8
    labels = torch.where(input_ids % 3 == 0, input_ids, IGNORE_INDEX)
    batches = [
        shard_batch(input_ids, labels, (5, 1, 7), place(rank, sp_size), label_weights=weights, shift_labels=False)
        for rank in range(sp_size)
    ]
    assert not any(batch.has_shifted_labels for batch in batches)
    whole = torch.cat([batch.labels_BL for batch in batches], dim=1)[0]
    assert torch.equal(whole[:13], labels[:13])
    assert (whole[13:] == IGNORE_INDEX).all()
    parts = [batch.label_weights_BL for batch in batches if batch.label_weights_BL is not None]
    assert torch.equal(torch.cat(parts, dim=1)[0, :16], weights)


@settings(max_examples=examples(30))
@given(
    rows=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3),
    padding=st.integers(0, 5),
    sp_size=st.integers(1, 6),
)
def test_the_rows_of_all_ranks_together_do_not_depend_on_their_number(
    rows: list[list[int]], padding: int, sp_size: int
) -> None:
    tokens = max(sum(row) for row in rows) + padding
    input_ids = torch.arange(1, 1 + len(rows) * tokens).view(len(rows), tokens)
    labels = torch.where(input_ids % 4 == 0, IGNORE_INDEX, input_ids)
    batches, whole = sharded(input_ids, labels, rows, sp_size)
    _, alone = sharded(input_ids, labels, rows, 1)
    for name, tensor in whole.items():
        assert torch.equal(tensor[:, :tokens], alone[name])
    assert batches[0].documents.row_tokens % sp_size == 0
    assert {batch.input_ids_BL.shape for batch in batches} == {(len(rows), batches[0].documents.row_tokens // sp_size)}
    supervised = sum(int((labels[row, : sum(own)] != IGNORE_INDEX).sum()) for row, own in enumerate(rows))
    firsts = [labels[row, sum(own[:index])] for row, own in enumerate(rows) for index in range(len(own))]
    first_supervised = sum(int(one != IGNORE_INDEX) for one in firsts)
    assert int((whole["labels_BL"] != IGNORE_INDEX).sum()) == supervised - first_supervised


def test_labels_stay_masked_and_those_in_padding_are_ignored() -> None:
    batch = shard_batch(torch.zeros(6).long(), torch.tensor([IGNORE_INDEX, IGNORE_INDEX, 2, 3, -1, -1]), [4], ALONE)
    assert batch.labels_BL[0].tolist() == [IGNORE_INDEX, 2, 3, *[IGNORE_INDEX] * 3] and batch.largest_label == 3


def test_positions_are_global_and_restart_in_each_document() -> None:
    _, whole = sharded(torch.zeros(2, 10, dtype=torch.long), None, [[4, 3], [9]], 4)
    assert whole["position_ids_BL"][0].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 0, 0, 0, 0]
    assert whole["position_ids_BL"][1].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0]


@pytest.mark.parametrize(
    "lengths",
    [(4, 2), [[4, 2]], torch.tensor([4, 2]), torch.tensor([[4, 2, 0]]), [torch.tensor([4, 2])]],
    ids=["tuple", "rows", "tensor", "padded-tensor", "tensors"],
)
def test_lengths_may_come_as_sequences_or_tensors(lengths: Any) -> None:
    assert shard_batch(torch.zeros(1, 8, dtype=torch.int32), None, lengths, ALONE).documents.lengths == ((4, 2),)


def test_unshard_cuts_the_padding_of_the_fullest_row_and_refuses_another_shape() -> None:
    batch = shard_batch(torch.zeros(2, 10, dtype=torch.long), None, [[4, 3], [2]], ALONE)
    logits = torch.randn(2, 10, 5)
    assert torch.equal(unshard(logits, batch), logits[:, :7])
    with pytest.raises(UserError, match=r"unshard got a tensor of shape \(2, 8, 5\); its first two dims .* \(2, 10\)"):
        unshard(logits[:, :8], batch)


IDS = torch.zeros(1, 8, dtype=torch.long)


@pytest.mark.parametrize(
    ("input_ids", "labels", "lengths", "text"),
    [
        (torch.zeros(1, 8), None, None, r"input_ids has shape \(1, 8\) and dtype torch.float32"),
        (torch.zeros(1, 2, 8).long(), None, None, r"input_ids has shape \(1, 2, 8\)"),
        (IDS, torch.zeros(1, 7).long(), None, r"labels have shape \(1, 7\) but input_ids have shape \(1, 8\)"),
        (IDS, torch.zeros(1, 8), None, r"labels has shape \(1, 8\) and dtype torch.float32"),
        (IDS, torch.tensor([[0, 0, -1, IGNORE_INDEX, 0, 0, 0, 0]]), None, r"labels .* contain -1"),
        (IDS, None, [[4], [4]], r"document_lengths has 2 rows but input_ids has 1"),
        (IDS, None, [4, 5], r"document_lengths\[0\] sums to 9"),
        (IDS, None, [], r"document_lengths\[0\] is empty"),
        (IDS, None, [4, 0], r"document_lengths\[0\] contains 0"),
    ],
)
def test_rows_that_do_not_fit_together_are_refused(
    input_ids: torch.Tensor, labels: torch.Tensor | None, lengths: Any, text: str
) -> None:
    with pytest.raises(UserError, match=text):
        shard_batch(input_ids, labels, lengths, ALONE)
