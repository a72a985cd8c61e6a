from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoConfig

from ray_ulysses.cli import app, run
from tests import architectures_page
from tests.distributed.sweep_case import MASKED, types_of
from tests.unit.attention.models import ARCHITECTURES, HYBRIDS


def test_the_page_is_what_was_stored_and_names_every_type() -> None:
    stored = architectures_page.load()
    assert architectures_page.PAGE.read_text() == architectures_page.page(stored)
    kinds = {one["kind"] for one in stored["outcomes"]}
    assert kinds <= {"exact", "refused", "composite", "not built"}
    exact = sum(one["kind"] == "exact" and one["variant"] == "default" for one in stored["outcomes"])
    masked = [one for one in stored["outcomes"] if one["variant"] == MASKED]
    types = len({one["model_type"] for one in stored["outcomes"] if one not in masked})
    readme = (architectures_page.ROOT / "README.md").read_text()
    composite = sum(one["kind"] == "composite" for one in stored["outcomes"])
    assert f"Of the {types} causal model types of Transformers" in readme
    assert f", {exact} are exact, {composite} are multimodal" in readme
    of_masked = sum(one["kind"] == "exact" for one in masked)
    assert f"{of_masked} of {len(masked)} masked ones" in readme
    if transformers.__version__ == stored["transformers"]:
        assert sorted({one["model_type"] for one in stored["outcomes"] if one not in masked}) == types_of("causal_lm")
        assert [one["model_type"] for one in masked] == types_of("masked_lm")


def told(capsys: pytest.CaptureFixture[str], model: Path, config: Any, code: int) -> str:
    config.save_pretrained(model)
    assert run(app, ["doctor", "--model", str(model)]) == code
    return capsys.readouterr().out


def test_doctor_tells_what_can_be_trained_and_how(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = told(capsys, tmp_path / "gemma2", ARCHITECTURES["gemma2"](), 0)
    assert "gemma2 can be trained exactly" in text
    assert "1 with attention with a window of 6 tokens, 1 with attention over whole documents" in text
    assert "1, 2, 4 divide the 4 heads evenly" in text
    assert "1 recurrent" in told(capsys, tmp_path / "qwen3_next", HYBRIDS["qwen3_next"](), 0)
    text = told(capsys, tmp_path / "gemma3", AutoConfig.for_model("gemma3"), 0)
    assert "gemma3_text can be trained exactly with model.part: text" in text
