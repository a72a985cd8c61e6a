"""Verifies a run by comparing its journal, checkpoints and rows with its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.read.masking import Masking
from ray_ulysses.data.read.reader import RowReader
from ray_ulysses.errors import UserError
from ray_ulysses.inspect.journal_checks import (
    Comparison,
    Finding,
    check_claims,
    check_journal,
    compare_runs,
    journal_claims,
    manifest_claims,
)
from ray_ulysses.inspect.row_checks import Reading, Watch, check_rows
from ray_ulysses.inspect.run_data import find_sources, open_plan
from ray_ulysses.inspect.trained_steps import TrainedSteps, trained_steps
from ray_ulysses.run.masks import read_masking
from ray_ulysses.run.run_files import check_run
from ray_ulysses.storage import current_owner
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.history import build_history
from ray_ulysses.tracking.journal_reader import read_entries, read_journal


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """Result of verifying that each planned row was trained exactly once, with its planned tokens."""

    name: str
    status: str
    plan_ids: tuple[str, ...]
    last_step: int
    """The last step that counts, or the last inherited step if there is none."""
    planned_steps: int
    steps: int
    rows: int
    tokens: int
    data_digest: str
    lost_steps: int
    num_manifests: int
    """Number of manifests compared with the journal and the plan."""
    num_commits: int
    """Number of the journal's commit events compared with the steps."""
    reading: Reading | None
    """Totals of the rows that were read again; None if reading was skipped."""
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    comparison: Comparison | None

    @property
    def holds(self) -> bool:
        """Whether the verification passed."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Return the output of ``ray-ulysses inspect RUN --verify --json``."""
        fields = asdict(self)
        for name in ("plan_ids", "findings", "notes"):
            fields[name] = list(fields[name])
        if self.reading is not None:
            fields["reading"]["digest"] = f"{self.reading.digest:016x}"
        return {"name": fields.pop("name"), "holds": self.holds, **fields}


def verify_run(
    run_dir: Place,
    *,
    other: Place | None = None,
    read: bool = True,
    corpora: Sequence[Place] = (),
    watch: Watch = lambda progress: None,
    trust_run: bool = False,
) -> Verification:
    """Verify that a run trained each planned row exactly once, with its planned tokens.

    A run in progress is verified up to its latest step.

    Args:
        run_dir: The run's directory.
        other: Directory of another run whose data is compared step by step.
        read: Whether to read each trained row again from the corpus.
        corpora: Current directories of corpora that are no longer at their planned paths.
        watch: Progress callback, called after each row.
        trust_run: Whether to use the secrets file and the servers that are specified only by the run's files.

    Raises:
        UserError: A directory is not a run directory, there is no plan, or a corpus can't be opened.
        StorageAwayError: The storage stayed unavailable for the retry time.
    """
    check_run(run_dir)
    plan = open_plan(run_dir)
    # Read manifests before the journal: steps are journaled before a checkpoint that contains them is committed.
    claims = manifest_claims(run_dir, trust_run=trust_run)
    journal = read_journal(run_dir)
    trained = trained_steps(journal.entries, plan)
    noted = journal_claims(journal.entries, trained)
    history = build_history(name=run_dir.absolute().name, journal=journal, owner=current_owner(run_dir))
    findings = [*check_journal(plan, trained), *check_claims(plan, trained, [*claims, *noted])]
    comparison, reading = None, None
    if other is not None:
        check_run(other, "OTHER")
        other_plan = open_plan(other, "OTHER")
        comparison, differences = compare_runs(
            plan=plan,
            steps=trained.steps,
            other=str(other),
            other_plan=other_plan,
            other_steps=trained_steps(read_entries(other), other_plan).steps,
        )
        findings += differences
    if read and trained.steps:
        sources = find_sources(run_dir, plan, corpora, trust_run=trust_run)
        reader = _open(CorpusSet(sources), plan, read_masking(run_dir))
        reading, differences = check_rows(plan, reader, trained.steps, watch)
        findings += differences
    return Verification(
        name=history.name,
        status=history.status,
        plan_ids=tuple(segment.plan_id for segment in plan.segments),
        last_step=trained.steps[-1].step if trained.steps else trained.inherited.step,
        planned_steps=plan.num_steps,
        steps=len(trained.steps),
        rows=sum(step.rows[1] - step.rows[0] for step in trained.steps),
        tokens=trained.tokens,
        data_digest=f"{trained.digest:016x}",
        lost_steps=len(trained.lost),
        num_manifests=len(claims),
        num_commits=len(noted),
        reading=reading,
        findings=tuple(findings),
        notes=(*_notes(plan, trained), *map(str, journal.damaged)),
        comparison=comparison,
    )


def _open(store: CorpusSet, plan: Plan, masking: Masking | None) -> RowReader:
    try:
        # Open all corpora first, so that a missing corpus is reported immediately.
        _ = store.corpora
        return RowReader(store, plan, masking)
    except UserError as error:
        way_out = "specify the current directory of the corpus with --corpus PATH, or skip reading with --no-read"
        raise UserError(str(error), way_out) from error


def _notes(plan: Plan, trained: TrainedSteps) -> list[str]:
    notes = []
    if not trained.steps:
        notes.append("no step that counts has been trained yet, so there is nothing to verify")
    if trained.inherited.step:
        notes.append(
            f"steps 1 to {trained.inherited.step} were inherited from {trained.inherited.origin}; verify them with "
            "that run's journal"
        )
    if trained.superseded:
        first, last = trained.superseded[0].step, trained.superseded[-1].step
        notes.append(
            f"the plan was branched after step {first - 1}, but no attempt has trained on the branch yet; the next "
            f"attempt will discard steps {first} to {last}, which were not verified"
        )
    if beyond := [step.step for step in trained.steps if step.step > plan.num_steps]:
        notes.append(f"steps from {beyond[0]} on are after the end of the plan and were not read again")
    return notes
