"""The report on an export, from which the printed summary and the model card are rendered."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """The comparison of an exported directory with the live model."""

    tokens: int
    """Tokens whose logits were compared."""
    documents: int
    """Number of their documents."""
    origin: str
    """Their source, in words."""
    difference: float
    """Largest difference of a logit."""
    scale: float
    """Largest logit of the live model."""
    bound: float
    """Largest allowed ``difference / scale``."""

    @property
    def relative(self) -> float:
        """Return the largest difference as a share of the largest logit."""
        return self.difference / self.scale if self.scale else self.difference

    @property
    def words(self) -> str:
        """Return the outcome in words."""
        where = f"over {self.tokens} tokens of {self.documents} documents ({self.origin})"
        if self.difference == 0:
            return f"its logits {where} are bitwise those of the live model"
        return (
            f"its logits {where} differ from the live model's by {self.relative:.1e} of the largest; "
            f"{self.bound:.0e} is allowed"
        )

    @property
    def holds(self) -> bool:
        """Return whether the two are the same model; NaN is not."""
        return self.relative <= self.bound


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFacts:
    """The facts of an adapter that other tools need."""

    base: str
    """Name or directory of the base model."""
    rank: int
    """Rank of its matrices."""
    has_modules: bool
    """Whether modules such as embeddings and norms were trained whole and are saved with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """One export."""

    run: str
    """The run's name."""
    step: int
    """Step of the checkpoint."""
    attempt: int
    """Attempt that committed it."""
    trained_tokens: int
    """Supervised tokens trained on up to it."""
    data_digest: str
    """Sum of the digests of all data up to it, 16 hexadecimal digits."""
    out: str
    architecture: str
    """Class of the model."""
    parameters: int
    weights: str
    """Precision of the files, in words."""
    files: dict[str, int]
    """Their sizes in bytes, by name."""
    context_tokens: int
    """Longest row that it was trained on."""
    max_positions: int | None
    """``max_position_embeddings``, unchanged; None where the model has none."""
    rope: str
    """Its rotary embedding in words; empty where there is nothing to say."""
    tokenizer: str
    """What became of the tokenizer, in words."""
    published_tokenizer: str
    """The same for whoever gets the directory: no place on the machine that exported it."""
    has_tokenizer: bool
    """Whether the directory has one."""
    versions: dict[str, str]
    """Versions of the libraries that wrote the checkpoint."""
    check: CheckResult | None
    """The check; None where it was left out."""
    seconds: float
    """Time that it took."""
    was_there: bool
    """Whether it had been exported before, so that nothing was written."""
    loaded_with: str = "AutoModelForCausalLM"
    """The class of Transformers that loads the directory."""
    adapter: AdapterFacts | None = None
    """The adapter that the directory holds; None for a whole model."""

    def published(self) -> ExportReport:
        """Return the report for the directory, without paths of the machine that exported it."""
        check = self.check and replace(self.check, origin=self.check.origin.partition(", since ")[0])
        return replace(self, out="", tokenizer=self.published_tokenizer, check=check)

    @property
    def num_bytes(self) -> int:
        """Return the size of all files."""
        return sum(self.files.values())

    @property
    def weight_files(self) -> int:
        """Return the number of weight files."""
        return sum(name.endswith(".safetensors") for name in self.files)

    @property
    def serving_tokens(self) -> int:
        """Return the longest context that both the training and the configuration cover."""
        return min(self.context_tokens, self.max_positions or self.context_tokens)


def decimal_size(num_bytes: int) -> str:
    """Return a size in decimal units, as ``--max-shard-size`` counts: ``16.1 GB``, ``740 MB``."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} B"
