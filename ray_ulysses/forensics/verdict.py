"""What verifying a run came to: what was looked at, and whatever does not hold."""

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
    """One thing that does not hold.

    Attributes:
        kind: Which of the claims is broken.
        step: The step that it is about, or the first of them; None where it is about no step.
        where: The place, for a person.
        what: What was found, and what should have been.
        meaning: What it means for the run.
    """

    kind: Kind
    step: int | None
    where: str
    what: str
    meaning: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.meaning}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What reading every trained row anew came to.

    Attributes:
        steps: Steps whose rows could be read.
        rows: Their rows.
        tokens: Tokens of those rows, padding included.
        digest: Sum of the digests of those rows.
    """

    steps: int
    rows: int
    tokens: int
    digest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two runs' data, step by step.

    Attributes:
        other: The other run.
        answer: ``same`` in every step; ``same_so_far`` where one of the two has trained further; ``different`` from
            ``first_different_step`` on; ``other_plan`` where they have no step of one plan in common, or have gone on
            by different plans.
        common_steps: Steps of one plan that both have trained.
        own_steps: Steps that the run has trained.
        other_steps: Steps that the other one has trained.
        first_different_step: The first step whose rows, supervised tokens or digest differ, or that different plans
            rule; None where there is none.
    """

    other: str
    answer: Answer
    common_steps: int
    own_steps: int
    other_steps: int
    first_different_step: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """Whether every planned row was trained on exactly once, with the tokens that it should have had.

    Attributes:
        name: The run's name.
        status: Where it stands.
        plan_ids: The segments of its plan.
        steps: Steps that count.
        rows: Rows that they trained on.
        tokens: Supervised tokens of those.
        data_digest: Sum of their digests modulo 2**64, 16 hexadecimal digits.
        lost_steps: Steps that were trained and thrown away.
        num_manifests: Checkpoints on disk that were held against journal and plan.
        num_commits: Checkpoints noted in the journal that were.
        reading: What reading every row anew came to; None where that was left out.
        findings: Whatever does not hold.
        notes: What is no fault, but should be known.
        comparison: The comparison with another run, where one was asked for.
    """

    name: str
    status: str
    plan_ids: tuple[str, ...]
    steps: int
    rows: int
    tokens: int
    data_digest: str
    lost_steps: int
    num_manifests: int
    num_commits: int
    reading: Reading | None
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    comparison: Comparison | None

    @property
    def holds(self) -> bool:
        """Return whether nothing was found."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``ray-ulysses inspect RUN --verify --json`` prints."""
        fields = asdict(self)
        for name in ("plan_ids", "findings", "notes"):
            fields[name] = list(fields[name])
        if self.reading is not None:
            fields["reading"]["digest"] = f"{self.reading.digest:016x}"
        return {"name": fields.pop("name"), "holds": self.holds, **fields}
