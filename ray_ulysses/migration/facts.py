"""The facts that files of other tools state, under names that do not depend on the tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ray_ulysses.errors import Problem, UserError, names_secret, shown
from ray_ulysses.migration.tables import Table, owner_of, read_foreign

_OFF: tuple[object, ...] = (None, False, 0, "", "none", "no", "false", [], {})
_MOST_SHOWN = 60
_OF_EVALUATION = "set data.validation, or data.eval_fraction, which holds documents out, and run.eval_every_steps"
_WITHOUT_EFFECT = dict.fromkeys(("eval_strategy", "eval_steps", "keep_best", "patience"), _OF_EVALUATION)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A value that a file states, or that its tool assumes."""

    value: object
    option: str
    """The option in its file, or an option of the command line. Empty for a default of the tool."""
    tool: str

    def __str__(self) -> str:
        return f"{self.option}: {_shortened(self.option, self.value)}" if self.option else f"{self.tool}'s default"


@dataclass(kw_only=True, slots=True)
class Facts:
    """Facts of all files; `used` has the names of the facts that a line of the configuration quotes."""

    stated: dict[str, Fact]
    source: str
    """Name of the first file, without its ending."""
    tools: tuple[str, ...]
    left_out: dict[str, list[str]]
    """The options that are left out, with their values, by the reason."""
    problems: list[Problem]
    used: set[str] = field(default_factory=set)

    def fact(self, name: str) -> Fact | None:
        """Return a fact, or None if nothing states it."""
        return self.stated.get(name)

    def value(self, name: str) -> object:
        """Return a fact's value, or None."""
        fact = self.stated.get(name)
        return None if fact is None else fact.value

    def number(self, name: str) -> float | None:
        """Return a fact as a number, or None. Text that is not a number is a problem."""
        value = self.value(name)
        if value is None:
            return None
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            fact = self.stated.pop(name)
            self.refuse(fact, "must be a number", "correct it in the file")
            return None

    def whole(self, name: str) -> int | None:
        """Return a fact as a whole number, rounded up, or None."""
        number = self.number(name)
        return None if number is None else -int(-number // 1)

    def text(self, name: str) -> str | None:
        """Return a fact as text, or None."""
        value = self.value(name)
        return None if value is None else str(value)

    def flag(self, name: str) -> bool:
        """Return whether a fact is stated and on."""
        return self.value(name) not in _OFF

    def refuse(self, fact: Fact, rule: str, hint: str) -> None:
        """Record a value that can't be converted."""
        self.problems.append(Problem(path=fact.option or fact.tool, value=fact.value, rule=rule, hint=hint))

    def leave(self, name: str, why: str) -> None:
        """Leave a fact out."""
        self.used.add(name)
        fact = self.stated[name]
        if fact.option:
            self.left_out.setdefault(why, []).append(str(fact))

    def leave_unused(self) -> None:
        """Leave out the facts that no line of the configuration quotes."""
        for name in self.stated.keys() - self.used:
            self.leave(name, _WITHOUT_EFFECT.get(name, "has no effect with the file's other options"))


def read_facts(paths: Sequence[Path], given: Mapping[str, Fact]) -> Facts:
    """Read files of other tools. The first file that states a fact wins, after the facts that are given.

    Raises:
        UserError: A file can't be read, or belongs to no known tool.
    """
    facts = Facts(stated=dict(given), source=paths[0].stem, tools=(), left_out={}, problems=[])
    owners: list[Table] = []
    for path in paths:
        tree = read_foreign(path)
        owner = owner_of(tree)
        if owner is None or not isinstance(tree, Mapping):
            raise UserError(
                f"--from={str(path)!r}: is not a configuration of a known tool; use a file of DeepSpeed, Accelerate, "
                "Transformers, TRL, Axolotl, LLaMA-Factory, ms-swift or torchtitan"
            )
        owners.append(owner)
        _read(facts, owner, tree)
    for owner in owners:
        for name, value in owner.defaults.items():
            facts.stated.setdefault(name, Fact(value=value, option="", tool=owner.tool))
    facts.tools = tuple(owner.tool for owner in owners)
    return facts


def _read(facts: Facts, table: Table, tree: Mapping[object, object]) -> None:
    """Sort each option of a file by its entry in the tool's table."""
    for option, value in table.options(tree):
        entry, shown_option = table.entry(option), f"{option}: {_shortened(option, value)}"
        if entry is None:
            why = f"unknown: {table.tool} {table.version} has no such option"
        elif value == "auto" and option != "bf16":
            why = "left to the tool; here it follows from the other settings"
        elif entry.kind == "carried":
            _add(facts, entry.text, Fact(value=value, option=option, tool=table.tool))
            continue
        elif entry.kind == "left out":
            why = entry.text
        elif value in _OFF:
            why = "off, as here"
        elif value in entry.harmless:
            why = "the same here"
        else:
            hint = f"remove the option from the file of {table.tool} to train without it"
            facts.problems.append(Problem(path=option, value=value, rule=entry.text, hint=hint))
            continue
        facts.left_out.setdefault(why, []).append(shown_option)


def _add(facts: Facts, name: str, fact: Fact) -> None:
    if fact.value is None:
        return
    if name in facts.stated and name in ("dataset", "validation") and facts.stated[name].tool == fact.tool:
        before = facts.stated[name]
        fact = Fact(value=[*_listed(before.value), *_listed(fact.value)], option=before.option, tool=fact.tool)
        facts.stated[name] = fact
    elif name in facts.stated:
        facts.left_out.setdefault(f"{facts.stated[name].option} decides", []).append(str(fact))
    else:
        facts.stated[name] = fact


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else [value]


def _shortened(option: str, value: object) -> str:
    """Format a value for a comment, on one line and without secrets."""
    name = option.rpartition(".")[2]
    if isinstance(value, str) and names_secret(name) and not name.startswith(("eos_", "pad_", "bos_", "unk_")):
        return "***"
    text = "{" + ", ".join(map(str, value)) + "}" if isinstance(value, Mapping) else shown(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
