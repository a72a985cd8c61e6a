"""The sample of the check, and its error if the model has diverged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ray_ulysses.errors import RunError
from ray_ulysses.export.check import take_sample
from tests.unit.attention.models import ARCHITECTURES, zoo_model
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.export.runs import export, fields_of, write_checkpoint, write_config
from tests.unit.inspect.runs import make_run


@pytest.mark.parametrize("value", [float("nan"), 1e38], ids=["weights", "logits"])
def test_a_diverged_model_is_reported_as_such(tmp_path: Path, value: float) -> None:
    model = zoo_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(value)
    write_config(tmp_path / "run", fields_of(ARCHITECTURES["llama"]()))
    write_checkpoint(tmp_path / "run", model)
    what = "lm_head.weight" if value != value else "logits are not finite, but its weights are"
    with pytest.raises(RunError, match=what):
        export(tmp_path / "run")
    assert list((tmp_path / "run/export").iterdir()) == []


@pytest.mark.parametrize(("most", "length"), [(None, 256), (64, 64)])
def test_a_run_without_a_plan_is_checked_with_seeded_tokens_of_its_vocabulary(
    tmp_path: Path, most: int | None, length: int
) -> None:
    sample = take_sample(tmp_path, 50, most)
    assert sample == take_sample(tmp_path, 50, most) and sample.origin.startswith("seeded tokens")
    assert [len(document) for document in sample.documents] == [length, length]
    assert sample.documents[0] != sample.documents[1]
    tokens = {token for document in sample.documents for token in document}
    assert tokens <= set(range(50)) and len(tokens) > 40


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    corpus = text_corpus(tmp_path / "data", varied_texts(20))
    return make_run(tmp_path / "run", [corpus.path]).folder


def test_a_run_is_checked_with_its_first_training_documents(planned: Path) -> None:
    sample = take_sample(planned, 264, 16)
    assert sample.origin == "the run's first training rows"
    assert [len(document) for document in sample.documents] == [16, 16]


@pytest.mark.parametrize("damage", ["plan.json", "rows.parquet", "middle", "corpus"])
def test_seeded_tokens_replace_an_unreadable_plan_or_corpus(planned: Path, tmp_path: Path, damage: str) -> None:
    path = planned / "plan/segment-0000" / ("pieces.parquet" if damage == "middle" else damage)
    if damage == "corpus":
        (tmp_path / "data").rename(tmp_path / "away")
    elif damage == "middle":
        content = bytearray(path.read_bytes())
        # The footer stays intact, so the plan can be opened.
        content[4:60] = bytes(56)
        path.write_bytes(content)
    else:
        path.write_bytes(path.read_bytes()[:40])
    sample = take_sample(planned, 264, None)
    what = "corpus" if damage == "corpus" else "data plan"
    assert sample.origin.startswith(f"seeded tokens, since the run's {what} can't be read (")
