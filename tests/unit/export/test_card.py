"""The model card says what was trained, and names only what others can find."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.model_config import described_config
from ray_ulysses.export.card import model_card, training_facts
from ray_ulysses.run.secrets_file import stored_config
from ray_ulysses.run.start_point import choose_checkpoint
from ray_ulysses.storage import LocalStore
from tests.unit.commands.test_export import ADAPTER, REPORT
from tests.unit.config.trees import small_tree
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.export.runs import export, write_checkpoint
from tests.unit.inspect.runs import make_run


def front_of(card: str) -> dict[str, object]:
    front: dict[str, object] = yaml.safe_load(card.split("---\n")[1])
    return front


def test_the_card_says_how_much_was_trained_the_losses_and_the_settings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [text_corpus(tmp_path / "data", varied_texts(20)).path])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(described_config(stored_config(run.folder)))
    for step in (1, 2):
        write_checkpoint(run.folder, model, step=step, metrics={"loss": 2.5, "eval_loss": 2.25})
    report = export(run.folder, average=2, check=False)
    card = (Path(report.out) / "README.md").read_text()
    assert report.training.planned_steps is not None and report.training.planned_steps > 2
    for line in (
        f"| trained | 2 of {report.training.planned_steps:,} steps, 1,200 supervised tokens |",
        "| training loss | 2.5000, before averaging |",
        "| validation loss | 2.2500 at step 2, before averaging |",
        "| average | mean of the checkpoints of steps 1, 2 |",
        f"| `optimizer.lr` | `{stored_config(run.folder).optimizer.lr}` |",
    ):
        assert line in card.splitlines(), line
    assert "run.plugins" not in card
    assert front_of(card) == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["ray-ulysses", "long-context"],
    }  # fmt: skip


@pytest.mark.parametrize("is_local", [False, True])
def test_only_what_is_on_the_hub_is_named_and_the_license_is_that_of_the_base(tmp_path: Path, is_local: bool) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    prepare = {"sources": ["org/texts", str(base), "org/texts.jsonl"], "tokenizer": "bytes", "kind": "auto"}
    path = str(base) if is_local else "org/base-of-nobody"
    plugins = ["examples.plugin:Focal"]
    changes = {"model__path": path, "data__prepare": prepare, "run__plugins": plugins}
    config = parse_config(small_tree(model__init="pretrained", **changes))
    write_checkpoint(tmp_path / "run", AutoModelForCausalLM.from_config(described_config(parse_config(small_tree()))))
    facts = training_facts(config, choose_checkpoint(LocalStore(tmp_path / "run"), "latest"), tmp_path / "run")
    assert (facts.base_model, facts.license) == ((None, "apache-2.0") if is_local else ("org/base-of-nobody", None))
    assert (facts.datasets, facts.planned_steps, facts.loss, facts.validation) == (("org/texts",), None, None, None)
    assert facts.settings["run.plugins"] == str(plugins)
    front = front_of(model_card(replace(ADAPTER, training=facts)).decode())
    named = {"license": "apache-2.0"} if is_local else {"base_model": "org/base-of-nobody"}
    assert front.items() >= {**named, "library_name": "peft", "datasets": ["org/texts"]}.items()
    assert str(tmp_path) not in model_card(replace(REPORT, training=facts)).decode()
