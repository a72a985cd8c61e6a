"""The commands of README.md and docs/, run one after another in a fresh clone, on the smallest model that there is.

A command is changed in what a test has not: paths, the large model, a tokenizer, and numbers that go with their size.
What is left out here is named in `_ELSEWHERE` with the test that runs it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.harness import free_port
from tests.distributed.run_case import make_config
from tests.docs_commands import PAGES, ROOT, Command, clone, commands
from tests.polling import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]
_TIMEOUT_S = 600
_START = ROOT / "docs/start.md"
_REFUSED = ("sp_sise", "run.seed=1")
_DEMO = "configs/llama-tiny_cpu_sp2-dp2_8k.yaml"
_LARGE = "configs/llama3-8b_8xh100_sp4-dp2_32k.yaml"
_ELSEWHERE = {
    "make ": "tests/unit/test_docs_commands.py: an install and the tests themselves are not started by a test",
    "ray-ulysses rehearse ": "tests/cluster/test_rehearsal.py",
    "pip install ": "tests/unit/test_docs_commands.py::test_the_gpu_install_is_resolved",
    "ray-ulysses demo": "tests/unit/commands/test_demo.py, and by the commands of docs/start.md below",
    **dict.fromkeys(("docker ", "kubectl ", "ray up ", "ray start "), "tests/unit/test_infra.py: there is no cluster"),
    "source ": "the environment is the one that runs the tests",
    **{f"ray-ulysses {name}": "tests/cluster/test_submit.py" for name in ("submit", "status", "logs", "stop")},
    "ray-ulysses export RUN --merge ": "tests/unit/export/test_adapters.py: the story's run has no adapter",
    "ray-ulysses init ": "tests/unit/run/test_first_config.py",
    "ray job submit ": "tests/cluster/test_submit.py::test_readmes_submission_runs_in_a_fresh_clone",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with small texts for a corpus, and the smallest model in the place of the large one."""
    folder = clone(tmp_path_factory.mktemp("clone"))
    shared = folder / "shared"
    (folder / "contracts").mkdir()
    for number in range(40):
        (folder / f"contracts/{number}.txt").write_text(f"contract {number}: " + "the parties agree " * (number + 45))
    chat = [{"role": "user", "content": "What did the parties agree?"}, {"role": "assistant", "content": "To agree."}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    text = make_config(
        shared / "runs", shared / "corpora/llama3", run__name="llama3-8b-32k", run__stop_step=2, run__self_test=False,
        data__context_tokens=1024, data__rows_per_step=4, data__engine="ray", data__eval_fraction=0.0,
        schedule__horizon_steps=20, checkpoint__every_steps=2, cluster__workers=4, cluster__cpus_per_worker=0.25,
    ).to_yaml()  # fmt: skip
    (folder / _LARGE).write_text(text)
    (folder / "config.yaml").write_text(text)
    return folder


def told(place: Path, text: str) -> str:
    run = place / "shared/runs/llama3-8b-32k"
    for ours, theirs in (
        (r"/data/contracts", "contracts"),
        (r"/models/llama-3-8b", "bytes"),
        (r"/mnt/shared/", f"{place}/shared/"),
        (r"cluster\.workers=4", "cluster.workers=2"),
        (r"data\.context_tokens=524288", "data.context_tokens=2048"),
        (r"data\.rows_per_step=4 --branch", "data.rows_per_step=4 --set run.stop_step=3 --branch"),
        (r"(--longest|--fit)\b", r"\1 --set memory.device_gib=8"),
        # By then docs/data.md has given the run another context, which `plan` would ask to be restored.
        (r"--price\b", "--set run.name=priced --price"),
        (r"--row 1234", "--row 0"),
        (r"--data held-out", f"--data {place}/shared/corpora/llama3"),
        (r"4k,32k,128k", "1k"),
        (r"evaluate llama-hf", f"evaluate {run}/export/step-00000002"),
        (r"runs/my-run", str(run)),
        (r"runs/other", str(run)),
        (r"\bOTHER\b", str(run)),
        (r"\bRUN\b", str(run)),
        (r"\b200\b", "2"),
    ):
        text = re.sub(ours, theirs, text)
    return text


def environment_of(place: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return environment | {
        "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
        "PYTHONPATH": str(place),
        "HF_HUB_OFFLINE": "1",
    }


def run(place: Path, text: str, code: int = 0) -> str:
    """Run a command as a reader's shell would, and return what it prints."""
    done = subprocess.run(
        ["bash", "-c", text], cwd=place, env=environment_of(place), text=True, timeout=_TIMEOUT_S, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == code, f"$ {text}\n{done.stdout}"
    assert "Traceback" not in done.stdout
    return done.stdout


def expected_code(text: str) -> int:
    return 2 if any(word in text for word in _REFUSED) else 0


def story() -> Iterator[Command]:
    for page in PAGES:
        if page.name != "start.md":
            # Object stores: tests/cluster/test_object_store_job.py.
            yield from (
                one for one in commands(page) if not one.text.startswith(tuple(_ELSEWHERE)) and "s3://" not in one.text
            )


def test_every_command_does_what_it_should(place: Path) -> None:
    ran = [run(place, told(place, command.text), expected_code(command.text)) for command in story()]
    said = dict(zip(map(str, story()), ran, strict=True))
    first, second = (text for name, text in said.items() if name.startswith("README.md: ray-ulysses train"))
    assert "step=2/2 loss=" in first
    assert "complete at step 2" in second, "half of the workers resume it, and nothing is left to do"
    assert (place / "shared/runs/llama3-8b-32k/export/step-00000002/model.safetensors").is_file()
    branched = next(text for name, text in said.items() if "--branch" in name)
    assert "step=3/3 loss=" in branched and "resumed_step=2" in branched


def test_the_first_commands_of_the_start_page_are_what_make_demo_runs() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    recipe = subprocess.run(
        ["make", "-n", "-o", ".venv/.installed", "demo"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = re.sub(r"\\\n\s*", "", recipe.stdout).replace(".venv/bin/", "").splitlines()
    demo = [one.text for one in commands(_START) if re.search("corpus-stdlib|llama-tiny", one.text)]
    assert [text.partition(" --set ")[0] for text in demo[:3]] == lines


def _block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", _START.read_text(encoding="utf-8"), re.M | re.S)
    return str(found)


def _start(place: Path, text: str, is_there: Callable[[], bool]) -> subprocess.Popen[bytes]:
    """Start a command in the background, and wait until it has done something."""
    words = shlex.split(text.removesuffix("&"))
    process = subprocess.Popen(words, cwd=place, env=environment_of(place), start_new_session=True)
    wait_until(lambda: process.poll() is not None or is_there(), text, timeout_s=_TIMEOUT_S, every_s=0.2)
    assert process.poll() is None
    return process


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=10) as page:
            return bool(page.status == 200)
    except OSError:
        return False


def test_the_start_page_goes_from_the_demo_over_a_kill_to_the_mlflow_page(place: Path) -> None:
    (place / _LARGE).write_text((ROOT / _LARGE).read_text())
    for name, text in ((_DEMO, (ROOT / _DEMO).read_text()), ("mine.yaml", _block("yaml"))):
        # Shorter, and long enough that what is killed has not finished.
        text = re.sub("8192|4096", "2048", text)
        (place / name).write_text(text.replace("eval_fraction: 0.01", "eval_fraction: 0.1"))
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands(_START):
            _do(place, command.text, started)
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    run(place, f"python -c {shlex.quote(_block('python'))}")


def _do(place: Path, text: str, started: list[subprocess.Popen[bytes]]) -> None:
    """Do what a reader does; what runs in the background is waited for and then kept in ``started``."""
    text = re.sub(r'"\$\(.*?\)"', str(Path(os.__file__).parent / "asyncio"), text)
    if text.startswith(tuple(_ELSEWHERE)):
        return
    if text.startswith("mlflow ui"):
        port = free_port()
        page = f"http://127.0.0.1:{port}/"
        started.append(_start(place, f"{text} --port {port} --workers 1", lambda: _answers(page)))
    elif text.endswith("&"):
        started.append(_start(place, text, (place / "runs/mine/checkpoints/step-00000006/manifest.json").is_file))
    elif text == "kill -9 %1":
        started[0].kill()
        started[0].wait(60)
    else:
        said = run(place, text, expected_code(text))
        if "cluster.workers=2" in text:
            assert "started workers=2" in said and "step=12/12 loss=" in said
