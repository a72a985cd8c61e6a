"""A run's README mentions ``--trust-run`` if commands that read the run need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.planner.report import build_report
from ray_ulysses.report.readme import render_readme
from ray_ulysses.run.checkpoint_store import checkpoint_location, needs_trust, stored_checkpoints
from ray_ulysses.storage.place import UnnamedServerError
from tests.unit.planner.runs import make_config, make_corpus, make_plan, make_shape

MINIO = "s3://bucket/runs?endpoint_override=minio:9000&scheme=http"


@pytest.mark.parametrize(
    ("sections", "needs"),
    [
        ({}, False),
        ({"cluster": {"secrets_file": "/secrets.env"}}, False),
        ({"checkpoint": {"storage": "s3://bucket/runs"}}, False),
        ({"checkpoint": {"storage": "s3://bucket/runs"}, "cluster": {"secrets_file": "/secrets.env"}}, True),
        ({"checkpoint": {"storage": MINIO}}, True),
        ({"data": {"path": MINIO}}, True),
        # The user specifies the server with RUN.
        ({"run": {"storage": MINIO}, "tracking": {"uri": "http://mlflow:5000"}}, False),
        ({"run": {"storage": MINIO}, "checkpoint": {"storage": MINIO}, "tracking": {"enabled": False}}, False),
    ],
)
def test_the_readme_mentions_trust_run_only_if_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], needs: bool
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    config, corpus = make_config(**sections), make_corpus([64] * 9)
    report = build_report(config, make_shape(config), corpus, make_plan(config, corpus))
    assert needs_trust(config) == needs
    text = render_readme(report, Path("/runs/demo"), checkpoint_location(config), needs_trust=needs)
    assert ("--trust-run" in text) == needs
    if config.checkpoint.storage is not None and config.cluster.secrets_file is None:
        try:
            stored_checkpoints(config, config.run_dir)
            is_refused = False
        except UnnamedServerError:
            is_refused = True
        assert is_refused == needs
