from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.attention.documents import pack_documents
from ray_ulysses.errors import UserError

rows_of_lengths = st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=1, max_size=4)


@settings(max_examples=30, deadline=None)
@given(lengths=rows_of_lengths, extra=st.integers(0, 7))
def test_spans_cover_every_token_of_every_row_once(lengths: list[list[int]], extra: int) -> None:
    row_tokens = max(1, max(sum(row) for row in lengths) + extra)
    documents = pack_documents(lengths, row_tokens)
    covered = [(row, token) for row, start, end in documents.spans for token in range(start, end)]
    assert covered == [(row, token) for row in range(len(lengths)) for token in range(row_tokens)]
    assert documents.num_rows == len(lengths)
    assert documents.num_document_tokens == max(sum(row) for row in lengths)


@settings(max_examples=30, deadline=None)
@given(lengths=rows_of_lengths, extra=st.integers(0, 7))
def test_cu_seqlens_are_the_borders_of_the_spans_laid_end_to_end(lengths: list[list[int]], extra: int) -> None:
    row_tokens = max(1, max(sum(row) for row in lengths) + extra)
    documents = pack_documents(lengths, row_tokens)
    sizes = [end - start for _, start, end in documents.spans]
    assert documents.cu_seqlens.dtype == torch.int32
    assert documents.cu_seqlens.diff().tolist() == sizes
    assert documents.cu_seqlens[0] == 0 and documents.cu_seqlens[-1] == len(lengths) * row_tokens
    assert documents.max_seqlen == max(sizes)


def test_padding_is_a_span_of_its_own_and_no_document() -> None:
    documents = pack_documents([[3, 2], [4]], 8)
    assert documents.spans == ((0, 0, 3), (0, 3, 5), (0, 5, 8), (1, 0, 4), (1, 4, 8))
    assert documents.lengths == ((3, 2), (4,))
    assert documents.max_position == 3
    assert documents.num_document_tokens == 5


def test_a_row_of_padding_alone_has_no_position() -> None:
    documents = pack_documents([()], 4)
    assert documents.spans == ((0, 0, 4),)
    assert (documents.max_position, documents.num_document_tokens) == (0, 0)


def test_documents_longer_than_their_row_are_refused() -> None:
    with pytest.raises(UserError, match=r"document_lengths\[1\] sums to 9, more than the row's 8 tokens; the lengths"):
        pack_documents([[8], [5, 4]], 8)


@pytest.mark.parametrize("length", [0, -3])
def test_a_document_without_tokens_is_refused(length: int) -> None:
    with pytest.raises(UserError, match=rf"document_lengths\[0\] holds {length}; every document has at least 1 token"):
        pack_documents([[2, length]], 8)
