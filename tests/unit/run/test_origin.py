"""Which checkpoint of another run is meant, and what is said when it is not there, not whole, or of another run."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from ray_ulysses.config import Config
from ray_ulysses.config.resume import resume_settings, settings_that_differ
from ray_ulysses.engine.model import differs_from_stored
from ray_ulysses.errors import UserError
from ray_ulysses.run import origin, preflight
from ray_ulysses.run.origin import Origin, check_origin, find_origin, pin_origin, pinned_origin
from ray_ulysses.run.preflight import PreparedRun, prepare_run
from ray_ulysses.storage import LocalStore
from ray_ulysses.storage.place import UnnamedServerError
from ray_ulysses.tracking.mlflow_models import TrackedCheckpoint
from tests.distributed.run_case import make_config
from tests.unit.checkpoint import fakes
from tests.unit.checkpoint.fakes import save


@pytest.fixture(autouse=True)
def of_our_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_corpus: Path) -> None:
    """Let the stored states, which are of no model, belong to the run's; put a corpus beside the run."""
    monkeypatch.setattr(preflight, "differs_from_stored", lambda config, state: None)
    (tmp_path / "corpus").symlink_to(small_corpus)


@pytest.fixture
def source(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "source")
    for step, loss in ((2, 1.0), (4, 3.0), (6, 2.0)):
        save(store, step, metrics={"loss": loss})
    return store


def _config(tmp_path: Path, asked: str, **changes: object) -> Config:
    settings = {"model__resume_from": asked, "model__resume_state": "weights", **changes}
    return make_config(tmp_path / "runs", tmp_path / "corpus", **settings)


def _prepared(config: Config) -> PreparedRun:
    return prepare_run(config, Path("/"))


def test_the_best_is_found_and_a_torn_manifest_is_refused(tmp_path: Path, source: LocalStore) -> None:
    origin = find_origin(_config(tmp_path, f"{source.root}@best"))
    assert origin is not None and origin.step == 2
    source.path("checkpoints/step-00000006/manifest.json").write_bytes(b"{")
    for asked in ("@latest", "@6"):
        with pytest.raises(UserError, match="step 6 is damaged"):
            _prepared(_config(tmp_path, f"{source.root}{asked}"))
    with pytest.raises(UserError, match="the metrics of step 6 can't be read"):
        _prepared(_config(tmp_path, f"{source.root}@best"))
    origin = find_origin(_config(tmp_path, f"{source.root}@4"))
    assert origin is not None and origin.step == 4


def test_a_pin_to_a_missing_step_is_reset(tmp_path: Path, source: LocalStore, caplog: pytest.LogCaptureFixture) -> None:
    """Begun from a run that was still being written: its retention went on before this run had saved anything."""
    config = _config(tmp_path, f"{source.root}@latest")
    pin_origin(config, Origin(reference=f"{source.root}@latest", location=str(source.root), step=4))
    source.delete("checkpoints/step-00000004")
    with caplog.at_level(logging.WARNING):
        prepared = _prepared(config)
    assert prepared.origin is not None and prepared.origin.step == 6
    assert f"{source.root}@4 no longer exists" in caplog.text
    # One that is there stays what it is, whatever has been committed since.
    pin_origin(config, prepared.origin)
    save(source, 8)
    again = _prepared(config).origin
    assert again == prepared.origin == pinned_origin(config)


def test_another_models_weights_are_refused(
    tmp_path: Path, source: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "differs_from_stored", differs_from_stored)
    with pytest.raises(UserError, match="belongs to a different model"):
        _prepared(_config(tmp_path, f"{source.root}@6"))


def test_a_place_that_holds_nothing_is_named_and_so_is_what_is_there(tmp_path: Path, source: LocalStore) -> None:
    config = _config(tmp_path, "mlflow:gone/6", tracking__enabled=True)
    # As MLflow has it, of a directory that was moved since.
    origin = Origin(reference="mlflow:gone/6", location=str(tmp_path / "old"), step=6)
    with pytest.raises(UserError, match="/old does not contain the checkpoint of step 6 "):
        check_origin(origin, config, None)


@pytest.mark.parametrize("is_ours", [True, False], ids=["started-with-one", "trained-with-one"])
def test_another_adapters_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ours: bool) -> None:
    source = LocalStore(tmp_path / "source")
    ours, theirs = (
        _config(tmp_path, f"{source.root}@2", model__adapter={"rank": 4} if has_one else None)
        for has_one in (is_ours, not is_ours)
    )
    monkeypatch.setattr(fakes, "META", replace(fakes.META, extra={"settings": resume_settings(theirs)}))
    save(source, 2)
    with pytest.raises(UserError, match=r"step 2 .*model\.adapter="):
        _prepared(ours)
    assert _prepared(theirs).origin is not None


def test_an_adapter_trained_over_a_base_of_another_dtype_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = LocalStore(tmp_path / "source")
    ours, theirs = (
        _config(tmp_path, f"{source.root}@2", model__adapter={"rank": 4}, model__base_dtype=one)
        for one in ("bf16", "nf4")
    )
    monkeypatch.setattr(fakes, "META", replace(fakes.META, extra={"settings": resume_settings(theirs)}))
    save(source, 2)
    with pytest.raises(UserError, match=r"step 2 .*model\.base_dtype=nf4 and this run has bf16"):
        _prepared(ours)
    assert _prepared(theirs).origin is not None


def test_settings_that_differ_from_the_stored_ones_are_named(tmp_path: Path) -> None:
    config = _config(tmp_path, "other@6", optimizer__lr=1e-4)
    stored = resume_settings(config)
    other = _config(tmp_path, "other@6", optimizer__lr=2e-4, run__name="elsewhere")
    assert settings_that_differ(stored, config) == ""
    assert settings_that_differ(stored, other) == "optimizer.lr is 0.0002 and was 0.0001"


STRANGE = "s3://bucket/runs?endpoint_override=127.0.0.1:9&scheme=http"


def test_a_pinned_foreign_server_is_refused(
    tmp_path: Path, source: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(tmp_path, str(source.root))
    pin_origin(config, Origin(reference=str(source.root), location=STRANGE, step=6))
    with pytest.raises(UnnamedServerError, match=r"resumed-from\.json=.*name the store itself in model.resume_from"):
        pinned_origin(config)
    with monkeypatch.context() as named:
        named.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        assert pinned_origin(config) is not None
    fields = {"state": "committed", "store": STRANGE, "path": "", "cursor": {}, "metrics": {}}
    found = TrackedCheckpoint(model_id="m", is_complete=True, step=6, attempt=1, **fields)
    monkeypatch.setattr(origin, "find_tracked", lambda *names, **options: found)
    with pytest.raises(UnnamedServerError, match=r"name the store itself in model\.resume_from"):
        find_origin(_config(tmp_path, "mlflow:a/6", tracking__enabled=True, tracking__uri="http://127.0.0.1:9"))
