from __future__ import annotations

import json
import random
import shutil
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_command
from ray_ulysses.run.run_files import RunTexts, describe_run
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.export.runs import TINY_LLAMA, commands_on, write_checkpoint, write_config
from tests.unit.foreign_values import damaged
from tests.unit.inspect.runs import make_run

_LOSS = ("--lengths", "32", "--max-tokens", "200")


@dataclass(frozen=True)
class World:
    """A finished run with the results of every command, its corpus, and a copy of its exported model."""

    run: Path
    corpus: Path
    model: Path

    def files(self) -> list[Path]:
        found = [path for top in (self.run, self.corpus, self.model) for path in top.rglob("*")]
        return sorted(path for path in found if path.suffix in (".json", ".jsonl", ".yaml") and path.stat().st_size)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    top = tmp_path_factory.mktemp("foreign")
    corpus = text_corpus(top, varied_texts(40)).path
    run = make_run(top / "runs/demo", [corpus])
    run.trained(4)
    write_config(run.folder, TINY_LLAMA.to_diff_dict() | {"model_type": "llama"}, data__path=str(corpus))
    write_checkpoint(run.folder, AutoModelForCausalLM.from_config(TINY_LLAMA), cursor=run.plan.cursor(4).to_json())
    describe_run(run.folder, RunTexts(plan="plan", readme="# A run\n", facts={"memory": {"device_bytes": 1}}))
    notes = {
        "tracking.json": {"uri": "sqlite:///nowhere", "experiment": "e", "key": "k" * 32, "run_id": "0" * 32},
        "resumed-from.json": {"asked": "/other", "location": "/other", "step": 4},
    }
    for name, note in notes.items():
        (run.folder / name).write_text(json.dumps(note))
    world = World(run.folder, corpus, top / "model")
    for name in ("export", "evaluate"):
        assert run_command(app, _commands(world)[name]) == 0, name
    shutil.copytree(run.folder / "export/step-00000004", world.model)
    return world


def _commands(it: World) -> dict[str, list[str]]:
    config, results = str(it.run / "config.yaml"), str(it.model.parent / "results")
    model = ["evaluate", str(it.model), "-q", "--out", results, "--data", str(it.corpus), "--task", "loss", *_LOSS]
    return {
        **commands_on(it.run, it.corpus, *_LOSS),
        "evaluate MODEL": model,
        "plan": ["plan", config],
        "plan MODEL": ["plan", config, f"--set=model.path={it.model}", "--set=model.config=null"],
    }


_NAMES = tuple(_commands(World(Path(), Path(), Path())))
_READERS = tuple(name for name in _NAMES if name.split()[0] in ("inspect", "export", "plan"))
_MOST_SECONDS = 60.0
"""Of processor time; an evaluation of the sound run takes one."""


@pytest.mark.parametrize(
    ("count", "seed", "names"),
    [
        pytest.param(20, 1, _READERS, id="20 cases"),
        *(pytest.param(200, seed, _NAMES, id=f"many-{seed}", marks=pytest.mark.slow) for seed in (2, 3, 4)),
    ],
)
def test_no_value_in_a_foreign_file_ends_a_command_in_a_traceback(
    world: World, capsys: pytest.CaptureFixture[str], count: int, seed: int, names: tuple[str, ...]
) -> None:
    drawn, faults = random.Random(seed), []
    sound = {file: file.read_bytes() for file in world.files()}
    for number in range(count):
        name = names[number % len(names)]
        # A command on a model reads no more than it.
        file = drawn.choice([one for one in sound if name.endswith("MODEL") <= (one.parent == world.model)])
        file.write_bytes(damaged(file, sound[file], drawn))
        begun = time.process_time()
        try:
            code = run_command(app, _commands(world)[name])
            said = capsys.readouterr().err
            assert code in (0, 1, 2) and "Traceback" not in said, said
            assert time.process_time() - begun < _MOST_SECONDS
        except Exception:
            faults.append(f"case {number}: {name} with {file}\n{traceback.format_exc()}")
        for changed, content in sound.items():
            changed.parent.mkdir(parents=True, exist_ok=True)
            changed.write_bytes(content)
    assert not faults, "\n".join(faults)
