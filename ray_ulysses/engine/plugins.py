"""Loads a run's plugins: callbacks, a loss per token, and a model class, from modules of the user's own job."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ray_ulysses.config.stages import corpus_paths
from ray_ulysses.errors import ConfigError, Problem, UserError
from ray_ulysses.logging import get_logger

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.engine.tiled_loss import TokenLoss

_log = get_logger(__name__)


class Plugin:
    """Base class of plugins. Each training process creates its own instance, without arguments."""

    ranks: Literal["first", "all"] = "first"
    """Ranks that call the callbacks: rank 0 only, or every rank."""
    on_error: Literal["stop", "log"] = "stop"
    """Response to an exception in a callback: end the run like a user's error, or log a warning and continue."""
    model_class: type[Any] | None = None
    """Subclass of Transformers' ``PreTrainedModel``, whose ``config_class`` has its own ``model_type``. A run with
    this ``model_type`` is built from the class."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Handle a completed step, after its evaluation and its save. ``metrics`` are those of the journal."""

    def on_evaluation(self, step: int, loss: float) -> None:
        """Handle an evaluation after a step."""

    def on_checkpoint(self, step: int, path: str) -> None:
        """Handle a committed checkpoint; ``path`` is relative to the run's checkpoint store. Called between steps."""

    def on_end(self, step: int, status: str) -> None:
        """Handle the end of this process's training, unless it fails or is killed.

        ``status`` is ``finished`` or ``stopped``; or ``resized`` or ``stage`` if the run continues in new processes.
        """

    def token_loss(self, log_probs_T: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token, fp32 ``[T]``; override this method to replace the cross-entropy.

        A token's loss must depend on this token alone: the run sums losses over tokens, and divides the sum by the
        step's number of supervised tokens. Every rank calls this method, for some of its tokens at a time.

        Args:
            log_probs_T: Log-probability of each label, fp32 ``[T]``.
            labels_T: Labels, int64 ``[T]``.
        """
        raise NotImplementedError


_CALLBACKS = {
    "on_step": (1, {"loss": 1.0}),
    "on_evaluation": (1, 1.0),
    "on_checkpoint": (1, "checkpoints/step-00000001"),
    "on_end": (1, "finished"),
}
"""Example arguments of each callback."""
_CHOICES = {"ranks": ("first", "all"), "on_error": ("stop", "log")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugins:
    """The plugins of a run, in the order of ``run.plugins``."""

    by_name: Mapping[str, Plugin]
    """Instances by their name in ``run.plugins``."""

    @property
    def token_loss(self) -> TokenLoss | None:
        """The loss that replaces the cross-entropy, or None. It raises a UserError if the plugin raises an error."""
        own = ((name, one.token_loss) for name, one in self.by_name.items() if _has_own(one, "token_loss"))
        return next((partial(_loss_of, name, loss) for name, loss in own), None)

    @property
    def model_type(self) -> str | None:
        """The ``model_type`` of the plugins' model class, or None if they have no model class."""
        found = (one.model_class for one in self.by_name.values() if one.model_class is not None)
        return next((str(one.config_class.model_type) for one in found), None)

    def call(self, callback: str, rank: int, step: int, value: object) -> None:
        """Call a callback of each plugin that wants it on this rank.

        Raises:
            UserError: A callback raised an exception, and its plugin's ``on_error`` is ``stop``.
        """
        for name, plugin in self.by_name.items():
            if rank > 0 and plugin.ranks == "first":
                continue
            try:
                getattr(plugin, callback)(step, value)
            except Exception as error:
                text = f"run.plugins: {callback} of {name} failed on rank {rank} at step {step} ({_in_words(error)})"
                if plugin.on_error == "stop":
                    way_out = "correct the plugin, or set its on_error to 'log', then run the same command again"
                    raise UserError(f"{text}; {way_out}") from error
                _log.warning("%s; training continues, because its on_error is 'log'", text)


def load_plugins(config: Config) -> Plugins:
    """Import a run's plugins, and register their model class with Transformers.

    Raises:
        ConfigError: A plugin can't be imported or used.
    """
    plugins, problems = find_plugins(config)
    if problems:
        raise ConfigError(problems, source="run.plugins")
    return plugins


def find_plugins(config: Config) -> tuple[Plugins, tuple[Problem, ...]]:
    """Import a run's plugins like `load_plugins`, and return the usable plugins and the problems of the others."""
    found: dict[str, Plugin] = {}
    problems: list[Problem] = []
    for number, name in enumerate(config.run.plugins):
        try:
            plugin = _imported(name, _foreign_folders(config))
            problem = next(_misfits(plugin, found), None)
            if _has_own(plugin, "token_loss") and config.objective.counts != "tokens":
                objective = config.objective
                problem = (
                    f"has a token_loss, but objective.kind={objective.kind} is a loss of {objective.counts}; use one "
                    "of them"
                )
            if problem is None:
                _register(plugin.model_class)
                found[name] = plugin
                continue
        except _Unusable as error:
            problem = str(error)
        rule, _, hint = problem.partition("; ")
        problems.append(Problem(path=f"run.plugins.{number}", value=name, rule=rule, hint=hint))
    return Plugins(by_name=found), tuple(problems)


class _Unusable(Exception):
    """A plugin can't be imported; the text has the form ``rule; hint``."""


def _foreign_folders(config: Config) -> Iterator[Path]:
    """Yield the folders whose content may come from others, from which no code is imported."""
    model = config.model
    places = (*corpus_paths(config), config.run.storage, config.checkpoint.storage, model.path, model.resume_from)
    return (Path(place).expanduser().resolve() for place in places if place is not None and "://" not in place)


def _imported(name: str, foreign: Iterator[Path]) -> Plugin:
    module, _, names = name.partition(":")
    try:
        # Finding the outermost package runs no code.
        spec = importlib.util.find_spec(module.partition(".")[0])
        homes = [] if spec is None else [*(spec.submodule_search_locations or ()), *filter(None, [spec.origin])]
        inside = [folder for folder in foreign if any(Path(home).resolve().is_relative_to(folder) for home in homes)]
        if inside:
            raise _Unusable(f"is in {inside[0]}, a folder of data or models; move the module to the job's own code")
        found: Any = importlib.import_module(module)
        for part in names.split("."):
            found = getattr(found, part)
        found = found() if isinstance(found, type) and issubclass(found, Plugin) else found
    except _Unusable:
        raise
    except Exception as error:
        hint = "put the module's folder on PYTHONPATH, or into the working_dir of the submitted job"
        raise _Unusable(f"can't be imported ({_in_words(error)}); {hint}") from error
    if not isinstance(found, Plugin):
        raise _Unusable("is not a plugin; derive its class from ray_ulysses.Plugin")
    return found


def _loss_of(name: str, loss: TokenLoss, log_probs_T: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    try:
        return loss(log_probs_T, labels_T)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        way_out = "correct the plugin, then run the same command again"
        raise UserError(f"run.plugins: token_loss of {name} failed ({_in_words(error)}); {way_out}") from error


def _misfits(plugin: Plugin, others: Mapping[str, Plugin]) -> Iterator[str]:
    """Yield a text of the form ``rule; hint`` for each way in which a plugin can't be used."""
    for name, choices in _CHOICES.items():
        if getattr(plugin, name) not in choices:
            yield f"has {name}={getattr(plugin, name)!r}; use {' or '.join(map(repr, choices))}"
    for name in dir(plugin):
        if name.startswith("on_") and name not in (*_CALLBACKS, *_CHOICES):
            yield f"has an unknown callback {name}; use {', '.join(_CALLBACKS)}, or rename the method"
    for name, arguments in _CALLBACKS.items():
        try:
            inspect.signature(getattr(plugin, name)).bind(*arguments)
        except TypeError as error:
            yield f"has a callback {name} that can't be called with (step, value): {error}; correct its arguments"
    for name in ("token_loss", "model_class"):
        if _has_own(plugin, name) and any(_has_own(other, name) for other in others.values()):
            yield f"has a {name}, and so has another plugin; use only one of them"
    if _has_own(plugin, "token_loss") and (reason := _wrong_loss(plugin.token_loss)) is not None:
        yield f"has a token_loss that {reason}; return one fp32 loss per token, which depends on this token alone"
    if plugin.model_class is not None and (reason := _wrong_model(plugin.model_class)) is not None:
        yield f"has a model_class {reason}"


def _has_own(plugin: Plugin, name: str) -> bool:
    return getattr(type(plugin), name, None) is not getattr(Plugin, name) or name in vars(plugin)


def _wrong_loss(loss: TokenLoss) -> str | None:
    """Return why a loss can't be used, or None. The loss of some tokens must not depend on the other tokens."""
    log_probs_T = torch.linspace(-9.0, -0.01, 13, requires_grad=True)
    labels_T = torch.arange(13)
    try:
        losses_T = loss(log_probs_T, labels_T)
        if losses_T.shape != log_probs_T.shape or losses_T.dtype != torch.float32:
            return f"returns {losses_T.dtype} of shape {list(losses_T.shape)} for 13 tokens"
        part_T = loss(log_probs_T[2:5], labels_T[2:5])
        gradient_T = torch.autograd.grad(losses_T.sum(), log_probs_T)[0]
    except Exception as error:
        return f"fails for 13 tokens ({_in_words(error)})"
    if not torch.allclose(part_T, losses_T[2:5], rtol=1e-5, atol=1e-7):
        return "gives a token another loss if other tokens are left out"
    return None if bool(gradient_T.isfinite().all()) else "has a gradient that is not finite"


def _wrong_model(found: Any) -> str | None:
    from transformers import CONFIG_MAPPING, PreTrainedModel

    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        return (
            "that is not a subclass of Transformers' PreTrainedModel; derive it from a decoder such as LlamaForCausalLM"
        )
    kind = getattr(found.config_class, "model_type", "")
    is_taken = kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] is not found.config_class
    if not kind or is_taken or found.config_class.__module__.startswith("transformers."):
        return f"with the model_type {kind!r} of Transformers; set its config_class to a class with another model_type"
    return None


def _register(found: type[Any] | None) -> None:
    if found is not None:
        from transformers import AutoConfig, AutoModelForCausalLM

        AutoConfig.register(found.config_class.model_type, found.config_class, exist_ok=True)
        AutoModelForCausalLM.register(found.config_class, found, exist_ok=True)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
