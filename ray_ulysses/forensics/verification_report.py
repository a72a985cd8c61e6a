"""The result of verifying a run: the extent of the checks, and every claim that does not hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal[
    "missing_steps",
    "repeated_step",
    "wrong_rows",
    "repeated_rows",
    "untrained_rows",
    "other_plan",
    "tokens",
    "digest",
    "unreadable_rows",
    "checkpoint_unreadable",
    "checkpoint_step",
    "checkpoint_cursor",
    "checkpoint_tokens",
    "checkpoint_digest",
    "comparison",
]
Answer = Literal["same", "same_so_far", "different", "other_plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A claim that does not hold."""

    kind: Kind
    step: int | None
    """The affected step, or the first of them; None if it concerns no step."""
    where: str
    """The place, in words."""
    what: str
    meaning: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.meaning}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The result of reading every trained row again."""

    steps: int
    """Steps whose rows could be read."""
    rows: int
    tokens: int
    """Tokens of these rows, including padding."""
    digest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The comparison of two runs' data, step by step."""

    other: str
    answer: Answer
    """``same`` in every step; ``same_so_far`` if one of the two has trained further; ``different`` from
    ``first_different_step`` on; ``other_plan`` if they share no step of one plan, or have continued by different
    plans."""
    common_steps: int
    """Steps of one plan that both have trained."""
    own_steps: int
    other_steps: int
    first_different_step: int | None
    """The first step whose rows, supervised tokens, digest or plan differ; None if none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The verification that every planned row was trained on exactly once, with its planned tokens."""

    name: str
    status: str
    plan_ids: tuple[str, ...]
    last_step: int
    """The last step that counts, or that was inherited from another run."""
    planned_steps: int
    steps: int
    rows: int
    tokens: int
    data_digest: str
    lost_steps: int
    num_manifests: int
    """Manifests that were compared with journal and plan."""
    num_commits: int
    """Commits in the journal that were compared with the steps."""
    reading: Reading | None
    """The result of reading every row again; None if that was left out."""
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    comparison: Comparison | None

    @property
    def holds(self) -> bool:
        """Return whether there are no findings."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``ray-ulysses inspect RUN --verify --json`` prints."""
        fields = asdict(self)
        for name in ("plan_ids", "findings", "notes"):
            fields[name] = list(fields[name])
        if self.reading is not None:
            fields["reading"]["digest"] = f"{self.reading.digest:016x}"
        return {"name": fields.pop("name"), "holds": self.holds, **fields}
