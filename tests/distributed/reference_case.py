"""A stored model, and its log-probabilities of pairs of answers, computed on gloo ranks without Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.corpus.reference import Part, Reference, write_part
from ray_ulysses.evaluation.reference import PreparedReference, ReferenceRequest, compute_parts, prepare_reference
from tests.distributed.harness import run_ranks

PART_TOKENS = 1500
FIELDS: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


def stored_model(folder: Path, seed: int = 5) -> Any:
    """Store a small model whose answers differ in probability, and return it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **FIELDS, initializer_range=0.2))
    model.save_pretrained(folder)
    return model


def plain_log_prob(model: Any, tokens: torch.Tensor, start: int) -> torch.Tensor:
    """Return the fp64 log-probability of a text's tokens from ``start`` on."""
    log_probs = functional.log_softmax(model(input_ids=tokens[None], use_cache=False).logits[0].double(), dim=-1)
    return log_probs[start - 1 : -1].gather(1, tokens[start:, None]).sum()


def plain_pair(model: Any, corpus: Corpus, document: int) -> tuple[torch.Tensor, list[int]]:
    """Return the log-probability of a pair's answers, fp64 [2], each alone, and their numbers of tokens."""
    spans, border = corpus.spans, int(corpus.borders[document])
    assert spans is not None
    size, at = int(corpus.lengths[document]), int(spans.offsets[document])
    tokens = torch.tensor([int(one) for one in corpus.read(document, 0, size)])
    starts = [int(spans.starts[at]), int(spans.starts[at + 1]) - border]
    texts = [tokens[:border], tokens[border:]]
    values = torch.stack([plain_log_prob(model, text, start) for text, start in zip(texts, starts, strict=True)])
    return values, [len(text) - start for text, start in zip(texts, starts, strict=True)]


def compute_rank(
    rank: int,
    world_size: int,
    request: ReferenceRequest,
    reference: Reference,
    parts: Sequence[Part],
    ring_size: int | None = None,
    dies_after: int | None = None,
) -> int:
    """Be a rank of a group, and return the number of parts that it has computed.

    ``dies_after``: the first rank is killed after it has stored this number of parts.
    """
    written = []

    def write_and_die(*arguments: Any) -> None:
        write_part(*arguments)
        written.append(arguments)
        if len(written) == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)

    with patch("ray_ulysses.evaluation.reference.write_part", write_and_die):
        return compute_parts(torch.device("cpu"), lambda text: None, request, reference, parts, ring_size)


def reference_run(
    corpus: Path, model: Path, *, world_size: int = 1, ring_size: int | None = None, dtype: Any = "fp32"
) -> PreparedReference:
    """Compute and commit the log-probabilities of a corpus's pairs."""
    request = ReferenceRequest(corpus=str(corpus), model=str(model), dtype=dtype, part_tokens=PART_TOKENS)
    prepared = prepare_reference(request)
    run_ranks(compute_rank, world_size, request, prepared.reference, prepared.missing(), ring_size)
    prepared.commit()
    return prepared
