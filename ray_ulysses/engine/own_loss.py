"""Refuses models whose own forward adds to the cross-entropy what training would leave out, such as Bamba's z-loss.

Training takes its loss from the logits alone, and adds the z-loss of ``optimizer.z_loss`` and the load-balancing loss
of :mod:`ray_ulysses.engine.router_loss`. Whatever else a model's forward adds when it is given labels would be ignored.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ray_ulysses.engine.model_parts import find_parts
from ray_ulysses.errors import UserError

if TYPE_CHECKING:
    from ray_ulysses.engine.model_parts import ModelParts

_CHECKED = "_ray_ulysses_own_loss"
_TOKENS = 13
_WORDS = ("loss", "coef")
_MOST_FIELDS = 8


def refuse_own_loss(model: Any) -> None:
    """Raise if the loss of a model's own forward is not the cross-entropy of its logits, the router loss aside.

    The model's own forward is called once with made-up logits in place of its decoder and its head, so that no
    architecture is known by name. A forward that can't be called in this way is left alone, and so is a model whose
    parameters DeepSpeed has partitioned, since a call of modules outside of a step would change ZeRO-3's trace of them.

    Args:
        model: A ``PreTrainedModel`` on any device, initialized or not; ``None`` for what is none.

    Raises:
        UserError: Names the settings of losses in the model's configuration, and what to set.
    """
    if model is None or vars(model).get(_CHECKED) or any(hasattr(one, "ds_id") for one in model.parameters()):
        return
    found = _losses(model)
    if found is None or abs(found[0] - found[1]) <= 2e-6 * abs(found[1]):
        vars(model)[_CHECKED] = True
        return
    config = model.config.get_text_config(decoder=True)
    settings = {name: value for name, value in config.to_dict().items() if _is_of_a_loss(name, value)}
    said = ", ".join(f"{name}={value}" for name, value in settings.items()) or "none of its settings says so"
    raise UserError(
        f"the forward of {type(model).__name__} adds a loss of its own to the cross-entropy ({said}), which is a mean "
        f"over a rank's slice and would be left out; set {', '.join(f'{name}: 0.0' for name in settings) or 'it to 0'} "
        "in model.config, for pretrained weights in the config.json of model.path; a z-loss per supervised token is "
        "optimizer.z_loss"
    )


def _is_of_a_loss(name: str, value: Any) -> bool:
    # Those of routers count only with output_router_logits, which the probe turns off.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value > 0 and any(word in name for word in _WORDS) and "aux" not in name


def _losses(model: Any) -> tuple[float, float] | None:
    """Return the loss that a forward makes of made-up logits, and their cross-entropy; None if it makes none."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    config = model.config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(3)
    # Far from 0, so that a z-loss with a coefficient of 1e-5 shows.
    logits_1NV = 10 + 3 * torch.randn(1, _TOKENS, config.vocab_size, generator=generator)
    ids_1N = torch.randint(0, config.vocab_size, (1, _TOKENS), generator=generator)
    inputs: dict[str, Any] = {"input_ids": ids_1N, "labels": ids_1N}
    if hasattr(config, "output_router_logits"):
        inputs["output_router_logits"] = False
    # One with a field for routers, which some forwards read.
    output = MoeModelOutputWithPast(last_hidden_state=torch.zeros(1, _TOKENS, config.hidden_size))
    # A few forwards read the dtype of the head's weight.
    head = partial(_given, logits_1NV)
    vars(head)["weight"] = logits_1NV
    try:
        with torch.no_grad():
            result = _finished(find_parts(model), output, head, inputs)
            logits_NV = result.logits[0, :-1].float()
    except Exception:
        # Of any type: the model is built in another way, or its forward reads what these outputs do not have.
        return None
    if not torch.is_tensor(result.loss):
        return None
    return float(result.loss), float(torch.nn.functional.cross_entropy(logits_NV, ids_1N[0, 1:]))


def _finished(parts: ModelParts, output: Any, head: Any, inputs: dict[str, Any]) -> Any:
    """Run the forward after the decoder; what a family's decoder returns beside hidden states is ``None``."""
    for _ in range(_MOST_FIELDS):
        try:
            return parts.finished(output, head, (), inputs)
        except AttributeError as error:
            if error.obj is not output or error.name is None:
                raise
            object.__setattr__(output, error.name, None)
    raise AttributeError(f"a forward that reads more than {_MOST_FIELDS} outputs of its decoder")


def _given(result: torch.Tensor, *_: Any) -> torch.Tensor:
    return result
