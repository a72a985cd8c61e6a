"""Finds the stored log-probabilities of a run's pairs of answers under its reference model."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence

from ray_ulysses.config import Config
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.corpus.reference import Reference, has_reference, stored_references
from ray_ulysses.engine.model_digest import model_digest
from ray_ulysses.errors import Problem
from ray_ulysses.run_names import REFERENCE_FILE
from ray_ulysses.storage.place import Place, is_file, open_store


def reference_digest(config: Config, *, has_begun: bool) -> str | None:
    """Return the digest of the run's reference model, or None if it has none. A run keeps its first reference model.

    Raises:
        UserError: The model can't be read.
    """
    if not config.objective.needs_reference:
        return None
    return (pinned_reference(config.run_dir) if has_begun else None) or model_digest(str(config.model.path))


def pin_reference(run_dir: Place, digest: str) -> None:
    """Store the digest of the run's reference model in its directory."""
    open_store(run_dir).replace(REFERENCE_FILE, [digest.encode()])


def pinned_reference(run_dir: Place) -> str | None:
    """Return the digest in a run's directory, or None if there is none."""
    if not is_file(run_dir / REFERENCE_FILE):
        return None
    return bytes(open_store(run_dir).read_whole(REFERENCE_FILE)).decode("ascii", "replace")


def reference_problems(
    config: Config, digest: str | None, corpora: Sequence[Corpus], setting_of: Callable[[str], str]
) -> Iterator[Problem]:
    """Yield a problem for each corpus without log-probabilities under the run's reference model, if it has one.

    Args:
        config: The run's configuration.
        digest: Digest of the reference model.
        corpora: The run's corpora.
        setting_of: Returns the setting that names a corpus.

    Raises:
        UserError: The stored values can't be read.
    """
    if digest is None:
        return
    model, dtype = str(config.model.path), config.model.dtype
    for corpus in corpora:
        if has_reference(corpus, reference_of(config, corpus, digest)):
            continue
        path, others = str(corpus.folder), []
        for one in stored_references(corpus):
            reason = f"--dtype {one.dtype}" if one.dtype != dtype else "a model with other weights"
            others.append(f"{one.model} ({'another corpus' if one.corpus != corpus.fingerprint else reason})")
        stored = f"; it has those under {', '.join(others)}" if others else ""
        yield Problem(
            path=setting_of(path),
            value=path,
            rule=f"has no log-probabilities under model.path={model}, which objective.kind={config.objective.kind} "
            f"needs for training and evaluation{stored}",
            hint=f"run `{reference_command(path, model, dtype)}`",
        )


def reference_notes(config: Config) -> tuple[str, ...]:
    """Return a note on the run's reference model, if it has one."""
    if not config.objective.needs_reference:
        return ()
    return (
        f"objective.kind={config.objective.kind}: the reference model is model.path={config.model.path}; its "
        "log-probabilities are read from the corpora (`ray-ulysses reference`), so it takes no memory",
    )


def reference_of(config: Config, corpus: Corpus, digest: str) -> Reference:
    """Return the run's reference model for a corpus, given the model's digest."""
    return Reference(corpus=corpus.fingerprint, digest=digest, dtype=config.model.dtype, model=str(config.model.path))


def reference_command(corpus: str, model: str, dtype: str) -> str:
    """Return the command that computes a corpus's log-probabilities."""
    return f"ray-ulysses reference {shlex.quote(corpus)} --model {shlex.quote(model)} --dtype {dtype}"
