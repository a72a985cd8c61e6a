"""Runs the self-test at the start of an attempt, with the attention settings of the run's layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray_ulysses.config import Config
from ray_ulysses.elastic.causes import is_consequence
from ray_ulysses.engine.encoder_shape import is_bidirectional
from ray_ulysses.engine.model import torch_dtype
from ray_ulysses.engine.model_config import planned_config
from ray_ulysses.engine.self_test import LinkTime, run_self_test
from ray_ulysses.engine.self_test_attention import AttentionSettings
from ray_ulysses.engine.zero import ZeroSettings
from ray_ulysses.errors import PeerError, RunError
from ray_ulysses.logging import get_logger
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.parallel.mesh import Role, SequenceMesh
from ray_ulysses.planner.throughput import GB, link_bandwidth
from ray_ulysses.run.settings import ResolvedRun
from ray_ulysses.trainer.worker import Worker

_FAR_BELOW = 0.5
"""Fraction of the planned bandwidth below which a link is reported. NVLink, InfiniBand and EFA are more than twice as
fast as their fallbacks."""
_GROUPS: dict[Role, str] = {
    "ulysses": "the head exchange",
    "ring": "the ring",
    "shard": "the weight all-gather",
}
_log = get_logger(__name__)


def check_start(run: ResolvedRun, worker: Worker, mesh: SequenceMesh, zero: ZeroSettings, nodes: Sequence[str]) -> None:
    """Run the self-test, and compare link speeds with the plan. All ranks must call this function.

    ``prepare_process`` must have been called. ``nodes`` contains the node name of each rank, indexed by rank.

    Raises:
        RunError: Results are wrong (every rank raises the same error), or a rank can't run the test. The error is a
            `PeerError` if a collective failed.
        UserError: The kernel set by ``model.attention`` is not available on this device.
    """
    text_config = planned_config(run.config).get_text_config(decoder=True)
    attention = attention_settings(run.config, run.shape, text_config)
    try:
        report = run_self_test(mesh, worker.device, attention, zero, node=worker.node, clock=worker.clock)
    except RunError:
        raise
    except RuntimeError as error:
        kind = PeerError if is_consequence(error) else RunError
        raise kind(
            f"the self-test failed to run on rank {worker.rank} ({worker.node}): {error}. Training uses the same "
            "kernels and collectives: run ray-ulysses doctor on this node, or exclude the node"
        ) from error
    if worker.rank == 0:
        _log.info("%s", report.in_words())
        for warning in slow_links(report.links, run.config, nodes):
            # Warnings are forwarded to the journal, where the user sees them.
            _log.warning("%s", warning)


def slow_links(links: Sequence[LinkTime], config: Config, nodes: Sequence[str]) -> list[str]:
    """Return a warning for each exchange that is much slower than the plan assumes.

    Without ``cluster.device``, the plan assumes no link speed, so there are no warnings.
    """
    cluster = config.cluster
    if config.gpu is None:
        return []
    found = []
    for link in links:
        # A ring spans several nodes if the ranks that share a row do.
        assumed = link_bandwidth(config, config.parallel.sp_size if link.role == "ring" else link.ranks)
        if link.bandwidth < _FAR_BELOW * assumed:
            by = " and ".join(link.transports) or "an unknown transport (set NCCL_DEBUG=INFO to log it)"
            found.append(
                f"{_GROUPS[link.role]} across {link.ranks} ranks reaches {link.bandwidth / GB:.3g} GB/s per rank, but "
                f"the plan assumes {assumed / GB:.3g} GB/s (cluster.device={cluster.device}, gpus_per_node="
                f"{cluster.gpus_per_node}, network_gbps={cluster.network_gbps:g}): steps take longer than planned. "
                f"The slowest rank is {link.slowest_rank} on {nodes[link.slowest_rank]}, where NCCL uses {by}. See "
                "docs/scale-out.md#network, or correct these settings and plan again"
            )
    return found


def attention_settings(config: Config, shape: ModelShape, text_config: Any) -> AttentionSettings:
    """Return the attention settings of the run's layers."""
    head_size, value_size = shape.head_dim, shape.value_dim
    num_kv_heads = shape.num_kv_heads
    if getattr(text_config, "v_head_dim", None) and getattr(text_config, "qk_nope_head_dim", None):
        # Latent attention: the shape lacks these sizes if model.config relies on Transformers' defaults.
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
        causal=not is_bidirectional(config),
        softcap=None if softcap is None else float(softcap),
        has_sinks=text_config.model_type == "gpt_oss",
        head_groups=config.memory.attention_head_groups,
    )


def layer_windows(text_config: Any) -> tuple[int | None, ...]:
    """Return the attention window of each kind of layer; None means full attention."""
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
