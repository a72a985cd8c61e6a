"""Runs the self-test at the start of an attempt, on attention as the run's layers use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray_ulysses.engine.model import torch_dtype
from ray_ulysses.engine.model_config import planned_config
from ray_ulysses.engine.self_test import SelfTestReport, run_self_test
from ray_ulysses.engine.self_test_attention import AttentionSettings
from ray_ulysses.errors import RunError
from ray_ulysses.logging import get_logger

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.engine.zero import ZeroSettings
    from ray_ulysses.model_shape import ModelShape
    from ray_ulysses.parallel.mesh import SequenceMesh
    from ray_ulysses.run.settings import ResolvedRun
    from ray_ulysses.trainer.worker import Worker

_log = get_logger(__name__)


def check_start(run: ResolvedRun, worker: Worker, mesh: SequenceMesh, zero: ZeroSettings) -> SelfTestReport:
    """Compare the attempt's process groups and devices with one process; every rank must call.

    Args:
        run: The run.
        worker: This worker; ``prepare_process`` has been called.
        mesh: The attempt's mesh.
        zero: The attempt's engine settings.

    Raises:
        RunError: The numbers are wrong here, with the same text on every rank; or a rank could not compute at all.
        UserError: The kernel that ``model.attention`` names can't be used here.
    """
    text_config = planned_config(run.config).get_text_config(decoder=True)
    attention = attention_settings(run.config, run.shape, text_config)
    try:
        report = run_self_test(mesh, worker.device, attention, zero, node=worker.node, clock=worker.clock)
    except RunError:
        raise
    except RuntimeError as error:
        raise RunError(
            f"the self-test could not run on rank {worker.rank} ({worker.node}): {error}. Every step needs the kernel "
            "or collective that failed: run ray-ulysses doctor on this node, or exclude it"
        ) from error
    if worker.rank == 0:
        _log.info("%s", report.in_words())
    return report


def attention_settings(config: Config, shape: ModelShape, text_config: Any) -> AttentionSettings:
    """Return the attention of the run's layers.

    Args:
        config: The run's configuration.
        shape: The model's shape.
        text_config: The ``PreTrainedConfig`` of the decoder, defaults filled in.
    """
    head_size, value_size = shape.head_dim, shape.value_dim
    num_kv_heads = shape.num_kv_heads
    if getattr(text_config, "v_head_dim", None) and getattr(text_config, "qk_nope_head_dim", None):
        # Latent attention, also of a configuration that leaves its sizes to the defaults, which the shape has not.
        head_size = int(text_config.qk_nope_head_dim) + int(text_config.qk_rope_head_dim or 0)
        value_size, num_kv_heads = int(text_config.v_head_dim), shape.num_heads
    softcap = getattr(text_config, "attn_logit_softcapping", None)
    return AttentionSettings(
        num_heads=shape.num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        value_size=value_size,
        dtype=torch_dtype(config.model.dtype),
        kernel=config.model.attention,
        windows=layer_windows(text_config),
        softcap=None if softcap is None else float(softcap),
        has_sinks=text_config.model_type == "gpt_oss",
        chunks=config.memory.attention_chunks,
    )


def layer_windows(text_config: Any) -> tuple[int | None, ...]:
    """Return the window of each kind of layer, ``None`` for full attention."""
    window = getattr(text_config, "sliding_window", None)
    if not window or getattr(text_config, "use_sliding_window", True) is False:
        return (None,)
    kinds = getattr(text_config, "layer_types", None)
    if not kinds:
        # One window for all layers, as in Mistral.
        return (int(window),)
    return tuple(
        found for kind, found in (("full_attention", None), ("sliding_attention", int(window))) if kind in kinds
    ) or (None,)
