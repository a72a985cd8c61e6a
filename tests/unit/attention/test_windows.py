"""Every layer has the window of the mask that Transformers builds for it, or the model is refused."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, masking_utils

from ray_ulysses import apply_ulysses, shard_batch
from ray_ulysses.attention.probe import (
    Mask,
    MaskFunction,
    NotAWindow,
    local_span_of,
    longer_than_any_window,
    mask_of,
    window_of,
)
from ray_ulysses.errors import UserError
from tests.breadth import fast_only
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import VOCAB, plain_config

TOKENS = 24
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": EXPERTS,
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen2_moe": EXPERTS | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS | {"moe_intermediate_size": 16, "head_dim": 8},
    "phi3": {},
    "phimoe": EXPERTS | {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "olmoe": EXPERTS,
    "olmo2": {},
    "olmo3": {},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "gpt_oss": EXPERTS | {"head_dim": 8},
    "cohere2": {},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "glm4_moe": EXPERTS | {"n_routed_experts": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    "seed_oss": {"head_dim": 8, "residual_dropout": 0.0},
    "minimax_m2": EXPERTS | {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": EXPERTS | {"head_dim": 8},
    "jetmoe": EXPERTS | {"kv_channels": 8, "num_key_value_heads": 2},
    "exaone4": {},
    "smollm3": {},
    "granite": {},
    "llama4_text": EXPERTS | {"head_dim": 8, "intermediate_size_mlp": 48},
}
PADDING = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def draw_settings(rng: random.Random) -> dict[str, Any]:
    """Draw settings that affect windows, some of them contradictory or unknown to the architecture."""
    num_layers = rng.choice([2, 3])
    kinds = rng.choices(["sliding_attention", "full_attention", "chunked_attention"], [5, 4, 1], k=num_layers)
    drawn = {
        "sliding_window": rng.choice([None, 1, 3, 5, 9]),
        "layer_types": rng.choice([None, kinds, ["sliding_attention"] * num_layers]),
        "use_sliding_window": rng.choice([True, False]),
        "max_window_layers": rng.choice([0, 1, num_layers]),
        "attention_chunk_size": rng.choice([None, None, None, 7]),
        "sliding_window_pattern": rng.choice([1, 2, 3]),
    }
    return {"num_hidden_layers": num_layers} | {
        name: drawn[name] for name in sorted(drawn) if rng.random() < 0.7 and drawn[name] is not None
    }


def outcome_of(kind: str, settings: dict[str, Any]) -> str:
    """Return ``no model``, ``refused``, ``equal`` or ``equal with a window named``."""
    try:
        config: PreTrainedConfig = plain_config(kind, **TYPES[kind] | PADDING, **settings)
        torch.manual_seed(7)
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(3.0)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        ids = torch.randint(3, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            wanted = model(input_ids=ids, use_cache=False).logits
    except UserError:
        raise
    except Exception:
        # Settings that contradict one another so that Transformers can't build or run the model.
        return "no model"
    try:
        apply_ulysses(model, ALONE)
    except UserError:
        return "refused"
    with torch.no_grad():
        found = model(**shard_batch(ids, None, None, ALONE).model_inputs()).logits
    error = float((found - wanted).norm() / wanted.norm())
    assert error < 1e-5, f"{kind} with {settings} is off by {error:.1e}"
    names_window = "sliding_window" in settings or "attention_chunk_size" in settings
    return "equal with a window named" if names_window else "equal"


def search(num_cases: int, seed: int) -> Counter[str]:
    rng, outcomes = random.Random(seed), Counter[str]()
    while outcomes.total() - outcomes["no model"] < num_cases:
        outcomes[outcome_of(rng.choice(sorted(TYPES)), draw_settings(rng))] += 1
    return outcomes


def test_a_drawn_architecture_has_the_windows_of_its_own_mask_or_is_refused() -> None:
    outcomes = search(16, seed=1)
    assert outcomes["equal with a window named"] >= 4


@pytest.mark.slow
def test_hundreds_of_drawn_architectures_have_the_windows_of_their_own_masks_or_are_refused() -> None:
    outcomes = search(600, seed=2)
    assert outcomes["equal with a window named"] >= 200
    assert outcomes["refused"] >= 1


@pytest.mark.parametrize(
    "kind", ["phimoe", "olmoe", *fast_only(["glm4_moe", "seed_oss", "minimax_m2", "jetmoe"], "glm4_moe")]
)
def test_a_window_that_only_the_mask_knows_is_applied(kind: str) -> None:
    types = {} if kind in ("phimoe", "olmoe") else {"layer_types": ["sliding_attention", "full_attention"]}
    assert outcome_of(kind, {"sliding_window": 5, **types}) == "equal with a window named"


def test_a_compiled_model_has_the_windows_that_only_its_mask_knows() -> None:
    """Under torch.compile nothing is checked per layer, so the window must be there before."""
    settings = {"sliding_window": 5, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
    config = plain_config("qwen2_moe", **TYPES["qwen2_moe"] | PADDING, **settings)
    ids = torch.randint(3, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    gradients = []
    for compiled in (False, True):
        torch.manual_seed(7)
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
        model.set_experts_implementation("eager")
        called, inputs = model, {"input_ids": ids, "use_cache": False}
        if compiled:
            called = torch.compile(apply_ulysses(model, ALONE), backend="aot_eager")
            inputs = shard_batch(ids, None, None, ALONE).model_inputs()
        logits = called(**inputs).logits
        torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
        gradients.append(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]))
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 1e-5


OTHER_MASKS: dict[str, MaskFunction] = {
    "both-ways": masking_utils.bidirectional_mask_function,
    "window-both-ways": masking_utils.sliding_window_bidirectional_mask_function(9),
    "spans-both-ways": masking_utils.chunked_overlay(7, torch.zeros(1, dtype=torch.int64)),
    "shifted-spans": lambda _, __, query, key: (key <= query) & ((key + 3) // 7 == (query + 3) // 7),
    "every-second": lambda _, __, query, key: (key <= query) & ((query - key) % 2 == 0),
    "growing": lambda _, __, query, key: (key <= query) & (query - key < 9 + query // 200),
    "later": lambda _, __, query, key: key > query,
    "hole": lambda _, __, query, key: (key <= query) & (key != 3),
}


@pytest.mark.parametrize("mask", OTHER_MASKS)
@pytest.mark.parametrize("find", [window_of, local_span_of])
def test_a_mask_that_is_not_a_causal_window_is_refused(mask: str, find: Callable[[MaskFunction, int], object]) -> None:
    with pytest.raises(NotAWindow):
        find(OTHER_MASKS[mask], 1001)


NO_MASKS = {name: mask for name, mask in OTHER_MASKS.items() if name not in ("both-ways", "window-both-ways")} | {
    "two-widths": lambda _, __, query, key: (query - key < 9) & (key - query < 10),
    "later-alone": lambda _, __, query, key: (key >= query) & (key - query < 9),
    "hole-both-ways": lambda _, __, query, key: (query >= 0) & (key != 3),
    "growing-both-ways": lambda _, __, query, key: (query - key).abs() < 9 + query.maximum(key) // 200,
}


@pytest.mark.parametrize("mask", NO_MASKS)
def test_a_mask_of_another_kind_is_refused(mask: str) -> None:
    with pytest.raises(NotAWindow):
        mask_of(NO_MASKS[mask], 1001)


@pytest.mark.parametrize("window", [1, 2, 6, 4096, None])
@pytest.mark.parametrize("causal", [True, False])
def test_the_window_of_a_mask_is_found(window: int | None, causal: bool) -> None:
    function = masking_utils.causal_mask_function if causal else masking_utils.bidirectional_mask_function
    if window is not None and causal:
        function = masking_utils.sliding_window_causal_mask_function(window)
    elif window is not None:
        # Transformers counts the tokens on each side.
        function = masking_utils.sliding_window_bidirectional_mask_function(window - 1)
    found = mask_of(function, longer_than_any_window({"sliding_window": window}))
    # A window of the token alone has no direction.
    assert found == Mask(window=window, causal=causal or window == 1)


def test_masks_are_evaluated_on_a_row_longer_than_any_number_of_the_configuration() -> None:
    assert longer_than_any_window({"a": 10, "b": {"window": [3, 4096]}, "c": "70000", "d": True}) > 2 * 4096
    # A tokenizer's placeholder for "no limit" is not a window.
    assert longer_than_any_window({"model_max_length": 10**30, "window": 8}) < 1000
