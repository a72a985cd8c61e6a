"""A converted configuration trains as the tool that it comes from: ten steps of Transformers' Trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ray_ulysses.config import Config, parse_config
from ray_ulysses.config.yaml_text import parse_yaml
from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.data.read.reader import RowReader
from ray_ulysses.migration.write import convert
from ray_ulysses.tracking.history import read_history
from tests.apart import relative
from tests.distributed.run_case import train
from tests.unit.data.corpora import text_corpus

STEPS, CONTEXT = 10, 96
# The schedule, its length and the epsilon are TRL's own; clipping and decay are at work.
ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS, "learning_rate": 2e-3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3,
    "lr_scheduler_type": "linear", "weight_decay": 0.1, "adam_beta2": 0.95, "max_grad_norm": 0.5, "bf16": False,
    "use_cpu": True, "seed": 1, "report_to": "none", "save_strategy": "no",
}  # fmt: skip
OVERRIDES = (
    "data.engine=local", "data.allow_other_tokenizer=true", "run.self_test=false", "cluster.workers=2",
    "parallel.sp_size=2",
)  # fmt: skip


def convert_arguments(folder: Path, model: Path, corpus: Path) -> Config:
    """Return our configuration for a file of TRL."""
    source = folder / "sft.json"
    own = {"model_name_or_path": str(model), "output_dir": str(folder / "run"), "max_length": CONTEXT, "packing": False}
    source.write_text(json.dumps(ARGUMENTS | own))
    tree, problems = parse_yaml(convert([source], {"--gpus": 1}), "converted")
    assert not problems
    return parse_config(tree, (*OVERRIDES, f"data.path={corpus}"))


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """The rows of a run in its order, with labels as Transformers expects them: not shifted."""

    def __init__(self, config: Config) -> None:
        plan: Plan = load_plan(config.run_dir / "plan")
        reader = RowReader(CorpusSet(plan.newest.sources), plan)
        self.rows = [reader.read("train", row, 0, 1) for step in range(1, STEPS + 1) for row in plan.step_rows(step)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        # One token more than the row, for the label of its last token: a document that is cut off has one.
        row = self.rows[index]
        length = sum(row.document_lengths)
        labels = row.labels[:length]
        return {"input_ids": np.append(row.input_ids[:length], max(labels[-1], 0)), "labels": np.append(-100, labels)}


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["labels"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    for row in rows:
        row["attention_mask"] = np.ones_like(row["labels"])
    return {
        name: torch.tensor(
            np.stack([np.pad(row[name], (0, longest - len(row[name])), constant_values=fill[name]) for row in rows])
        )
        for name in fill
    }


class Recorded(Trainer):
    """Transformers' Trainer, which notes the loss of each step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parts: list[float] = []

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*arguments, **options)
        self.parts.append(float(loss.double()))
        return loss

    def losses(self) -> Iterator[float]:
        each = ARGUMENTS["gradient_accumulation_steps"]
        return (sum(self.parts[first : first + each]) for first in range(0, len(self.parts), each))


def test_ten_steps_of_a_converted_configuration_are_those_of_the_trainer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    described = LlamaConfig(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    model = LlamaForCausalLM(described)
    model.save_pretrained(tmp_path / "model")
    # Some are longer than a row, whose end is then cut off as in TRL.
    texts = [f"{number} is a number, and {number + 1} follows. " * (1 + number % 4) for number in range(70)]
    text_corpus(tmp_path, texts)
    config = convert_arguments(tmp_path, tmp_path / "model", tmp_path / "corpus")
    assert train(config) == ("finished", STEPS)
    ours = [step.loss for step in read_history(config.run_dir).steps]

    known = {field.name for field in fields(TrainingArguments)}
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "theirs"),
        train_sampling_strategy="sequential",
        disable_tqdm=True,
        **{name: value for name, value in ARGUMENTS.items() if name in known},
    )
    trainer = Recorded(model=model, args=arguments, train_dataset=Rows(config), data_collator=padded)
    trainer.train()
    theirs = list(trainer.losses())
    assert len(ours) == len(theirs) == STEPS and ours[-1] < ours[0] - 0.5
    assert relative(ours, theirs) <= 1e-5
