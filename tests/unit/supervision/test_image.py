"""Launchers that an image forks, with a real image and a fake launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ray_ulysses.supervision.image import warm_image
from ray_ulysses.supervision.order import IMAGE, LauncherProcess, Ready
from tests.polling import wait_until

LAUNCHER = "tests.unit.supervision.slow_launcher"


def _is_image(one: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # a zombie of another test has no command line
        return "ray_ulysses.supervision.image" in one.cmdline()
    return False


def _images() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if _is_image(one)]


@pytest.fixture(params=[False, True], ids=["leads-its-session", "leads-none-yet"])
def stops_early(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        monkeypatch.setenv("TEST_STOPS_EARLY", "1")
    return bool(request.param)


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch) -> Iterator[psutil.Process]:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    with warm_image(LAUNCHER):
        # Until it executes the image's program, the child has this process's command line.
        wait_until(_images, "the image")
        yield _images()[0]


def launched() -> tuple[LauncherProcess, psutil.Process]:
    launcher = LauncherProcess(LAUNCHER)
    assert isinstance(launcher.receive(), Ready)
    assert launcher.pid is not None
    return launcher, psutil.Process(launcher.pid)


def test_every_launcher_is_forked_with_the_environment_and_folder_of_its_supervisor(
    image: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TEST_STDERR_BYTES", "7")
    both = [launched(), launched()]
    for launcher, process in both:
        assert process.parent() == image
        assert "RAY_AUTH_TOKEN" not in process.environ()
        assert process.cwd() == str(tmp_path)
        wait_until(lambda one=launcher: one.stderr.end() == "-" * 7, "stderr reaches the supervisor")  # type: ignore[misc]
    assert len({os.getsid(process.pid) for _, process in both}) == 2, "each leads a session, so that it can be killed"
    os.kill(both[0][1].pid, signal.SIGTERM)
    codes = [launcher.end(20.0) for launcher, _ in both]
    assert codes == [-signal.SIGTERM, -signal.SIGKILL]
    assert not [one for one in image.children() if one.status() != psutil.STATUS_ZOMBIE]


def test_a_stopped_launcher_ends_with_its_supervisor(stops_early: bool, image: psutil.Process) -> None:
    starts = f"import signal; from {LauncherProcess.__module__} import *; one = LauncherProcess(''); signal.pause()"
    supervisor = subprocess.Popen([sys.executable, "-c", starts])
    wait_until(image.children, "the launcher is forked")
    (launcher,) = image.children()
    if stops_early:
        wait_until(lambda: launcher.status() == psutil.STATUS_STOPPED, "it stops")
        assert os.getsid(launcher.pid) == image.pid
    else:
        wait_until(lambda: os.getsid(launcher.pid) == launcher.pid, "it leads its session")
        launcher.suspend()
    supervisor.kill()
    supervisor.wait()
    launcher.wait(20.0)


def test_without_its_image_a_launcher_ends_and_the_next_is_executed(image: psutil.Process) -> None:
    launcher, process = launched()
    image.kill()
    process.wait(20.0)
    with pytest.raises(EOFError):
        launcher.receive()
    assert launcher.end(20.0) == -signal.SIGKILL
    again, process = launched()
    assert process.parent() == psutil.Process()
    again.end(20.0)


def test_the_image_ends_with_the_block() -> None:
    with warm_image(LAUNCHER):
        address = os.environ[IMAGE]
        _, process = launched()
    process.wait(20.0)
    assert IMAGE not in os.environ
    assert not Path(address).exists()
