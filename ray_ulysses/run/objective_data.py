"""Compares the corpora of a run with its objective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ray_ulysses.config import Config
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.errors import Problem


def objective_problems(
    config: Config, corpora: Sequence[Corpus], setting_of: Callable[[str], str]
) -> Iterator[Problem]:
    """Refuse corpora that do not suit the objective. ``setting_of`` returns the setting that names a corpus."""
    kind = config.objective.kind
    for corpus in corpora:
        path, info = str(corpus.folder), corpus.info
        rule = hint = ""
        if info.are_queries != (kind == "embedding"):
            rule = "has pairs of a query and a text" if info.are_queries else "has no pairs of a query and a text"
            rule += f", which objective.kind={kind} " + ("can't use" if info.are_queries else "requires")
            hint = "prepare pairs with --query-field and --positive-field, or set another objective.kind"
            hint = "set objective.kind: embedding" if info.are_queries else hint
        elif info.are_pairs and not config.objective.uses_pairs:
            loss = "kto" if info.has_labeled_answers else "dpo"
            rule, hint = "has answers, which need a preference loss", f"set objective.kind, for example to {loss}"
        elif config.objective.uses_answers and not info.are_pairs:
            rule = f"does not contain pairs of answers, which objective.kind={kind} requires"
            fields = "--completion-field and --label-field" if kind == "kto" else "--chosen-field and --rejected-field"
            hint = f"prepare it with {fields}, or set objective.kind: next_token"
        elif kind == "kto" and not info.has_labeled_answers:
            rule = f"has pairs of answers without labels, which objective.kind={kind} requires"
            hint = "prepare it with --completion-field and --label-field, or set objective.kind, for example to dpo"
        elif kind != "kto" and info.has_labeled_answers:
            rule, hint = f"has labeled answers, but objective.kind={kind} compares pairs", "set objective.kind: kto"
        elif kind == "classification" and not info.classes:
            rule = f"has documents without classes, which objective.kind={kind} requires"
            hint = "prepare it with --label-field, or set objective.kind: next_token"
        elif kind == "classification" and (others := sorted({*info.classes} - {*config.objective.classes})):
            rule = f"has the class {others[0]!r}, which is not one of objective.classes"
            hint = "add it to objective.classes, or remove objective.classes to use the classes of the corpora"
        if rule:
            yield Problem(path=setting_of(path), value=path, rule=rule, hint=hint)
