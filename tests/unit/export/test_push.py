"""An export reaches the hub in one commit, or the local directory stays and the error says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ray_ulysses.cli import app, run
from ray_ulysses.storage.hub import push_folder
from tests.hub_server import AWAY, serve_hub, use_hub
from tests.unit.attention.models import ARCHITECTURES, zoo_model
from tests.unit.export.runs import fields_of, write_checkpoint, write_config

TOKEN = "hf_a-secret-token"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    write_config(tmp_path / "run", fields_of(ARCHITECTURES["llama"]()))
    write_checkpoint(tmp_path / "run", zoo_model("llama"))
    return tmp_path / "run"


def push(capsys: pytest.CaptureFixture[str], made: Path, *options: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run(app, ["export", str(made).replace("s3:/", "s3://"), "--no-check", "--push-to-hub", "me/long", *options])
    said = capsys.readouterr()
    assert TOKEN not in said.out + said.err
    return code, said.out, said.err


@pytest.mark.parametrize("visibility", ["private", "public"])
def test_a_push_is_one_commit_of_all_files_without_an_earlier_models_weights(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, visibility: str
) -> None:
    pushed: dict[str, dict[str, bytes]] = {}
    public = ["--public"] if visibility == "public" else []
    with serve_hub({}, pushed=pushed, token=TOKEN) as (address, requests):
        use_hub(address, tmp_path / "hub", monkeypatch)
        for options in (["--max-shard-size", "20KB"], ["--overwrite", "--json"]):
            requests.clear()
            code, out, err = push(capsys, made, *options, *public)
            assert code == 0, err
            assert sum("/commit/" in one for one in requests) == 1
            folder = made / "export/step-00000004"
            files = {path.name: path.read_bytes() for path in folder.iterdir()}
            assert pushed["me/long"] == files | {".visibility": visibility.encode()}
    found = json.loads(out)
    assert found["hub_commit"] == f"{address}/me/long/commit/{'c' * 40}" and found["mlflow_model"] is None


def test_the_token_may_be_in_the_secrets_file_of_a_trusted_run(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = tmp_path / "secrets.env"
    secrets.write_text(f"HF_TOKEN={TOKEN}\n")
    secrets.chmod(0o600)
    write_config(made, fields_of(ARCHITECTURES["llama"]()), cluster__secrets_file=str(secrets))
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    code, _, err = push(capsys, made)
    assert code == 2 and "there is no token" in err
    pushed: dict[str, dict[str, bytes]] = {}
    with serve_hub({}, pushed=pushed, token=TOKEN) as (address, _):
        use_hub(address, tmp_path / "hub", monkeypatch)
        code, _, err = push(capsys, made, "--trust-run")
    assert code == 0, err
    assert "model.safetensors" in pushed["me/long"]


@pytest.mark.parametrize(("kind", "other"), [("model", "adapter_model"), ("adapter_model", "model")])
def test_a_push_deletes_only_weights_of_its_kind_at_the_top_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, other: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    old = [f"{kind}-00001-of-00002.safetensors", f"{kind}.safetensors.index.json"]
    kept = [f"checkpoint/{kind}.safetensors", f"{other}.safetensors", "voice.safetensors", "notes.txt"]
    pushed = {"me/long": dict.fromkeys([*old, *kept], b"old")}
    new = f"{kind}.safetensors"
    (tmp_path / new).write_bytes(b"new")
    with serve_hub({}, pushed=pushed, token=TOKEN) as (address, _):
        use_hub(address, tmp_path / "hub", monkeypatch)
        push_folder(tmp_path, [new], "me/long", "push", private=True, message="new")
    assert pushed["me/long"] == {**dict.fromkeys(kept, b"old"), new: b"new"}


def test_a_push_takes_only_the_exported_files_and_refuses_links(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: dict[str, dict[str, bytes]] = {}
    assert run(app, ["export", str(made), "--no-check"]) == 0
    folder = made / "export/step-00000004"
    (tmp_path / "private").write_bytes(b"secret")
    (folder / "notes.txt").symlink_to(tmp_path / "private")
    with serve_hub({}, pushed=pushed, token=TOKEN) as (address, _):
        use_hub(address, tmp_path / "hub", monkeypatch)
        code, _, err = push(capsys, made)
        assert code == 0, err
        assert pushed["me/long"].keys() == {path.name for path in folder.iterdir()} - {"notes.txt"} | {".visibility"}
        pushed.clear()
        # A record in another user's run may name a link, whose size is the length of its target.
        record = json.loads((folder / "ray_ulysses_export.json").read_text())
        record["report"]["files"]["notes.txt"] = (folder / "notes.txt").lstat().st_size
        (folder / "ray_ulysses_export.json").write_text(json.dumps(record))
        code, _, err = push(capsys, made)
    assert code == 2 and "notes.txt is a link" in " ".join(err.split()) and not pushed


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (401, "does not accept the token; set HF_TOKEN"),
        (403, "the token may not write there (HTTP 403)"),
        (500, "answers with HTTP 500; try again later"),
        (0, f"the hub at {AWAY} did not store the files"),
    ],
)
def test_a_failed_push_leaves_the_export_and_says_what_to_do(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, status: int,
    reason: str,
) -> None:  # fmt: skip
    with serve_hub({}, status=status) as (address, _):
        use_hub(address if status else AWAY, tmp_path / "hub", monkeypatch)
        code, _, err = push(capsys, made)
    said = " ".join(err.split())
    assert code == 1 and reason in said and "is complete; the same command uploads it" in said
    assert (made / "export/step-00000004/model.safetensors").is_file()


def test_what_can_not_be_pushed_is_refused_before_the_export(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = push(capsys, made, "--push-to-hub", "not/an/id")
    assert code == 2 and "is not a repository id" in err
    code, _, err = push(capsys, Path("s3://bucket/run"))
    assert code == 2 and "uploads a local directory; add --out DIR" in err
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    code, _, err = push(capsys, made)
    assert code == 2 and "there is no token" in err and "HF_TOKEN" in err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, err = push(capsys, made)
    assert code == 2 and "HF_HUB_OFFLINE" in err
    assert run(app, ["export", str(made), "--public"]) == 2
    assert not (made / "export").exists()
