"""Every architecture of the zoo on one GPU: in fp32 against one process on the CPU, and in bf16 as it is trained.

In fp32 the layers that carry state run Transformers' own PyTorch code. The packages that replace it on GPUs
(``causal-conv1d``, ``flash-linear-attention``, ``mamba-ssm``) compute in bf16: where they are installed, one call for
all documents of a row is held against a call per document, and both against fp32.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from ray_ulysses import apply_ulysses, causal_lm_loss, shard_batch
from ray_ulysses.attention import mixers
from ray_ulysses.attention.batch import IGNORE_INDEX
from ray_ulysses.attention.mixers import find_mixers
from ray_ulysses.engine.fused_norms import fuse_norms
from ray_ulysses.engine.tiled_mlp import tile_mlps
from tests.distributed.seam_case import gradient_error, make_row, reference_step
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import ARCHITECTURES, HYBRIDS, VOCAB, moved_away, plain_config, zoo_model

NUM_ROWS = 3
PACKAGES = {
    "causal_conv1d_fn": "causal_conv1d", "chunk_gated_delta_rule": "fla", "chunk_kda": "fla",
    "mamba_chunk_scan_combined": "mamba_ssm",
}  # fmt: skip
HAS_PACKAGES = any(importlib.util.find_spec(package) for package in PACKAGES.values())
LENGTHS = (300, 1, 150, 61, 512)
# bf16 weights and activations through two layers against fp32, norm-wise the whole gradient.
BF16_BOUND = 5e-2


@pytest.fixture(autouse=True)
def no_tf32() -> Iterator[None]:
    settings = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [one.allow_tf32 for one in settings]
    for one in settings:
        one.allow_tf32 = False
    yield
    for one, allowed in zip(settings, before, strict=True):
        one.allow_tf32 = allowed


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: one.grad.detach().cpu() for name, one in model.named_parameters() if one.grad is not None}


def step(model: Any, device: str, num_rows: int = NUM_ROWS) -> tuple[float, dict[str, torch.Tensor]]:
    """Train the rows of law 1's matrix on one process."""
    batches = [shard_batch(ids.to(device), labels.to(device), lengths, ALONE)
               for ids, labels, lengths in map(make_row, range(num_rows))]  # fmt: skip
    tokens = sum(int((batch.labels_BL != IGNORE_INDEX).sum()) for batch in batches)
    sums = []
    for batch in batches:
        loss_sum, _ = causal_lm_loss(model, batch)
        (loss_sum / tokens).backward()
        sums.append(float(loss_sum.detach()))
    return sum(sums) / tokens, gradients_of(model)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *HYBRIDS])
def test_a_step_in_fp32_is_that_of_one_process_on_the_cpu(architecture: str) -> None:
    if architecture in HYBRIDS and HAS_PACKAGES:
        pytest.skip("packages that compute in bf16 replace its code")
    model = apply_ulysses(zoo_model(architecture).to("cuda"), ALONE)
    # As in a run on a GPU.
    fuse_norms(model)
    loss, gradients = step(model, "cuda")
    wanted = reference_step(architecture, NUM_ROWS, torch.float64)
    own = reference_step(architecture, NUM_ROWS, torch.float32)
    assert loss == pytest.approx(wanted.loss, rel=1e-5)
    error, worst_tensor = gradient_error(gradients, own.gradients, wanted.gradients)
    if error > 1 and architecture in HYBRIDS:
        # As on the CPU: gradients of queries and keys that nearly cancel, held against the default attention.
        default = reference_step(architecture, NUM_ROWS, torch.float32, "sdpa")
        error, worst_tensor = gradient_error(gradients, default.gradients, wanted.gradients)
    assert error <= 1, f"{worst_tensor} is off by {error:.2f} of what law 1 allows"


EXPERTS = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64, "sliding_window": 64},
}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 2048}


def wide_model(model_type: str, dtype: torch.dtype, device: str, **sizes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    config = plain_config(model_type, **{**WIDE, **sizes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return moved_away(model, 2.0, 0.1).to(torch.bfloat16).to(dtype).to(device)


def wide_row(device: str) -> torch.Tensor:
    ids = torch.randint(0, VOCAB, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    return ids.to(device)


def wide_step(model: Any, device: str) -> tuple[float, dict[str, torch.Tensor]]:
    batch = shard_batch(wide_row(device), None, LENGTHS, ALONE)
    loss_sum, num_tokens = causal_lm_loss(model, batch)
    (loss_sum / num_tokens).backward()
    return float(loss_sum.detach() / num_tokens), {name: one.double() for name, one in gradients_of(model).items()}


def whole_error(ours: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    assert ours.keys() == wanted.keys()
    apart = torch.stack([(ours[name] - truth).norm() for name, truth in wanted.items()]).norm()
    return float(apart / torch.stack([truth.norm() for truth in wanted.values()]).norm())


@pytest.mark.parametrize("architecture", EXPERTS)
@pytest.mark.parametrize("tile", ["off", 128])
def test_experts_and_their_router_loss_in_bf16_are_those_of_fp32(architecture: str, tile: Any) -> None:
    """Experts run as Transformers runs them on a GPU by default, in grouped products."""
    sizes = {**EXPERTS[architecture], "output_router_logits": True, "router_aux_loss_coef": 0.05}
    wanted_loss, wanted = wide_step(
        apply_ulysses(wide_model(architecture, torch.float32, "cpu", **sizes), ALONE), "cpu"
    )
    model = apply_ulysses(wide_model(architecture, torch.bfloat16, "cuda", **sizes), ALONE)
    tile_mlps(model, tile)
    loss, gradients = wide_step(model, "cuda")
    assert loss == pytest.approx(wanted_loss, rel=1e-2)
    # A token whose two best experts are nearly equal may go to another one in bf16.
    assert whole_error(gradients, wanted) <= 2 * BF16_BOUND


_DELTA_NET = {
    "head_dim": 64, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_chunk_size": 64,
}  # fmt: skip
PACKED: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_next": {
        **_DELTA_NET, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128, "decoder_sparse_step": 1,
    },
    "olmo_hybrid": {**{name: one for name, one in _DELTA_NET.items() if name != "head_dim"}, "pad_token_id": 0},
    "kimi_linear": {
        "num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "dense"], "linear_num_heads": 4, "linear_head_dim": 64, "kv_lora_rank": 64,
        "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64, "num_local_experts": 4,
        "moe_intermediate_size": 128, "num_experts_per_tok": 2, "pad_token_id": 0,
    },
    "bamba": {"attn_layer_indices": [1], **_MAMBA},
    "falcon_h1": {"mamba_d_ssm": 512, **_MAMBA},
}  # fmt: skip


@contextmanager
def one_call_per_document() -> Iterator[None]:
    with mock.patch.object(mixers, "packed_arguments", return_value=None):
        yield


def packed_model(architecture: str, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Any:
    return apply_ulysses(wide_model(architecture, dtype, device, **PACKED[architecture]), ALONE)


def skip_without_packages(architecture: str) -> None:
    """Skip unless each package function that the architecture's layers call comes from a package."""
    from ray_ulysses.attention.mixers import _package_functions

    (_, mixer, _), *_ = find_mixers(wide_model(architecture, torch.bfloat16, "cpu", **PACKED[architecture]))
    missing = {PACKAGES[one["func_name"]] for one in _package_functions(mixer)
               if one["func_name"] in PACKAGES and not one["is_new_implementation"]}  # fmt: skip
    if missing:
        pytest.skip(f"needs {', '.join(sorted(missing))}")


@pytest.mark.parametrize("architecture", PACKED)
def test_one_call_of_a_package_for_all_documents_is_a_call_for_each(architecture: str) -> None:
    skip_without_packages(architecture)
    asked, calls = mixers.packed_arguments, []

    def counting(*args: Any) -> Any:
        calls.append(asked(*args))
        return calls[-1]

    with mock.patch.object(mixers, "packed_arguments", counting):
        loss, gradients = wide_step(packed_model(architecture), "cuda")
    assert calls and None not in calls, "the packages' functions were not taken to keep documents apart"
    with one_call_per_document():
        each_loss, each = wide_step(packed_model(architecture), "cuda")
    print(f"{architecture}: one call against a call per document: {whole_error(gradients, each):.1e}")
    assert loss == pytest.approx(each_loss, rel=2e-3)
    assert whole_error(gradients, each) <= 2e-2
    for name, truth in each.items():
        scale = max(float(truth.norm()), 1e-2 * float(torch.stack([one.norm() for one in each.values()]).norm()))
        assert float((gradients[name] - truth).norm()) <= 5e-2 * scale, name


@pytest.mark.parametrize("architecture", PACKED)
def test_a_step_with_packages_in_bf16_is_that_of_fp32(architecture: str) -> None:
    skip_without_packages(architecture)
    reference = packed_model(architecture, torch.float32, "cpu")
    with plain_code(reference):
        wanted_loss, wanted = wide_step(reference, "cpu")
    loss, gradients = wide_step(packed_model(architecture), "cuda")
    print(f"{architecture}: bf16 with packages against fp32: {whole_error(gradients, wanted):.1e}")
    assert loss == pytest.approx(wanted_loss, rel=1e-2)
    assert whole_error(gradients, wanted) <= 2 * BF16_BOUND


@contextmanager
def plain_code(model: Any) -> Iterator[None]:
    """Make a model's layers run Transformers' own PyTorch code although packages are installed."""
    with pytest.MonkeyPatch.context() as patch, one_call_per_document():
        for _, mixer, _ in find_mixers(model):
            code = sys.modules[type(mixer).__module__]
            for name, function in list(vars(code).items()):
                if inspect.isfunction(function) and "is_new_implementation" in function.__code__.co_freevars:
                    own = inspect.getclosurevars(function).nonlocals["torch_function"]
                    patch.setattr(code, name, partial(_of_known, own))
        yield


def _of_known(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    known = inspect.signature(function).parameters
    return function(*args, **{name: value for name, value in kwargs.items() if name in known})


@pytest.mark.parametrize("architecture", PACKED)
def test_no_document_reaches_another_through_a_package(architecture: str) -> None:
    skip_without_packages(architecture)
    model = packed_model(architecture).eval()
    outputs: list[list[torch.Tensor]] = []
    for _, module, _ in find_mixers(model):
        module.register_forward_hook(
            lambda module, args, out: outputs[-1].append(out[0] if isinstance(out, tuple) else out)
        )
    changed = slice(301, 451)
    for shift in (0, 7):
        ids = wide_row("cuda")
        ids[:, changed] = (ids[:, changed] + shift) % VOCAB
        outputs.append([])
        with torch.no_grad():
            model(**shard_batch(ids, None, LENGTHS, ALONE).model_inputs())
    others = torch.ones(sum(LENGTHS), dtype=torch.bool)
    others[changed] = False
    assert outputs[0]
    for before, after in zip(*outputs, strict=True):
        assert not torch.equal(before[:, changed], after[:, changed])
        assert torch.equal(before[:, others], after[:, others])


def test_compiled_layers_in_bf16_are_those_of_fp32() -> None:
    sizes = {"head_dim": 64, "num_key_value_heads": 2}
    wanted_loss, wanted = wide_step(apply_ulysses(wide_model("qwen3", torch.float32, "cpu", **sizes), ALONE), "cpu")
    model = apply_ulysses(wide_model("qwen3", torch.bfloat16, "cuda", **sizes), ALONE)
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    loss, gradients = wide_step(model, "cuda")
    assert loss == pytest.approx(wanted_loss, rel=1e-2)
    assert whole_error(gradients, wanted) <= BF16_BOUND
