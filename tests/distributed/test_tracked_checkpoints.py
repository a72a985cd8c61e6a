"""MLflow shows the checkpoints that there are, whatever died before it could hear of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ray_ulysses.checkpoint import read_manifest
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.run.origin import find_tracked
from ray_ulysses.run.trackers import tracked
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.mlflow_client import open_client
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity
from tests.distributed.run_case import make_config, make_corpus, train, train_to_death

pytestmark = pytest.mark.distributed
WORLD = 2


@pytest.mark.slow
def test_the_next_attempt_tells_of_what_the_dead_one_could_not(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    given = {"cluster__workers": WORLD, "run__stop_step": 20, "checkpoint__keep_last": 2, "data__rows_per_step": 2}
    # No tracker hears of the first attempt's commits before the second has ended.
    silent = make_config(tmp_path, corpus, **given)
    train_to_death(silent, "one", (0, "step", 13))
    store = LocalStore(silent.run_dir)
    assert committed_steps(store) == (5, 10)
    shard = store.path(f"checkpoints/step-00000010/{read_manifest(store, 10).shards[0].file}")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    config = make_config(tmp_path, corpus, **given, tracking__enabled=True)
    train(config, "two")
    with tracked(config, drain_s=120.0):
        pass
    assert config.tracking_uri is not None
    client = open_client(config.tracking_uri)
    identity = TrackingIdentity.load(config.run_dir)
    assert identity is not None and identity.run_id is not None
    experiment = client.get_run(identity.run_id).info.experiment_id
    models = client.search_logged_models([experiment])
    shown = sorted((int(model.tags["step"]), model.tags["attempt"], model.tags["state"]) for model in models)
    assert shown == [
        *((5, "1", "deleted"), (10, "1", "damaged"), (10, "2", "deleted")),
        (15, "2", "committed"),
        (20, "2", "committed"),
    ]

    assert committed_steps(store) == (15, 20)
    for step in (15, 20):
        found, manifest = find_tracked("run", step, uri=config.tracking_uri), read_manifest(store, step)
        (tags,) = [model.tags for model in models if model.tags["step"] == str(step)]
        assert (found.store, tags["digest"]) == (str(config.run_dir), manifest.meta.digest)
        assert found.cursor == json.loads(json.dumps(manifest.meta.cursor))
        assert json.loads(tags["topology"]) == {"world_size": 2, "sp_size": 2, "ring_size": 1, "dp_size": 1}
        assert found.metrics["loss"] == pytest.approx(manifest.meta.metrics["loss"], rel=1e-12)
    (last,) = [model for model in models if model.tags["step"] == "20"]
    assert (last.tags["parent"], last.tags["reason"]) == ("checkpoints/step-00000005", "end")
