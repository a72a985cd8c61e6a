"""Every file and folder of a run is replaced by a link: no command follows it, and none hangs.

The links lead to canaries outside the run. A canary keeps its content and its times, the time of the last reading
included, and its text is neither printed nor in a file that a command has written.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from ray_ulysses.checkpoint import CheckpointRef, KeepRules, Retention
from ray_ulysses.checkpoint.fence import claim_attempt
from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_command
from ray_ulysses.config import Config
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.errors import UlyssesError
from ray_ulysses.run.completion import record_completion
from ray_ulysses.run.preflight import prepare_run
from ray_ulysses.run.requests import RequestWatch, preemption_noticed, request_save, request_stop, stop_requested
from ray_ulysses.run.run_files import RunTexts, describe_run
from ray_ulysses.run.trackers import tracked
from ray_ulysses.storage import LocalStore, run_claim
from ray_ulysses.tracking.journal import claim_journal, open_journal
from ray_ulysses.tracking.tensorboard_sink import TensorBoardSink
from tests.distributed.run_case import make_config, make_corpus, prepare_attempt
from tests.unit.export.runs import commands_on, write_checkpoint
from tests.unit.inspect.runs import Run

MARK = "CANARY-7f3a"
MODEL = LlamaConfig(
    vocab_size=264,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
KINDS = ("its own content", "a marked file", "a marked folder", "a device", "a pipe")
LEFT = "checkpoints/step-00000003/attempt-0001"
"""Of an attempt that died before it committed; retention deletes it."""
# What was emptied, truncated, written into, read or waited for before links were refused, and by which command.
REPRESENTATIVES = {
    LEFT: ("its own content", "train"),
    "lock/holder-0000001.json": ("a marked file", "train"),
    "journal": ("its own content", "inspect"),
    "config.yaml": ("its own content", "inspect"),
    "README.md": ("a marked file", "report"),
    "plan": ("its own content", "inspect --row"),
    "trackers": ("a marked folder", "train"),
    "trackers/tensorboard.json": ("a pipe", "train"),
    "export": ("a marked folder", "export"),
}
_MOST_SECONDS, _PARTS = 60, 4


@dataclass(frozen=True)
class Linked:
    """A run that every case begins with, and where it lies."""

    config: Config
    corpus: Path
    pristine: Path

    @property
    def folder(self) -> Path:
        assert isinstance(self.config.run_dir, Path)
        return self.config.run_dir

    def restore(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.pristine, self.folder)


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Linked:
    """A run with all that training and the trackers write into it."""
    top = tmp_path_factory.mktemp("linked")
    corpus = make_corpus(top, ("bisect.py", "calendar.py", "cmd.py", "copy.py"))
    model = {"model_type": "llama", **{name: getattr(MODEL, name) for name in vars(MODEL) if name in _SIZES}}
    config = make_config(
        top / "runs",
        corpus,
        model__config=model,
        run__stop_step=4,
        parallel__sp_size=1,
        cluster__workers=1,
        tracking__enabled=True,
        tracking__trackers=["tensorboard"],
        checkpoint__keep_last=1,
    )
    prepare_attempt(config, "session")
    folder = config.run_dir
    assert isinstance(folder, Path)
    made = Run(folder=folder, plan=load_plan(folder / "plan"), corpora=prepare_run(config, Path("/")).corpora)
    steps = [made.started(world_size=1, sp_size=1), *made.steps(1, 4), made.committed(2), made.committed(4)]
    made.attempt([*steps, {"event": "attempt_ended", "reason": "stopped"}])
    with closing(open_journal(folder, 1, writer="command")) as journal:
        journal.append({"event": "hang", "text": "rank 0 hangs", "stacks": {}})
    network = AutoModelForCausalLM.from_config(MODEL)
    for step in (2, 4):
        write_checkpoint(folder, network, step=step, world_size=1, cursor=made.plan.cursor(step).to_json())
    describe_run(folder, RunTexts(plan="plan", readme="# A run\n", facts={"memory": {"device_bytes": 1}}))
    LocalStore(folder).replace("tracking.json", [b'{"tracking_uri": "sqlite:///nowhere", "run_id": "1"}'])
    with tracked(config):
        pass
    store = LocalStore(folder)
    assert claim_attempt(store, 1)
    notes = ("save-request", "stop-request", "preemption-notice", "excluded-nodes", "identity", "resumed-from.json")
    others = (
        "refused/session",
        f"probe-{0:032x}/rank-00000",
        "tensorboard-events/events.out",
        "ray/session/file",
        "export/mine",
    )
    for name in (*notes, *others, f"{LEFT}/rank-00000-of-00001.safetensors"):
        store.replace(name, [b""])
    with run_claim(folder):
        pass
    shutil.copytree(folder, top / "pristine")
    return Linked(config, corpus, top / "pristine")


@pytest.fixture(scope="module")
def complete(linked: Linked) -> Linked:
    """The run with the results of all commands."""
    for name in ("report", "export", "evaluate"):
        assert run_command(app, _commands(linked)[name]) == 0
    shutil.rmtree(linked.pristine)
    shutil.copytree(linked.folder, linked.pristine)
    return linked


_SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "tie_word_embeddings"),
}


def _commands(run: Linked) -> dict[str, list[str]]:
    return commands_on(run.folder, run.corpus, "--lengths", "200", "--max-tokens", "400")


def _track(config: Config) -> None:
    with tracked(config):
        pass


def _train(run: Linked) -> Iterator[object]:
    """Do what a command that resumes the run does, and its workers, without a step."""
    config, folder = run.config, run.folder
    with contextlib.suppress(OSError, UlyssesError), run_claim(folder):
        yield
    with contextlib.suppress(OSError, UlyssesError):
        record_completion(prepare_run(config, Path("/")))
    for call in (
        lambda: prepare_attempt(config, "again"),
        lambda: describe_run(folder, RunTexts(plan="plan", readme="readme", facts={})),
        lambda: claim_journal(folder).close(),
        lambda: open_journal(folder, 1).close(),
        lambda: open_journal(folder, 1, writer="command").close(),
        lambda: request_stop(folder, "again"),
        lambda: stop_requested(folder, "again"),
        lambda: request_save(folder),
        lambda: _take_save_request(folder),
        lambda: preemption_noticed(folder),
        lambda: _track(config),
        lambda: TensorBoardSink(folder / "tensorboard-events").connect(),
        lambda: Retention(LocalStore(folder), KeepRules(last=1)).apply(CheckpointRef(step=4, attempt=1, world_size=1)),
    ):
        with contextlib.suppress(OSError, UlyssesError):
            call()
        yield


def _take_save_request(folder: Path) -> None:
    watch = RequestWatch(folder, "again")
    watch.look()
    watch.take_save()
    watch.saved(watch.taken or 0.0)
    assert watch._calls.wait(20.0)
    watch.close()


def _targets(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _snapshot(place: Path) -> dict[str, tuple[bytes, int, int, int]]:
    """Return each canary's content and its times; reading the content here does not change them."""
    found = {}
    for path in sorted([place, *place.rglob("*")]) if os.path.lexists(place) else ():
        status = path.lstat()
        times = (status.st_mtime_ns, status.st_atime_ns, status.st_mode)
        content = b""
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY | os.O_NOATIME)
            content = os.read(descriptor, status.st_size)
            os.close(descriptor)
        found[str(path)] = (content, *times)
    return found


def _plant(link: Path, kind: str, canaries: Path) -> Path | None:
    """Put a link in the place of a file or a folder of a run; return the canary, None where it needs no watch."""
    canary = canaries / "canary"
    if kind == "its own content":
        shutil.move(link, canary)
    elif link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    else:
        link.unlink()
    if kind == "a device":
        link.symlink_to("/dev/zero")
        return None
    if kind == "a pipe":
        os.mkfifo(canary)
    elif kind == "a marked file":
        canary.write_text(f"{MARK}\n")
    elif kind == "a marked folder":
        for name in ("", "attempt-0001", "step-00000002/attempt-0001", "segment-0000", "00000001"):
            (canary / name).mkdir(parents=True, exist_ok=True)
            (canary / name / ".writing-1").write_text(MARK)
            (canary / name / "manifest.json").write_text(MARK)
            (canary / name / "rank-00000-of-00001.safetensors").write_text(MARK)
            (canary / name / "attempt-0001.jsonl").write_text(MARK)
    link.symlink_to(canary)
    for path in [*canary.rglob("*"), canary]:
        # An old time of reading changes with the next one even where a mount is lazy about it.
        os.utime(path, (1, 2), follow_symlinks=False)
    return canary


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """End a call that hangs or that reads a device without end."""

    def late(*_: object) -> None:
        raise AssertionError(f"it took more than {_MOST_SECONDS} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # Not SIGALRM, which ends a test that hangs.
    before = signal.signal(signal.SIGUSR1, late)
    timer = threading.Timer(_MOST_SECONDS, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.start()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        timer.cancel()
        signal.signal(signal.SIGUSR1, before)


def _written_marks(run: Linked) -> list[str]:
    """Return the files in and beside the run that hold a canary's text; no link is followed."""
    top = run.folder.parent
    files = (Path(at) / name for at, _, names in os.walk(top) for name in names)
    return [str(path) for path in files if not path.is_symlink() and path.is_file() and MARK in path.read_text("latin")]


def _followed(
    run: Linked, target: str, kind: str, commands: tuple[str, ...], canaries: Path, said: Callable[[], str]
) -> Iterator[str]:
    """Yield the commands that do more than refuse a run of which a file or a folder is a link."""
    for name in commands:
        shutil.rmtree(canaries, ignore_errors=True)
        canaries.mkdir()
        canary = _plant(run.folder / target, kind, canaries)
        before = {} if canary is None else _snapshot(canary)
        try:
            with _bounded():
                if name == "train":
                    for _ in _train(run):
                        assert canary is None or _snapshot(canary) == before
                else:
                    assert run_command(app, _commands(run)[name]) in (0, 1, 2)
            assert canary is None or _snapshot(canary) == before, "the canary was touched"
            assert MARK not in said(), "the canary was printed"
            assert not _written_marks(run), "the canary was copied"
        except AssertionError as error:
            yield f"{name}: {target} is a link to {kind}: {error}"
        finally:
            run.restore()


@pytest.mark.parametrize("target", REPRESENTATIVES)
def test_no_link_in_a_run_is_followed(
    linked: Linked, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    def said() -> str:
        return "".join(capsys.readouterr())

    kind, command = REPRESENTATIVES[target]
    assert not list(_followed(linked, target, kind, (command,), tmp_path / "canaries", said))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("kind", KINDS)
def test_no_command_follows_a_link_in_place_of_any_file_or_folder(
    complete: Linked, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, part: int
) -> None:
    def said() -> str:
        return "".join(capsys.readouterr())

    found: list[str] = []
    for target in _targets(complete.pristine)[part::_PARTS]:
        found += _followed(complete, target, kind, (*_commands(complete), "train"), tmp_path / "canaries", said)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("target", [LEFT, "lock", "journal", "plan", "attempts"])
def test_train_refuses_a_link_by_its_name_before_it_starts_ray(
    linked: Linked, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr("ray_ulysses.cluster.train_job.ray_session", lambda *_, **__: pytest.fail("Ray was started"))
    (tmp_path / "canaries").mkdir()
    (tmp_path / "config.yaml").write_text(linked.config.to_yaml())
    canary = _plant(linked.folder / target, "its own content", tmp_path / "canaries")
    assert canary is not None
    before = _snapshot(canary)
    try:
        assert run_command(app, ["train", str(tmp_path / "config.yaml"), "-q"]) in (1, 2)
        assert f"{linked.folder / target} is a link" in " ".join(capsys.readouterr().err.split())
        assert _snapshot(canary) == before
    finally:
        linked.restore()
