"""``ray-ulysses train`` with a GPU per worker on an embedded Ray: it is killed, re-forms, is stopped, and goes on."""

from __future__ import annotations

import json
import signal
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from ray_ulysses.config import Config
from ray_ulysses.tracking.events import AttemptStarted
from ray_ulysses.tracking.history import read_history
from tests.cluster.commands import Command, start, train, wait_for_step
from tests.cluster.conftest import ray_folder as ray_folder
from tests.distributed.run_case import make_config, make_corpus
from tests.unit.tracking.journals import read_events

MODEL = {
    "model_type": "llama", "vocab_size": 264, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip
DEVICE: dict[str, Any] = {"cluster__gpus_per_worker": 1, "model__dtype": "bf16"}


def make_run(folder: Path, corpus: Path, stop_step: int, **changes: Any) -> Config:
    return make_config(
        folder / "runs", corpus, run__stop_step=stop_step, run__self_test=True, parallel__sp_size=1,
        cluster__workers=1, cluster__cpus_per_worker=1, data__engine="ray", data__context_tokens=4096,
        data__rows_per_step=2, data__epochs=400, model__config=MODEL, checkpoint__every_steps=1000,
        **{**DEVICE, **changes},
    )  # fmt: skip


def command(*arguments: object, log: Path) -> str:
    done = Command(*arguments, log=log)
    assert done.wait() == 0, done.text
    return done.text


def on_the_gpu(running: Command) -> list[psutil.Process]:
    asked = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    users = {int(line) for line in subprocess.check_output(asked, text=True).split()}
    found = [one for one in psutil.Process(running.process.pid).children(recursive=True) if one.pid in users]
    assert found, [users, [(one.pid, one.ppid(), one.cmdline()) for one in psutil.Process().children(recursive=True)]]
    return found


def test_a_run_is_killed_forms_again_stops_and_goes_on_to_its_export(tmp_path: Path, ray_folder: Path) -> None:
    corpus = make_corpus(tmp_path)
    config = make_run(tmp_path, corpus, 4000)
    running = start(config, tmp_path / "first")
    try:
        wait_for_step(config, 20)
        lost_at = read_history(config.run_dir).step
        (training,) = on_the_gpu(running)
        launcher = training.parent()
        assert launcher is not None and "ray_ulysses.supervision.launcher" in launcher.cmdline(), "it was forked"
        training.kill()
        wait_for_step(config, lost_at + 40)
        assert on_the_gpu(running)[0].parent() == launcher, "the launcher has forked the next one, and imported nothing"
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 0, running.text
    finally:
        running.kill()
    stopped = read_history(config.run_dir)
    resumed = [event.resumed_step for event in read_events(config.run_dir) if isinstance(event, AttemptStarted)]
    assert len(resumed) == 2 and resumed[1] >= lost_at - 2, "storage has no checkpoint: it came from peer memory"
    assert stopped.lost_steps <= 2

    last = stopped.step + 10
    code, text = train(make_run(tmp_path, corpus, last), tmp_path / "second")
    assert code == 0, text
    inspected = json.loads(command("inspect", config.run_dir, "--json", log=tmp_path / "inspect.json"))
    assert inspected["status"] == "finished" and inspected["step"] == last
    rows = [step["rows"] for step in inspected["steps"]]
    assert rows[0][0] == 0 and all(before[1] == after[0] for before, after in pairwise(rows))
    print(text[-2500:])

    command("export", config.run_dir, "--out", tmp_path / "model", log=tmp_path / "export.txt")
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.config.hidden_size == MODEL["hidden_size"]
    asked = ("evaluate", config.run_dir, "--data", corpus, "--lengths", "1k,2k")
    print(command(*asked, log=tmp_path / "evaluate.txt")[-3000:])
