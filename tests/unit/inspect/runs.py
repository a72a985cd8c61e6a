"""Builders for small runs without training: a real corpus and plan, a journal, and manifests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray_ulysses.checkpoint import CheckpointMeta, Manifest, StateDescription
from ray_ulysses.checkpoint.shard_table import ShardTable
from ray_ulysses.config.loading import parse_config
from ray_ulysses.data.plan.corpus_set import CorpusSet, open_sources, plan_input
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan, write_segment
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.plan.stages import remainder_after
from ray_ulysses.data.read.digest import add_digests, row_digest, slice_checksum
from ray_ulysses.data.read.reader import RowReader
from ray_ulysses.run_names import manifest_key
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.journal import claim_journal
from tests.unit.config.trees import small_tree
from tests.unit.tracking import journals

SETTINGS = PlanSettings(seed=3, context_tokens=128, pad_multiple=8, rows_per_step=4, token_cost=10)
Record = dict[str, Any]


@dataclass
class Run:
    """A run directory, and methods to write what an attempt would write."""

    folder: Path
    plan: Plan
    corpora: CorpusSet
    digests: dict[tuple[str, int], int] = field(default_factory=dict)

    def digest(self, step: int, plan: Plan | None = None) -> int:
        """Digest of the data that a model receives in a step, read in two slices per row like two ranks do."""
        plan = plan or self.plan
        if (plan.plan_id, step) not in self.digests:
            reader, rows = RowReader(self.corpora, plan), plan.step_rows(step)
            sums = [sum(slice_checksum(reader.read("train", row, rank, 2)) for rank in (0, 1)) for row in rows]
            digests = (row_digest(row, value) for row, value in zip(rows, sums, strict=True))
            self.digests[plan.plan_id, step] = add_digests(*digests)
        return self.digests[plan.plan_id, step]

    def step(self, step: int, plan: Plan | None = None, **changes: Any) -> Record:
        plan = plan or self.plan
        rows = plan.step_rows(step)
        own = {"loss": 2.0, "tokens": plan.step_tokens(step), "rows": [rows.start, rows.stop], "seconds": 1.0}
        return journals.step(step, **{**own, "digest": f"{self.digest(step, plan):016x}", **changes})

    def steps(self, first: int, last: int, plan: Plan | None = None) -> list[Record]:
        return [self.step(step, plan) for step in range(first, last + 1)]

    def started(self, resumed_step: int = 0, plan: Plan | None = None, **changes: Any) -> Record:
        ids = [segment.plan_id for segment in (plan or self.plan).segments]
        return journals.started(resumed_step, **{"world_size": 2, "dp_size": 1, "plan_ids": ids, **changes})

    def attempt(self, records: Iterable[Record]) -> Run:
        """Write an attempt's journal."""
        journal = claim_journal(self.folder)
        for record in records:
            journal.append(record)
        journal.close()
        return self

    def trained(self, last: int, finished: bool = False) -> Run:
        """Write the journal of one attempt that trained up to a step without a fault."""
        end: list[Record] = [{"event": "attempt_ended", "reason": "finished"}, {"event": "run_finished", "step": last}]
        return self.attempt([self.started(), *self.steps(1, last), *(end if finished else ())])

    def meta(self, step: int, plan: Plan | None = None, **changes: Any) -> CheckpointMeta:
        plan = plan or self.plan
        tokens = sum(plan.step_tokens(one) for one in range(1, step + 1))
        sums = {"digest": f"{self.sum(step, plan):016x}", "tokens": tokens}
        return CheckpointMeta(**{"sp_size": 2, "cursor": plan.cursor(step).to_json(), **sums, **changes})

    def sum(self, step: int, plan: Plan | None = None) -> int:
        return add_digests(*(self.digest(one, plan) for one in range(1, step + 1)))

    def checkpoint(self, step: int, plan: Plan | None = None, **changes: Any) -> Run:
        """Commit a checkpoint without tensors."""
        meta, state = self.meta(step, plan, **changes), StateDescription(tensors={})
        manifest = Manifest(step=step, attempt=1, world_size=2, meta=meta, state=state, shards=ShardTable({}, 2, ()))
        LocalStore(self.folder).create(manifest_key(step), [manifest.to_bytes()])
        return self

    def committed(self, step: int, **changes: Any) -> Record:
        meta = self.meta(step)
        sums = {"digest": meta.digest, "tokens": meta.tokens, "next_row": meta.cursor["next_row"]}
        return journals.commit(step, **{"world_size": 2, **sums, **changes})

    def branch(self, step: int, settings: PlanSettings, corpora: Sequence[Path]) -> Plan:
        """Branch the plan after a step, and return the previous plan."""
        before = self.plan
        opened = open_sources([(str(path), None) for path in corpora], before.newest.sources)
        remainder = remainder_after(before, step, opened.sources, settings)
        write_segment(self.folder / "plan", len(before.segments), plan_input(opened), settings, remainder)
        self.plan, self.corpora = load_plan(self.folder / "plan"), opened
        return before


def make_run(folder: Path, corpora: Sequence[Path], settings: PlanSettings = SETTINGS) -> Run:
    """Plan a run that has trained nothing yet."""
    opened = open_sources([(str(path), None) for path in corpora])
    write_segment(folder / "plan", 0, plan_input(opened), settings)
    configure(folder, corpora[0])
    (folder / "journal").mkdir()
    return Run(folder=folder, plan=load_plan(folder / "plan"), corpora=opened)


def configure(folder: Path, corpus: Path) -> None:
    """Write the run's configuration, as a resume does."""
    tree = small_tree(data__path=str(corpus), run__storage=str(folder.parent), run__name=folder.name)
    (folder / "config.yaml").write_text(parse_config(tree).to_yaml())
