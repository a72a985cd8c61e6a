"""Every shipped configuration loads and matches its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ray_ulysses.config import load_config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.run.settings import model_shape

_CONFIGS = tuple(sorted((Path(__file__).parents[3] / "configs").glob("*.yaml")))
_BY_NAME = pytest.mark.parametrize("path", _CONFIGS, ids=[path.stem for path in _CONFIGS])
_NAME = re.compile(
    r"^(?P<model>[a-z0-9.-]+)_(?:cpu|(?P<gpus>\d+)xh100)_sp(?P<sp>\d+)(?:-(?:elastic|stages|dp(?P<dp>\d+)))?_(?P<context>\d+)(?P<unit>[km])$"
)
# Parameters as the models' own pages state them.
# Models of documents have no output head over the vocabulary.
_PARAMETERS = {
    "llama3-8b-classification": 7_504_924_672,
    "llama3-8b": 8_030_261_248,
    "modernbert-large-embedding": 394_781_696,
    "modernbert-large": 395_881_664,
    "qwen3-4b": 4_022_468_096,
}


def _shape(path: Path) -> ModelShape:
    config = load_config(path, environment={})
    assert config.model.config is not None, "a shipped configuration is planned without a network"
    return model_shape(config)


def _context(match: re.Match[str]) -> int:
    return int(match["context"]) * (1024 if match["unit"] == "k" else 1024**2)


@_BY_NAME
def test_a_configuration_is_what_its_name_says(path: Path) -> None:
    config, match = load_config(path, environment={}), _NAME.match(path.stem)
    assert match is not None
    assert config.parallel.sp_size == int(match["sp"])
    assert config.cluster.workers.is_fixed is ("elastic" not in path.stem)
    assert not match["dp"] or config.dp_size == int(match["dp"])
    assert config.data.context_tokens == _context(match)
    assert config.cluster.gpus_per_worker == (1 if match["gpus"] else 0)
    assert not match["gpus"] or config.cluster.workers.max == int(match["gpus"])


@_BY_NAME
def test_the_inline_model_is_the_model(path: Path) -> None:
    shape = _shape(path)
    assert shape.is_exact
    name = path.stem.partition("_")[0]
    own = shape.num_parameters - (shape.part.added if shape.part is not None else 0)
    # Its adapter, or its data, stands behind the model's name.
    expected = next((count for model, count in _PARAMETERS.items() if f"{name}-".startswith(f"{model}-")), None)
    assert own == expected or (expected is None and name == "llama-tiny")
