"""Scores do not depend on how texts are packed, and the logits of a row never exist together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ray_ulysses import apply_ulysses
from ray_ulysses.errors import RunError
from ray_ulysses.evaluation.scoring import Passage, score_passages
from tests.breadth import fast_only
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import ARCHITECTURES, VOCAB, zoo_model


def passages(lengths: tuple[int, ...], vocab: int = VOCAB) -> list[Passage]:
    rng = np.random.default_rng(5)
    found = []
    for length in lengths:
        is_scored = rng.random(length) < 0.6
        is_scored[0] = False
        found.append(Passage(tokens=rng.integers(1, vocab, length), is_scored=is_scored))
    return found


@torch.no_grad()
def alone(model: Any, passage: Passage) -> tuple[np.ndarray, np.ndarray]:
    """Compute losses and correctness with Transformers' own attention, from complete logits in float64."""
    ids = torch.from_numpy(passage.tokens)[None]
    logits = model(input_ids=ids, use_cache=False).logits[0].double()
    losses = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none").numpy()
    is_right = (logits[:-1].argmax(-1) == ids[0, 1:]).numpy()
    scored = passage.is_scored[1:]
    return np.where(scored, losses, 0.0), is_right & scored


@pytest.mark.parametrize("architecture", fast_only(ARCHITECTURES, "llama", "qwen3", "gemma2", "cohere2", "granite"))
@pytest.mark.parametrize("row_tokens", [40, 200])
def test_scores_equal_those_of_the_model_alone(architecture: str, row_tokens: int) -> None:
    texts = passages((17, 40, 2, 9, 33))
    model = zoo_model(architecture).eval()
    wanted = [alone(model, text) for text in texts]
    found = list(score_passages(apply_ulysses(model, ALONE), texts, ALONE, row_tokens=row_tokens))
    assert len(found) == len(texts)
    for (losses, is_right), scores in zip(wanted, found, strict=True):
        assert scores.losses.dtype == np.float64
        np.testing.assert_allclose(scores.losses[1:], losses, atol=2e-5)
        assert (scores.is_correct[1:] == is_right).all()


def test_the_logits_of_a_row_never_exist_together() -> None:
    # No other tensor of this model is as large as the row's logits.
    model = zoo_model("qwen3", vocab_size=8192).eval()
    (text,) = passages((2048,), vocab=8192)

    class Largest(TorchDispatchMode):
        values = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.values = max(self.values, out.numel())
            return out

    prepared = apply_ulysses(model, ALONE)
    with Largest() as largest:
        list(score_passages(prepared, [text], ALONE, row_tokens=2048))
    assert 0 < largest.values <= 2048 * 8192 // 4


def test_a_model_that_has_diverged_ends_the_evaluation() -> None:
    model = zoo_model("llama").eval()
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    with pytest.raises(RunError, match="losses on these texts are not finite"):
        list(score_passages(apply_ulysses(model, ALONE), passages((9,)), ALONE, row_tokens=16))
