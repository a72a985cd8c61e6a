"""Activations in host memory on one process: bitwise the same, in order, without races, within the budget."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import nn

from ray_ulysses import apply_ulysses, causal_lm_loss, shard_batch
from ray_ulysses.attention.recompute import KeptOutput
from ray_ulysses.engine.activation_offload import ActivationOffload, _Slabs, offload_activations
from ray_ulysses.engine.tiled_mlp import tile_mlps
from ray_ulysses.errors import UserError
from ray_ulysses.model_shape import ModelShape
from tests.breadth import fast_only
from tests.planned import estimate
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import ARCHITECTURES, SIZES, VOCAB, magnified, tiny_model, zoo_model
from tests.unit.engine.late_copies import LateCopies
from tests.unit.engine.steps import checkpointed, gradients_of, make_batch, peak_bytes, step

Kind = Literal["layer_inputs", "attention_outputs"]
INPUTS: Kind = "layer_inputs"
OUTPUTS: Kind = "attention_outputs"
BOTH: tuple[Kind, Kind] = (INPUTS, OUTPUTS)
TOKENS = 40
LAYERS = 5
ROOM = 1 << 20
LAYER_BYTES = TOKENS * SIZES["hidden_size"] * 4


def make_model(architecture: str = "llama", keep: KeptOutput = "both", **changes: Any) -> Any:
    return checkpointed(apply_ulysses(zoo_model(architecture, **changes), ALONE).train(), keep)


def offload_to(
    model: Any, copies: LateCopies, kinds: Collection[Kind] = BOTH, keep: KeptOutput = "both"
) -> ActivationOffload:
    offload = ActivationOffload(copies, kinds, keep=keep, budget_bytes=copies.num_bytes)
    for layer in model.modules():
        if getattr(layer, "gradient_checkpointing", False):
            layer._gradient_checkpointing_func = partial(offload.checkpoint, layer._gradient_checkpointing_func)
    return offload


def deep(copies: LateCopies, kinds: Collection[Kind] = BOTH) -> tuple[Any, ActivationOffload]:
    model = make_model(num_hidden_layers=LAYERS)
    return model, offload_to(model, copies, kinds)


def assert_same_bits(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(ours[name], wanted[name])] == []


@pytest.mark.parametrize("architecture", fast_only(ARCHITECTURES, "llama", "gpt_oss"))
@pytest.mark.parametrize("keep", ["both", "none"])
def test_no_bit_of_loss_and_gradients_changes(architecture: str, keep: KeptOutput) -> None:
    model = make_model(architecture, keep)
    tile_mlps(model, 7)
    wanted = step(model)
    offload_activations(
        model, BOTH if keep == "both" else [INPUTS], keep=keep, budget_bytes=ROOM, device=torch.device("cpu")
    )
    for _ in range(2):
        assert_same_bits(step(model), wanted)


@pytest.mark.parametrize("kinds", [[INPUTS], [OUTPUTS], BOTH], ids=lambda kinds: "+".join(kinds))
def test_copies_that_happen_as_late_as_they_may_change_no_bit(kinds: Collection[Kind]) -> None:
    wanted = step(make_model(num_hidden_layers=LAYERS))
    copies = LateCopies(ROOM)
    model, offload = deep(copies, kinds)
    with torch.no_grad():
        causal_lm_loss(model, make_batch())
    assert copies.log == [], "an evaluation copies nothing"
    highest = []
    for _ in range(3):
        assert_same_bits(step(model), wanted)
        assert offload.bytes_in_use == 0
        highest.append(copies.highest)
    copies.finish()
    per_layer = {INPUTS: LAYER_BYTES, OUTPUTS: LAYER_BYTES + TOKENS * SIZES["num_attention_heads"] * 4}
    assert highest == [LAYERS * sum(per_layer[kind] for kind in kinds)] * 3
    assert copies.most_pending_bytes <= highest[0] * 2 // LAYERS


def test_inputs_leave_in_order_and_come_back_one_layer_ahead() -> None:
    copies = LateCopies(ROOM)
    model, _ = deep(copies, [INPUTS])
    step(model)
    log = [(event, start // LAYER_BYTES) for event, start in copies.log]
    # A layer's activations leave the device when the second layer after it starts.
    forward = [("out", 0), ("out", 1)]
    for layer in range(2, LAYERS):
        forward += [("out done", layer - 2), ("out", layer)]
    assert log[: len(forward)] == forward
    # The last two layers are still on the device; every other layer is copied back while its successor computes.
    backward = [event for event in log[len(forward) :] if event[0].startswith("in")]
    assert backward == [("in", 2), ("in", 1), ("in done", 2), ("in", 0), ("in done", 1), ("in done", 0)]


def test_memory_on_the_device_does_not_grow_with_the_layers() -> None:
    # The row is long because each layer saves 5 KiB of generator state as well.
    long = 1024

    def peak(layers: int, kinds: Collection[Kind]) -> int:
        model = make_model(num_hidden_layers=layers)
        offload_activations(model, kinds, keep="both", budget_bytes=1 << 24, device=torch.device("cpu"))
        model.requires_grad_(False).get_input_embeddings().requires_grad_()
        batch = shard_batch(torch.arange(long)[None] % VOCAB, None, (long,), ALONE)
        return peak_bytes(lambda: causal_lm_loss(model, batch)[0].backward())

    kept = peak(12, []) - peak(6, [])
    assert kept >= 6 * 2 * long * SIZES["hidden_size"] * 4
    assert peak(12, BOTH) - peak(6, BOTH) <= kept / 20


@pytest.mark.parametrize("call", [3, LAYERS + 2], ids=["forward", "backward"])
def test_an_exception_leaves_no_slab_in_use_and_the_next_step_is_right(call: int) -> None:
    wanted = step(make_model(num_hidden_layers=LAYERS))
    copies = LateCopies(ROOM)
    model, offload = deep(copies)
    calls: Iterator[int] = iter(range(100))

    def fail(*_: Any) -> None:
        if next(calls) == call:
            raise KeyError("planned")

    hooks = [layer.mlp.register_forward_pre_hook(fail) for layer in model.model.layers]
    with pytest.raises(KeyError, match="planned"):
        step(model)
    for hook in hooks:
        hook.remove()
    gc.collect()
    assert offload.bytes_in_use == 0
    assert_same_bits(step(model), wanted)
    copies.finish()


def test_backward_passes_may_follow_several_forward_passes_but_run_only_once_each() -> None:
    plain = make_model(num_hidden_layers=LAYERS)
    causal_lm_loss(plain, make_batch(), tile="off")[0].backward()  # type: ignore[no-untyped-call]
    model, offload = deep(LateCopies(ROOM))
    losses = [causal_lm_loss(model, make_batch(), tile="off")[0] for _ in range(2)]
    for loss in losses:
        model.zero_grad()
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        assert_same_bits(gradients_of(model), gradients_of(plain))
    with pytest.raises(RuntimeError, match=r"one backward pass only.*offload_activations: \[\]"):
        loss.backward()  # type: ignore[no-untyped-call]
    assert offload.bytes_in_use == 0
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:3].requires_grad_(False)
    step(model)
    assert offload.bytes_in_use == 0, "frozen layers free their slabs too"


OWN_WIDTHS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "diffllama": {"num_key_value_heads": 2},
    "mimo_v2_flash": {
        "head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2,
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB, "intermediate_size": [48] * 2, "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.0] * 2,
        "laurel_rank": 4, "hidden_size_per_layer_input": 8,
    },
}  # fmt: skip
"""Models whose values are wider or narrower than their queries, or whose layers take several streams."""
NAMED_AS_USUAL = [name for name in ARCHITECTURES if name not in ("gpt2", *OWN_WIDTHS)]


@pytest.mark.parametrize("architecture", [*OWN_WIDTHS, *fast_only(NAMED_AS_USUAL, "llama", "gemma4_text")])
@pytest.mark.parametrize("keep", fast_only(("both", "kernel"), "kernel"))
def test_the_planned_host_memory_is_enough_and_not_too_much(architecture: str, keep: KeptOutput) -> None:
    own = OWN_WIDTHS.get(architecture)
    model: Any = zoo_model(architecture) if not own else magnified(tiny_model(architecture, **own))
    checkpointed(apply_ulysses(model, ALONE).train(), keep)
    wanted = step(model)
    planned = estimate(
        ModelShape.from_config_dict(model.config.to_dict()), world_size=1, sp_size=1, context_tokens=TOKENS,
        dtype="fp32", attention_output=keep, offload_activations=BOTH,
    )  # fmt: skip
    take, ends = _Slabs.take, []

    def noted(self: _Slabs, num_bytes: int) -> Any:
        slab = take(self, num_bytes)
        ends.append(slab.stop)
        return slab

    with mock.patch.object(_Slabs, "take", noted):
        offload_activations(model, BOTH, keep=keep, budget_bytes=planned.offloaded_bytes, device=torch.device("cpu"))
        assert_same_bits(step(model), wanted)
    assert planned.offloaded_bytes <= 1.1 * max(ends)


def test_more_than_the_budget_is_refused() -> None:
    needed = LAYERS * LAYER_BYTES
    step(deep(LateCopies(needed), [INPUTS])[0])
    model, offload = deep(LateCopies(needed - 1), [INPUTS])
    with pytest.raises(UserError, match=rf"^memory\.offload_activations: .* {needed - 1:,} bytes of host memory"):
        step(model)
    gc.collect()
    assert offload.bytes_in_use == 0


def test_an_in_place_change_of_a_kept_tensor_is_refused() -> None:
    model, _ = deep(LateCopies(ROOM), [INPUTS])

    def change(layer: nn.Module, args: tuple[torch.Tensor, ...], output: Any) -> None:
        args[0].detach().add_(1.0)

    model.model.layers[1].register_forward_hook(change)
    with pytest.raises(RuntimeError, match="copied to host memory was changed in place after the forward"):
        step(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.transpose(1, 2),
        lambda tensor: tensor[:, ::2],
        lambda tensor: tensor[:, 1:],
        lambda tensor: tensor.to(torch.bfloat16)[..., :3].transpose(0, 2),
        lambda tensor: tensor[:, :0],
    ],
    ids=["transposed", "with gaps", "with an offset", "bf16", "empty"],
)
def test_a_tensor_of_any_layout_comes_back(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    kept = change(torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1)))
    offload = ActivationOffload(LateCopies(ROOM), [INPUTS], keep="none", budget_bytes=ROOM)
    own = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    weight = torch.ones((), dtype=kept.dtype, requires_grad=True)
    seen: list[torch.Tensor] = []

    def function(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return (tensor * weight).exp()

    outputs = [offload.checkpoint(own, function, one) for one in (kept, kept + 1, kept + 2)]
    for output in reversed(outputs):
        output.sum().backward()
    first, again = seen[0], seen[-1]
    assert (len(seen) == 6 and again.data_ptr() != first.data_ptr()) or not kept.numel()
    assert torch.equal(again, first) and again.dtype == first.dtype
    is_dense = torch.empty_like(first).stride() == first.stride()
    assert again.stride() == first.stride() or not is_dense or not first.numel()


def test_a_layer_that_is_called_with_its_input_by_name_is_refused() -> None:
    offload = ActivationOffload(LateCopies(64), [INPUTS], keep="none", budget_bytes=64)
    with pytest.raises(UserError, match=r"^memory.offload_activations: .*layer_inputs can't be identified"):
        offload.checkpoint(lambda function: function(), nn.Identity())


def test_compiled_layers_run_as_they_are() -> None:
    wanted = step(make_model(num_hidden_layers=2))
    model = make_model(num_hidden_layers=2)
    copies = LateCopies(ROOM)
    offload_to(model, copies)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="aot_eager")
    assert_same_bits({name.replace("_orig_mod.", ""): one for name, one in step(model).items()}, wanted)
    assert copies.log
