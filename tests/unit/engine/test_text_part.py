"""The text decoder of a multimodal checkpoint is found, sized and cut out, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.config.schema import with_settings
from ray_ulysses.engine.model import build_model, check_architecture
from ray_ulysses.errors import ConfigError, UserError
from ray_ulysses.run.preflight import report_run
from ray_ulysses.run.settings import model_shape
from tests.unit.attention.models import tiny_model
from tests.unit.attention.multimodal import MULTIMODAL, multimodal_model
from tests.unit.config.trees import small_tree


def config_of(base: Path, **changes: Any) -> Config:
    model = {"init": "pretrained", "path": str(base), "part": "text", "dtype": "fp32", "rope": "unchanged"} | changes
    return parse_config(small_tree() | {"model": model})


@pytest.fixture(params=MULTIMODAL)
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    model = multimodal_model(request.param)
    model.save_pretrained(tmp_path)
    return model


def test_the_decoder_is_loaded_by_its_own_names_and_the_rest_is_not_there(whole: Any, tmp_path: Path) -> None:
    decoder: Any = build_model(config_of(tmp_path))
    wanted = dict(whole.named_parameters())
    inside = ("model.language_model.", "lm_head.")
    assert {name for name, _ in decoder.named_parameters()} == {name for name in wanted if name.startswith(inside)}
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
    assert decoder.config.get_text_config().use_cache is False
    assert decoder.is_gradient_checkpointing


def test_a_plan_sizes_the_decoder_alone(whole: Any, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    decoder, shape = build_model(config), model_shape(config)
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (2, 4, 2, 8)
    assert shape.tied_embeddings == whole.config.tie_word_embeddings
    counted = sum(parameter.numel() for parameter in decoder.parameters())
    # The estimate may lack biases and norms of heads.
    assert counted - 200 <= shape.num_parameters <= counted
    assert len(check_architecture(config).layers) == 2
    planned = with_settings(config, {"parallel.sp_size": 2, "run.storage": str(tmp_path / "runs")})
    assert report_run(planned, tmp_path, synthetic=True).problems == ()


def test_a_decoder_is_drawn_from_the_seed_and_described_in_line(tmp_path: Path) -> None:
    whole = multimodal_model("gemma3")
    whole.save_pretrained(tmp_path)
    described = {"model_type": "gemma3", "text_config": {"hidden_size": 32, "num_hidden_layers": 2}}
    loaded = build_model(config_of(tmp_path, config=described))
    drawn = build_model(config_of(tmp_path, init="random"))
    again = build_model(config_of(tmp_path, init="random"))
    for name, parameter in drawn.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        assert parameter.shape == loaded.get_parameter(name).shape
    described["text_config"] = {"hidden_size": 48}
    with pytest.raises(UserError, match=r"text_config\.hidden_size is 32 in model.path and 48 in model\.config"):
        build_model(config_of(tmp_path, config=described))


def test_a_multimodal_checkpoint_is_refused_without_model_part(whole: Any, tmp_path: Path) -> None:
    config = config_of(tmp_path, part="whole")
    for refused in (check_architecture, model_shape, build_model):
        with pytest.raises(UserError, match=r"multimodal model.*set model\.part: text"):
            refused(config)
    with pytest.raises(ConfigError, match=r"model\.config: .*it has text_config, vision_config\); set model\.part"):
        parse_config(small_tree(model__config=MULTIMODAL["gemma3"]().to_dict()))


def test_the_text_part_needs_the_directory_of_a_multimodal_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path.*into a copy of the complete checkpoint.*the directory"):
        parse_config(small_tree(model__part="text"))
    with pytest.raises(UserError, match=r"model\.path='owner/name': no such directory; .* download the model"):
        report_run(config_of(Path("owner/name")), Path("/"))
    tiny_model().save_pretrained(tmp_path)
    for refused in (check_architecture, model_shape, build_model):
        with pytest.raises(UserError, match=r"model\.part=text: .*'llama' is not multimodal; remove model\.part"):
            refused(config_of(tmp_path))
