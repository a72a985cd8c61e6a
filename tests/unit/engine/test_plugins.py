"""Plugins: what is refused before a worker starts, whose errors end a run, and the loss per token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from examples.plugin import Focal, SquaredLlama, SquaredLlamaConfig
from ray_ulysses import Plugin, apply_ulysses, shard_batch
from ray_ulysses.config import Config, parse_config
from ray_ulysses.engine.loss import training_loss
from ray_ulysses.engine.plugins import find_plugins, load_plugins
from ray_ulysses.errors import ConfigError, UserError
from ray_ulysses.run.preflight import report_run
from tests.unit.attention.meshes import ALONE
from tests.unit.config.trees import small_tree


class Misspelled(Plugin):
    def on_steps(self, step: int) -> None: ...


class TakesOne(Plugin):
    def on_end(self, step: int) -> None: ...  # type: ignore[override]


class SomeRanks(Plugin):
    ranks = "some"  # type: ignore[assignment]


class MeanLoss(Plugin):
    def token_loss(self, log_probs_T: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
        return -log_probs_T.mean()


class OfOthers(Plugin):
    def token_loss(self, log_probs_T: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
        return log_probs_T.mean() - log_probs_T


class OwnLoss(Plugin):
    def token_loss(self, log_probs_T: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
        return -2 * log_probs_T


class Builtin(Plugin):
    model_class = LlamaForCausalLM


class Raises(Plugin):
    def on_step(self, step: int, metrics: Any) -> None:
        raise KeyError(step)


class Logs(Raises):
    on_error = "log"


class EveryRank(Raises):
    ranks = "all"


def config_of(*names: str, **changes: Any) -> Config:
    listed = [name if ":" in name else f"{__name__}:{name}" for name in names]
    return parse_config(small_tree(run__plugins=listed, **changes))


def test_a_loss_of_tokens_beside_a_loss_of_pairs_is_refused() -> None:
    config = config_of("OwnLoss", objective__kind="simpo", data__overlong="drop")
    with pytest.raises(ConfigError, match="has a token_loss, but objective"):
        load_plugins(config)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["no_such_module:Plugin"], "can't be imported (ModuleNotFoundError: No module named 'no_such_module')"),
        (["Missing"], "has no attribute 'Missing'"),
        (["json:loads"], "derive its class from ray_ulysses.Plugin"),
        (["Misspelled"], "unknown callback on_steps; use on_step, on_evaluation, on_checkpoint, on_end"),
        (["TakesOne"], "on_end that can't be called with (step, value)"),
        (["SomeRanks"], "has ranks='some'; use 'first' or 'all'"),
        (["MeanLoss"], "token_loss that returns torch.float32 of shape []"),
        (["OfOthers"], "token_loss that gives a token another loss if other tokens are left out"),
        (["examples.plugin:Focal", "OwnLoss"], "has a token_loss, and so has another plugin"),
        (["Builtin"], "model_class with the model_type 'llama' of Transformers"),
    ],
)
def test_a_plugin_that_cannot_serve_is_refused_before_a_worker_starts(names: list[str], words: str) -> None:
    config = config_of(*names)
    (problem,) = find_plugins(config)[1]
    assert problem.path == f"run.plugins.{len(names) - 1}" and words in str(problem)
    with pytest.raises(ConfigError):
        load_plugins(config)


@pytest.mark.parametrize("name", ["no_colon", "a:b:c", "../a:b", "a:", "os.system('x'):y"])
def test_only_module_and_object_name_a_plugin(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.plugins"):
        parse_config(small_tree(run__plugins=[name]))


def test_no_code_is_imported_from_a_folder_of_data_or_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    (problem,) = find_plugins(config_of("planted:Plugin", data__path=str(tmp_path)))[1]
    assert f"is in {tmp_path}, a folder of data or models" in str(problem)
    assert "planted" not in sys.modules
    # The folder of a command that stores its runs beside itself is not the home of a package without __init__.py.
    monkeypatch.chdir(tmp_path)
    assert find_plugins(config_of("examples.plugin:Focal", run__storage=str(tmp_path)))[1] == ()


def test_plan_reports_a_plugin_with_the_other_problems(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "run__storage": str(tmp_path), "data__path": str(tmp_path / "none"), "cluster__workers": 2,
    }  # fmt: skip
    assert not report_run(config_of("Raises", **changes), tmp_path, synthetic=True).problems
    listed = config_of("Misspelled", "examples.plugin:Squared", **changes)
    report = report_run(listed, tmp_path, synthetic=True)
    assert [problem.path for problem in report.problems] == ["run.plugins.0", "model.config.model_type"]


def test_an_error_in_a_callback_ends_the_run_or_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    stops, logs, every = (load_plugins(config_of(name)) for name in ("Raises", "Logs", "EveryRank"))
    with pytest.raises(UserError, match=r"on_step of \S+:Raises failed on rank 0 at step 3 \(KeyError: 3\)"):
        stops.call("on_step", 0, 3, {})
    stops.call("on_step", 1, 3, {})
    with pytest.raises(UserError, match="on rank 1"):
        every.call("on_step", 1, 3, {})
    with caplog.at_level("WARNING", logger="ray_ulysses"):
        logs.call("on_step", 0, 3, {})
    assert "Logs failed on rank 0 at step 3 (KeyError: 3); training continues" in caplog.text


@pytest.mark.parametrize("tile", ["off", 3])
def test_a_loss_of_ones_own_and_its_gradient_are_sums_over_tokens(tile: Any) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model, oracle = (SquaredLlama(SquaredLlamaConfig(vocab_size=13, num_attention_heads=2, **sizes)) for _ in range(2))
    oracle.load_state_dict(model.state_dict())
    ids, weights = torch.randint(0, 13, (1, 11)), torch.rand(1, 11)
    labels = ids.masked_fill(torch.arange(11) % 4 == 2, -100)
    batch = shard_batch(ids, labels, [11], ALONE, label_weights=weights)
    found = training_loss(apply_ulysses(model, ALONE), batch, tile=tile, token_loss=Focal().token_loss)
    found.objective_sum.backward()
    log_probs = oracle(input_ids=ids).logits[0, :-1].log_softmax(-1)
    wanted = sum(
        -weights[0, place] * (1 - log_probs[place - 1, label].exp()) ** 2 * log_probs[place - 1, label]
        for place, label in enumerate(labels[0].tolist())
        if place > 0 and label != -100
    )
    wanted.backward()
    torch.testing.assert_close(found.loss_sum, wanted.detach(), rtol=1e-5, atol=0)
    for ours, truth in zip(model.parameters(), oracle.parameters(), strict=True):
        assert (ours.grad - truth.grad).norm() <= 1e-5 * truth.grad.norm()
