"""Renders docs/journal.md from the classes of the journal and of ``inspect --json``; ``make docs`` writes it."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ray_ulysses.inspect.run_data import SegmentRecord, SourceRecord
from ray_ulysses.tracking.events import (
    AttemptStarted,
    CheckpointEvent,
    CommandEvent,
    EndEvent,
    Evaluated,
    EvaluatedCorpus,
    Event,
    InheritedSteps,
    RowRange,
    RunFailed,
    Sample,
    Sampled,
    SourcesMeasured,
    StepDone,
    TrainedCorpus,
)
from ray_ulysses.tracking.history import AttemptRecord, CheckpointRecord, RunHistory
from ray_ulysses.tracking.journal_lines import encode_record
from ray_ulysses.tracking.run_time import StartTime, TimeSpent
from ray_ulysses.tracking.steps import Steps, step_rows
from ray_ulysses.validation import Digest, Seconds
from tests.configuration_page import cell, type_name

PAGE = Path(__file__).parents[1] / "docs" / "journal.md"
_NAMED = (
    (Digest, "digest"),
    (Seconds, "seconds"),
    (RowRange, "two integers"),
    (tuple[int, int], "two integers"),
    (Steps, "list"),
    (tuple[AttemptRecord, ...], "list"),
    (tuple[Sample, ...], "list"),
    (tuple[Sampled, ...], "list"),
    (tuple[CheckpointRecord, ...], "list"),
    (tuple[SourceRecord, ...], "list"),
    (tuple[EvaluatedCorpus, ...], "list"),
    (tuple[TrainedCorpus, ...], "list"),
    *((kind, "object") for kind in (InheritedSteps, TimeSpent, StartTime, RunFailed, Evaluated)),
    *((dict[str, value], "object") for value in (Any, str, float)),
)
_EXAMPLE = {
    "time": 1700000005.0,
    "attempt": 1,
    "event": "step",
    "step": 1,
    "loss": 5.25,
    "tokens": 8000,
    "rows": [0, 8],
    "digest": "00000000deadbeef",
    "seconds": 1.98,
}

_HEAD = """# The journal and `inspect --json`

<!-- Generated from `ray_ulysses/tracking` and `ray_ulysses/inspect`; run `make docs` to update it. -->

The journal is the record of a run: its steps and the rows that they trained on, its checkpoints, its failures, and
where its time went. It is plain text, and can be read while the run trains. Most programs should read
[`ray-ulysses inspect RUN --json`](#inspect-run---json) instead, which checks the journal and counts each step once.

## Files

| file in `RUN/journal/` | written by |
|---|---|
| `attempt-0003.jsonl` | rank 0 of the third attempt; the main file |
| `attempt-0003.controller.jsonl` | Ray Train's controller |
| `attempt-0003.command.jsonl` | the command |

Each file has one writer, which only appends. In an object store each of these names is a folder of segments,
`00000001.jsonl` and so on, which joined in order are the file. A segment `00000001-00000256.jsonl` replaces the
segments with those numbers, and the main file begins with an empty `00000000.jsonl`.

Read attempts in ascending order. Within an attempt, read the main file first, and then the events of the other files in
the order of their times.

## Lines

A line is a JSON object in UTF-8 that ends with a newline:

```json
{example}
```

`crc32` is the CRC-32 (zlib), as 8 hexadecimal digits, of all bytes between `{{"crc32": "01234567", ` and the newline.

```python
import json, zlib


def read_line(line: bytes) -> dict | None:
    \"\"\"Return the event of a line; None if it is damaged.\"\"\"
    line = line.rstrip(b"\\n")
    head, rest = line[:22], line[22:]
    return json.loads(line) if head == b'{{"crc32": "%08x", ' % zlib.crc32(rest) else None
```

| a reader finds | and should |
|---|---|
| a last line that is not whole and has no newline | ignore it and read it again later; its writer may have died |
| an empty line | ignore it |
| a wrong checksum, or an `attempt` that is not that of the file | leave the line out, and report its file and number |
| an unknown field, or an unknown `event` | ignore it; a later version wrote it |
| a step for the second time | count the last record |
| an attempt that starts with `resumed_step` r | count no earlier record of a step beyond r: those steps were lost |

A *row* is one packed sequence, which `sp_size` ranks share. *Supervised tokens* are those with a label. In the tables
below, integers are never negative, *seconds* is a duration or a Unix time, and a *digest* is a sum of hashes modulo 2⁶⁴
as up to 16 hexadecimal digits. `"nan"`, `"inf"` and `"-inf"` stand for the numbers that JSON lacks. A field marked °
may be missing.

## Events

Every event has these fields:

{common}

Events of a command ({of_commands}) also have:

{of_command}
"""

_INSPECT = """## `inspect RUN --json`

One JSON object.

### The run

{run}

### `steps[]`

A `loss` that is not a number is null.

{steps}

### `attempts[]`

An attempt that died before it was ready to train has a number, and is not listed.

{attempts}

### `checkpoints[]`

{checkpoints}

### `time_spent`

{time_spent}

### `time_spent.starts`

The fields of `starts` add up to `startup_s + waiting_s`, and those of `recovery` to `recovery_s`.

{starts}

### `evaluation`

A `loss` that is not a number is null.

{evaluation}

### `failure`

{failure}

### `plan[]`

{plan}

### `plan[].sources[]`

{sources}
"""


def render_journal() -> str:
    kinds = {next(field.default for field in fields(kind) if field.name == "event"): kind for kind in get_args(Event)}
    common = ("time", "attempt")
    of_commands = ", ".join(f"`{name}`" for name, kind in kinds.items() if issubclass(kind, CommandEvent))
    parts = [
        _HEAD.format(
            example=encode_record(_EXAMPLE)[1].decode().strip(),
            common=_table(
                CommandEvent, common, before=["| `event` | text | The kind of event, which is a heading below. |"]
            ),
            of_commands=of_commands,
            of_command=_table(CommandEvent, _own(CommandEvent), are_marked=True),
        )
    ]
    shown: dict[type, str] = {}
    for name, kind in kinds.items():
        parts += [f"### `{name}`", _text(kind.__doc__)]
        base, names = kind.__mro__[1], _own(kind)
        if base in shown:
            only = ", ".join(f"`{field}`" for field in _own(kinds[shown[base]]))
            parts.append(f"The fields of `{shown[base]}` except {only}{', and:' if names else '.'}")
        elif base in (CheckpointEvent, EndEvent):
            shown[base], names = name, _own(base) + names
        if names:
            parts.append(_table(kind, names, are_marked=True))
        if kind is AttemptStarted:
            parts += ["#### `taken_over`", _table(InheritedSteps, _own(InheritedSteps), are_marked=True)]
        elif kind is Evaluated:
            parts += ["#### `corpora[]`", _table(EvaluatedCorpus, _own(EvaluatedCorpus))]
        elif kind is SourcesMeasured:
            parts += ["#### `corpora[]`", _table(TrainedCorpus, _own(TrainedCorpus))]
    (step,) = Steps(step_rows([encode_record(_EXAMPLE)[0]])).json_lines()
    of_plan = [
        "| `plan` | list | Segments of the data plan. |",
        "| `plan_problem`° | text | Why the plan can't be read. |",
    ]
    total = f"| `total_s` | number | {_text(TimeSpent.total_s.__doc__)} |"
    parts.append(
        _INSPECT.format(
            run=_table(RunHistory, _own(RunHistory), after=of_plan),
            steps=_table(StepDone, json.loads(step)),
            attempts=_table(AttemptRecord, _own(AttemptRecord)),
            checkpoints=_table(CheckpointRecord, _own(CheckpointRecord)),
            time_spent=_table(TimeSpent, _own(TimeSpent), before=[total]),
            starts=_table(StartTime, _own(StartTime)),
            evaluation=_table(Evaluated, ["step", "loss", "tokens", "corpora"]),
            failure=_table(EndEvent, ["session", *_own(EndEvent)]),
            plan=_table(SegmentRecord, _own(SegmentRecord)),
            sources=_table(SourceRecord, _own(SourceRecord)),
        )
    )
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _own(kind: type) -> list[str]:
    return [name for name in kind.__annotations__ if name != "event"]


def _table(
    kind: type, names: Iterable[str], *, before: Sequence[str] = (), after: Sequence[str] = (), are_marked: bool = False
) -> str:
    types, texts = get_type_hints(kind, include_extras=True), _docstrings(kind)
    optional = {
        field.name for field in fields(kind) if not (field.default is MISSING and field.default_factory is MISSING)
    }
    marks = {name: "°" if are_marked and name in optional else "" for name in types}
    rows = [f"| `{name}`{marks[name]} | {type_name(types[name], _NAMED)} | {_text(texts[name])} |" for name in names]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *before, *rows, *after])


def _docstrings(kind: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for base in filter(is_dataclass, kind.__mro__):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for field, text in pairwise(node.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                    found.setdefault(name, doc)
    return found


def _text(docstring: str | None) -> str:
    return re.sub(r"\bNone\b", "null", cell(docstring).replace("``", "`"))


if __name__ == "__main__":
    PAGE.write_text(render_journal(), encoding="utf-8")
