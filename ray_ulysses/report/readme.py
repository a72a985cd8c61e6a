"""Renders the README.md of a run's directory: key facts, and commands to work with the run."""

from __future__ import annotations

import shlex
from pathlib import Path

from ray_ulysses.planner.report import PlanReport
from ray_ulysses.report.words import count
from ray_ulysses.run_names import CONFIG_FILE
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.metric_units import METRIC_UNITS

_TRUST = """
If the run is yours, add `--trust-run` to `inspect` and `export`. Without this option, they don't use the servers and
the secrets file that are specified only in `config.yaml`.
"""


def render_readme(report: PlanReport, run_dir: Place, storage: str, *, needs_trust: bool) -> str:
    """Return the README in Markdown. MLflow shows it as the run's description.

    Args:
        report: The run's plan.
        run_dir: The run's directory.
        storage: Location of the run's checkpoints.
        needs_trust: Whether commands that read the run need ``--trust-run``.
    """
    data, layout, shape = report.data, report.layout, report.shape
    metrics = "\n".join(f"| `{one.name}` | {one.unit} | {one.meaning} |" for one in METRIC_UNITS)
    folder = shlex.quote(str(run_dir))
    # Commands accept a local path only, so for a remote directory the user's own file is assumed.
    config = f"{folder}/{CONFIG_FILE}" if isinstance(run_dir, Path) else CONFIG_FILE
    trust = _TRUST if needs_trust else ""
    return f"""# {report.name}

A ray-ulysses training run: a {shape.model_type} model with {count(shape.num_parameters)} parameters, rows of
{data.row_tokens:,} tokens, {data.rows_per_step:,} rows per step, {data.num_steps:,} planned steps.

| | |
|---|---|
| directory | `{run_dir}` |
| checkpoints | `{storage}` |
| corpus | {report.corpus.path} ({report.corpus.num_documents:,} documents, {count(report.corpus.num_tokens)} tokens) |
| data plan | `{data.plan_id}` |
| workers when this was written | {layout.world_size} = dp {layout.dp_size} x sp {layout.sp_size} |

`config.yaml` contains all settings, `plan.txt` the plan with its memory estimate, and `journal/` the run's events.

```console
ray-ulysses inspect {folder}                  # history, and time by category
ray-ulysses inspect {folder} --checkpoints    # checkpoints to resume from
ray-ulysses train {config}        # resume the run, unless it is complete
ray-ulysses export {folder}                   # convert the newest checkpoint to a Hugging Face model directory
```
{trust}
| tracker metric | unit | meaning |
|---|---|---|
{metrics}
"""
