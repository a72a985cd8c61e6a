"""Renders README.md of a run's directory: its facts, and the commands for it."""

from __future__ import annotations

import shlex
from pathlib import Path

from ray_ulysses.planner.report import PlanReport
from ray_ulysses.report.words import count
from ray_ulysses.run_names import CONFIG_FILE
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.metric_units import METRIC_UNITS

_TRUST = """
If the run is yours, add `--trust-run` to `inspect` and `export`: without it they don't use the servers and the file of
secrets that only `config.yaml` names.
"""


def render_readme(report: PlanReport, run_dir: Place, storage: str, *, needs_trust: bool) -> str:
    """Return the text, in Markdown; MLflow shows it as the description of the run.

    Args:
        report: The run's plan.
        run_dir: Its directory.
        storage: Location of its checkpoints.
        needs_trust: Whether the commands that read it need ``--trust-run``.
    """
    data, layout, shape = report.data, report.layout, report.shape
    metrics = "\n".join(f"| `{one.name}` | {one.unit} | {one.meaning} |" for one in METRIC_UNITS)
    folder = shlex.quote(str(run_dir))
    # A command reads its configuration from a path.
    config = f"{folder}/{CONFIG_FILE}" if isinstance(run_dir, Path) else CONFIG_FILE
    trust = _TRUST if needs_trust else ""
    return f"""# {report.name}

A training run of ray-ulysses: a {shape.model_type} model of {count(shape.num_parameters)} parameters, on rows of
{data.row_tokens:,} tokens, {data.rows_per_step:,} rows per step, {data.num_steps:,} steps planned.

| | |
|---|---|
| directory | `{run_dir}` |
| checkpoints | `{storage}` |
| corpus | {report.corpus.path} ({report.corpus.num_documents:,} documents, {count(report.corpus.num_tokens)} tokens) |
| data plan | `{data.plan_id}` |
| workers when this was written | {layout.world_size} = dp {layout.dp_size} x sp {layout.sp_size} |

`config.yaml` has every setting, `plan.txt` the plan and its memory estimate, `journal/` everything that happened.

```console
ray-ulysses inspect {folder}                  # what happened, and where the time went
ray-ulysses inspect {folder} --checkpoints    # checkpoints to resume from
ray-ulysses train {config}        # resumes, or reports that it is complete
ray-ulysses export {folder}                   # a Hugging Face model directory of the newest checkpoint
```
{trust}
| metric in the trackers | unit | meaning |
|---|---|---|
{metrics}
"""
