"""Classes of a run come from its stored configuration, the head of its model, or its corpora."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from ray_ulysses.engine.model import planned_model
from ray_ulysses.evaluation.model_source import directory_config
from ray_ulysses.run.classes import with_classes
from ray_ulysses.run.preflight import prepare_run
from ray_ulysses.run.settings import model_shape
from tests.distributed.run_case import make_config
from tests.distributed.test_classification_runs import labeled_corpus, settings_of

NAMES = ("ad", "code", "poem")


def stored_head(folder: Path, described: dict[str, Any], names: tuple[str, ...]) -> Path:
    fields = {name: value for name, value in described.items() if name != "model_type"}
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("llama", **fields, **labels))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return labeled_corpus(tmp_path_factory.mktemp("documents") / "all", NAMES)


def config_with(tmp_path: Path, corpus: Path, **changes: Any) -> Any:
    more = {"run__stop_step": 1, "cluster__workers": 1, "parallel__sp_size": 1, **changes}
    return make_config(tmp_path, corpus, **settings_of(**more))


def test_a_head_keeps_the_order_of_its_classes(tmp_path: Path, corpus: Path) -> None:
    described = dict(make_config(tmp_path, corpus).model.config or {})
    head = stored_head(tmp_path / "head", described, ("poem", "code", "ad"))
    config = config_with(tmp_path, corpus, model__init="pretrained", model__path=str(head))
    assert with_classes(config, None).objective.classes == ("poem", "code", "ad")
    assert prepare_run(config, Path("/")).report.problems == ()
    sorted_names = {"model__init": "pretrained", "model__path": str(head), "objective__classes": list(NAMES)}
    (problem,) = prepare_run(config_with(tmp_path, corpus, **sorted_names), Path("/")).report.problems
    assert problem.path == "objective.classes" and "poem, code, ad" in problem.rule


def test_other_classes_than_the_heads_are_refused_before_a_worker_starts(tmp_path: Path, corpus: Path) -> None:
    described = dict(make_config(tmp_path, corpus).model.config or {})
    head = stored_head(tmp_path / "head", described, ("negative", "positive"))
    config = config_with(tmp_path, corpus, model__init="pretrained", model__path=str(head))
    (problem,) = prepare_run(config, Path("/")).report.problems
    assert problem.path == "objective.classes" and "negative, positive" in problem.rule


def test_a_run_keeps_its_classes_when_a_corpus_is_gone(tmp_path: Path, corpus: Path) -> None:
    config = config_with(tmp_path, corpus)
    begun = with_classes(config, None)
    assert begun.objective.classes == NAMES
    fewer = labeled_corpus(tmp_path / "fewer", NAMES[:2])
    assert with_classes(config_with(tmp_path, fewer), begun).objective.classes == NAMES


def test_a_stored_classifier_is_evaluated_as_one(tmp_path: Path, corpus: Path) -> None:
    described = dict(make_config(tmp_path, corpus).model.config or {})
    found = directory_config(stored_head(tmp_path / "head", described, ("poem", "ad")), "fp32")
    assert (found.objective.kind, found.objective.classes) == ("classification", ("poem", "ad"))


@pytest.mark.parametrize("model_type", ["bert", "distilbert", "modernbert"])
def test_an_encoder_is_planned_with_its_own_parameters_and_attention_in_both_directions(
    tmp_path: Path, corpus: Path, model_type: str
) -> None:
    fields = {"vocab_size": 264, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    ids = {f"{name}_token_id": number for number, name in enumerate(("pad", "unk", "cls", "sep", "bos", "eos"))}
    described = {"model_type": model_type, "intermediate_size": 64, **fields, **ids}
    config = config_with(tmp_path, corpus, model__config=described)
    config = with_classes(config, None)
    shape, model = model_shape(config), planned_model(config)
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    decoder = with_classes(config_with(tmp_path, corpus), None)
    assert shape.attention_width == 2 * model_shape(decoder).attention_width * 2
