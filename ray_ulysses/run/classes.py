"""Finds the names of the classes that a run predicts."""

from __future__ import annotations

from collections.abc import Iterator

from ray_ulysses.config import Config
from ray_ulysses.config.schema import with_settings
from ray_ulysses.config.stages import corpus_paths
from ray_ulysses.data.corpus.corpus import Corpus, corpus_exists
from ray_ulysses.data.corpus.format import ordered_classes
from ray_ulysses.engine.model_config import objective_of, stored_config
from ray_ulysses.errors import Problem, UserError


def with_classes(config: Config, stored: Config | None) -> Config:
    """Return the configuration with the names of the classes, unless they are set or not needed.

    A run that has begun keeps its classes. A new run takes those of the head in ``model.path``, if there is a head with
    these names, or else those of its corpora.

    Args:
        config: The run's configuration.
        stored: The configuration of the run if it has begun.

    Raises:
        UserError: A corpus can't be read.
    """
    if config.objective.kind != "classification" or config.objective.classes:
        return config
    if stored is not None and stored.objective.classes:
        classes = stored.objective.classes
    else:
        there = [Corpus.open(path) for path in corpus_paths(config) if corpus_exists(path)]
        classes = ordered_classes(name for corpus in there for name in corpus.info.classes)
        head = head_classes(config)
        classes = head if {*classes} <= {*head} else classes
    return with_settings(config, {"objective.classes": classes})


def head_classes(config: Config) -> tuple[str, ...]:
    """Return the classes of the stored head from which a run starts, or none if there is no such head."""
    if config.model.init != "pretrained" or config.model.path is None:
        return ()
    try:
        found = stored_config(config.model.path)
    except UserError:
        # Loading the model reports the cause.
        return ()
    if objective_of(found) != "classification":
        return ()
    return tuple(str(found.id2label[number]) for number in range(found.num_labels))


def class_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem if the stored head of a run's model predicts other classes, or the same in another order."""
    classes, head = config.objective.classes, head_classes(config)
    is_named = not all(name.startswith("LABEL_") for name in head)
    if (
        config.objective.kind == "classification"
        and head
        and head != classes
        and (is_named or len(head) != len(classes))
    ):
        yield Problem(
            path="objective.classes",
            value=list(classes),
            rule=f"differs from the classes of the head in model.path: {', '.join(head)}",
            hint="use these names in this order, or set model.path to a model without a classification head",
        )
