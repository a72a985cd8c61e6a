"""Implements ``doctor``: checks this machine, and the cluster that it would use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import ray

from ray_ulysses.cluster.node_watch import CloudSetting, found_provider, metadata_service
from ray_ulysses.cluster.ray_access import asks_for_token
from ray_ulysses.cluster.session import cluster_address, ray_session
from ray_ulysses.doctor import Check, check_machine, check_model
from ray_ulysses.elastic.notices import PROVIDER_NAMES, UnexpectedAnswerError, reach_hint
from ray_ulysses.errors import RunError, UserError


def doctor_checks(*, storage: str | None, address: str | None, model: str | None) -> Iterator[Check]:
    """Check machine and cluster, or a model instead, and yield each result at once."""
    if model is not None:
        yield from check_model(model)
        return
    if address is not None or os.environ.get("RAY_ADDRESS"):
        # First, since a cluster that can't be reached is known in seconds.
        yield _check_cluster(address)
        yield from check_token(address)
    yield from check_machine(storage)
    yield check_cloud()


def check_cloud(url: str | None = None, setting: CloudSetting = "auto") -> Check:
    """Check whether this machine's cloud would announce its end; nothing is asked on a machine that is no cloud's.

    Args:
        url: As ``elastic.cloud_metadata_url``.
        setting: As ``elastic.cloud_notices``.
    """
    provider = found_provider(setting)
    if provider is None:
        detail = "none by this machine's firmware: runs expect no notices (elastic.cloud_notices)"
        return Check(name="cloud", level="ok", detail=detail)
    name = PROVIDER_NAMES[provider]
    try:
        notice = metadata_service(provider, url=url, hints=True).notice()
    except (OSError, UnexpectedAnswerError) as error:
        detail = f"{name}, whose metadata service gives no notices of this machine's end ({error})"
        return Check(name="cloud", level="warn", detail=detail, hint=reach_hint(provider))
    if notice is not None:
        detail = f"{name} announces that this machine is going to be taken away: {notice.what}"
        return Check(name="cloud", level="warn", detail=detail, hint="use another machine")
    return Check(name="cloud", level="ok", detail=f"{name}, which announces this machine's end")


def _check_cluster(address: str | None) -> Check:
    try:
        with ray_session(address, cpus=0):
            nodes = [node for node in ray.nodes() if node["Alive"]]
            total = ray.cluster_resources()
    except (RunError, UserError) as error:
        return Check(name="cluster", level="fail", detail=str(error))
    cpus, gpus = total.get("CPU", 0.0), total.get("GPU", 0.0)
    return Check(name="cluster", level="ok", detail=f"{len(nodes)} nodes, {cpus:g} CPUs, {gpus:g} GPUs")


def check_token(address: str | None) -> Iterator[Check]:
    """Check whether the cluster asks for a token; yields nothing without a cluster that answers."""
    target = cluster_address(address)
    if target is None:
        return
    try:
        asks = asks_for_token(target)
    except (RunError, UserError):
        # The check of the cluster reports it.
        return
    if asks:
        yield Check(name="token", level="ok", detail="the cluster runs nothing without one")
        return
    detail = "the cluster takes jobs without one, from anyone who reaches it over the network"
    hint = "start Ray on each node with RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN (docs/shared-machines.md)"
    yield Check(name="token", level="warn", detail=detail, hint=hint)
