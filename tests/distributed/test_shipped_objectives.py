"""Each shipped configuration with an objective of its own trains a tiny model of the same kind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig

from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.text_part import auto_class
from ray_ulysses.run.classes import with_classes
from ray_ulysses.tracking.events import Evaluated
from ray_ulysses.tracking.history import read_history
from tests.breadth import fast_only
from tests.distributed.reference_case import reference_run
from tests.distributed.run_case import train
from tests.distributed.test_classification_runs import labeled_corpus
from tests.distributed.test_embedding_runs import corpus_of_pairs
from tests.distributed.test_kto_runs import labeled_corpus as labeled_answers
from tests.distributed.test_mlm_runs import corpus_of
from tests.distributed.test_pair_runs import pair_corpus
from tests.mask_tokenizer import mask_tokenizer
from tests.unit.tracking.journals import read_events

_CONFIGS = Path(__file__).parents[2] / "configs"
_OWN = [
    path
    for path in sorted(_CONFIGS.glob("*.yaml"))
    if yaml.safe_load(path.read_text()).get("objective", {}).get("kind", "next_token") != "next_token"
]
_FAST = [path for path in _OWN if "-dpo_" in path.name or "embedding" in path.name]
_TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}


def tiny(path: Path, folder: Path) -> Config:
    """Return a shipped configuration with a tiny model, a short context, two workers and a corpus of its kind."""
    tree: dict[str, Any] = yaml.safe_load(path.read_text())
    # PyYAML follows YAML 1.1, in which 1e-6 is text.
    tree["optimizer"]["lr"] = float(tree["optimizer"]["lr"])
    kind = tree["objective"]["kind"]
    described = {**tree["model"]["config"], **_TINY, "vocab_size": 264}
    if "num_key_value_heads" in described:
        described["num_key_value_heads"] = 2
    if described["model_type"] == "modernbert":
        described |= _IDS
    if kind == "mlm":
        corpus = corpus_of(folder / "texts", mask_tokenizer(folder / "tokenizer"))
    elif kind == "classification":
        corpus = labeled_corpus(folder / "documents")
    elif kind == "embedding":
        corpus = corpus_of_pairs(folder / "texts")
    elif kind == "kto":
        corpus = labeled_answers(folder / "answers")
    else:
        corpus = pair_corpus(folder / "pairs")
    if tree["model"].get("path") is not None:
        # A stored model takes the place of the one on the hub.
        task = "masked_lm" if described["model_type"] == "modernbert" else "causal_lm"
        fields = {name: value for name, value in described.items() if name != "model_type"}
        torch.manual_seed(0)
        model = auto_class("whole", task).from_config(AutoConfig.for_model(described["model_type"], **fields))
        model.save_pretrained(folder / "model")
        tree["model"] |= {"path": str(folder / "model"), "config": None}
    else:
        tree["model"]["config"] = described
    changes: dict[str, dict[str, Any]] = {
        "run": {"storage": str(folder / "runs"), "storage_kind": "local", "stop_step": 2, "eval_every_steps": 1},
        "model": {"dtype": "fp32"},
        "data": {
            "path": str(corpus),
            "context_tokens": 256,
            "rows_per_step": 4,
            "eval_fraction": 0.2,
            "engine": "local",
        },
        "parallel": {"sp_size": 2},
        "schedule": {"warmup_steps": 1},
        "memory": {"device_gib": None, "host_gib": None},
        "tracking": {"enabled": False, "uri": None},
        "cluster": {"workers": 2, "gpus_per_worker": 0, "device": None},
    }
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    return with_classes(parse_config(tree), None)


@pytest.mark.parametrize("path", fast_only(_OWN, *_FAST), ids=[path.stem for path in _OWN])
def test_a_shipped_objective_trains_a_tiny_model(path: Path, tmp_path: Path) -> None:
    config = tiny(path, tmp_path)
    if config.objective.needs_reference:
        reference_run(Path(str(config.data.path)), tmp_path / "model")
    assert train(config, "once") == ("finished", 2)
    steps = read_history(config.run_dir).steps
    assert [step.step for step in steps] == [1, 2] and all(math.isfinite(step.loss) for step in steps)
    evaluations = [one for one in read_events(config.run_dir) if isinstance(one, Evaluated)]
    assert [one.step for one in evaluations] == [0, 1, 2]
