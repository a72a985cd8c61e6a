"""remove_ulysses restores the model."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from ray_ulysses import apply_ulysses, causal_lm_loss, remove_ulysses, shard_batch
from ray_ulysses.errors import UserError
from tests.breadth import fast_only
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import ARCHITECTURES, HYBRIDS, VOCAB, zoo_model

IDS = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(3))
EVERY = fast_only(
    [*ARCHITECTURES, *HYBRIDS], "llama", "gemma2", "gpt_oss", "phi3-longrope", "qwen3_next", "bamba", "gpt2"
)


def own_state(model: Any) -> list[tuple[str, str, Any]]:
    """Return all attributes of a model's modules except their hooks."""
    return [
        (name, key, _comparable(value))
        for name, module in model.named_modules()
        for key, value in sorted(vars(module).items())
        if key not in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
    ]


def _comparable(value: Any) -> Any:
    # A dynamic rotary module has a new tensor with the longest row after each forward.
    plain = isinstance(value, int | str | float | None)
    return value if plain else value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else id(value)


@pytest.mark.parametrize("architecture", EVERY)
def test_nothing_of_it_stays(architecture: str) -> None:
    model = zoo_model(architecture).eval()
    with torch.no_grad():
        before, state = model(IDS, use_cache=False).logits, own_state(model)
        apply_ulysses(model, ALONE)
        for _ in range(2):
            apply_ulysses(model, ALONE)
        causal_lm_loss(model, shard_batch(IDS, None, [[10, 14]], ALONE))
        assert remove_ulysses(model) is model
        assert torch.equal(model(IDS, use_cache=False).logits, before)
    assert own_state(model) == state and not model._forward_pre_hooks
    assert model.config._attn_implementation == "eager"


def test_it_generates_and_can_be_applied_again() -> None:
    model = zoo_model("llama").eval()
    plain = deepcopy(model).generate(IDS, max_new_tokens=4, do_sample=False)
    batch = shard_batch(IDS, None, None, ALONE)
    apply_ulysses(model, ALONE)
    loss, _ = causal_lm_loss(model, batch)
    with pytest.raises(UserError, match=r"call remove_ulysses\(model\)"):
        model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert torch.equal(remove_ulysses(model).generate(IDS, max_new_tokens=4, do_sample=False), plain)
    again, _ = causal_lm_loss(apply_ulysses(model, ALONE), batch)
    assert torch.equal(loss, again)


def test_a_copy_has_guards_of_its_own() -> None:
    batch = shard_batch(IDS, None, None, ALONE)
    model: Any = apply_ulysses(zoo_model("llama"), ALONE)
    copy, other = deepcopy(model), deepcopy(model)
    copy.set_attn_implementation("sdpa")
    with pytest.raises(UserError, match=r"attention implementation was set to 'sdpa' after apply_ulysses"):
        causal_lm_loss(copy, batch)
    other.model.layers[0].self_attn = zoo_model("llama").model.layers[0].self_attn
    with pytest.raises(UserError, match=r"^LlamaAttention at model\.layers\.0\.self_attn was replaced"):
        causal_lm_loss(other, batch)
    # To generate, say, while a frozen copy is the reference.
    frozen, (wanted, _) = deepcopy(model), causal_lm_loss(model, batch)
    remove_ulysses(model)
    assert torch.equal(causal_lm_loss(frozen, batch)[0], wanted)


def test_a_configuration_that_two_models_share_is_refused_by_name() -> None:
    config = ARCHITECTURES["llama"](attn_implementation="eager")
    model, other = LlamaForCausalLM(config), LlamaForCausalLM(config)
    apply_ulysses(apply_ulysses(model, ALONE), ALONE)
    with pytest.raises(
        UserError, match=r"^apply_ulysses was not called on this LlamaAttention's model, but the model's co"
    ):
        other(IDS)
    with pytest.raises(
        UserError, match=r"^the configuration of this LlamaForCausalLM is shared with, .*copy\.deepcopy\(config\)$"
    ):
        apply_ulysses(other, ALONE)
    remove_ulysses(model)
    assert torch.isfinite(other(IDS).logits).all()
    apply_ulysses(other, ALONE)


def test_a_model_without_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"^this LlamaForCausalLM has no Ulysses attention; pass the model"):
        remove_ulysses(zoo_model("llama"))
