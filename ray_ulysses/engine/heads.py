"""Pools one vector per document from the slices of rows, and computes losses of vectors: of classes and of pairs.

A document's vector is the hidden state of its first or last token, or the mean over its tokens: a sum over this rank's
tokens, added up over all ranks of ``sp``. All ranks have the vectors, and a classifier's own forward finishes on them
as if they were documents of one token. One rank of ``sp`` counts the loss.

In the contrastive loss of pairs, the negatives of a query are all other positives of the optimizer step, on every rank
and in every micro-batch. A step therefore runs the model twice (GradCache, https://arxiv.org/abs/2101.06983): first
without gradients for all vectors, then each micro-batch for the gradients of its weights. Activations of only one
micro-batch exist at a time, and the loss is the same for every layout.

Legend: D documents of the batch, N tokens of this rank's slice, H hidden size, C classes, P pairs of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from ray_ulysses.attention.batch import ShardedBatch, held_tokens
from ray_ulysses.attention.dependence import noise_copy
from ray_ulysses.attention.exchange import sum_over_ranks
from ray_ulysses.attention.trunk import classifies
from ray_ulysses.engine.model_parts import inner_model, replaced_forward, unhooked
from ray_ulysses.engine.router_loss import router_loss_of
from ray_ulysses.errors import UserError
from ray_ulysses.parallel.mesh import SequenceMesh

Pooling = Literal["first", "last", "mean"]
"""Tokens of a document whose hidden states are averaged: the first or last token, or all tokens."""

_POOLING = "_ray_ulysses_pooling"
_TOKENS = 13
_QUERIES = 1024
"""Number of queries whose similarities to all positives exist at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassificationLoss:
    """The loss of a batch's documents. One rank of ``sp`` counts them, so that sums over all ranks are right."""

    objective_sum: torch.Tensor
    """fp32 scalar to differentiate once: the cross-entropy, or 0 if another rank of ``sp`` counts the documents."""
    loss_sum: torch.Tensor
    """fp64 scalar, detached: the sum of the documents' cross-entropy in nats, or 0 if another rank counts them."""
    losses_D: torch.Tensor
    """fp32 cross-entropy of each document in nats, detached, equal on all ranks of ``sp``."""
    num_documents: int
    """Number of documents, or 0 if another rank of ``sp`` counts them."""
    logits_DC: torch.Tensor
    """fp32 logits of each document, detached, equal on all ranks of ``sp``."""


def document_vectors(model: Callable[..., Any], batch: ShardedBatch, pooling: Pooling) -> torch.Tensor:
    """Run the forward pass up to the last hidden states, and return a vector of each document; differentiable.

    Documents are numbered through all rows of the batch. All ranks of ``sp`` must call this function, and a loss of the
    vectors must be counted on one of them. Vectors of several tokens are added up in fp32.

    Args:
        model: The model, or the engine that wraps the model. An output head is not run.
        batch: This rank's slice.
        pooling: Tokens of a document to average.

    Returns:
        Vectors in the model's precision ``[D, H]``, equal on all ranks of ``sp``.

    Raises:
        UserError: ``pooling`` is unknown.
    """
    if pooling not in get_args(Pooling):
        raise UserError(f"pooling={pooling!r} is unknown; use one of {', '.join(get_args(Pooling))}")
    inner = inner_model(model)
    # The forward of a bare model is replaced, so its own one is called without the hooks, which have run.
    trunk = inner.base_model
    run = trunk if trunk is not inner else MethodType(type(inner).forward, inner)

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _pooled(run(*args, **kwargs).last_hidden_state, batch, pooling)

    with replaced_forward(inner, forward):
        vectors_DH: torch.Tensor = model(**batch.model_inputs())
    return vectors_DH


def classification_loss(
    model: Callable[..., Any], batch: ShardedBatch, classes_D: torch.Tensor | Sequence[int]
) -> ClassificationLoss:
    """Run the forward pass and return the loss of the batch's documents. All ranks of ``sp`` must call this function.

    The mean over all documents has the gradient of ``objective_sum * loss_scale(global_documents, mesh, ...)``.

    Args:
        model: A ``*ForSequenceClassification`` of Transformers, or the engine that wraps the model.
        batch: This rank's slice.
        classes_D: Class of each document, in the order of rows and documents, on the host.

    Raises:
        UserError: See `pooling_of`, or the classes do not fit the batch or the model.
    """
    num_classes = inner_model(model).config.num_labels
    classes_D = torch.as_tensor(classes_D, dtype=torch.int64)
    num_documents = sum(map(len, batch.documents.lengths))
    if classes_D.shape != (num_documents,):
        raise UserError(f"the batch has {num_documents} documents, but classes_D has shape {tuple(classes_D.shape)}")
    wrong = classes_D[(classes_D < 0) | (classes_D >= num_classes)].tolist()
    if wrong:
        raise UserError(f"classes_D contains {wrong[0]}, but the model has the classes 0 to {num_classes - 1}")
    logits_DC = document_logits(model, batch).float()
    losses_D = cross_entropy(logits_DC, classes_D.to(logits_DC.device), reduction="none")
    counts = batch.mesh.sp_rank == 0
    objective_sum = losses_D.sum() * counts
    return ClassificationLoss(
        objective_sum=objective_sum,
        loss_sum=losses_D.detach().double().sum() * counts,
        losses_D=losses_D.detach(),
        num_documents=num_documents if counts else 0,
        logits_DC=logits_DC.detach(),
    )


def document_logits(model: Callable[..., Any], batch: ShardedBatch) -> torch.Tensor:
    """Run the forward pass and return the logits of each document's class ``[D, C]``, equal on all ranks of ``sp``.

    The logits are differentiable. All ranks of ``sp`` must call this function, and count a loss on one of them.

    Raises:
        UserError: See `pooling_of`.
    """
    inner = inner_model(model)
    pooling, trunk = pooling_of(inner), inner.base_model
    pooler = getattr(trunk, "pooler", None)
    found: list[torch.Tensor] = []

    def vectors(hidden_BLH: torch.Tensor) -> torch.Tensor:
        if not found:
            found.append(_pooled(hidden_BLH, batch, pooling)[:, None])
        return found[0]

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        output = trunk(*args, **kwargs)
        return _finished(inner, replace(output, last_hidden_state=vectors(output.last_hidden_state)))

    with ExitStack() as replaced:
        replaced.enter_context(replaced_forward(inner, forward))
        if pooler is not None:
            # BERT's pooler is part of the trunk, and reads the first token of each row.
            replaced.enter_context(
                replaced_forward(pooler, lambda hidden_BLH: type(pooler).forward(pooler, vectors(hidden_BLH)))
            )
        logits_DC: torch.Tensor = model(**batch.model_inputs())
    return logits_DC


def _finished(model: Any, output: Any) -> torch.Tensor:
    """Run the model's own forward with ``output`` in place of the trunk's output, and return the logits ``[D, C]``."""
    hidden_DTH = output.last_hidden_state
    stand_in = object.__new__(type(model))
    # Transformers' decoders refuse several documents without a padding ID, which here is no token of a document.
    config = copy(model.config)
    config.pad_token_id = 0
    own = {model.base_model_prefix: lambda *args, **kwargs: output, "config": config}
    stand_in.__dict__ = {**model.__dict__, **own}
    ids_DT = torch.ones(hidden_DTH.shape[:2], dtype=torch.int64, device=hidden_DTH.device)
    logits_DC: torch.Tensor = type(model).forward(stand_in, input_ids=ids_DT).logits
    return logits_DC


def _pooled(hidden_BLH: torch.Tensor, batch: ShardedBatch, pooling: Pooling) -> torch.Tensor:
    """Return each document's vector ``[D, H]`` from hidden states of slices."""
    lengths = [length for row in batch.documents.lengths for length in row]
    runs, sizes = torch.unique_consecutive(_pooled_documents(batch, pooling), return_counts=True)
    # Without tokens of its own, a rank joins the backward pass by an empty sum.
    hidden_NH = hidden_BLH.flatten(0, 1)
    dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
    parts, numbers = [hidden_NH[:0].sum(0, dtype=dtype)], [len(lengths)]
    for number, part in zip(runs.tolist(), hidden_NH.split(sizes.tolist()), strict=True):
        if number < len(lengths):
            parts.append(part.sum(0, dtype=dtype))
            numbers.append(number)
    device = hidden_NH.device
    sums_DH = torch.zeros(len(lengths) + 1, hidden_NH.shape[1], dtype=dtype, device=device)
    sums_DH = sums_DH.index_add(0, torch.tensor(numbers, device=device), torch.stack(parts))[:-1]
    if batch.mesh.sp_size > 1:
        sums_DH = sum_over_ranks(sums_DH, batch.mesh.group("sp").group_name)
    if pooling == "mean":
        sums_DH = sums_DH / torch.tensor(lengths, dtype=dtype, device=device)[:, None]
    return sums_DH.to(hidden_NH.dtype)


def _pooled_documents(batch: ShardedBatch, pooling: Pooling) -> torch.Tensor:
    """Return the document into whose vector each of this rank's tokens is pooled, int64 ``[N]`` on the host, or D."""
    documents = batch.documents
    numbers_BS = torch.full((documents.num_rows, documents.row_tokens), sum(map(len, documents.lengths)), device="cpu")
    number = 0
    for row, lengths in enumerate(documents.lengths):
        start = 0
        for length in lengths:
            last = start + length - 1
            first, stop = {"first": (start, start + 1), "last": (last, last + 1), "mean": (start, last + 1)}[pooling]
            numbers_BS[row, first:stop] = number
            number, start = number + 1, last + 1
    return held_tokens(numbers_BS, batch.mesh).flatten()


def pooling_of(model: Any) -> Pooling:
    """Return how the head of a model pools a document.

    The head of a small copy is called with noise in place of hidden states, so no list of architectures is needed.

    Args:
        model: A ``*ForSequenceClassification``, on any device, partitioned or not.

    Raises:
        UserError: The model has no head for documents, the head drops values at random or is set up for another
            problem than one class of several, or the pooling is not one of `Pooling`.
    """
    known: Pooling | None = vars(model).get(_POOLING)
    if known is not None:
        return known
    name = type(model).__name__
    if not classifies(model):
        raise UserError(f"{name} does not classify documents; use AutoModelForSequenceClassification")
    if model.config.num_labels < 2 or model.config.problem_type not in (None, "single_label_classification"):
        raise UserError(
            f"num_labels={model.config.num_labels} and problem_type={model.config.problem_type}: only one class of "
            "several is supported; use num_labels of at least 2 and problem_type single_label_classification"
        )
    if router_loss_of(model) is not None:
        raise UserError(
            "the router loss is a mean over tokens, which does not fit a mean over documents; set "
            "model.config.output_router_logits = False"
        )
    random = [f"{at} (p={one.p:g})" for at, one in model.named_modules() if isinstance(one, nn.Dropout) and one.p > 0]
    if random:
        raise UserError(f"{name} has dropout at {random[0]}, which depends on the layout; set classifier_dropout: 0.0")
    vars(model)[_POOLING] = found = _probed_pooling(model)
    return found


def _probed_pooling(model: Any) -> Pooling:
    from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

    # Hooks of ZeRO-3 would gather the original's weights.
    drawn: Any = unhooked(noise_copy(model)[0])
    pooler = getattr(drawn.base_model, "pooler", None)
    noise = torch.Generator().manual_seed(3)
    hidden_1TH = torch.randn(1, _TOKENS, model.config.get_text_config().hidden_size, generator=noise)

    def logits_of(hidden_1TH: torch.Tensor) -> torch.Tensor:
        hidden_1TH = hidden_1TH.to(drawn.dtype)
        pooled = None if pooler is None else pooler(hidden_1TH)
        output = BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=hidden_1TH, pooler_output=pooled)
        return _finished(drawn, output)

    with torch.no_grad():
        whole = logits_of(hidden_1TH)
        vectors: dict[Pooling, torch.Tensor] = {
            "first": hidden_1TH[:, :1], "last": hidden_1TH[:, -1:], "mean": hidden_1TH.mean(1, keepdim=True),
        }  # fmt: skip
        for pooling, vector_11H in vectors.items():
            if torch.allclose(logits_of(vector_11H), whole, rtol=1e-4, atol=1e-6):
                return pooling
    raise UserError(
        f"the head of {type(model).__name__} reads neither the first token, nor the last one, nor the mean of all "
        "tokens, so it can't be computed from slices of a document; use another model or another pooling in "
        "model.config"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ContrastiveLoss:
    """The loss of all pairs of a step, identical on all ranks."""

    loss_sum: float
    """Sum of the queries' cross-entropy in nats."""
    num_pairs: int
    num_right: int
    """Number of queries that are more similar to their positive than to any other."""
    gradients: tuple[torch.Tensor, ...]
    """Gradient of `loss_sum` by the vectors of each of this rank's micro-batches, fp32 ``[D, H]``."""
    queries: tuple[torch.Tensor, ...]
    """For each of this rank's micro-batches, the loss of each query in nats, and 1 if the query counts in `num_right`,
    otherwise 0; fp64 ``[P, 2]``."""


def contrastive_loss(vectors: Sequence[torch.Tensor], mesh: SequenceMesh, temperature: float = 0.05) -> ContrastiveLoss:
    """Return the InfoNCE loss of a step's pairs, and its gradient by this rank's vectors.

    A query's loss is the cross-entropy of its cosine similarities to all positives of the step, divided by the
    temperature (https://arxiv.org/abs/1807.03748). All ranks of the world must call this function.

    Args:
        vectors: Vectors of the documents of each of this rank's micro-batches, ``[D, H]``: queries and positives
            alternate. See `document_vectors`; equal on all ranks of ``sp``.
        mesh: The mesh.
        temperature: Divisor of the similarities, above 0.

    Raises:
        UserError: The temperature is not positive, or a micro-batch holds half a pair.
    """
    if not temperature > 0:
        raise UserError(f"temperature={temperature} must be above 0")
    sizes = [len(one) for one in vectors]
    if any(size % 2 for size in sizes):
        raise UserError(f"the micro-batches have {sizes} documents, but pairs need an even number; keep both in a row")
    all_DH, first = _gathered(torch.cat([one.detach().float() for one in vectors]), mesh)
    all_DH.requires_grad_()
    num_pairs, found = len(all_DH) // 2, [torch.zeros(0, 2, dtype=torch.float64, device=all_DH.device)]
    for start in range(0, num_pairs, _QUERIES):
        with torch.enable_grad():
            unit_P2H = normalize(all_DH, dim=-1).view(num_pairs, 2, -1)
            similarities = unit_P2H[start : start + _QUERIES, 0] @ unit_P2H[:, 1].T / temperature
            own = torch.arange(start, start + len(similarities), device=all_DH.device)
            losses = cross_entropy(similarities, own, reduction="none")
            losses.sum().backward()
        is_right = similarities.detach().argmax(dim=-1) == own
        found.append(torch.stack([losses.detach().double(), is_right.double()], dim=1))
    own_DH = torch.zeros_like(all_DH) if all_DH.grad is None else all_DH.grad
    gradients = own_DH[first : first + sum(sizes)].split(sizes)
    queries_P2 = torch.cat(found)
    loss_sum, num_right = queries_P2.sum(0).tolist()
    return ContrastiveLoss(
        loss_sum=loss_sum,
        num_pairs=num_pairs,
        num_right=int(num_right),
        gradients=tuple(gradients),
        queries=queries_P2[first // 2 : (first + sum(sizes)) // 2].split([size // 2 for size in sizes]),
    )


def contrastive_objective(
    model: Callable[..., Any], batch: ShardedBatch, pooling: Pooling, gradient_DH: torch.Tensor
) -> torch.Tensor:
    """Run the forward pass of the second pass, and return a scalar to differentiate once.

    The mean over all pairs has the gradient of the scalar times ``loss_scale(global_pairs, mesh, ...)``, added up over
    the step's micro-batches. Random states must be equal in both passes. All ranks of ``sp`` must call this function.

    Args:
        model: The model, or the engine that wraps the model.
        batch: This rank's slice of a micro-batch.
        pooling: As in the first pass.
        gradient_DH: Gradient of the loss by the micro-batch's vectors; see `ContrastiveLoss.gradients`.
    """
    vectors_DH = document_vectors(model, batch, pooling).float()
    return (vectors_DH * gradient_DH).sum() * (batch.mesh.sp_rank == 0)


def _gathered(own_DH: torch.Tensor, mesh: SequenceMesh) -> tuple[torch.Tensor, int]:
    """Return the vectors of all rows of the world, and the place of this rank's first vector."""
    if mesh.world_size == 1:
        return own_DH, 0
    world, sp = mesh.group("loss"), mesh.group("sp")
    # The ranks of sp have the same vectors, and the first of them sends them.
    sent = len(own_DH) if mesh.sp_rank == 0 else 0
    sizes = torch.zeros(mesh.world_size, dtype=torch.int64, device=own_DH.device)
    sizes[dist.get_rank(world)] = sent
    dist.all_reduce(sizes, group=world)
    counts = sizes.tolist()
    padded_DH = own_DH.new_zeros(max(counts), own_DH.shape[1])
    padded_DH[:sent] = own_DH[:sent]
    parts = [torch.empty_like(padded_DH) for _ in counts]
    dist.all_gather(parts, padded_DH, group=world)
    first = sum(counts[: dist.get_global_rank(sp, 0)])
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]), first
