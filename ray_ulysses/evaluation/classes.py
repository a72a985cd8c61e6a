"""Predicts the classes of held-out documents."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ray_ulysses.attention.batch import shard_batch
from ray_ulysses.engine.heads import document_logits
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.evaluation.held_out import HeldOut
from ray_ulysses.evaluation.held_out_loss import choose_documents
from ray_ulysses.evaluation.report import ClassReport
from ray_ulysses.parallel.mesh import SequenceMesh


def check_classes(held: HeldOut, classes: tuple[str, ...]) -> None:
    """Raise an error unless every document has one of a model's classes.

    Raises:
        UserError: A corpus has no classes, or another class.
    """
    for corpus in held.corpora.corpora:
        if not corpus.info.classes:
            raise UserError(
                f"--data: the documents of {corpus.folder} have no classes, but the model predicts them; prepare the "
                "documents with --label-field"
            )
        if others := sorted({*corpus.info.classes} - {*classes}):
            raise UserError(
                f"--data: {corpus.folder} has the class {others[0]!r}, but the model has only {', '.join(classes)}; "
                "leave out the documents of other classes"
            )


def predict_classes(
    held: HeldOut,
    model: Callable[..., Any],
    classes: tuple[str, ...],
    mesh: SequenceMesh,
    device: torch.device,
    *,
    longest: int,
    max_tokens: int,
    seed: int,
) -> ClassReport | None:
    """Compare the predicted classes of documents with their own, or return None if all documents are too long.

    Leaves out documents of more than ``longest`` tokens, and stops after the document that reaches ``max_tokens``. All
    ranks of ``sp`` must call this function.

    Raises:
        RunError: The logits are not finite.
    """
    confusion = np.zeros((len(classes), len(classes)), dtype=np.int64)
    losses = []
    fitting = np.flatnonzero(held.lengths <= longest)
    places = fitting[choose_documents(held.lengths[fitting], longest=longest, max_tokens=max_tokens, seed=seed)]
    for place in places.tolist():
        corpus, local = held.corpora.locate(int(held.numbers[place]))
        own = classes.index(corpus.info.classes[corpus.labels[local]])
        tokens = torch.from_numpy(held.read(place, 0, int(held.lengths[place]))).to(device)
        with torch.no_grad():
            logits_1C = document_logits(model, shard_batch(tokens, None, None, mesh)).float()
        losses.append(float(functional.cross_entropy(logits_1C, torch.tensor([own], device=device))))
        confusion[own, int(logits_1C.argmax())] += 1
    if not losses:
        return None
    if not math.isfinite(loss_sum := math.fsum(losses)):
        raise RunError(
            "the model's logits on these documents are not finite: the model has diverged, or its dtype overflows; "
            "select an earlier step with --step, or compute with --dtype fp32"
        )
    return ClassReport(classes=classes, confusion=tuple(map(tuple, confusion.tolist())), loss_sum=loss_sum)
