"""Reports settings that are valid but may be unintended."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ray_ulysses.config import Config
from ray_ulysses.config.schema import with_settings
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.packing import NUM_OPEN_ROWS, WIDE_OPEN_ROWS
from ray_ulysses.data.plan.segment import PlanSettings, Segment
from ray_ulysses.data.plan.steps import QUARTERS, balance_windows, step_times
from ray_ulysses.model_shape import BALANCING_BIASES, UNCOUNTED_ROUTERS, ModelShape
from ray_ulysses.planner.experts import ExpertTraffic
from ray_ulysses.planner.layouts import compare_layouts
from ray_ulysses.planner.memory_terms import GIB
from ray_ulysses.planner.settings import secondary_size
from ray_ulysses.planner.stages import Stage

_WANTED_FILL = 0.995
_MOST_EMPTY = 0.05
_SHARE_TOLERANCE = 0.01
_WANTED_IMBALANCE = 1.1
_BALANCE_STEPS = (4, 16, 64)
_FASTER = 0.9


def plan_notes(
    config: Config,
    shape: ModelShape,
    stage: Stage | None,
    corpora: Sequence[Corpus] = (),
    settled: PlanSettings | None = None,
) -> tuple[str, ...]:
    """Return notes on a stage's settings that may be unintended.

    ``stage`` is None if no corpus is prepared. A run without stages is treated as a single stage. For ``settled``, see
    `compare_layouts`.
    """
    notes = [
        *_config_notes(config),
        *_layout_notes(config, shape, settled),
        *_encoding_notes(corpora),
        *_expert_notes(config, shape),
    ]
    if stage is not None:
        notes += [
            *_data_notes(config, stage),
            *_fill_notes(stage.plan.newest),
            *_balance_notes(config, stage.plan.newest),
            *_checkpoint_notes(config, stage),
        ]
    if not shape.is_exact:
        notes.append(f"the parameter count of model_type {shape.model_type!r} is an estimate")
    if shape.mixer_layers:
        notes.append(
            f"{shape.mixer_layers} of {shape.num_layers} layers are recurrent: their activation memory is estimated "
            "as if they were attention layers (1.0 to 11.5 times as much was measured without the optimized kernel "
            "packages), and their time as matrix products only; measure both with `ray-ulysses check`"
        )
    return tuple(notes)


def _config_notes(config: Config) -> Iterator[str]:
    rows, dp_size = config.data.rows_per_step, config.dp_size
    if rows % dp_size:
        slots = -(-rows // dp_size) * dp_size
        yield (
            f"data.rows_per_step={rows} is not a multiple of the {dp_size} data-parallel groups: {slots - rows} of "
            f"{slots} row slots per step are idle; the loss is not affected"
        )
    if config.memory.zero_secondary == "node" and secondary_size(config) == 1:
        yield (
            f"memory.zero_secondary=node has no effect, because all {config.cluster.workers.max} workers are on one "
            f"node (cluster.gpus_per_node={config.cluster.gpus_per_node})"
        )
    model = config.model
    if model.resume_from is None and model.resume_state != "all":
        yield (
            f"model.resume_state={model.resume_state} has no effect, because model.resume_from is null; the run starts "
            f"with model.init={model.init}"
        )


def _layout_notes(config: Config, shape: ModelShape, settled: PlanSettings | None) -> Iterator[str]:
    """Propose a layout that communicates less, if the run spans several nodes and a step gets at least 10% faster."""
    if config.cluster.workers.max <= config.cluster.gpus_per_node:
        return
    found = compare_layouts(with_settings(config, {"memory.plan": "off"}), shape, settled)
    now = next((one for one in found if not one.settings), None)
    if now is not None and found[0].time.seconds <= _FASTER * now.time.seconds:
        yield (
            f"a faster layout fits: {found[0].options()} ({found[0].reason(now)}, predicted if each row is one "
            "document); see `plan --layouts`"
        )


def _expert_notes(config: Config, shape: ModelShape) -> Iterator[str]:
    is_balanced = shape.experts is not None and shape.model_type in BALANCING_BIASES
    if is_balanced and config.optimizer.router_bias_rate is None:
        yield (
            f"optimizer.router_bias_rate is null, so the biases that balance the routers of {shape.model_type} keep "
            "their values"
        )
    if shape.model_type in UNCOUNTED_ROUTERS:
        yield (
            f"the tokens of each expert are not counted, because the routers of {shape.model_type} do not return the "
            "chosen experts"
        )
    traffic = ExpertTraffic.of(config, shape)
    if traffic is not None:
        exchanged = traffic.tokens * traffic.token_bytes
        less = "less" if traffic.zero_bytes <= exchanged else "more"
        yield (
            f"per layer and micro-batch, ZeRO-3 moves {traffic.zero_bytes / GIB:.2f} GiB per rank for the experts, "
            f"{less} than the {exchanged / GIB:.2f} GiB of expert parallelism (not implemented) for the "
            f"{traffic.tokens:,} tokens per rank of a full row; both move the same at {traffic.break_even_tokens:,} "
            "tokens"
        )


def _data_notes(config: Config, stage: Stage) -> Iterator[str]:
    plan = stage.plan
    horizon = config.schedule.horizon_steps or stage.schedule_end(plan.num_steps) - stage.schedule_start
    if (warmup := config.schedule.warmup(horizon)) >= horizon:
        yield (
            f"{stage.schedule}.warmup_steps={warmup} is not below the schedule's {horizon} steps, so the learning rate "
            "never decays"
        )
    yield from _share_notes(plan.newest)
    num_unlabelled = plan.newest.totals.unlabelled_rows
    if num_unlabelled:
        yield (
            f"{num_unlabelled:,} rows are excluded from the plan, because none of their tokens has a label; "
            f"{plan.newest.train.num_rows:,} rows remain"
        )
    if plan.newest.branch is not None and plan.newest.stage is None and config.schedule.horizon_steps is None:
        before = plan.segments[-2].end_step
        yield (
            f"schedule.horizon_steps is null, so at step {plan.newest.base_step:,} the schedule's end moves from step "
            f"{before:,} to {plan.num_steps:,}, and the learning rate changes abruptly"
        )


def _share_notes(segment: Segment) -> Iterator[str]:
    weights = [source.weight or 0.0 for source in segment.sources]
    for info, tokens in zip(segment.epochs, segment.source_tokens, strict=False):
        asked = [weight / sum(weights) for weight in weights]
        found = [taken / max(1, sum(tokens)) for taken in tokens]
        if any(abs(one - other) > _SHARE_TOLERANCE for one, other in zip(asked, found, strict=True)):
            said = ", ".join(
                f"{one:.0%} are from {source.path} ({other:.0%} by weight)"
                for source, one, other in zip(segment.sources, found, asked, strict=True)
                if source.is_used
            )
            yield (
                f"of the tokens planned for epoch {info.epoch + 1}, {said}: shares differ from weights because "
                "documents are not cut to match the weights"
            )
            return


def _encoding_notes(corpora: Sequence[Corpus]) -> Iterator[str]:
    tokens = {
        ("bos", "begin"): [corpus.info.encoding.bos_token_id for corpus in corpora],
        ("eos", "end"): [corpus.info.encoding.eos_token_id for corpus in corpora],
    }
    for (which, does), of_corpora in tokens.items():
        # Show the first corpus for each token.
        found = {token: corpora[of_corpora.index(token)] for token in of_corpora}
        if len(found) > 1:
            where = ", ".join(
                f"in {corpus.folder} with {'no token' if token is None else f'token {token}'}"
                for token, corpus in found.items()
            )
            yield (f"documents {does} differently: {where}. If unintended, prepare all corpora with the same --{which}")
    templates = [corpus.info.encoding.chat_template for corpus in corpora]
    writers = {text: corpora[templates.index(text)] for text in templates if text is not None}
    if len(writers) > 1:
        yield (
            f"conversations in {' and '.join(str(corpus.folder) for corpus in writers.values())} were rendered with "
            "different chat templates, but an export contains only the first template. If unintended, prepare all "
            "corpora with the same --chat-template"
        )


def _fill_notes(segment: Segment) -> Iterator[str]:
    packing, num_rows, epochs = segment.settings.packing, segment.train.num_rows, len(segment.epochs)
    empty_rows = num_rows * (1 - segment.fill)
    # Rows that are still open at an epoch's end are poorly filled with any packing. Ignore them unless they are most.
    num_open = epochs * (WIDE_OPEN_ROWS if packing == "wide_fit" else NUM_OPEN_ROWS)
    is_poor = empty_rows - epochs > _MOST_EMPTY * num_rows
    if not is_poor and empty_rows - num_open <= (1 - _WANTED_FILL) * num_rows:
        return
    # If each document has its own row because it fills the row, no packing helps.
    num_pieces = int(segment.train.stats(0, num_rows).num_pieces.sum(dtype=np.int64))
    if packing == "none":
        why = ", because each document has its own row; use best_fit to pack several documents into a row"
    elif packing == "best_fit" and num_rows > num_open and num_pieces > 1.5 * num_rows:
        why = (
            f"; try wide_fit, which chooses among {WIDE_OPEN_ROWS:,} open rows instead of {NUM_OPEN_ROWS} and is "
            "better for documents of a third to two thirds of a row"
        )
    else:
        why = (
            ", because few combinations of documents fill a row; use concat, which splits documents, or try another "
            "data.context_tokens"
        )
    yield f"data.packing={packing} leaves {1 - segment.fill:.1%} of the rows empty{why}"


def _balance_notes(config: Config, segment: Segment) -> Iterator[str]:
    settings = segment.settings
    rows, dp_size = settings.rows_per_step, config.dp_size
    if dp_size == 1:
        return
    now = segment.step_times(dp_size).imbalance
    if now <= _WANTED_IMBALANCE:
        return
    costs, steps = segment.costs(), settings.balance_steps
    changes = [("balance_steps", rows, more) for more in _BALANCE_STEPS if more > steps]
    if rows < QUARTERS * dp_size and rows % dp_size == 0:
        changes.append(("rows_per_step", QUARTERS * dp_size, steps))
    for name, more_rows, more_steps in changes:
        level = []
        for epoch in segment.epochs:
            part = costs[epoch.first_row : epoch.first_row + epoch.num_rows]
            level.append(part[balance_windows(part, more_rows, more_steps, epoch.first_row)])
        then = step_times(np.concatenate(level), more_rows, dp_size).imbalance
        if then - 1 <= (now - 1) / 2:
            old, new = (rows, more_rows) if name == "rows_per_step" else (steps, more_steps)
            yield (
                f"data.{name}={old}: with {dp_size} data-parallel groups, steps take {now:.2f}x as long as with "
                f"perfectly balanced ranks; with data.{name}={new}, they take {then:.2f}x"
            )
            return


def _checkpoint_notes(config: Config, stage: Stage) -> Iterator[str]:
    checkpoint, evaluation = config.checkpoint, config.run.eval_every_steps
    every, last_step = checkpoint.every_steps, stage.plan.num_steps
    last_step = min(config.run.stop_step or last_step, last_step)
    # A stage shorter than the interval needs no note if it saves at its end, as every stage but the last does.
    saves_at_end = checkpoint.save_at_end or not stage.ends_the_run
    is_rare = every is None or (not saves_at_end and last_step // every == stage.first_step // every)
    if checkpoint.every_minutes is None and is_rare:
        what = "stage" if stage.name else "run"
        when = "only at its end" if saves_at_end else "only on demand"
        yield (
            f"checkpoint.every_steps={every if every is not None else 'null'} and checkpoint.every_minutes=null up to "
            f"step {last_step:,}: the {what} saves {when}, so an earlier failure loses all progress"
            f"{f' since step {stage.first_step:,}' if stage.first_step else ''}"
        )
    if checkpoint.keep_best == 0 or checkpoint.best_metric != "eval_loss" or evaluation is None:
        return
    if every is None or (every % evaluation and evaluation % every):
        meet = "only by chance" if every is None else f"every {math.lcm(every, evaluation):,} steps"
        yield (
            f"run.eval_every_steps={evaluation} and checkpoint.every_steps={every if every is not None else 'null'} "
            f"coincide {meet}: checkpoint.keep_best={checkpoint.keep_best} selects only among evaluated checkpoints; "
            "make one interval a multiple of the other"
        )
