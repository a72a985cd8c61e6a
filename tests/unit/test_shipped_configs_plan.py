from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from ray_ulysses.cli import app, run
from ray_ulysses.config import Config, load_config
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.run.preflight import prepare_run
from tests.breadth import fast_only
from tests.local_preparation import prepare_local
from tests.mask_tokenizer import mask_tokenizer
from tests.unit.data.corpora import text_corpus, varied_texts, write_texts
from tests.unit.data.test_pairs import prepared

_CONFIGS = tuple(sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")))
_EACH_KIND = [
    path
    for path in _CONFIGS
    if any(
        word in path.stem for word in ("tiny", "chat", "lora", "1m", "qwen3-4b_8xh100_sp4", "dpo", "mlm", "embedding")
    )
]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a corpus of each kind of objective: texts, with or without mask tokens, and pairs of answers or texts."""
    folder = tmp_path_factory.mktemp("corpus")
    # Long enough that every context has several full rows, in a hundred documents, so that some are held out.
    texts = [text * 200 for text in varied_texts(100, longest=400)]
    found = {"texts": text_corpus(folder / "texts", texts).path}
    write_texts(folder / "masked", [text.replace("a", " ") for text in texts])
    found["masked"] = folder / "masked-corpus"
    tokenizer = str(mask_tokenizer(folder / "tokenizer"))
    prepare_local(
        PrepareRequest(sources=SourceSpec(paths=(str(folder / "masked"),)), out=found["masked"], tokenizer=tokenizer)
    )
    rows = [{"prompt": text[:15_000], "chosen": text[:90], "rejected": text[:60]} for text in texts]
    found["pairs"] = prepared(folder / "pairs", rows, prompt="prompt").path
    rows = [{"query": text[:90], "positive": text[90:8000]} for text in texts]
    found["queries"] = prepared(
        folder / "queries", rows, chosen=None, rejected=None, query="query", positive="positive"
    ).path
    return found


def corpus_of(corpora: dict[str, Path], config: Config) -> Path:
    objective = config.objective
    if objective.kind == "embedding":
        return corpora["queries"]
    return corpora["pairs" if objective.uses_pairs else "masked" if objective.task == "masked_lm" else "texts"]


@pytest.mark.parametrize("path", fast_only(_CONFIGS, *_EACH_KIND), ids=[path.stem for path in _CONFIGS])
def test_a_shipped_configuration_is_planned_without_problems(
    path: Path, corpora: dict[str, Path], tmp_path: Path
) -> None:
    config = load_config(path, (f"run.storage={tmp_path}",), environment={})
    # The weights of a reference model are not on this machine.
    kind = "orpo" if config.objective.needs_reference else config.objective.kind
    overrides = (f"data.path={corpus_of(corpora, config)}", f"run.storage={tmp_path}", f"objective.kind={kind}")
    config = load_config(path, overrides, environment={})
    # The corpus is too short for stages of billions of tokens.
    short = {"tokens": None, "steps": 1, "rows_per_step": 1}
    stages = tuple(stage.model_copy(update=short) for stage in config.stages)
    prepared = prepare_run(config.model_copy(update={"stages": stages}), tmp_path)
    assert prepared.report.problems == ()
    assert prepared.plan.num_steps >= 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("plan asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("path", fast_only(_CONFIGS, _CONFIGS[0]), ids=[path.stem for path in _CONFIGS])
def test_a_shipped_configuration_is_sized_before_there_is_a_corpus(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(app, ["plan", str(path)]) == 2
    assert "data.path=" in (said := capsys.readouterr().out) and "--synthetic" in said
    assert run(app, ["plan", str(path), "--synthetic"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    config = load_config(path, environment={}).with_absolute_paths(tmp_path)
    assert f"data synthetic documents: there is no corpus in {config.data.path} steps" in said
    assert re.search(r"memory (fits: )?[0-9.]+ ", said) and "can start once it has a corpus" in said
    # Nothing that would be read as a property of the user's own data.
    assert not re.search(r"longest document|split documents|token id|stops at step", said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_network")
def test_a_model_that_does_not_fit_is_refused_without_a_corpus_too(capsys: pytest.CaptureFixture[str]) -> None:
    path = next(path for path in _CONFIGS if "512k" in path.stem)
    assert run(app, ["plan", str(path), "--set", "memory.device_gib=16", "--json", "--synthetic"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["corpus"]["is_made_up"] is True
    assert [problem.partition("=")[0] for problem in report["problems"]] == ["memory.device_gib"]
