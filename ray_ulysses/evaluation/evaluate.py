"""Evaluates a model, from the initial checks to the report. All ranks of ``sp`` run the same code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from ray_ulysses.clock import SystemClock
from ray_ulysses.data.read.masking import Masking, masking_with
from ray_ulysses.errors import UserError
from ray_ulysses.evaluation.classes import check_classes, predict_classes
from ray_ulysses.evaluation.held_out import HeldOut, find_tokenizer, held_out_documents, refuse_other_tokens
from ray_ulysses.evaluation.held_out_loss import SPAN_TOKENS, context_gain, pair_preference, position_loss
from ray_ulysses.evaluation.model_source import ModelSource, find_model
from ray_ulysses.evaluation.needles import Haystack, needle_rows, retrieval_cells
from ray_ulysses.evaluation.report import (
    KINDS,
    EvaluationReport,
    EvaluationRequest,
    RetrievalCell,
)
from ray_ulysses.evaluation.scoring import Score, score_passages
from ray_ulysses.parallel.mesh import SequenceMesh
from ray_ulysses.run.masks import read_masking
from ray_ulysses.run.settings import versions

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """An evaluation that has passed all checks and is ready to start."""

    request: EvaluationRequest
    """The options, with ``latest`` or ``best`` replaced with a step, so that all processes load the same checkpoint."""
    source: ModelSource
    held: HeldOut
    haystack: Haystack | None
    """Documents and tokenizer for the retrieval tests; None if retrieval is not tested."""
    contexts: tuple[int, ...]
    """Context lengths for which the gain is measured, in tokens; empty if none fits."""
    lengths: tuple[int, ...]
    """Lengths of retrieval rows, ascending. The loss is measured up to the longest of these lengths."""
    notes: tuple[str, ...]
    """Caveats to print with the results."""


def prepare_evaluation(request: EvaluationRequest) -> Prepared:
    """Find the model, the documents and the tokenizer, and check that they fit together, without reading weights.

    Raises:
        UserError: An option is wrong or can't be satisfied.
        RunError: The checkpoint can't be used.
    """
    source = find_model(request)
    held = held_out_documents(request.data, request.run_dir, trust_run=request.trust_run)
    largest = max(corpus.info.max_token_id for corpus in held.corpora.corpora)
    if largest >= source.vocab_size:
        raise UserError(
            f"--data: the documents contain token {largest}, but the model has only {source.vocab_size} tokens; "
            "prepare them with the model's own tokenizer"
        )
    if source.config.objective.kind == "embedding" or any(corpus.info.are_queries for corpus in held.corpora.corpora):
        raise UserError(
            f"{request.model}: models and pairs for embeddings can't be evaluated by this command; use the run's "
            "eval/pair_accuracy, or load the export with sentence-transformers"
        )
    if any(corpus.info.has_labeled_answers for corpus in held.corpora.corpora):
        raise UserError(
            f"--data: {held.words} are labeled answers, on which only training evaluates (run.eval_every_steps); give "
            "pairs of answers or texts with --data"
        )
    held = replace(held, masking=_masking(request, source, held))
    lengths = request.lengths or default_lengths(source.context_tokens)
    notes = [f"the losses are measured on training text ({held.words}); give held-out documents with --data"] * (
        held.is_training_text and "loss" in request.tasks
    )
    contexts: tuple[int, ...] = ()
    reason = f"retrieval needs texts, but {held.words} are pairs of answers" if held.are_pairs else ""
    if held.masking is not None:
        reason = "retrieval needs a model that predicts the next token, and this one predicts masked tokens"
    if source.classifies:
        check_classes(held, source.config.objective.classes)
        reason = "retrieval needs a language model, but the model classifies documents"
    if reason and "retrieval" in request.tasks:
        if request.tasks == ("retrieval",):
            raise UserError(f"--task=retrieval: {reason}; use --task loss")
        notes.append(f"{reason}, so it was not tested")
    if "loss" in request.tasks and not held.are_pairs and not source.classifies:
        contexts, more = _contexts(request, source, held, lengths)
        notes += more
    haystack = None
    model_dir = request.model_dir
    if model_dir is not None and request.tokenizer is None:
        refuse_other_tokens(held, model_dir)
    if "retrieval" in request.tasks and not reason:
        haystack = Haystack(held, find_tokenizer(held, request.tokenizer, model_dir), source.vocab_size)
        # Raises if a row is too short for its questions or contains unknown tokens. Try the longest kind first.
        for kind in sorted(KINDS, key=lambda one: one != "several_keys"):
            next(needle_rows(haystack, kind, length=lengths[0], depths=(0.5,), cases=1, seed=request.seed))
    if source.num_positions is not None and lengths[-1] > source.num_positions:
        raise UserError(
            f"--lengths: rows of {lengths[-1]} tokens exceed the model's table of {source.num_positions} positions, "
            f"which, unlike rotary positions, can't be extended; use lengths of at most {source.num_positions}"
        )
    left_out = int((held.longest_texts > lengths[-1]).sum())
    if left_out and (held.are_pairs or source.classifies):
        notes.append(f"{left_out:,} documents with more than {lengths[-1]:,} tokens (--lengths) were left out")
    rotary = source.rotary_positions
    if rotary is not None and lengths[-1] > max(rotary, source.context_tokens):
        notes.append(
            f"lengths above {max(rotary, source.context_tokens):,} tokens exceed the positions the model was trained on"
        )
    return Prepared(
        request=request if source.step is None else replace(request, step=source.step),
        source=source,
        held=held,
        haystack=haystack,
        contexts=contexts,
        lengths=lengths,
        notes=tuple(notes),
    )


def _masking(request: EvaluationRequest, source: ModelSource, held: HeldOut) -> Masking | None:
    if source.config.objective.task != "masked_lm":
        return None
    if held.are_pairs:
        raise UserError(f"--data: {held.words} are pairs of answers, but the model predicts masked tokens")
    if request.run_dir is not None:
        return read_masking(request.run_dir)
    objective, tokenizer = source.config.objective, find_tokenizer(held, request.tokenizer, request.model_dir)
    masking = masking_with(
        tokenizer,
        seed=request.seed,
        fraction=objective.mask_fraction,
        unit=objective.mask_unit,
        replace=objective.mask_replacement,
    )
    masking.refuse_small(source.vocab_size)
    return masking


def _contexts(
    request: EvaluationRequest, source: ModelSource, held: HeldOut, lengths: tuple[int, ...]
) -> tuple[tuple[int, ...], list[str]]:
    wanted = lengths
    if not request.lengths:
        # The longest context and its span together fill the model's context.
        last = max(source.context_tokens - SPAN_TOKENS, 1)
        wanted = (*(one for one in lengths if one < last), last)
    longest, end = int(held.lengths.max()), source.num_positions
    most = longest if end is None else min(longest, end)
    fitting = tuple(one for one in wanted if one + SPAN_TOKENS <= most)
    if len(fitting) == len(wanted):
        return fitting, []
    left_out = f"{', '.join(f'{one:,}' for one in wanted[len(fitting) :])} tokens before a span of {SPAN_TOKENS}"
    if end is not None and end < longest:
        return fitting, [f"context gain: {left_out} exceed the model's table of {end:,} positions"]
    return fitting, [f"context gain: no document has {left_out}; the longest document has {longest:,} tokens"]


def evaluate(prepared: Prepared, mesh: SequenceMesh, device: torch.device, say: Say) -> EvaluationReport:
    """Load the model and run the requested tasks. All ranks of ``sp`` must call this function.

    Raises:
        UserError: The model can't be computed exactly on this mesh.
        RunError: The weights can't be read, or a loss is not finite.
    """
    clock = SystemClock()
    started = clock.monotonic()
    request, source, contexts = prepared.request, prepared.source, prepared.contexts
    say(f"loading {request.model}" + ("" if source.step is None else f", step {source.step:,}"))
    model = source.load(mesh, device)
    row_tokens = max([*prepared.lengths, *(one + SPAN_TOKENS for one in contexts)])
    score = partial(score_passages, model, mesh=mesh, row_tokens=row_tokens, device=device)
    limits = {"longest": prepared.lengths[-1], "max_tokens": request.max_tokens, "seed": request.seed}
    preference = classes = by_position = gain = None
    cells: tuple[RetrievalCell, ...] = ()
    if source.classifies:
        say(f"classes of documents of {request.max_tokens:,} tokens")
        classes = predict_classes(prepared.held, model, source.config.objective.classes, mesh, device, **limits)
    elif prepared.held.are_pairs:
        say(f"preferences in pairs of {request.max_tokens:,} tokens")
        preference = pair_preference(prepared.held, score, **limits)
    else:
        if "loss" in request.tasks:
            say(f"loss over {request.max_tokens:,} tokens")
            by_position = position_loss(prepared.held, score, **limits)
        if contexts:
            say(f"loss of the same tokens with {', '.join(f'{one:,}' for one in contexts)} tokens of context")
            spans = 8 * request.cases
            gain = context_gain(prepared.held, score, contexts=contexts, num_spans=spans, seed=request.seed)
        cells = tuple(_retrieval(prepared, score, say))
    notes = list(prepared.notes)
    if classes is None and source.classifies:
        notes.append(f"classes: every document is longer than {prepared.lengths[-1]:,} tokens (--lengths)")
    elif "loss" in request.tasks and by_position is None and preference is None and classes is None:
        notes.append("loss: the chosen documents have no supervised token")
    return EvaluationReport(
        model=str(request.model),
        step=source.step,
        dtype=source.dtype,
        data=prepared.held.words,
        is_training_text=prepared.held.is_training_text,
        sp_size=mesh.sp_size,
        seed=request.seed,
        lengths=prepared.lengths,
        versions=versions(),
        notes=tuple(notes),
        position_loss=by_position,
        context_gain=gain,
        retrieval=cells,
        seconds=round(clock.monotonic() - started, 3),
        preference=preference,
        classes=classes,
    )


def _retrieval(prepared: Prepared, score: Score, say: Say) -> Iterator[RetrievalCell]:
    request = prepared.request
    if prepared.haystack is None:
        return
    for kind in KINDS:
        for length in prepared.lengths:
            say(f"retrieval, {kind}: rows of {length:,} tokens")
            yield from retrieval_cells(
                prepared.haystack,
                score,
                kind=kind,
                length=length,
                num_depths=request.depths,
                cases=request.cases,
                seed=request.seed,
            )


def default_lengths(context_tokens: int) -> tuple[int, ...]:
    """Return the lengths 1k, 4k, 16k and so on below the context, and the context length itself."""
    found = []
    length = 2**10
    while length < context_tokens:
        found.append(length)
        length *= 4
    return (*found, context_tokens)
