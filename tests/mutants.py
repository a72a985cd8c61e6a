"""Plants the bugs that this field is known for, one at a time, and sees that each turns its test red.

``python -m tests.mutants`` (``make mutants``) works on a copy of the tree, prints a table and exits with 1 if a bug
goes unnoticed. ``--only WORD`` takes the mutants whose name holds a word, ``--show`` prints how each test failed,
``--list`` runs nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("ray_ulysses", "tests", "benchmarks", "examples", "pyproject.toml")
TIMEOUT_S = 240.0
_TESTS_FAILED = 1  # pytest's exit code; 0 is green, everything above 1 means that the tests did not run

Verdict = Literal["killed", "SURVIVED", "BROKEN"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A bug to plant.

    Attributes:
        name: What goes wrong, in the field's words.
        file: File to change, from the root of the repository.
        old: Text that stands in it exactly once.
        new: Text that takes its place.
        killer: Id of the test that must turn red.
    """

    name: str
    file: str
    old: str
    new: str
    killer: str

    def planted(self, text: str) -> str:
        """Return the file's text with the bug in it."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"mutant {self.name!r}: its text occurs {count} times in {self.file}; it must occur once")
        return text.replace(self.old, self.new)


PLAIN_LOOP = "tests/distributed/test_plain_loop.py"
TAKES_OVER = (
    "tests/unit/data/read/test_stream_takes_over.py::"
    "test_from_any_step_on_and_after_any_number_of_rows_read_directly_the_rows_are_the_direct_readers"
)

MUTANTS = (
    Mutant(
        name="optimizer.eps is fixed at its default",
        file="ray_ulysses/run/settings.py",
        old="eps=config.optimizer.eps,",
        new="eps=1e-8,",
        killer=f"{PLAIN_LOOP}::test_thirty_steps_are_those_of_a_plain_loop[stage-3-alone]",
    ),
    Mutant(
        name="optimizer.betas are fixed at their default",
        file="ray_ulysses/run/settings.py",
        old="betas=config.optimizer.betas,",
        new="betas=(0.9, 0.95),",
        killer=f"{PLAIN_LOOP}::test_thirty_steps_are_those_of_a_plain_loop[stage-3-alone]",
    ),
    Mutant(
        name="optimizer.weight_decay is fixed at its default",
        file="ray_ulysses/run/settings.py",
        old="weight_decay=config.optimizer.weight_decay,",
        new="weight_decay=0.1,",
        killer=f"{PLAIN_LOOP}::test_thirty_steps_are_those_of_a_plain_loop[stage-3-alone]",
    ),
    Mutant(
        name="optimizer.max_grad_norm is fixed at its default",
        file="ray_ulysses/run/settings.py",
        old="max_grad_norm=config.optimizer.max_grad_norm,",
        new="max_grad_norm=1.0,",
        killer=f"{PLAIN_LOOP}::test_thirty_steps_are_those_of_a_plain_loop[stage-3-alone]",
    ),
    Mutant(
        name="optimizer.z_loss is not trained",
        file="ray_ulysses/trainer/loop.py",
        old="z_loss=config.optimizer.z_loss,",
        new="z_loss=0.0,",
        killer=f"{PLAIN_LOOP}::test_thirty_steps_are_those_of_a_plain_loop[stage-3-alone]",
    ),
    Mutant(
        name="rope: the base of full attention stays in a model with several kinds of layers",
        file="ray_ulysses/engine/model_config.py",
        old="{**stored, _FULL: changed} if kinds",
        new='{**stored, _FULL: {**changed, "rope_theta": stored[_FULL]["rope_theta"]}} if kinds',
        killer="tests/unit/engine/test_rope.py::"
        "test_layers_with_windows_keep_their_positions_and_the_others_get_the_new_ones[theta]",
    ),
    Mutant(
        name="the Adam of an offloaded optimizer adds weight decay to gradients",
        file="ray_ulysses/engine/zero.py",
        old="adamw_mode=True",
        new="adamw_mode=False",
        killer=f"{PLAIN_LOOP}::test_the_optimizer_that_is_offloaded_from_a_gpu_decays_weights_and_not_gradients",
    ),
    Mutant(
        name="weight decay reaches biases of several dims",
        file="ray_ulysses/engine/optimizer.py",
        old=' or "bias" in own',
        new="",
        killer="tests/unit/engine/test_optimizer.py::"
        "test_all_but_norms_biases_and_state_space_coefficients_decays[gpt_oss]",
    ),
    Mutant(
        name="adapters: one that looks for tokens of the row is trained",
        file="ray_ulysses/attention/refusals.py",
        old='if getattr(config, "alora_invocation_tokens", None):',
        new="if False:",
        killer="tests/unit/attention/test_peft.py::"
        "test_each_method_of_peft_has_the_gradients_of_the_eager_model_or_is_refused[lora-activated]",
    ),
    Mutant(
        name="adapters: one that was added after the model was inspected is trained",
        file="ray_ulysses/attention/ulysses.py",
        old="        check_adapters(module)\n",
        new="",
        killer="tests/unit/attention/test_peft.py::"
        "test_an_adapter_that_is_added_after_apply_ulysses_is_not_trained_before_it_was_inspected[LILY]",
    ),
    Mutant(
        name="inspect: a finished run is finished whoever trains it further",
        file="ray_ulysses/tracking/history.py",
        old="(owner is None or owner.since <= finished.time)",
        new="True",
        killer="tests/unit/tracking/test_history.py::test_the_status_says_where_the_run_stands[tail7-10.0-running]",
    ),
    Mutant(
        name="journal: the files of the command and of the controller are read one after the other",
        file="ray_ulysses/tracking/journal_reader.py",
        old="        entries[num_main:] = sorted(entries[num_main:], key=lambda entry: entry.time)",
        new="        entries[num_main:] = entries[num_main:]",
        killer="tests/unit/tracking/test_journal_reader.py::"
        "test_what_was_recorded_beside_an_attempt_is_in_the_order_of_its_times",
    ),
    Mutant(
        name="journal: the time of a command that could not start is left out",
        file="ray_ulysses/tracking/failures.py",
        old=' | {"command_started": failure.command_started}',
        new="",
        killer="tests/unit/cluster/test_failures.py::"
        "test_a_command_that_could_not_start_counts_from_its_start_and_by_itself",
    ),
    Mutant(
        name="mlflow: what a deleted run refuses is dropped",
        file="ray_ulysses/tracking/mlflow_tracker.py",
        old="if error.error_code in _REFUSALS and _is_active(self._client.get_run(self._run_id).info):",
        new="if error.error_code in _REFUSALS:",
        killer="tests/unit/tracking/test_mlflow_tracker.py::"
        "test_a_run_that_is_deleted_while_it_is_tracked_costs_no_point",
    ),
    Mutant(
        name="tracking: the record that follows a deleted one has nothing but what comes after",
        file="ray_ulysses/tracking/tail.py",
        old="self._cursor, self._source, self._pending = _Cursor(), None, []",
        new="self._cursor = _Cursor(files=self._cursor.files)",
        killer="tests/unit/tracking/test_tail.py::test_another_record_at_the_tracker_gets_the_whole_run",
    ),
    Mutant(
        name="check: a trial with other memory settings than the run",
        file="ray_ulysses/commands/check.py",
        old="trial_config(starting_from(planned), options, stamp)",
        new="trial_config(starting_from(config.with_absolute_paths(Path.cwd())), options, stamp)",
        killer="tests/unit/commands/test_check.py::"
        "test_a_trial_has_the_memory_that_the_planner_chooses_for_the_whole_run",
    ),
    Mutant(
        name="evaluate: each process looks for the newest checkpoint by itself",
        file="ray_ulysses/evaluation/evaluate.py",
        old="request=request if source.step is None else replace(request, step=source.step),",
        new="request=replace(request),",
        killer="tests/unit/evaluation/test_evaluate_command.py::"
        "test_a_checkpoint_that_is_committed_meanwhile_is_not_evaluated[latest]",
    ),
    Mutant(
        name="evaluate: fp32 is of rounded weights, not of the masters",
        file="ray_ulysses/evaluation/model_source.py",
        old="stored = stored_tensors(meta, manifest.state, self.weights, dtype)",
        new='stored = stored_tensors(meta, manifest.state, "model", dtype)',
        killer="tests/unit/evaluation/test_model_source.py::"
        "test_the_decoder_of_a_multimodal_model_has_its_masters_in_fp32_and_else_what_it_was_trained_with[bf16-fp32]",
    ),
    Mutant(
        name="model: quantized weights are trained, and exported with a configuration that calls them quantized",
        file="ray_ulysses/engine/model_config.py",
        old="        if quantization is not None:",
        new="        if False:",
        killer="tests/unit/engine/test_model.py::test_quantized_weights_are_refused_before_they_are_read[random]",
    ),
    Mutant(
        name="model: the scales of quantized weights are dropped",
        file="ray_ulysses/engine/model.py",
        old="    if scaled:",
        new="    if False:",
        killer="tests/unit/engine/test_model.py::test_scales_beside_weights_are_not_left_out",
    ),
    Mutant(
        name="weights: what is left of documents that were begun does not count in the share of its source",
        file="ray_ulysses/data/plan/planning.py",
        old="drawing.available_tokens(number) + resumed[number] if weight",
        new="drawing.available_tokens(number) if weight",
        killer="tests/unit/data/plan/test_branches.py::"
        "test_what_is_left_of_documents_counts_in_the_share_of_their_source[weights0]",
    ),
    Mutant(
        name="weights: rows that are left out take planned documents of their epoch with them",
        file="ray_ulysses/data/plan/planning.py",
        old="(empty or keeps)",
        new="empty",
        killer="tests/unit/data/plan/test_branches.py::"
        "test_an_epoch_of_weighted_sources_loses_nothing_but_the_rows_that_are_left_out[0]",
    ),
    Mutant(
        name="weights: a branch with the same weights takes planned documents of the epoch from it",
        file="ray_ulysses/data/plan/stages.py",
        old="keeps=_keeps(newest, sources, settings)",
        new="keeps=skipped is not None",
        killer="tests/unit/data/plan/test_branches.py::"
        "test_a_branch_with_the_same_weights_keeps_what_the_epoch_had_planned",
    ),
    Mutant(
        name="weights: what documents count for in longer rows is not asked before they are kept",
        file="ray_ulysses/data/plan/stages.py",
        old="    return len(counts) == 1 and ",
        new="    return ",
        killer="tests/unit/data/plan/test_branches.py::"
        "test_documents_that_were_dropped_come_with_the_same_weights_where_rows_take_them",
    ),
    Mutant(
        name="plan copies: one that was deleted or damaged ends the run",
        file="ray_ulysses/data/plan/plan_files.py",
        old="        self._renew()\n",
        new="",
        killer="tests/unit/run/test_run_dir_in_a_store.py::"
        "test_a_copy_of_the_plan_that_is_damaged_or_deleted_is_made_anew",
    ),
    Mutant(
        name="schedule: steps before a branch of the stages take the end that was planned after it",
        file="ray_ulysses/planner/stages.py",
        old="self.run_plan.run_end(step) if is_shared",
        new="self.run_plan.num_steps if is_shared",
        killer="tests/unit/run/test_stages.py::test_steps_before_a_branch_keep_their_learning_rate[shared-schedule]",
    ),
    Mutant(
        name="quiet: warnings are left out with the progress",
        file="ray_ulysses/commands/output.py",
        old="""_KEPT = ("note:", "warning:")""",
        new="""_KEPT = ("note:",)""",
        killer="tests/unit/commands/test_waiting.py::test_quiet_keeps_notes_and_warnings_alone",
    ),
    Mutant(
        name="report: a step without a z-loss is drawn with one",
        file="ray_ulysses/report/pictures.py",
        old="there = ~np.isnan(record.kept[name])",
        new="there = np.ones(len(record.kept), np.bool_)",
        killer="tests/unit/report/test_report.py::test_the_losses_beside_the_loss_are_drawn_where_the_journal_has_them",
    ),
    Mutant(
        name="MLflow: the checkpoint that was the latest keeps the mark",
        file="ray_ulysses/tracking/checkpoint_updates.py",
        old="""tuple(one.model_id for one in tracked if mark in one.marks and one is not holder)""",
        new="""()""",
        killer="tests/unit/tracking/test_mlflow_models.py"
        "::test_one_checkpoint_is_the_latest_and_one_the_best_whatever_goes",
    ),
    Mutant(
        name="packing: a piece is put into a row with too little room",
        file="ray_ulysses/data/plan/packing.py",
        old="(tops[number] < 0 or free[tops[number]] < length)",
        new="tops[number] < 0",
        killer="tests/unit/data/plan/test_packing.py::test_wide_fit_is_the_plain_rule_however_it_is_cut_into_blocks",
    ),
    Mutant(
        name="packing: a row whose class is in another word of bits is not found",
        file="ray_ulysses/data/plan/packing.py",
        old="    return (at << _SHIFT) + _lowest_bit(word)",
        new="    return (at << _SHIFT) + _lowest_bit(word) if at == first >> _SHIFT else -1",
        killer="tests/unit/data/plan/test_packing.py::test_wide_fit_is_the_plain_rule_however_it_is_cut_into_blocks",
    ),
    Mutant(
        name="chat: what the assistant said in a prompt is learned with the completion",
        file="ray_ulysses/data/sources/rows.py",
        old="[{**message, WEIGHT: 0} if message",
        new="[message if message",
        killer="tests/unit/data/sources/test_messages.py::"
        "test_of_a_completion_of_messages_the_prompts_turns_are_not_learned",
    ),
    Mutant(
        name="chat: a turn is learned in a context that the template writes only later",
        file="ray_ulysses/data/tokenize/turns.py",
        old="            texts.append(_closed(turn, messages, number, render, special))",
        new="            texts[0].ranges.insert(0, (begin, end))",
        killer="tests/unit/data/tokenize/test_chat_templates.py::test_every_turn_is_learned_once_after_what_asks_for_it",
    ),
    Mutant(
        name="chats: what a template writes of a turn outside its marks is not learned",
        file="ray_ulysses/data/tokenize/turns.py",
        old="    _refuse_unmarked(messages, learned, marked)\n",
        new="",
        killer="tests/unit/data/tokenize/test_chat.py::test_a_part_of_a_turn_outside_the_marks_is_learned_by_rendering",
    ),
    Mutant(
        name="evaluation: the loss of a mixture's routers counts as loss",
        file="ray_ulysses/trainer/step.py",
        old="found.loss_sum.double()",
        new="found.objective_sum.double()",
        killer="tests/unit/trainer/test_step.py::test_an_evaluation_has_no_router_loss",
    ),
    Mutant(
        name="tracking: a receiver that ended an attempt gets the next one's events as if it had not",
        file="ray_ulysses/tracking/wandb_sink.py",
        old="        self._run = None\n\n\ndef",
        new="\n\ndef",
        killer="tests/unit/tracking/test_other_trackers.py::test_wandb_gets_what_two_attempts_left_while_it_was_away",
    ),
    Mutant(
        name="chat: a line feed in the prompt's place is learned",
        file="ray_ulysses/data/tokenize/turns.py",
        old="ranges=[(len(asked), len(answered))])",
        new="ranges=[(len(asked) - 1, len(answered))])",
        killer="tests/unit/data/tokenize/test_chat_templates.py::test_every_turn_is_learned_once_after_what_asks_for_it",
    ),
    Mutant(
        name="chat: the beginning of a tool loop is forgotten before it was answered",
        file="ray_ulysses/data/tokenize/turns.py",
        old="text=asked + said, pieces=pieces, ranges=[(len(asked), len(asked) + len(said))])",
        new="text=answered, pieces=(whole,), ranges=[(at + len(prompt), len(answered))])",
        killer="tests/unit/data/tokenize/test_chat_templates.py::test_every_turn_is_learned_once_after_what_asks_for_it",
    ),
    Mutant(
        name="tokens: a text begins without the tokenizer's own token",
        file="ray_ulysses/data/tokenize/encoding.py",
        old="        return np.concatenate([*_one(self.bos_token_id), bare, *_one(self.eos_token_id)])",
        new="        return np.concatenate([bare, *_one(self.eos_token_id)])",
        killer="tests/unit/data/tokenize/test_encoding.py::test_a_text_begins_as_the_tokenizer_itself_begins_it",
    ),
    Mutant(
        name="tokens: a resumed preparation keeps units without the token that begins texts",
        file="ray_ulysses/data/prepare/unit_writer.py",
        old="encoder.tokenizer.info.fingerprint, encoder.fingerprint]",
        new="encoder.tokenizer.info.fingerprint]",
        killer=(
            "tests/unit/data/tokenize/test_encoding.py::test_units_without_the_token_that_begins_texts_are_made_again"
        ),
    ),
    Mutant(
        name="gradient x sp",
        file="ray_ulysses/engine/loss.py",
        old="factor = float(mesh.world_size * accumulation)",
        new="factor = float(mesh.world_size * mesh.sp_size * accumulation)",
        killer="tests/distributed/test_seam_parity.py::test_a_step_equals_that_of_one_process[sp2-dp2]",
    ),
    Mutant(
        name="the loop of DDP told of an accumulation",
        file="examples/ddp.py",
        old="accumulation=1)",
        new="accumulation=len(batches))",
        killer="tests/distributed/test_examples.py::test_a_loop_trains_as_one_process_does[ddp]",
    ),
    Mutant(
        name="the loop of FSDP2 with each rank's own denominator",
        file="examples/fsdp2.py",
        old="        dist.all_reduce(tokens)\n",
        new="",
        killer="tests/distributed/test_examples.py::test_a_loop_trains_as_one_process_does[fsdp2]",
    ),
    Mutant(
        name="the loop of DeepSpeed told of no accumulation",
        file="examples/deepspeed_zero3.py",
        old="zero_stage=3, accumulation=accumulation)",
        new="zero_stage=3, accumulation=1)",
        killer="tests/distributed/test_examples.py::test_a_loop_trains_as_one_process_does[deepspeed_zero3]",
    ),
    Mutant(
        name="a head of its own dropped for the tie of the configuration",
        file="ray_ulysses/engine/stored_weights.py",
        old="    hf_config.tie_word_embeddings = False\n",
        new="    hf_config.tie_word_embeddings = True\n",
        killer="tests/distributed/test_pretrained.py::test_a_head_of_its_own_is_kept_though_the_configuration_ties_it",
    ),
    Mutant(
        name="the guard of a copied model looks at its original",
        file="ray_ulysses/attention/ulysses.py",
        old="check_attached(module, kinds, ATTENTION_NAME)",
        new="check_attached(base, kinds, ATTENTION_NAME)",
        killer="tests/unit/attention/test_remove.py::test_a_copy_is_guarded_by_itself",
    ),
    Mutant(
        name="a negative label is trained as token 0 beside a z-loss",
        file="ray_ulysses/engine/tiled_loss.py",
        old="torch.where(is_counted_T, labels_T, 0)[:, None]",
        new="labels_T.clamp_min(0)[:, None]",
        killer="tests/unit/engine/test_tiled_loss.py::test_a_label_that_is_no_token_is_not_trained_as_another",
    ),
    Mutant(
        name="the first coefficient of the router loss stays",
        file="ray_ulysses/engine/router_loss.py",
        old="    if before != coefficients:\n",
        new="    if before is None:\n",
        killer="tests/unit/engine/test_router_loss.py::test_a_coefficient_that_is_changed_later_counts_as_in_transformers",
    ),
    Mutant(
        name="a loss that a wrapper rounds to bf16 is trained with",
        file="ray_ulysses/engine/loss.py",
        old="        _refuse_rounded(objective_sum)\n",
        new="",
        killer="tests/unit/engine/test_tiled_loss.py::test_a_loss_that_a_wrapper_rounds_is_refused",
    ),
    Mutant(
        name="the output head of a hub id is dropped, since it is compared under ZeRO-3",
        file="ray_ulysses/engine/stored_weights.py",
        old="    directory = _weights_directory(path)\n",
        new="    directory = Path(path)\n",
        killer="tests/unit/engine/test_model.py::test_a_head_of_a_hub_id_is_its_own_though_the_configuration_ties_it",
    ),
    Mutant(
        name="the whole's second copy of a tied head left as it was",
        file="ray_ulysses/export/decoder_merge.py",
        old="        if there in tensors:\n",
        new="        if there not in tensors:\n",
        killer="tests/unit/export/test_decoder_merge.py::test_a_tied_head_that_is_stored_as_well_is_new_in_both_places",
    ),
    Mutant(
        name="a decoder's tensors written from the front of the whole's file",
        file="ray_ulysses/export/files.py",
        old="stream.seek(offset)",
        new="stream.seek(0)",
        killer="tests/unit/export/test_decoder_merge.py::test_the_decoder_is_new_and_all_else_is_as_it_was[qwen2_vl]",
    ),
    Mutant(
        name="gradient x sp, pure",
        file="ray_ulysses/engine/loss.py",
        old="factor = float(mesh.world_size * accumulation)",
        new="factor = float(mesh.world_size * mesh.sp_size * accumulation)",
        killer="tests/unit/engine/test_loss.py::test_the_scale_undoes_the_engines_mean_over_ranks_and_micro_batches",
    ),
    Mutant(
        name="KV-copy gradients not summed",
        file="ray_ulysses/attention/exchange.py",
        old="            (own[:, head].add_ if is_added else own[:, head].copy_)(part[:, head])\n",
        new="            own[:, head].copy_(part[:, head])\n",
        killer="tests/distributed/test_exchange.py::"
        "test_the_exchange_is_plain_slicing_forward_and_backward[one-kv-head-for-all]",
    ),
    Mutant(
        name="a command that trains on beside the run's new owner",
        file="ray_ulysses/cluster/train_job.py",
        old="        nonlocal page_of\n        end_if_lost(claims, config.run_dir, session)\n",
        new="        nonlocal page_of\n",
        killer="tests/unit/cluster/test_takeover.py::"
        "test_workers_are_given_up_at_once_when_another_command_takes_the_run",
    ),
    Mutant(
        name="KV-copy gradients added in bf16",
        file="ray_ulysses/attention/exchange.py",
        old="    dtype = like.dtype if plan.kv_copies == 1 else torch.promote_types(like.dtype, torch.float32)\n",
        new="    dtype = like.dtype\n",
        killer="tests/distributed/test_exchange.py::test_gradients_of_a_copied_head_are_added_in_fp32",
    ),
    Mutant(
        name="a ring's output merged in bf16",
        file="ray_ulysses/attention/ring.py",
        old="out_THE = torch.empty(shape, dtype=precision, device=query_THD.device)",
        new="out_THE = torch.empty(shape, dtype=query_THD.dtype, device=query_THD.device)",
        killer="tests/distributed/test_bf16.py::test_bf16_errors_do_not_grow_with_the_ranks[ring-4]",
    ),
    Mutant(
        name="a ring's KV gradients added in bf16",
        file="ray_ulysses/attention/ring.py",
        old="value_TKE.numel(), dtype=precision, device=query_THD.device)",
        new="value_TKE.numel(), dtype=query_THD.dtype, device=query_THD.device)",
        killer="tests/distributed/test_bf16.py::test_bf16_errors_do_not_grow_with_the_ranks[ring-4]",
    ),
    Mutant(
        name="heads of the ranks interleaved",
        file="ray_ulysses/attention/exchange.py",
        old='    return slice(heads.first, heads.stop) if kind == "query" else slice(heads.first_kv, heads.stop_kv)\n',
        new='    return slice(heads.first % 2, None, 2) if kind == "query" else slice(heads.first_kv, heads.stop_kv)\n',
        killer="tests/distributed/test_exchange.py::"
        "test_the_exchange_is_plain_slicing_forward_and_backward[kv-heads-divide]",
    ),
    Mutant(
        name="a scrambled uneven split",
        file="ray_ulysses/attention/exchange.py",
        old="        _put_back(blocks[source], plan.ranks[source], into_BHLD, kinds, written_kv)\n",
        new="        _put_back(blocks[source], plan.ranks[-1 - source], into_BHLD, kinds, written_kv)\n",
        killer="tests/distributed/test_exchange.py::"
        "test_the_exchange_is_plain_slicing_forward_and_backward[heads-do-not-divide]",
    ),
    Mutant(
        name="a ring step that skips the merge",
        file="ray_ulysses/attention/ring.py",
        old="    out_THE.mul_(kept).add_(part_THE.to(out_THE.dtype) * added)\n",
        new="    out_THE.add_(part_THE.to(out_THE.dtype))\n",
        killer="tests/distributed/test_seam_parity.py::test_a_ring_equals_one_process[u1-r2]",
    ),
    Mutant(
        name="a ring that forgets gradients of keys that went round",
        file="ray_ulysses/attention/ring.py",
        old="                grad_kv += incoming.wait()\n",
        new="                incoming.wait()\n",
        killer="tests/distributed/test_seam_parity.py::test_a_ring_equals_one_process[u1-r2]",
    ),
    Mutant(
        name="a ring's window measured in chunks laid end to end",
        file="ray_ulysses/attention/documents.py",
        old="if len(parts) == 2 and not (windowed and has_gap):",
        new="if len(parts) == 2:",
        killer="tests/unit/attention/test_documents.py::test_the_kernel_calls_of_a_ring_see_each_visible_pair_once",
    ),
    Mutant(
        name="a sink that is not sliced by head",
        file="ray_ulysses/attention/ulysses.py",
        old="        s_aux = s_aux[mine.first : mine.stop]\n",
        new="        s_aux = s_aux[: mine.num_heads]\n",
        killer="tests/distributed/test_seam_parity.py::test_sinks_are_those_of_the_ranks_heads",
    ),
    Mutant(
        name="a soft-cap without its slope",
        file="ray_ulysses/attention/kernels/math.py",
        old="            score_grads_KGtu = score_grads_KGtu.mul_(slope_KGtu)\n",
        new="            pass\n",
        killer="tests/unit/attention/test_kernels.py::"
        "test_a_kernel_equals_the_definition_forward_and_backward[math-packed-None-softcap]",
    ),
    Mutant(
        name="state carried across documents",
        file="ray_ulysses/attention/mixers.py",
        old="    return [stop - start for start, stop in pairwise(borders)]\n",
        new="    return [borders[-1]]\n",
        killer="tests/unit/attention/test_mixers.py::"
        "test_a_layer_on_a_packed_row_gives_what_its_module_gives_each_document[qwen3_next]",
    ),
    Mutant(
        name="a convolution that reads the neighbouring document where one is short",
        file="ray_ulysses/attention/mixers.py",
        old="    borders = context.documents.full.spans.borders\n",
        new="    all_borders = context.documents.full.spans.borders\n"
        "    borders = [one for one in all_borders if one - 1 not in all_borders]\n",
        killer="tests/unit/attention/test_mixers.py::"
        "test_a_layer_on_a_packed_row_gives_what_its_module_gives_each_document[lfm2]",
    ),
    Mutant(
        name="decay of the wrong heads: parameters",
        file="ray_ulysses/attention/mixers.py",
        old=".select(dim, rank).clone()",
        new=".select(dim, ranks - 1 - rank).clone()",
        killer="tests/distributed/test_hybrids.py::test_every_hybrid_equals_one_process_on_each_document[2-each-kind]",
    ),
    Mutant(
        name="decay of the wrong heads: exchange",
        file="ray_ulysses/attention/mixer_layouts.py",
        old='"in_proj_ba": (Block(module.num_k_heads, 2 * group),),',
        new='"in_proj_ba": (Block(module.num_v_heads), Block(module.num_v_heads)),',
        killer="tests/distributed/test_hybrids.py::test_every_hybrid_equals_one_process_on_each_document[2-each-kind]",
    ),
    Mutant(
        name="the gate of other channels",
        file="ray_ulysses/attention/mixers.py",
        old="result[..., : out.shape[2]]",
        new="result[..., : out.shape[2]].flip(-1)",
        killer="tests/unit/attention/test_mixers.py::"
        "test_a_layer_on_a_packed_row_gives_what_its_module_gives_each_document[bamba]",
    ),
    Mutant(
        name="the gate of lightning attention applied to whole rows as well",
        file="ray_ulysses/attention/mixers.py",
        old="fill_value=torch.inf",
        new="fill_value=0.0",
        killer="tests/unit/attention/test_mixers.py::"
        "test_a_layer_on_a_packed_row_gives_what_its_module_gives_each_document[minimax]",
    ),
    Mutant(
        name="what Mamba 1 makes of all channels made of a rank's own",
        file="ray_ulysses/attention/exchange.py",
        old="    dist.all_reduce(total, group=group_named(group))\n",
        new="",
        killer="tests/distributed/test_hybrids.py::test_every_hybrid_equals_one_process_on_each_document[2-each-kind]",
    ),
    Mutant(
        name="the gradient of a sum over ranks not added up",
        file="ray_ulysses/attention/exchange.py",
        old="return torch.ops.ray_ulysses.sum_over_ranks(grad, ctx.group), None",
        new="return grad, None",
        killer="tests/distributed/test_hybrids.py::test_every_hybrid_equals_one_process_on_each_document[2-each-kind]",
    ),
    Mutant(
        name="the gate of a norm over all heads sent to the other ranks",
        file="ray_ulysses/attention/mixer_layouts.py",
        old="is_exchanged=not has_norm",
        new="is_exchanged=True",
        killer="tests/distributed/test_hybrids.py::test_a_layer_sends_each_channel_to_the_rank_of_its_head_and_no_more",
    ),
    Mutant(
        name="packed rows given to a kernel that does not keep documents apart",
        file="ray_ulysses/attention/mixers.py",
        old='one["is_new_implementation"] and _TABLES[name] in one["applicable_params"]',
        new='one["is_new_implementation"]',
        killer="tests/unit/attention/test_packed_mixers.py::"
        "test_a_kernel_that_does_not_take_the_tables_is_called_for_each_document[chunk_gated_delta_rule]",
    ),
    Mutant(
        name="a loss that a model's own forward adds left out without a word",
        file="ray_ulysses/engine/loss.py",
        old="if found is None or abs(found[0] - found[1]) <= 2e-6 * abs(found[1]):",
        new="if True:",
        killer="tests/unit/engine/test_own_loss.py::test_a_z_loss_of_the_model_is_refused_before_weights[0.5]",
    ),
    Mutant(
        name="FLOPs of a layer that is used twice counted once",
        file="ray_ulysses/engine/model.py",
        old="in model.named_parameters(remove_duplicate=False)",
        new="in model.named_parameters()",
        killer="tests/unit/engine/test_hybrid_shape.py::test_products_with_weights_are_those_that_torch_counts[zamba2]",
    ),
    Mutant(
        name="FLOPs of a recurrence left out",
        file="ray_ulysses/model_shape.py",
        old="return used + self.mixer_multiply_adds",
        new="return used + 0",
        killer="tests/unit/engine/test_hybrid_shape.py::test_a_state_is_counted_for_what_reads_and_writes_it[jamba]",
    ),
    Mutant(
        name="a group of states sent to the ranks of another group",
        file="ray_ulysses/attention/mixer_layouts.py",
        old=".repeat_interleave(ranks // block.units, dim=dim)",
        new=".repeat(*[1] * dim, ranks // block.units, *[1] * (part.dim() - dim))",
        killer="tests/distributed/test_hybrids.py::test_every_hybrid_equals_one_process_on_each_document[4]",
    ),
    Mutant(
        name="the exchange after a layer that carries state repeated under checkpointing",
        file="ray_ulysses/attention/recompute.py",
        old="kept |= {operators.scatter_heads.default, operators.scatter_channels.default}",
        new="kept |= {operators.scatter_heads.default}",
        killer="tests/distributed/test_hybrids.py::"
        "test_a_layer_that_carries_state_takes_as_many_collectives_as_attention",
    ),
    Mutant(
        name="calls of modules without parameters traced by ZeRO-3",
        file="ray_ulysses/engine/zero.py",
        old="        trace_parameters_only(engine)\n",
        new="        pass\n",
        killer="tests/distributed/test_zero_trace.py::"
        "test_ranks_with_other_documents_experts_and_labels_trace_the_same_calls",
    ),
    Mutant(
        name="experts with modules inside gathered one by one",
        file="ray_ulysses/engine/zero.py",
        old='(is_stacked or type(module).__name__.endswith("Experts"))',
        new="is_stacked",
        killer="tests/unit/engine/test_zero.py::test_the_experts_of_a_layer_are_one_module_to_the_engine[dbrx-2]",
    ),
    Mutant(
        name="chunks of local attention that begin with the row instead of the document",
        file="ray_ulysses/attention/documents.py",
        old="        for first in range(start, end, stretch)\n",
        new="        for first in (start, *range(start - start % stretch + stretch, end, stretch))\n",
        killer="tests/unit/attention/test_documents.py::test_stretches_begin_with_their_document_on_every_ring",
    ),
    Mutant(
        name="a temperature by the place in the slice",
        file="ray_ulysses/attention/ulysses.py",
        old="position_ids_BL=batch.position_ids_BL if",
        new="position_ids_BL=torch.arange(batch.position_ids_BL.shape[1])[None] if",
        killer="tests/unit/attention/test_architectures.py::"
        "test_packed_documents_train_as_each_does_alone[llama4_text]",
    ),
    Mutant(
        name="a ring taken by a hybrid",
        file="ray_ulysses/attention/refusals.py",
        old="    if mesh.ring_size > 1:\n",
        new="    if mesh.ring_size > 99:\n",
        killer="tests/unit/attention/test_mixers.py::test_a_ring_is_refused",
    ),
    Mutant(
        name="attention computed again under checkpointing",
        file="ray_ulysses/attention/recompute.py",
        old="if operator not in self._storage:",
        new="if operator is not None:",
        killer="tests/distributed/test_recompute.py::test_collectives_bytes_and_attention_forwards_of_a_layer",
    ),
    Mutant(
        name="gathered logits' gradient not summed over ranks",
        file="ray_ulysses/parallel/collectives.py",
        old="        dist.all_reduce(grad, group=ctx.group)\n",
        new="",
        killer="tests/distributed/test_exchange.py::"
        "test_a_gathered_sequence_is_in_order_and_its_gradient_is_summed_over_ranks",
    ),
    Mutant(
        name="local positions, seam",
        file="ray_ulysses/attention/batch.py",
        old="position_ids_BL=held_tokens(position_ids_BS, mesh)",
        new="position_ids_BL=position_ids_BS[:, : position_ids_BS.shape[1] // mesh.sp_size].contiguous()",
        killer="tests/unit/attention/test_batch.py::test_positions_are_global_and_restart_in_each_document",
    ),
    Mutant(
        name="local positions, reader",
        file="ray_ulysses/data/read/reader.py",
        old="position_ids[target] = np.arange(inside, inside + count)",
        new="position_ids[target] = np.arange(count)",
        killer="tests/unit/data/read/test_digest.py::test_the_digest_of_a_row_is_the_same_for_every_sp_size",
    ),
    Mutant(
        name="a row without documents is taken for padding",
        file="ray_ulysses/attention/batch.py",
        old="        if not lengths:\n",
        new="        if False:\n",
        killer="tests/unit/attention/test_batch.py::test_rows_that_do_not_fit_together_are_refused",
    ),
    Mutant(
        name="length-dependent RoPE sees its slice only",
        file="ray_ulysses/attention/rope.py",
        old="last = position_ids_BL.new_full((*position_ids_BL.shape[:-1], 1), length - 1)",
        new="last = position_ids_BL[..., -1:]",
        killer="tests/unit/attention/test_rope.py::test_every_document_gets_the_frequencies_that_it_has_alone",
    ),
    Mutant(
        name="LongRoPE by the longest neighbour",
        file="ray_ulysses/attention/rope.py",
        old="_choose(batch.document_lengths_BL > original, longer, rotary)",
        new="longer",
        killer="tests/unit/attention/test_rope.py::test_every_document_gets_the_frequencies_that_it_has_alone",
    ),
    Mutant(
        name="dynamic RoPE remembers longer rows",
        file="ray_ulysses/attention/rope.py",
        old="        _forget_longest_row(module, x.device)\n",
        new="",
        killer="tests/unit/attention/test_rope.py::test_frequencies_do_not_depend_on_the_rows_that_came_before",
    ),
    Mutant(
        name="a label lost at a shard border, seam",
        file="ray_ulysses/attention/batch.py",
        old="labels_BL=held_tokens(shifted_BS, mesh)",
        new="labels_BL=torch.nn.functional.pad(held_tokens(shifted_BS, mesh)[:, :-1], (0, 1), value=IGNORE_INDEX)",
        killer="tests/unit/attention/test_batch.py::"
        "test_a_label_is_the_next_token_of_the_same_document_even_across_a_shard_border",
    ),
    Mutant(
        name="a label lost at a shard border, reader",
        file="ray_ulysses/data/read/reader.py",
        old="num_labels = min(count, piece.num_labels - inside)",
        new="num_labels = min(count - 1, piece.num_labels - inside)",
        killer="tests/unit/data/read/test_exactly_once.py::"
        "test_every_planned_token_is_received_exactly_once_at_any_sequence_of_worlds",
    ),
    Mutant(
        name="a label of the next document",
        file="ray_ulysses/attention/batch.py",
        old="shifted_BS[row, start : end - 1] = labels_BS[row, start + 1 : end]",
        new="shifted_BS[row, start:end][: num_tokens - start - 1] = labels_BS[row, start + 1 : end + 1]",
        killer="tests/unit/attention/test_batch.py::"
        "test_a_label_is_the_next_token_of_the_same_document_even_across_a_shard_border",
    ),
    Mutant(
        name="ignored document spans",
        file="ray_ulysses/attention/documents.py",
        old="        start = 0\n        for length in row_lengths:\n",
        new="        start = 0\n        for length in [sum(row_lengths)] * bool(row_lengths):\n",
        killer="tests/unit/attention/test_ulysses.py::test_no_token_attends_across_documents[llama]",
    ),
    Mutant(
        name="ignored cu_seqlens",
        file="ray_ulysses/attention/documents.py",
        old="    borders = (0, *accumulate(stop - first for first, stop in local))\n"
        "    assert borders[1:] == tuple(stop for _, stop in local)\n",
        new="    borders = (0, local[-1][1])\n",
        killer="tests/unit/attention/test_documents.py::test_without_a_ring_spans_are_documents_and_tails_of_padding",
    ),
    Mutant(
        name="a sliding window one token too wide",
        file="ray_ulysses/attention/kernels/call.py",
        old="early = key_at < query_at - self.left\n",
        new="early = key_at < query_at - self.left - 1\n",
        killer="tests/unit/attention/test_kernels.py::"
        "test_a_kernel_equals_the_definition_forward_and_backward[sdpa-packed-3-plain]",
    ),
    Mutant(
        name="a sliding window one token too wide, seam",
        file="ray_ulysses/attention/ring.py",
        old="    left = layer.window - 1 if layer.window is not None and hides else None\n",
        new="    left = layer.window if layer.window is not None and hides else None\n",
        killer="tests/unit/attention/test_documents.py::test_the_kernel_calls_of_a_ring_see_each_visible_pair_once",
    ),
    Mutant(
        name="the probe blind to what an operation does",
        file="ray_ulysses/attention/probe.py",
        old="    if agree(before, after, arrangements):\n",
        new="    if True:\n",
        killer="tests/unit/attention/test_probe.py::test_an_operation_between_tokens_is_refused_in_a_module_that_is_swapped_in[pad-shift]",
    ),
    Mutant(
        name="the probe tries rows of one length only",
        file="ray_ulysses/attention/probe.py",
        old="_OTHER_ROWS = (2, 23)\n",
        new="_OTHER_ROWS = (2, TOKENS)\n",
        killer="tests/unit/attention/test_probe.py::"
        "test_an_operation_between_tokens_is_refused_in_a_module_that_is_swapped_in[length-of-the-row]",
    ),
    Mutant(
        name="the probe blind to slices",
        file="ray_ulysses/attention/dependence.py",
        old="        if name in _PARTS:\n",
        new="        if False:\n",
        killer="tests/unit/attention/test_probe.py::test_an_operation_along_the_tokens_is_named[first-token-slice]",
    ),
    Mutant(
        name="the probe blind to padding",
        file="ray_ulysses/attention/dependence.py",
        old="            return self._tokens_dims(first) != self._tokens_dims(result)\n",
        new="            return False\n",
        killer="tests/unit/attention/test_probe.py::test_an_operation_along_the_tokens_is_named[unfold-constant_pad_nd]",
    ),
    Mutant(
        name="a window that only the mask knows left out",
        file="ray_ulysses/attention/probe.py",
        old="        window=window,\n",
        new="        window=None,\n",
        killer="tests/unit/attention/test_windows.py::test_a_window_that_only_the_mask_knows_is_applied[phimoe-]",
    ),
    Mutant(
        name="a mask with a hole taken for a window",
        file="ray_ulysses/attention/probe.py",
        old="    if not torch.equal(_visible(mask_function, queries, keys), expected(queries, keys)):\n",
        new="    if expected(queries, keys) is None:\n",
        killer="tests/unit/attention/test_windows.py::test_a_mask_that_is_no_causal_window_is_told[hole]",
    ),
    Mutant(
        name="a block of tokens that is not compared",
        file="ray_ulysses/data/corpus/flat_file.py",
        old="        if damaged is not None:\n            place",
        new="        if False:\n            place",
        killer="tests/unit/data/corpus/test_flat_file.py::"
        "test_a_flipped_bit_is_noticed_where_it_is_read_and_nowhere_else",
    ),
    Mutant(
        name="points of TensorBoard acknowledged before they are on the disk",
        file="ray_ulysses/tracking/tensorboard_sink.py",
        old="        self._writer.flush()\n",
        new="",
        killer="tests/unit/tracking/test_other_trackers.py::test_what_was_handed_over_before_a_death_is_on_the_disk",
    ),
    Mutant(
        name="a damaged block of the cache believed",
        file="ray_ulysses/storage/block_cache.py",
        old="        return self._cache.drop(self._file, _blocks(start, size))",
        new="        return False",
        killer="tests/unit/data/corpus/test_remote_corpus.py::"
        "test_a_cache_that_lost_blocks_in_a_power_cut_is_read_past",
    ),
    Mutant(
        name="a copied corpus committed before its files",
        file="ray_ulysses/data/prepare/upload.py",
        old="            keys = [*shards, ",
        new="            keys = [CORPUS_FILE, *shards, ",
        killer="tests/unit/data/corpus/test_remote_corpus.py::test_a_copy_that_is_killed_is_no_corpus_and_goes_on",
    ),
    Mutant(
        name="a stretch taken from the start of its block",
        file="ray_ulysses/data/corpus/flat_file.py",
        old="count=count, offset=begin - start)",
        new="count=count)",
        killer="tests/unit/data/corpus/test_flat_file.py::test_any_stretch_is_what_was_written[1-uint16]",
    ),
    Mutant(
        name="loss weights one token off",
        file="ray_ulysses/data/read/reader.py",
        old="store.label_weights(piece.document, first_label, first_label + num_labels)\n",
        new="store.label_weights(piece.document, first_label - 1, first_label - 1 + num_labels)\n",
        killer="tests/unit/data/read/test_label_weights.py::test_each_label_has_its_weight_at_every_layout",
    ),
    Mutant(
        name="rows that were read directly come once more through the stream",
        file="ray_ulysses/data/read/streamed_source.py",
        old="while number < handover.num_direct:",
        new="while number < 0:",
        killer="tests/unit/data/read/test_stream_takes_over.py::"
        "test_rows_that_were_read_directly_while_the_stream_was_ready_are_dropped_from_it",
    ),
    Mutant(
        name="fillers before the stream has come shift its rows",
        file="ray_ulysses/data/read/streamed_source.py",
        old="                handover.num_direct += 1",
        new="                handover.num_direct += row is not None",
        killer=f"{TAKES_OVER}[(0, 3, 1, 2, 1)]",
    ),
    Mutant(
        name="a rank that waits for its row counts as one that hangs",
        file="ray_ulysses/supervision/child.py",
        old="        wait_for_row=progress.wait_for_row,\n",
        new="",
        killer="tests/distributed/test_faults.py::"
        "test_a_row_that_comes_late_is_waited_for_longer_than_a_rank_that_hangs",
    ),
    Mutant(
        name="loss weights lost on the way through Ray Data",
        file="ray_ulysses/data/read/blocks.py",
        old="        return None if self._weights is None else self._weights[",
        new="        return None if True else self._weights[",
        killer="tests/unit/data/read/test_streamed_source.py::test_a_slice_travels_whole",
    ),
    Mutant(
        name="a long text cut inside white space",
        file="ray_ulysses/data/tokenize/dividing.py",
        old='_ONE_LINE_FEED = re.compile(r"[!-~]\\n(?=[A-Za-z])")\n',
        new='_ONE_LINE_FEED = re.compile(r"\\n(?=[A-Za-z])")\n',
        killer="tests/unit/data/tokenize/test_dividing.py::test_the_tokens_of_the_parts_are_those_of_the_text[gpt 2]",
    ),
    Mutant(
        name="texts of a batch placed one text late",
        file="ray_ulysses/data/prepare/unit_writer.py",
        old="firsts = writer.add(ids) + np.cumsum(lengths) - lengths",
        new="firsts = writer.add(ids) + np.cumsum(lengths)",
        killer="tests/unit/data/prepare/test_text_batches.py::"
        "test_the_corpus_is_the_same_however_texts_are_gathered[bytes-ends]",
    ),
    Mutant(
        name="masks of labels one token off on the way through Ray Data",
        file="ray_ulysses/data/read/blocks.py",
        old="weights.append(store.label_weights(document, start, start + length))",
        new="weights.append(store.label_weights(document, start + 1, start + 1 + length))",
        killer="tests/unit/data/read/test_streamed_source.py::test_streamed_rows_are_the_direct_readers[(1, 1, 1)-600]",
    ),
    Mutant(
        name="a weighted loss divided by tokens",
        file="ray_ulysses/trainer/step.py",
        old="    return read, float(total)\n",
        new="    return read, tokens\n",
        killer="tests/distributed/test_loss_weights.py::test_the_loss_is_the_mean_by_weight_at_every_layout[(1, 1, 2)]",
    ),
    Mutant(
        name="a mean of means",
        file="ray_ulysses/engine/loss.py",
        old="objective_sum = losses_N.sum() if",
        new="objective_sum = losses_N.mean() if",
        killer="tests/unit/trainer/test_step.py::"
        "test_the_loss_is_a_mean_over_all_tokens_of_the_step_and_its_gradient_that_of_the_mean",
    ),
    Mutant(
        name="a z-loss of labels that are ignored",
        file="ray_ulysses/engine/tiled_loss.py",
        old="return losses_T, torch.where(is_counted_T, z_loss * log_z_T.square(), zero)",
        new="return losses_T, z_loss * log_z_T.square()",
        killer="tests/unit/engine/test_tiled_loss.py::test_a_z_loss_is_that_of_the_models_own_logits[7-granite]",
    ),
    Mutant(
        name="a z-loss that is reported in the loss",
        file="ray_ulysses/trainer/step.py",
        old="+= row_loss.loss_sum.double()",
        new="+= row_loss.objective_sum.detach().double()",
        killer="tests/unit/trainer/test_step.py::test_a_z_loss_is_trained_on_and_reported_beside_the_loss",
    ),
    Mutant(
        name="a router loss of each slice",
        file="ray_ulysses/engine/router_loss.py",
        old="    if batch.mesh.sp_size > 1:\n        dist.all_reduce(sums,",
        new="    if batch.mesh.sp_size < 1:\n        dist.all_reduce(sums,",
        killer="tests/distributed/test_router_loss.py::test_the_router_loss_of_shared_rows_equals_that_of_one_process",
    ),
    Mutant(
        name="a router loss of padding",
        file="ray_ulysses/engine/router_loss.py",
        old="    is_token_BL = batch.document_lengths_BL > 0\n",
        new="    is_token_BL = batch.document_lengths_BL >= 0\n",
        killer="tests/unit/engine/test_router_loss.py::"
        "test_value_and_gradient_are_those_of_each_row_by_itself_without_its_padding[1-False]",
    ),
    Mutant(
        name="a router loss whose gradient is lost in experts over tiles",
        file="ray_ulysses/engine/tiled_mlp.py",
        old="*(one[part] for one in d_scores)",
        new="*(torch.zeros_like(one[part]) for one in d_scores)",
        killer="tests/unit/engine/test_router_loss.py::"
        "test_loss_and_gradients_are_those_of_transformers[mixtral-5-checkpointed-tiled]",
    ),
    Mutant(
        name="a router loss of each row that is not weighted by its tokens",
        file="ray_ulysses/engine/router_loss.py",
        old="loss.num_experts * num_supervised_B1.double()",
        new="loss.num_experts * (num_supervised_B1 > 0).double()",
        killer="tests/unit/engine/test_router_loss.py::"
        "test_value_and_gradient_are_those_of_each_row_by_itself_without_its_padding[1-False]",
    ),
    Mutant(
        name="a router loss with the configuration's coefficient in place of the setting",
        file="ray_ulysses/engine/router_loss.py",
        old="            setattr(text, name, coefficient)\n",
        new="            pass\n",
        killer="tests/unit/engine/test_router_loss.py::"
        "test_the_setting_replaces_what_the_models_configuration_says[0.03-False-0.03]",
    ),
    Mutant(
        name="a norm over tiles that keeps the gradient of its last tile alone",
        file="ray_ulysses/engine/tiled_mlp.py",
        old="            add_gradients(sums, found)\n",
        new="            sums = [None if one is None else one.float() for one in found]\n",
        killer="tests/unit/engine/test_tiled_mlp.py::"
        "test_a_norm_over_tiles_has_the_same_bits_and_sums_its_weight_gradient_in_fp32[torch.float32]",
    ),
    Mutant(
        name="Ulysses attention removed by halves where it was applied twice",
        file="ray_ulysses/attention/attachment.py",
        old="            self._attention, self._changed = self._earlier._attention, self._earlier._changed\n",
        new="            pass\n",
        killer="tests/unit/attention/test_remove.py::test_nothing_of_it_stays[llama]",
    ),
    Mutant(
        name="the work of experts that a token does not go through",
        file="ray_ulysses/model_shape.py",
        old="self.num_parameters - self.idle_parameters + self.repeated_parameters",
        new="self.num_parameters + self.repeated_parameters",
        killer="tests/unit/planner/test_flops.py::test_experts_that_a_token_does_not_go_through_cost_nothing",
    ),
    Mutant(
        name="a norm with weights of each head that goes over tiles",
        file="ray_ulysses/engine/tiled_mlp.py",
        old="not is_fused and not _matrices(module)",
        new="not is_fused",
        killer="tests/unit/engine/test_tiled_mlp.py::test_norms_with_weights_of_their_own_for_each_head_stay_whole",
    ),
    Mutant(
        name="heads over tiles that come back in another order",
        file="ray_ulysses/engine/tiled_mlp.py",
        old="(order.index(dim) for dim in range(len(order)))",
        new="order",
        killer="tests/unit/engine/test_tiled_mlp.py::"
        "test_heads_in_any_order_of_memory_have_the_same_bits_and_are_not_copied[(2, 0, 1, 3)-torch.float32]",
    ),
    Mutant(
        name="an MLP that is recomputed twice",
        file="ray_ulysses/engine/tiled_mlp.py",
        old="        ctx.keeper, ctx.mlp, ctx.tile, ctx.weights = keeper, mlp, tile, weights\n",
        new="        ctx.keeper, ctx.mlp, ctx.tile, ctx.weights = ctx, mlp, tile, weights\n"
        "        ctx.save_for_backward(hidden_1NH)\n",
        killer="tests/unit/engine/test_tiled_mlp.py::"
        "test_a_checkpointed_layer_computes_12_products_of_a_projection_where_11_are_computed_without_tiles",
    ),
    Mutant(
        name="the gradient of the last tile alone",
        file="ray_ulysses/engine/tiled_loss.py",
        old="total.add_(part)",
        new="total.copy_(part)",
        killer="tests/unit/engine/test_tiled_loss.py::test_tiles_change_no_loss_no_gradient_and_no_prediction[granite]",
    ),
    Mutant(
        name="random state by place and not by row",
        file="ray_ulysses/trainer/step.py",
        old="(row.row % 2**64)",
        new="steps",
        killer="tests/unit/trainer/test_step.py::test_random_draws_belong_to_the_row_and_not_to_its_place",
    ),
    Mutant(
        name="a repeated row, dealing",
        file="ray_ulysses/data/plan/steps.py",
        old="list(ordered[first : first + dp_size])",
        new="list(ordered[max(first - 1, 0) :][: min(dp_size, len(ordered) - first)])",
        killer="tests/unit/data/read/test_exactly_once.py::"
        "test_every_planned_token_is_received_exactly_once_at_any_sequence_of_worlds",
    ),
    Mutant(
        name="a repeated row, steps that overlap",
        file="ray_ulysses/data/plan/plan.py",
        old="return range(first, min(first + size, segment.base_row + segment.train.num_rows))",
        new="return range(max(0, first - 1), min(first + size, segment.base_row + segment.train.num_rows))",
        killer="tests/unit/data/read/test_exactly_once.py::"
        "test_every_planned_token_is_received_exactly_once_at_any_sequence_of_worlds",
    ),
    Mutant(
        name="digest by XOR",
        file="ray_ulysses/data/read/digest.py",
        old="return sum(digests) % MODULUS",
        new='return int(np.bitwise_xor.reduce(np.array(digests, dtype="uint64")))',
        killer="tests/unit/data/read/test_digest.py::test_rows_that_swap_contents_a_repeated_row_and_a_lost_one_are_noticed",
    ),
    Mutant(
        name="digest of the plan and not of what the model received",
        file="ray_ulysses/trainer/step.py",
        old="(batch.input_ids_BL, batch.labels_BL, batch.position_ids_BL, batch.label_weights_BL)",
        new="(batch.input_ids_BL * 0, batch.labels_BL, batch.position_ids_BL, batch.label_weights_BL)",
        killer="tests/unit/trainer/test_step.py::test_the_checksum_is_of_the_tensors_that_the_model_is_given",
    ),
    Mutant(
        name="the documents of another place where a block ends",
        file="ray_ulysses/data/plan/drawing.py",
        old="documents[place - first], found[place - first]",
        new="documents[place % CHUNK], found[place % CHUNK]",
        killer="tests/unit/data/plan/test_drawing.py::test_every_document_and_fragment_is_drawn_at_its_place[1023]",
    ),
    Mutant(
        name="a data set that was saved again is read on",
        file="ray_ulysses/data/sources/extraction.py",
        old="if dataset_stamp(path, opened) != unit.files[0]:",
        new="if not len(opened):",
        killer="tests/unit/data/prepare/test_preparation.py::"
        "test_a_data_set_that_is_saved_again_during_a_preparation_is_refused[of the hub]",
    ),
    Mutant(
        name="a data set that is being saved again is read on, since its fingerprint is written last",
        file="ray_ulysses/data/sources/extraction.py",
        old="    if dataset_state(path, opened) != unit.state:\n        raise changed(path)\n",
        new="",
        killer="tests/unit/data/prepare/test_preparation.py::"
        "test_a_data_set_that_is_being_saved_again_is_refused_though_its_fingerprint_is_the_old_one",
    ),
    Mutant(
        name="a loss mask that ends no turn",
        file="ray_ulysses/data/tokenize/encoding.py",
        old="masked = _encoded(document.ids, starts, stops, ends)",
        new="masked = _encoded(document.ids, starts, stops, document.turn_ends)",
        killer="tests/unit/data/tokenize/test_encoding.py::"
        "test_a_loss_mask_ends_turns_as_labels_do_wherever_an_end_token_is_added",
    ),
    Mutant(
        name="the corpus is a source of itself",
        file="ray_ulysses/data/prepare/preparation.py",
        old="list_units(request.sources, request.unit_bytes, request.out)",
        new="list_units(request.sources, request.unit_bytes)",
        killer="tests/unit/data/prepare/test_preparation.py::test_a_corpus_inside_its_source_is_no_source[texts/corpus]",
    ),
    Mutant(
        name="a text forges the end token",
        file="ray_ulysses/data/prepare/unit_writer.py",
        old="is_kept[[*encoded.left_out]] = False",
        new="is_kept[[]] = False",
        killer="tests/unit/data/tokenize/test_forged_tokens.py::test_a_document_that_would_become_a_special_token_is_left_out",
    ),
    Mutant(
        name="a text forges the end token that was chosen",
        file="ray_ulysses/data/tokenize/encoding.py",
        old="{**tokenizer.forgeable, **self.frame}",
        new="tokenizer.forgeable",
        killer="tests/unit/data/tokenize/test_forged_tokens.py::"
        "test_a_text_can_not_forge_a_chosen_end_token_that_is_not_special",
    ),
    Mutant(
        name="a chat forges the end token that was chosen",
        file="ray_ulysses/data/tokenize/chat.py",
        old="self._refused = {**special, **frame}",
        new="self._refused = special",
        killer="tests/unit/data/tokenize/test_forged_tokens.py::"
        "test_a_chat_can_not_forge_a_chosen_end_token_that_is_not_special",
    ),
    Mutant(
        name="a chat template makes the end token of strings",
        file="ray_ulysses/data/tokenize/chat.py",
        old="        if forged is not None:\n",
        new="        if forged is not None and not meant:\n",
        killer="tests/unit/data/tokenize/test_forged_chats.py::"
        "test_a_special_token_made_of_strings_leaves_the_conversation_out",
    ),
    Mutant(
        name="a corpus that is named for staging is deleted",
        file="ray_ulysses/commands/prepare.py",
        old='directory = (staging or cache_folder("prepare")) / stable_hash(str(where))',
        new='directory = staging or cache_folder("prepare") / stable_hash(str(where))',
        killer="tests/unit/commands/test_prepare.py::test_a_corpus_that_is_named_for_staging_stays",
    ),
    Mutant(
        name="calls of tools with the arguments of others",
        file="ray_ulysses/data/sources/extraction.py",
        old="return found if values is not None and pa.types.is_primitive(values.type) else _without_nulls(found)",
        new="return found",
        killer="tests/unit/data/sources/test_messages.py::"
        "test_a_null_is_left_out_where_parquet_filled_it_in_and_kept_where_json_lines_have_it",
    ),
    Mutant(
        name="evaluation rows trained on",
        file="ray_ulysses/data/plan/drawing.py",
        old="return is_taken or length < 2 or _is_held_out(document, key, threshold) != want_held",
        new="return is_taken or length < 2 or (want_held and not _is_held_out(document, key, threshold))",
        killer="tests/unit/data/plan/test_plan.py::test_evaluation_documents_are_never_trained_on",
    ),
    Mutant(
        name="evaluation interval off by one",
        file="ray_ulysses/trainer/loop.py",
        old="return every is not None and (step % every == 0 or is_last)",
        new="return every is not None and ((step - 1) % every == 0 or is_last)",
        killer="tests/unit/trainer/test_step.py::test_what_is_done_every_so_many_steps_is_done_at_their_multiples",
    ),
    Mutant(
        name="checkpoints a step late",
        file="ray_ulysses/trainer/saving.py",
        old="step % section.every_steps == 0",
        new="(step - 1) % section.every_steps == 0",
        killer="tests/unit/trainer/test_triggers.py::test_what_is_due_has_a_reason",
    ),
    Mutant(
        name="the live state written behind training's back",
        file="ray_ulysses/checkpoint/staging.py",
        old="if self._in_place and isinstance(source, ShardedState):",
        new="if isinstance(source, ShardedState):",
        killer="tests/unit/checkpoint/test_background.py::"
        "test_what_is_written_is_the_state_that_was_asked_for_whatever_training_does_meanwhile",
    ),
    Mutant(
        name="a thread that saves and opens the first GPU",
        file="ray_ulysses/checkpoint/background.py",
        old="        choose_device(self._staging.device)\n",
        new="",
        killer="tests/unit/checkpoint/test_background.py::test_the_thread_that_saves_uses_the_ranks_own_gpu",
    ),
    Mutant(
        name="training waits for the memory of a copy",
        file="ray_ulysses/trainer/vaulting.py",
        old="            self._saver.prepare(self._reserve)\n",
        new="            self._reserve()\n",
        killer="tests/unit/trainer/test_vaulting.py::test_training_does_not_wait_for_the_memory_of_a_copy",
    ),
    Mutant(
        name="a state is copied to memory that another thread still makes",
        file="ray_ulysses/checkpoint/background.py",
        old="return is_prepared and self._staging",
        new="return self._staging",
        killer="tests/unit/trainer/test_saving.py::test_training_does_not_wait_for_the_memory_of_a_copy",
    ),
    Mutant(
        name="a child that trains beside what the one before has left on its GPU",
        file="ray_ulysses/supervision/child.py",
        old="            if total - free <= total * _FREE_PART:\n",
        new="            if total:\n",
        killer="tests/unit/supervision/test_free_device.py::test_the_memory_of_the_process_before_is_waited_for",
    ),
    Mutant(
        name="a dead attempt's late checkpoint loaded",
        file="ray_ulysses/checkpoint/fence.py",
        old="return all(start >= step for later, start in self.started_from.items() if later > attempt)",
        new="return True",
        killer="tests/unit/checkpoint/test_fence.py::"
        "test_a_commit_that_slipped_through_is_not_part_of_the_run_and_not_in_the_way",
    ),
    Mutant(
        name="a dead attempt commits",
        file="ray_ulysses/checkpoint/fence.py",
        old="return read_lineage(store).newest_attempt > attempt",
        new="return False",
        killer="tests/unit/checkpoint/test_fence.py::test_a_dead_attempt_can_not_commit_once_another_has_been_claimed",
    ),
    Mutant(
        name="a dead attempt deletes",
        file="ray_ulysses/checkpoint/retention.py",
        old="if lineage.newest_attempt > newest.attempt:",
        new="if False:",
        killer="tests/unit/checkpoint/test_retention.py::test_an_attempt_that_was_overtaken_deletes_nothing",
    ),
    Mutant(
        name="a shard deleted that a faster rank has just written",
        file="ray_ulysses/checkpoint/retention.py",
        old="saving = owner == attempt and step > newest",
        new="saving = False",
        killer="tests/unit/checkpoint/test_background.py::"
        "test_retention_does_not_touch_what_ranks_ahead_of_it_are_writing",
    ),
    Mutant(
        name="shards deleted under a manifest whose answer was lost",
        file="ray_ulysses/checkpoint/save.py",
        old="if found == content:",
        new="if False:",
        killer="tests/unit/checkpoint/test_faults.py::test_a_manifest_whose_answer_was_lost_is_committed",
    ),
    Mutant(
        name="a shard committed unread",
        file="ray_ulysses/checkpoint/save.py",
        old="return shard, find_damage(store, step_folder(step), shard, read_content=True), None",
        new="return shard, None, None",
        killer="tests/unit/checkpoint/test_faults.py::test_bytes_that_change_on_their_way_to_the_disk_are_never_committed",
    ),
    Mutant(
        name="parts of blocks read unverified",
        file="ray_ulysses/checkpoint/load.py",
        old="check_blocks(batch.shard, read_range.stored, sums, blocks, read_range.start)",
        new="None if read_range.first > 0 else "
        "check_blocks(batch.shard, read_range.stored, sums, blocks, read_range.start)",
        killer="tests/unit/checkpoint/test_read_batches.py::"
        "test_a_flip_in_a_part_that_is_read_is_found_and_one_beside_it_is_not_read",
    ),
    Mutant(
        name="the best checkpoint deleted",
        file="ray_ulysses/checkpoint/retention.py",
        old="for _, step in sorted(known)[:num_steps]]",
        new="for _, step in sorted(known, reverse=True)[:num_steps]]",
        killer="tests/unit/checkpoint/test_retention.py::test_the_best_and_every_nth_outlive_the_last",
    ),
    Mutant(
        name="a checkpoint taken though what is not loaded of it is damaged",
        file="ray_ulysses/trainer/resume.py",
        old="    if verify_all:\n",
        new="    if False:\n",
        killer="tests/unit/trainer/test_resume.py::test_a_flipped_byte_anywhere_makes_the_one_before_be_taken",
    ),
    Mutant(
        name="a restart that draws the weights which it replaces",
        file="ray_ulysses/trainer/loop.py",
        old="partition_config(settings), start.description)",
        new="partition_config(settings))",
        killer="tests/distributed/test_resume_without_weights.py::"
        "test_a_restart_goes_on_bitwise_and_draws_and_reads_nothing[zero3-random-tied-fp32]",
    ),
    Mutant(
        name="shared weights that come apart in a restart",
        file="ray_ulysses/engine/model.py",
        old="if parameter not in allocated:",
        new="if True:",
        killer="tests/unit/engine/test_empty_model.py::test_shared_frozen_and_marked_parameters_stay_what_they_are",
    ),
    Mutant(
        name="adapters that each rank draws for itself",
        file="ray_ulysses/engine/adapter.py",
        old="    torch.manual_seed(seed)\n",
        new="",
        killer="tests/unit/engine/test_adapter.py::test_the_first_weights_depend_on_the_seed_alone",
    ),
    Mutant(
        name="a row shorter than a tile makes its gradients in another order",
        file="ray_ulysses/engine/tiled_mlp.py",
        old="""if tile >= num_tokens and not _has_order(self):""",
        new="""if tile >= num_tokens:""",
        killer="tests/unit/engine/test_tiled_mlp.py::"
        "test_gradients_are_ready_in_one_order_whatever_a_rank_has[kept-llama]",
    ),
    Mutant(
        name="a journal's segment that can't be opened is taken for an empty one",
        file="ray_ulysses/tracking/journal_files.py",
        old="if num_bytes is None:",
        new="if False:",
        killer="tests/unit/tracking/test_journal.py::"
        "test_a_segment_that_can_not_be_opened_is_not_taken_for_an_empty_one",
    ),
    Mutant(
        name="MLflow: its database is made where it will be",
        file="ray_ulysses/tracking/mlflow_client.py",
        old="""if database is not None and database.parent.is_dir() and not database.exists():""",
        new="""if False:""",
        killer="tests/unit/tracking/test_mlflow_client.py::test_a_death_among_the_tables_leaves_no_database",
    ),
    Mutant(
        name="nothing before an adapter of MLPs needs a gradient",
        file="ray_ulysses/engine/adapter.py",
        old="""if getattr(model, "_require_grads_hook", None) is None:""",
        new="""if False:""",
        killer="tests/distributed/test_adapter.py::"
        "test_the_gradients_of_every_trained_weight_equal_those_of_one_process",
    ),
    Mutant(
        name="a merged adapter without its scale",
        file="ray_ulysses/export/stream.py",
        old="(product * stored.low_rank.scale)",
        new="product",
        killer="tests/unit/export/test_adapters.py::"
        "test_an_adapter_and_the_merged_model_are_those_of_peft[gemma2-extension-fp32]",
    ),
    Mutant(
        name="a frozen weight counted as trained",
        file="ray_ulysses/planner/state_memory.py",
        old="return -(-shape.trained_parameters // self.world_size)",
        new="return self.shard(shape)",
        killer="tests/unit/planner/test_adapter.py::test_only_trained_weights_have_gradients_and_a_state",
    ),
    Mutant(
        name="a guess at when a failure happened",
        file="ray_ulysses/tracking/run_time.py",
        old='(min(last_record, detected), "unknown_s")',
        new='(min(last_record, detected), "detect_s")',
        killer="tests/unit/tracking/test_run_time.py::test_what_a_journal_does_not_tell_is_unknown",
    ),
    Mutant(
        name="a run begun anew over damaged checkpoints",
        file="ray_ulysses/run/start_point.py",
        old="    elif damaged:\n",
        new="    elif False:\n",
        killer="tests/unit/trainer/test_resume.py::"
        "test_a_run_of_which_nothing_is_whole_does_not_begin_anew_and_nothing_goes",
    ),
    Mutant(
        name="a shard taken for whole because it is listed",
        file="ray_ulysses/checkpoint/choice.py",
        old='        if listed.get(f"{folder}/{shard.file}") == shard.num_bytes:\n',
        new='        if f"{folder}/{shard.file}" in listed:\n',
        killer="tests/unit/checkpoint/test_choice.py::"
        "test_shards_that_are_missing_or_too_short_are_found_by_their_sizes_alone[a-truncated-shard]",
    ),
    Mutant(
        name="a checkpoint set aside that was mended meanwhile",
        file="ray_ulysses/checkpoint/choice.py",
        old="if isinstance(found, Manifest) and found.attempt != damage.attempt:",
        new="if False:",
        killer="tests/unit/checkpoint/test_choice.py::"
        "test_what_was_committed_anew_since_it_was_looked_at_is_not_set_aside",
    ),
    Mutant(
        name="a run that is complete and never said so",
        file="ray_ulysses/run/completion.py",
        old="    if recorded is None and started:\n        _record_found",
        new="    if recorded and started:\n        _record_found",
        killer="tests/unit/run/test_completion.py::"
        "test_an_attempt_that_died_after_its_last_save_is_finished_by_the_next_command",
    ),
    Mutant(
        name="an unreadable checkpoint destroyed",
        file="ray_ulysses/checkpoint/choice.py",
        old='if damage.kind in ("unreadable", "foreign"):',
        new="if False:",
        killer="tests/unit/checkpoint/test_faults.py::test_what_can_not_be_read_now_is_passed_over_and_not_destroyed",
    ),
    Mutant(
        name="a ZeRO-1 partition stored from the parameter's beginning",
        file="ray_ulysses/engine/partition_view.py",
        old="start=begin - position, length=end - begin",
        new="start=0, length=end - begin",
        killer="tests/distributed/test_checkpoint_layouts.py::test_every_stage_and_world_loads_every_other_and_goes_on",
    ),
    Mutant(
        name="the moments of another run taken with its weights",
        file="ray_ulysses/run/recovery.py",
        old='with_optimizer=resume_state == "optimizer"',
        new="with_optimizer=True",
        killer="tests/distributed/test_saving.py::test_a_run_of_another_context_length_starts_from_the_weights",
    ),
    Mutant(
        name="a document trained on again after a branch",
        file="ray_ulysses/data/plan/drawing.py",
        old="is_taken = taken.size > 0 and taken[document]",
        new="is_taken = False",
        killer="tests/unit/data/plan/test_branches.py::test_every_target_is_trained_once_an_epoch_through_any_branches",
    ),
    Mutant(
        name="what a branch left of a document lost",
        file="ray_ulysses/data/plan/stages.py",
        old="pieces.take(np.flatnonzero(~is_trained & is_split[pieces.document]))",
        new="pieces.take(np.flatnonzero(~is_trained & ~is_split[pieces.document]))",
        killer="tests/unit/data/plan/test_branches.py::test_every_target_is_trained_once_an_epoch_through_any_branches",
    ),
    Mutant(
        name="a label outside its span",
        file="ray_ulysses/data/read/reader.py",
        old="may_be = True if weights is None else weights > 0",
        new="may_be = True",
        killer="tests/unit/data/read/test_spans_in_rows.py::test_labels_are_the_spans_at_every_split",
    ),
    Mutant(
        name="a span read one token late",
        file="ray_ulysses/data/read/reader.py",
        old="first_label = piece.start + inside + 1\n",
        new="first_label = piece.start + inside\n",
        killer="tests/unit/data/read/test_spans_in_rows.py::test_labels_are_the_spans_at_every_split",
    ),
    Mutant(
        name="lost tokens not counted",
        file="ray_ulysses/data/plan/drawing.py",
        old="lost = length - capacity - 1",
        new="lost = 0",
        killer="tests/unit/data/plan/test_plan.py::test_what_becomes_of_overlong_documents_is_counted",
    ),
    Mutant(
        name="a source walked from its start in every epoch",
        file="ray_ulysses/data/plan/planning.py",
        old="uses += chosen",
        new="uses += False",
        killer="tests/unit/data/plan/test_mixture.py::test_a_source_goes_on_where_it_stopped",
    ),
    Mutant(
        name="what a run has used of a source forgotten by a branch",
        file="ray_ulysses/data/plan/stages.py",
        old="uses += begun",
        new="uses += False",
        killer="tests/unit/data/plan/test_rounds.py::test_documents_are_not_repeated_after_a_change_of_weights",
    ),
    Mutant(
        name="resume at the wrong row, cursor",
        file="ray_ulysses/data/plan/plan.py",
        old="local = min((step - segment.base_step) * segment.settings.rows_per_step, segment.train.num_rows)",
        new="local = max(0, step - segment.base_step - 1) * segment.settings.rows_per_step",
        killer="tests/unit/data/plan/test_plan.py::test_cursors_name_the_next_row_and_are_recognised",
    ),
    Mutant(
        name="resume at the wrong row, a stream that restarts at row 0",
        file="ray_ulysses/data/read/row_source.py",
        old="ReadAhead(self._slices_from(step), self._prefetch_rows)",
        new="ReadAhead(self._slices_from(1), self._prefetch_rows)",
        killer="tests/unit/data/read/test_row_source.py::test_a_source_starts_at_every_step",
    ),
    Mutant(
        name="a schedule that follows where the run stops",
        file="ray_ulysses/engine/optimizer.py",
        old="(step - first) / max(1, horizon_steps - first)",
        new="(step - first) / max(1, min(horizon_steps, 6) - first)",
        killer="tests/unit/engine/test_optimizer.py::test_the_rate_warms_up_linearly_and_falls_along_half_a_cosine",
    ),
    Mutant(
        name="missing weights drawn at random",
        file="ray_ulysses/engine/model.py",
        old='    _refuse_missing(loaded[1]["missing_keys"], path)\n',
        new="",
        killer="tests/unit/engine/test_model.py::test_weights_that_lack_a_tensor_are_refused_and_not_drawn",
    ),
    Mutant(
        name="a sequence-parallel group torn over two nodes",
        file="ray_ulysses/elastic/placement.py",
        old="workers = min(room[node], wanted.most - sum(placed.values())) // sp_size * sp_size",
        new="workers = min(room[node], wanted.most - sum(placed.values()))",
        killer="tests/unit/elastic/test_placement.py::test_every_placement_is_a_world_that_fits",
    ),
    Mutant(
        name="groups larger than a node: no more workers than the fewest",
        file="ray_ulysses/elastic/placement.py",
        old="missing = max(wanted.least, spanned) -",
        new="missing = wanted.least -",
        killer="tests/unit/elastic/test_placement.py::test_groups_larger_than_a_node_take_all_nodes",
    ),
    Mutant(
        name="a lost worker that is only stopped keeps its place, and may go on",
        file="ray_ulysses/cluster/scaling.py",
        old="        _kill(actors)\n        for number in actors:",
        new="        for number in actors:",
        killer="tests/unit/cluster/test_joining.py::test_the_place_of_a_worker_that_is_lost_is_taken_by_one_that_joins",
    ),
    Mutant(
        name="a restart for every node that drains",
        file="ray_ulysses/elastic/placement.py",
        old="    if waited_s < (LEAVE_S if leaves else SETTLE_S):\n        return seen, None\n    settled",
        new="    settled",
        killer="tests/unit/elastic/test_sizing.py::test_nodes_that_drain_one_after_the_other_cost_one_restart",
    ),
    Mutant(
        name="a run that shrinks below its fewest workers",
        file="ray_ulysses/elastic/placement.py",
        old="if possible is None or not (leaves",
        new="if not (leaves",
        killer="tests/unit/elastic/test_sizing.py::test_a_run_that_would_be_left_with_too_few_workers_trains_on",
    ),
    Mutant(
        name="a fault that returns before anything new is saved is never charged",
        file="ray_ulysses/cluster/failures.py",
        old="newest_step > own.resumed_step",
        new="newest_step >= own.resumed_step",
        killer="tests/unit/cluster/test_failures.py"
        "::test_workers_that_form_again_are_not_charged_for_where_the_attempt_moved_the_run_on",
    ),
    Mutant(
        name="members form again for every node that joins, where nobody was started",
        file="ray_ulysses/cluster/scaling.py",
        old="        if more:",
        new="        if False:",
        killer="tests/unit/cluster/test_scaling.py"
        "::test_a_run_grows_onto_a_node_that_joins_once_the_workers_there_are_ready",
    ),
    Mutant(
        name="members are asked to move before those that join are there",
        file="ray_ulysses/cluster/scaling.py",
        old="            if self._joining.have_joined(group, now):\n                self._move()",
        new="            self._joining.have_joined(group, now)\n            self._move()",
        killer="tests/unit/cluster/test_scaling.py"
        "::test_a_run_grows_onto_a_node_that_joins_once_the_workers_there_are_ready",
    ),
    Mutant(
        name="a run whose workers all joined later is taken for finished",
        file="ray_ulysses/cluster/controller.py",
        old="                statuses[0].running = True",
        new="                pass",
        killer="tests/unit/cluster/test_scaling.py::test_workers_that_joined_later_train_on_when_all_of_rays_are_lost",
    ),
    Mutant(
        name="children that are started beside those of the generation before",
        file="ray_ulysses/elastic/reform.py",
        old="    if running and waited_s < 2 * group.end_s:\n        return group, ()\n    for worker in running:\n",
        new="    for worker in ():\n",
        killer="tests/unit/elastic/test_reform.py::test_on_any_history_one_generation_trains_and_it_is_never_stuck",
    ),
    Mutant(
        name="a supervisor that is silent is waited for without end",
        file="ray_ulysses/elastic/reform.py",
        old="    if running and waited_s < 2 * group.end_s:\n",
        new="    if running:\n",
        killer="tests/unit/elastic/test_reform.py::test_a_supervisor_that_does_not_stop_its_child_is_lost",
    ),
    Mutant(
        name="a late report of the generation before is taken for one of this",
        file="ray_ulysses/elastic/reform.py",
        old="if event.generation != group.generation or worker.place is None or worker.report is not None:",
        new="if worker.place is None or worker.report is not None:",
        killer="tests/unit/elastic/test_reform.py::test_reports_of_a_generation_that_is_over_change_nothing",
    ),
    Mutant(
        name="workers of nodes that are dead or draining train on",
        file="ray_ulysses/elastic/reform.py",
        old="worker.is_there and worker.place is not None and worker.place.node not in unusable:",
        new="worker.is_there and worker.place is not None:",
        killer="tests/unit/elastic/test_reform.py"
        "::test_members_that_were_asked_to_move_go_on_without_the_node_that_leaves",
    ),
    Mutant(
        name="lost workers are members again",
        file="ray_ulysses/elastic/reform.py",
        old="        if worker.is_there and worker.place is not None and worker.place.node not in unusable:",
        new="        if worker.place is not None and worker.place.node not in unusable:",
        killer="tests/unit/elastic/test_reform.py::test_a_lost_node_leaves_the_whole_groups_of_the_others",
    ),
    Mutant(
        name="a fault that ends every attempt before its first step is retried for ever",
        file="ray_ulysses/elastic/reform.py",
        old="        if group.failed_forms < MOST_FAILED_FORMS:",
        new="        if True:",
        killer="tests/unit/elastic/test_reform.py::test_two_generations_without_a_step_are_left_to_ray",
    ),
    Mutant(
        name="the same error at the same step is no reason to end",
        file="ray_ulysses/elastic/reform.py",
        old="    if raised is not None and raised.returns(group.last_raised):",
        new="    if False:",
        killer="tests/unit/elastic/test_reform.py"
        "::test_an_error_at_the_same_step_twice_is_final_and_at_another_step_is_not",
    ),
    Mutant(
        name="a node whose GPU has failed trains on",
        file="ray_ulysses/elastic/reform.py",
        old="(group.unusable - but) | group.broken",
        new="group.unusable - but",
        killer="tests/unit/elastic/test_reform.py"
        "::test_a_node_whose_gpu_has_failed_is_left_and_its_rows_are_not_at_fault",
    ),
    Mutant(
        name="a worker that joins trains untested",
        file="ray_ulysses/elastic/reform.py",
        old="is_tested=tested.issuperset(members)",
        new="is_tested=group.generation > 1",
        killer="tests/unit/elastic/test_reform.py::test_workers_are_tested_again_with_one_that_has_joined",
    ),
    Mutant(
        name="a consequence is judged before its cause is seen",
        file="ray_ulysses/elastic/reform.py",
        old="and waited_s < CAUSE_S:",
        new="and waited_s < 0.0:",
        killer="tests/unit/elastic/test_reform.py::test_the_cause_of_consequences_is_waited_for_and_not_for_ever",
    ),
    Mutant(
        name="a stage that ends the run where its nodes are draining",
        file="ray_ulysses/elastic/reform.py",
        old="formed or (_start(group, group.members) if is_stage else None)",
        new="formed",
        killer="tests/unit/elastic/test_reform.py::test_a_stage_ends_no_run_whose_nodes_are_all_to_go",
    ),
    Mutant(
        name="a stage that ends the run",
        file="ray_ulysses/elastic/reform.py",
        old='is_stage = statuses == {"stage"}',
        new="is_stage = False",
        killer="tests/unit/elastic/test_reform.py::test_the_end_of_a_stage_begins_the_next_on_the_same_workers",
    ),
    Mutant(
        name="a border of stages without a checkpoint",
        file="ray_ulysses/trainer/saving.py",
        old="step >= last_step and ends_stage)",
        new="False)",
        killer="tests/unit/trainer/test_triggers.py::test_the_end_of_a_stage_is_saved_whatever_the_rules",
    ),
    Mutant(
        name="a stage that begins one step before the last of the one before",
        file="ray_ulysses/data/plan/stages.py",
        old="_next(plan, plan.num_steps, stages[number]",
        new="_next(plan, plan.num_steps - 1, stages[number]",
        killer="tests/unit/data/plan/test_stages.py::test_a_stage_of_tokens_ends_with_the_step_that_reaches_them",
    ),
    Mutant(
        name="a stage of tokens that ends one step late",
        file="ray_ulysses/data/plan/planning.py",
        old="int(np.searchsorted(ends, left)) + 1",
        new="int(np.searchsorted(ends, left)) + 2",
        killer="tests/unit/data/plan/test_stages.py::test_a_stage_of_tokens_ends_with_the_step_that_reaches_them",
    ),
    Mutant(
        name="a run at a border that stays in the stage before",
        file="ray_ulysses/planner/stages.py",
        old="plan.stage_of_step(step + 1) if",
        new="plan.stage_of_step(max(step, 1)) if",
        killer="tests/unit/run/test_stages.py::test_a_run_at_a_border_is_in_the_stage_that_follows",
    ),
    Mutant(
        name="a schedule of its own that is counted from the run's beginning",
        file="ray_ulysses/planner/stages.py",
        old="schedule_start=first_step if has_own else 0,",
        new="schedule_start=0,",
        killer="tests/unit/run/test_stages.py::test_a_run_at_a_border_is_in_the_stage_that_follows",
    ),
    Mutant(
        name="a begun stage whose schedule becomes its own",
        file="ray_ulysses/config/resume.py",
        old="if (had_own := _has_own_schedule(old, number)) != _has_own_schedule(new, number):",
        new="if (had_own := _has_own_schedule(old, number)) and not _has_own_schedule(new, number):",
        killer="tests/unit/config/test_stages.py::test_a_branch_changes_the_data_of_the_present_and_all_that_is_to_come",
    ),
    Mutant(
        name="an older checkpoint exported with the context of a later branch",
        file="ray_ulysses/forensics/run_data.py",
        old="plan.segments[plan.segment_of_step(step)].settings.context_tokens",
        new="plan.settings.context_tokens",
        killer="tests/unit/export/test_planned_data.py::"
        "test_a_checkpoint_from_before_a_branch_has_the_context_of_its_own_steps",
    ),
    Mutant(
        name="the tokenizer's chat template exported, not the one that was trained",
        file="ray_ulysses/export/tokenizer_files.py",
        old="if (template := prepared.template) not in (None, own):",
        new="if (template := prepared.template) is not None and own is None:",
        killer="tests/unit/export/test_chat_template.py::test_a_template_that_was_edited_since_is_exported_as_it_was",
    ),
    Mutant(
        name="a warm-up of a stage held against the steps of the whole run",
        file="ray_ulysses/planner/notes.py",
        old="stage.schedule_end(plan.num_steps) - stage.schedule_start",
        new="stage.schedule_end(plan.num_steps)",
        killer="tests/unit/run/test_stages.py::"
        "test_notes_look_at_each_stage_with_its_own_horizon_and_its_own_checkpoints",
    ),
    Mutant(
        name="memory of the last stage alone",
        file="ray_ulysses/planner/search.py",
        old="fit = all(fits(own, configured_memory(own, shape)) for own in stage_configs(changed))",
        new="fit = fits(changed, configured_memory(changed, shape))",
        killer="tests/unit/planner/test_choice.py::test_what_is_chosen_fits_in_every_stage",
    ),
    Mutant(
        name="losses of different stages compared",
        file="ray_ulysses/checkpoint/retention.py",
        old="return self.stage, self.measured",
        new='return "", self.measured',
        killer="tests/unit/checkpoint/test_retention.py::test_the_best_are_those_of_each_stage",
    ),
    Mutant(
        name="a border counted as a recovery",
        file="ray_ulysses/tracking/run_time.py",
        old='command.pause = "stages_s" if event.reason == STAGE else "recovery_s"',
        new='command.pause = "recovery_s"',
        killer="tests/unit/tracking/test_run_time.py::"
        "test_the_time_between_two_stages_is_no_recovery_and_a_failure_there_is",
    ),
    Mutant(
        name="the costliest rows among the losses that check compares",
        file="ray_ulysses/forensics/check_report.py",
        old="for one in trial.steps[1:] if",
        new="for one in trial.steps if",
        killer="tests/unit/forensics/test_check_report.py::"
        "test_the_first_step_of_the_costliest_rows_is_not_held_against_the_others",
    ),
    Mutant(
        name="an optimizer that is never reset",
        file="ray_ulysses/trainer/resume.py",
        old="if not stage.begins_anew or chosen.position.step != stage.first_step:",
        new="if True:",
        killer="tests/unit/trainer/test_resume.py::test_a_stage_that_resets_the_optimizer_takes_no_moments_at_its_border",
    ),
    Mutant(
        name="members that move restart through Ray",
        file="ray_ulysses/elastic/reform.py",
        old='(group.moves and statuses == {"resized"})',
        new="False",
        killer="tests/unit/elastic/test_reform.py"
        "::test_members_that_were_asked_to_move_go_on_without_the_node_that_leaves",
    ),
    Mutant(
        name="a stop of the user is taken for a move",
        file="ray_ulysses/elastic/reform.py",
        old='(group.moves and statuses == {"resized"})',
        new="group.moves",
        killer="tests/unit/elastic/test_reform.py::test_a_stop_that_overtakes_a_move_ends_the_run",
    ),
    Mutant(
        name="an announced loss is charged as a failure",
        file="ray_ulysses/elastic/reform.py",
        old='kind="preempted" if is_announced else "lost",',
        new='kind="lost",',
        killer="tests/unit/elastic/test_reform.py::test_a_draining_node_that_dies_is_a_preemption",
    ),
    Mutant(
        name="children start before every worker has joined",
        file="ray_ulysses/elastic/reform.py",
        old="all(worker.is_there for worker in group.workers.values()):",
        new="any(worker.is_there for worker in group.workers.values()):",
        killer="tests/unit/elastic/test_reform.py::test_children_start_when_all_workers_have_joined_in_rays_order",
    ),
    Mutant(
        name="a worker that is lost while the others stop is not missed",
        file="ray_ulysses/elastic/reform.py",
        old='if event.worker not in group.members or group.phase not in ("training", "stopping"):',
        new='if event.worker not in group.members or group.phase != "training":',
        killer="tests/unit/elastic/test_reform.py::test_the_cause_of_consequences_is_waited_for_and_not_for_ever",
    ),
    Mutant(
        name="growth at any cost",
        file="ray_ulysses/elastic/placement.py",
        old="return saved_s >= _GAIN_PER_COST * restart_s",
        new="return saved_s >= 0.0",
        killer="tests/unit/elastic/test_growth.py::test_growth_must_save_ten_times_what_it_costs",
    ),
    Mutant(
        name="places of the workers that are replaced counted as taken",
        file="ray_ulysses/cluster/scaling.py",
        old="Counter(self._placed if self._holds_room else {})",
        new="Counter()",
        killer="tests/unit/cluster/test_scaling.py::test_a_lost_node_leaves_a_smaller_run_at_once",
    ),
    Mutant(
        name="a resize that ends the run",
        file="ray_ulysses/cluster/scaling.py",
        old='one.error = one.error or Resized("the workers are started again at another number")',
        new="pass",
        killer="tests/unit/cluster/test_scaling.py::test_a_resize_that_all_have_ended_for_restarts_the_run",
    ),
    Mutant(
        name="a cloud's deadline read on the wrong clock",
        file="ray_ulysses/elastic/notices.py",
        old="self.received_at + server_time - self.server_time",
        new="server_time",
        killer="tests/unit/elastic/test_notices.py::test_aws_gives_a_deadline_on_its_own_clock",
    ),
    Mutant(
        name="another machine's preemption taken for this one's",
        file="ray_ulysses/elastic/notices.py",
        old="is_end and isinstance(resources, list) and machine in resources",
        new="is_end and isinstance(resources, list)",
        killer="tests/unit/elastic/test_notices.py::test_azure_gives_the_soonest_end_of_this_machine",
    ),
    Mutant(
        name="a preemption token that is never renewed",
        file="ray_ulysses/cluster/node_watch.py",
        old="            self._token = None\n        raise",
        new="            pass\n        raise",
        killer="tests/unit/cluster/test_metadata_service.py::test_a_token_is_asked_for_once_and_again_when_it_has_expired",
    ),
    Mutant(
        name="a step that DeepSpeed leaves out as its gradient is not finite counted as trained",
        file="ray_ulysses/trainer/step.py",
        old="math.isfinite(loss_sum) and num_bad_norms == 0",
        new="math.isfinite(loss_sum)",
        killer="tests/unit/trainer/test_step.py::test_a_gradient_that_is_not_finite_is_seen_under_a_finite_loss",
    ),
    Mutant(
        name="rows of a bad step that come back with the next branch",
        file="ray_ulysses/data/plan/stages.py",
        old="return range(branch.skipped[0] - before.base_row, branch.skipped[1] - before.base_row)",
        new="return range(0)",
        killer="tests/unit/data/plan/test_branches.py::"
        "test_rows_that_are_left_out_are_trained_in_no_later_segment_of_their_epoch_and_nothing_else_is_lost",
    ),
    Mutant(
        name="a spike that counts for the spikes after it",
        file="ray_ulysses/elastic/outliers.py",
        old="return middle + mads * max(spread, _LEAST_SPREAD * abs(middle))",
        new="return middle + mads * max(window)",
        killer="tests/unit/elastic/test_spikes.py::test_a_loss_far_above_the_newest_ones_is_a_spike",
    ),
    Mutant(
        name="a hang blamed on the rank that is ahead",
        file="ray_ulysses/elastic/hang.py",
        old="least = min(",
        new="least = max(",
        killer="tests/unit/elastic/test_hang.py::test_the_rank_that_the_others_wait_for_is_named",
    ),
    Mutant(
        name="a hang found in an evaluation that is longer than a step",
        file="ray_ulysses/elastic/hang.py",
        old='"evaluation": limits.evaluation_s,',
        new='"evaluation": step_bound_s(step_seconds, limits),',
        killer="tests/unit/elastic/test_hang.py::"
        "test_a_rank_that_still_evaluates_saves_or_starts_is_given_the_time_for_that",
    ),
    Mutant(
        name="a slow node that is left though the others have no room",
        file="ray_ulysses/cluster/scaling.py",
        old="            room = self._room({node: nodes[node] for node in some}, self._held)\n",
        new="            room = dict.fromkeys(some, 1000)\n",
        killer="tests/unit/cluster/test_scaling.py::test_a_slow_node_is_better_than_too_few_workers",
    ),
    Mutant(
        name="a slow node that is taken back when another is left",
        file="ray_ulysses/cluster/scaling.py",
        old="left = announced | (frozenset(placed) - frozenset(nodes))",
        new="left = frozenset(placed) - frozenset(nodes)",
        killer="tests/unit/cluster/test_scaling.py::test_a_node_that_was_left_is_not_taken_back_when_another_is_left",
    ),
    Mutant(
        name="a slow rank that is never measured",
        file="ray_ulysses/trainer/compute_watch.py",
        old="waited_s >= WINDOW_S",
        new="waited_s < 0",
        killer="tests/unit/trainer/test_compute_watch.py::test_ranks_are_measured_at_most_every_30_s",
    ),
    Mutant(
        name="a straggler counted over windows that are not in a row",
        file="ray_ulysses/elastic/outliers.py",
        old="        if middle > 0 and seconds > RATIO * middle\n",
        new="        if (middle > 0 and seconds > RATIO * middle) or rank in windows\n",
        killer="tests/unit/elastic/test_stragglers.py::test_a_window_at_the_others_pace_starts_the_count_anew",
    ),
    Mutant(
        name="a child that starts although its start was taken back while the one before ended",
        file="ray_ulysses/supervision/supervisor.py",
        old="                    self._next = None\n",
        new="",
        killer="tests/unit/supervision/test_supervisor.py::test_a_start_that_waits_for_the_child_before_can_be_taken_back",
    ),
    Mutant(
        name="a failure judged again by Ray while the coordinator's judge is late",
        file="ray_ulysses/cluster/failures.py",
        old="        with self._lock:\n            failure = self._verdict",
        new="        if True:\n            failure = self._verdict",
        killer="tests/unit/cluster/test_failures.py::"
        "test_a_judgement_that_the_coordinator_did_not_wait_for_is_waited_for_by_ray",
    ),
    Mutant(
        name="the judgement of a failure of workers before taken for that of others",
        file="ray_ulysses/cluster/controller.py",
        old="        self._judge.forget()\n",
        new="",
        killer="tests/unit/cluster/test_failures.py::"
        "test_the_judgement_of_workers_before_is_not_taken_for_that_of_others",
    ),
    Mutant(
        name="a stop while the command connects to Ray again gives up what peer memory alone holds",
        file="ray_ulysses/cluster/signals.py",
        old="        if not self._has_workers:\n            self._steps.forget()",
        new="        self._steps.forget()",
        killer="tests/unit/cluster/test_signals.py"
        "::test_steps_in_peer_memory_are_saved_if_the_stop_comes_while_the_command_connects_to_ray_again",
    ),
    Mutant(
        name="SIGTERM ends a command without a word once Ray is connected",
        file="ray_ulysses/cluster/session.py",
        old="    _handle({number: interrupt if one == signal.SIG_DFL else one for number, one in before.items()})\n",
        new="",
        killer="tests/unit/cluster/test_session.py::test_sigterm_does_what_it_did_before_ray_or_interrupts",
    ),
    Mutant(
        name="a stop after a failure that gives up what peer memory alone holds",
        file="ray_ulysses/cluster/signals.py",
        old='                    self._state, self._kept_step = "kept", event.memory_step\n',
        new="                    pass\n",
        killer="tests/unit/cluster/test_signals.py::"
        "test_steps_that_peer_memory_alone_holds_are_saved_before_the_command_ends[failed]",
    ),
    Mutant(
        name="a shard of the peer memory without its second copy",
        file="ray_ulysses/vault/store.py",
        old="                if partner != writer and self._is_copied(key, writer, partner):\n",
        new="                if partner != writer:\n",
        killer="tests/unit/vault/test_store.py::test_any_single_agent_may_be_lost[a]",
    ),
    Mutant(
        name="a copy sent to the partner that has died in the place of the one that was started there",
        file="ray_ulysses/vault/agent.py",
        old="        client.drop_ended()\n",
        new="",
        killer="tests/unit/vault/test_store.py::"
        "test_a_partner_that_was_started_again_at_its_address_gets_the_next_copy",
    ),
    Mutant(
        name="small chunks written over by those that are joined to them",
        file="ray_ulysses/vault/client.py",
        old="            joined[filled : filled + len(view)] = view\n",
        new="            joined[: len(view)] = view\n",
        killer="tests/unit/vault/test_agent.py::"
        "test_a_file_is_its_chunks_whatever_their_sizes_and_whoever_yields_them_reuses_the_memory[small]",
    ),
    Mutant(
        name="an overtaken attempt drops what its successor kept meanwhile",
        file="ray_ulysses/trainer/vaulting.py",
        old="                self._take_over(store, listed)\n",
        new="                self._take_over(store, self._listed(store))\n",
        killer="tests/unit/trainer/test_vaulting.py::test_what_a_newer_attempt_keeps_meanwhile_is_not_dropped",
    ),
    Mutant(
        name="agents that do not answer hold up the states that others keep",
        file="ray_ulysses/vault/store.py",
        old="self._looks.submit(self._readmit, node)",
        new="self._threads.submit(self._readmit, node)",
        killer="tests/unit/vault/test_store.py::test_agents_that_do_not_answer_hold_up_no_state_that_others_keep",
    ),
    Mutant(
        name="an agent that is started again in the middle of training gets a third of what training has left",
        file="ray_ulysses/cluster/vault_agents.py",
        old="limit_bytes or known.limit_bytes or None",
        new="limit_bytes",
        killer="tests/cluster/one_ray/test_vault_agents.py::"
        "test_an_agent_outlives_a_killed_driver_and_ends_with_the_run",
    ),
    Mutant(
        name="an agent as patient with a frozen partner as whoever waits for both",
        file="ray_ulysses/vault/agent.py",
        old="AgentClient(to, self._token, progress_s=PARTNER_S)",
        new="AgentClient(to, self._token)",
        killer="tests/unit/vault/test_store.py::"
        "test_of_a_frozen_partner_and_the_agent_that_waits_for_it_the_partner_is_left_out[in the middle]",
    ),
    Mutant(
        name="a manifest of the peer memory decided by whichever agent is near",
        file="ray_ulysses/vault/store.py",
        old="self._first(sorted(self.nodes), ",
        new="self._first(self.nodes, ",
        killer="tests/unit/vault/test_store.py::"
        "test_a_manifest_is_seen_by_all_from_its_decision_on_although_its_writer_died_before_spreading_it",
    ),
    Mutant(
        name="a state overwritten while an agent keeps it",
        file="ray_ulysses/vault/files.py",
        old="        return self._mapped[self.num_bytes :] != LENT\n",
        new="        return True\n",
        killer="tests/unit/vault/test_lent_memory.py::test_staging_leaves_a_state_alone_until_its_successor_is_kept",
    ),
    Mutant(
        name="lent memory never returned",
        file="ray_ulysses/vault/files.py",
        old="        os.pwrite(self._descriptor, RETURNED, self.num_bytes)\n",
        new="",
        killer="tests/unit/vault/test_lent_memory.py::test_a_buffer_is_lent_until_its_file_and_the_files_readers_are_gone",
    ),
    Mutant(
        name="lent memory without a limit",
        file="ray_ulysses/vault/files.py",
        old="        self._files.charge(num_bytes)\n",
        new="",
        killer="tests/unit/vault/test_lent_memory.py::test_a_file_beyond_the_limit_is_refused_and_its_buffer_returned",
    ),
    Mutant(
        name="memory that a dead agent had written again",
        file="ray_ulysses/checkpoint/staging.py",
        old="            self._forget(number)\n        return False\n",
        new="            return True\n        return False\n",
        killer="tests/unit/vault/test_lent_memory.py::test_staging_takes_new_memory_where_an_agent_is_gone_with_the_old",
    ),
    Mutant(
        name="a buffer waited for without end",
        file="ray_ulysses/vault/files.py",
        old=" or self._owner.is_overdue(self)\n",
        new="\n",
        killer="tests/unit/vault/test_lent_memory.py::test_a_buffer_whose_file_outlasts_its_successor_is_given_up",
    ),
    Mutant(
        name="the newest state given up as overdue",
        file="ray_ulysses/vault/files.py",
        old="        if self._newest is not None and self._newest() is buffer:\n",
        new="        if self._newest is not None and self._newest() is None:\n",
        killer="tests/unit/vault/test_lent_memory.py::test_a_buffer_whose_file_outlasts_its_successor_is_given_up",
    ),
    Mutant(
        name="a worker that joins too late waits for ever",
        file="ray_ulysses/supervision/coordinator.py",
        old='        if present.group.phase == "ended":\n            # It is late',
        new="        if False:\n            # It is late",
        killer="tests/unit/supervision/test_coordinator.py::test_workers_that_join_after_the_end_are_told_so",
    ),
    Mutant(
        name="a stopped supervisor holds up the end of the run",
        file="ray_ulysses/cluster/controller.py",
        old='is_silent = group.phase == "ended" and group.workers[worker].is_lost',
        new="is_silent = False",
        killer="tests/unit/cluster/test_scaling.py::"
        "test_a_worker_that_failed_counts_as_ended_only_once_that_is_decided",
    ),
    Mutant(
        name="failures that the journal refuses are not counted",
        file="ray_ulysses/cluster/failures.py",
        old="            self.unrecorded.append(failure)\n",
        new="            pass\n",
        killer="tests/unit/cluster/test_failures.py::test_failures_that_the_journal_refused_count_once_and_in_their_order",
    ),
    Mutant(
        name="failures that were written all the same are counted twice",
        file="ray_ulysses/cluster/failures.py",
        old=" if one.time not in known)",
        new=")",
        killer="tests/unit/cluster/test_failures.py::test_failures_that_the_journal_refused_count_once_and_in_their_order",
    ),
    Mutant(
        name="a stop that was taken for a resize is not asked for again",
        file="ray_ulysses/cluster/signals.py",
        old="            raise KeyboardInterrupt\n        self._ask_again()\n",
        new="            raise KeyboardInterrupt\n",
        killer="tests/unit/cluster/test_signals.py::test_a_step_is_saved_before_the_command_ends",
    ),
    Mutant(
        name="stacks of a false alarm told of the next hang",
        file="ray_ulysses/supervision/coordinator.py",
        old="self._asked_at, self._stacks, self._left = now, {}, {}",
        new="self._asked_at = now",
        killer="tests/unit/supervision/test_hang_watch.py::test_stacks_of_a_false_alarm_are_not_those_of_the_next",
    ),
    Mutant(
        name="a stopped launcher is not looked at",
        file="ray_ulysses/supervision/supervisor.py",
        old="{PROCESS_STOPPED: self.pid, LAUNCHER_STOPPED: launcher}",
        new="{PROCESS_STOPPED: self.pid}",
        killer="tests/unit/supervision/test_watched_child.py::test_what_is_stopped_for_a_second_is_named",
    ),
    Mutant(
        name="an agent without a thread for a connection takes no other one",
        file="ray_ulysses/vault/agent.py",
        old="            except RuntimeError:\n                # There are too many",
        new="            except KeyError:\n                # There are too many",
        killer="tests/unit/vault/test_agent.py::test_a_connection_for_which_there_is_no_thread_is_not_the_last_one",
    ),
    Mutant(
        name="where a file was found is forgotten at once",
        file="ray_ulysses/vault/store.py",
        old="            self._holders[key] = node\n            return found\n",
        new="            return found\n",
        killer="tests/unit/vault/test_store.py::test_where_a_file_was_found_is_asked_first_for_the_rest_of_it",
    ),
    Mutant(
        name="a checkpoint is committed while records of its steps wait in memory",
        file="ray_ulysses/trainer/record.py",
        old="            self._flush()\n            self._journal.sync()\n",
        new="            self._journal.sync()\n",
        killer="tests/unit/trainer/test_record.py::test_no_checkpoint_relies_on_records_that_are_still_to_be_written",
    ),
    Mutant(
        name="a store is first asked for requests after a while",
        file="ray_ulysses/run/requests.py",
        old="        if not self._is_near:\n            self._calls.ask(self._look)\n",
        new="",
        killer="tests/unit/run/test_requests.py::"
        "test_what_was_asked_before_is_seen_at_once_however_rarely_a_store_is_asked",
    ),
    Mutant(
        name="a manifest made by one call",
        file="ray_ulysses/checkpoint/manifest.py",
        old='pieces += [b"," if number else b"", _ENCODER.encode(_shard_to_json(shard)).encode()]',
        new="pass\n    pieces.append(_ENCODER.encode([*map(_shard_to_json, shards)])[1:-1].encode())",
        killer="tests/unit/checkpoint/test_manifest.py::"
        "test_each_call_that_makes_a_manifest_makes_a_shard_of_it_at_most",
    ),
    Mutant(
        name="a shard's layout remembered without its dtypes",
        file="ray_ulysses/checkpoint/shards.py",
        old="@lru_cache(maxsize=4)\n",
        new="@(lambda make: lambda held, known={}: known.setdefault(tuple(one[:3] for one in held), make(held)))\n",
        killer="tests/unit/checkpoint/test_shards.py::"
        "test_shards_that_differ_in_one_thing_only_each_have_their_own_header",
    ),
    Mutant(
        name="a self-test that one wrong process passes",
        file="ray_ulysses/engine/self_test.py",
        old="    return max(least, 2 * own_error) if math.isfinite(own_error) else least\n",
        new="    return max(least, 2 * own_error)\n",
        killer="tests/unit/engine/test_self_test.py::test_one_process_that_is_wrong_itself_makes_no_other_right",
    ),
    Mutant(
        name="pages of headers kept for the partner's copies",
        file="ray_ulysses/vault/files.py",
        old="            if file.is_large and file.pages.num_bytes",
        new="            if file.pages.num_bytes",
        killer="tests/unit/vault/test_lent_memory.py::test_neither_descriptors_nor_memory_grow_from_state_to_state",
    ),
    Mutant(
        name="others held up while memory is cleared",
        file="ray_ulysses/vault/files.py",
        old="        threading.Thread(target=close, name=",
        new="        threading.Thread(target=close() or bool, name=",
        killer="tests/unit/vault/test_lent_memory.py::"
        "test_memory_that_no_process_has_any_more_is_cleared_without_holding_up_others",
    ),
    Mutant(
        name="a buffer overdue from its file on",
        file="ray_ulysses/vault/files.py",
        old="weakref.ref(buffer), None\n",
        new="weakref.ref(buffer), self._clock.monotonic()\n",
        killer="tests/unit/vault/test_lent_memory.py::test_a_buffer_whose_file_outlasts_its_successor_is_given_up",
    ),
    Mutant(
        name="extents of lent memory joined over a gap",
        file="ray_ulysses/vault/client.py",
        old="        if self.extents and sum(self.extents[-1]) == offset:\n",
        new="        if self.extents:\n",
        killer="tests/unit/vault/test_lent_memory.py::test_a_file_is_its_chunks_whichever_of_them_are_lent[l4 gap l4]",
    ),
    Mutant(
        name="a chunk of the peer memory kept unverified",
        file="ray_ulysses/vault/files.py",
        old="        if checksum(room) != wanted:\n",
        new="        if checksum(room) != wanted and not room:\n",
        killer="tests/unit/vault/test_agent.py::test_a_chunk_that_arrived_damaged_is_refused_and_its_memory_given_back",
    ),
    Mutant(
        name="files of an object store kept beside one that was deleted meanwhile",
        file="ray_ulysses/storage/object_store.py",
        old="            for key in keys if len(keys) > 1 else ():\n",
        new="            for key in ():\n",
        killer="tests/unit/storage/test_object_store.py::"
        "test_a_folder_in_which_other_tools_have_marked_folders_is_deleted_and_the_markers_stay[google]",
    ),
    Mutant(
        name="a peer memory that a copy of the run shares",
        file="ray_ulysses/run/ownership.py",
        old="    return stable_hash([run_identity(config), str(place)])\n",
        new="    return stable_hash([run_identity(config), place.name])\n",
        killer="tests/unit/run/test_ownership.py::"
        "test_a_copied_directory_has_a_peer_memory_of_its_own_and_a_linked_one_has_not",
    ),
    Mutant(
        name="a fenced attempt's state taken from peer memory",
        file="ray_ulysses/run/recovery.py",
        old="unless=self.unusable, lineage=lineage)",
        new="unless=self.unusable)",
        killer="tests/unit/trainer/test_resume.py::test_the_storage_alone_says_which_attempts_peer_memory_may_hold",
    ),
    Mutant(
        name="training from step 0 with a part of a damaged state",
        file="ray_ulysses/trainer/resume.py",
        old="        if chosen is None:\n",
        new="        if chosen is None and in_memory is None:\n",
        killer="tests/unit/trainer/test_resume.py::"
        "test_a_state_of_peer_memory_that_was_loaded_in_part_is_no_beginning_and_no_obstacle_to_the_next_attempt",
    ),
    Mutant(
        name="each layer takes its memory anew from the system",
        file="ray_ulysses/engine/zero.py",
        old="        _keep_freed_memory()\n",
        new="",
        killer="tests/unit/engine/test_zero.py::"
        "test_a_process_on_a_cpu_keeps_the_memory_that_a_layer_frees_for_the_next",
    ),
    Mutant(
        name="host memory for latent attention planned with the width of another model's heads",
        file="ray_ulysses/planner/activation_memory.py",
        old="    width = shape.output_width // shape.num_heads * (in",
        new="    width = shape.attention_width // shape.num_heads * (in",
        killer="tests/unit/engine/test_activation_offload.py::test_what_plan_counts_is_enough_and_not_too_much",
    ),
    Mutant(
        name="a failed attempt waits for a checkpoint that nobody needs",
        file="ray_ulysses/trainer/saving.py",
        old="if not self._saver.is_saving or (is_in_memory and",
        new="if not self._saver.is_saving or (False and",
        killer="tests/unit/trainer/test_saving.py::"
        "test_a_failure_that_the_next_attempt_repairs_from_peer_memory_waits_for_no_checkpoint",
    ),
    Mutant(
        name="a run that ends loses the checkpoint that was being written",
        file="ray_ulysses/trainer/saving.py",
        old="(is_in_memory and not isinstance(error, UserError | FinalError))",
        new="is_in_memory",
        killer="tests/unit/trainer/test_saving.py::"
        "test_otherwise_the_checkpoint_is_completed_and_the_failure_told_before",
    ),
    Mutant(
        name="the only state in peer memory dropped before its successor is there",
        file="ray_ulysses/trainer/vaulting.py",
        old="            self._take_over(self._vault.store, self._listed(self._vault.store))\n",
        new="            self._kept = -1; self._take_over(self._vault.store, self._listed(self._vault.store))\n",
        killer="tests/unit/trainer/test_vaulting.py::"
        "test_the_state_that_an_attempt_started_from_is_kept_until_its_successor_is",
    ),
    Mutant(
        name="children that import what every decoder needs, each anew",
        file="ray_ulysses/supervision/launcher.py",
        old='    "transformers.models.llama.modeling_llama",',
        new='    "transformers.models.llama",',
        killer="tests/distributed/test_reform.py::"
        "test_children_that_die_or_stop_and_a_lost_node_cost_at_most_a_step[sp1-stopped]",
    ),
    Mutant(
        name="an agent that answers again without the marks of the attempt",
        file="ray_ulysses/trainer/vaulting.py",
        old="            is_known = self._num_readmitted == self._vault.store.num_readmitted\n",
        new="            is_known = self._num_readmitted <= self._vault.store.num_readmitted\n",
        killer="tests/unit/trainer/test_vaulting.py::"
        "test_an_agent_that_answers_again_is_marked_and_cleared_of_what_it_missed",
    ),
    Mutant(
        name="an agent that is full of what it has missed to drop",
        file="ray_ulysses/trainer/vaulting.py",
        old="        self._clear(self._vault.store, is_known=False)\n",
        new="        pass\n",
        killer="tests/unit/trainer/test_vaulting.py::test_room_is_made_where_an_agent_has_missed_what_was_dropped",
    ),
    Mutant(
        name="an agent that was started again and is never asked",
        file="ray_ulysses/vault/store.py",
        old="            due = [node for node, at in self._left_out.items() if at <= now]\n",
        new="            due = [node for node, at in self._left_out.items() if at > now + 1e9]\n",
        killer="tests/unit/vault/test_store.py::test_an_agent_that_is_started_again_at_its_address_is_used_again[all]",
    ),
    Mutant(
        name="activations freed on the device before their copy to the host",
        file="ray_ulysses/engine/activation_offload.py",
        old="            _wait(copies, self.running)\n            self.tensor = None",
        new="            self.running.clear()\n            self.tensor = None",
        killer="tests/unit/engine/test_activation_offload.py::test_copies_that_happen_as_late_as_they_may_change_no_bit[layer_inputs]",
    ),
    Mutant(
        name="activations copied in before they were copied out",
        file="ray_ulysses/engine/activation_offload.py",
        old="            _wait(copies, self.running)\n            self.tensor = None",
        new="            self.tensor = None",
        killer="tests/unit/engine/test_activation_offload.py::test_copies_that_happen_as_late_as_they_may_change_no_bit[attention_outputs]",
    ),
    Mutant(
        name="a slab used again while it is copied",
        file="ray_ulysses/engine/activation_offload.py",
        old="            _wait(self._copies, running)\n            self._slabs",
        new="            self._slabs",
        killer="tests/unit/engine/test_activation_offload.py::test_an_exception_leaves_no_slab_in_use_and_the_next_step_is_right[forward]",
    ),
    Mutant(
        name="hooks that keep a layer's input on the device",
        file="ray_ulysses/engine/activation_offload.py",
        old="return put(inputs.pop()) if",
        new="return put(inputs[0]) if",
        killer="tests/unit/engine/test_activation_offload.py::test_memory_on_the_device_does_not_grow_with_the_layers",
    ),
    Mutant(
        name="an evaluation's losses a token late",
        file="ray_ulysses/evaluation/scoring.py",
        old="losses[1:], is_correct[1:] = found_T2[start : stop - 1, 0],",
        new="losses[1:], is_correct[1:] = found_T2[start + 1 : stop, 0],",
        killer="tests/unit/evaluation/test_scoring.py::test_the_scores_are_those_of_the_model_alone[200-llama]",
    ),
    Mutant(
        name="an answer right by one of its tokens",
        file="ray_ulysses/evaluation/needles.py",
        old="scores.is_correct[answer.tokens].all()",
        new="scores.is_correct[answer.tokens].any()",
        killer="tests/unit/evaluation/test_retrieval.py::"
        "test_a_model_that_knows_answers_all_and_a_tokens_slip_is_a_wrong_answer",
    ),
    Mutant(
        name="a context of one token less than is said",
        file="ray_ulysses/evaluation/held_out_loss.py",
        old="yield held.passage(place, start - context, context + SPAN_TOKENS, first_scored=context)",
        new="yield held.passage(place, start - context + 1, context + SPAN_TOKENS - 1, first_scored=context - 1)",
        killer="tests/unit/evaluation/test_held_out_loss.py::"
        "test_every_context_has_the_same_targets_and_exactly_its_tokens_before_them",
    ),
    Mutant(
        name="documents called held out that an earlier segment trained",
        file="ray_ulysses/data/plan/drawing.py",
        old="        marks[document] &= _is_held_out",
        new="        marks[document] = _is_held_out",
        killer="tests/unit/data/plan/test_branches.py::"
        "test_what_a_plan_says_is_held_out_no_step_trains_and_every_evaluation_reads",
    ),
    Mutant(
        name="a spike between two points of a picture is dropped",
        file="ray_ulysses/report/drawing.py",
        old="np.concatenate((starts, ends, order[starts], order[ends]))",
        new="np.concatenate((starts, ends))",
        killer="tests/unit/report/test_thinning.py::test_no_spike_is_dropped",
    ),
    Mutant(
        name="the data mix takes rows in the order in which they were packed",
        file="ray_ulysses/report/pictures.py",
        old="yield np.repeat(rows, numbers), source, found.length",
        new="yield np.repeat(np.arange(at, at + len(rows)), numbers), source, found.length",
        killer="tests/unit/report/test_report.py::"
        "test_the_data_mix_counts_the_tokens_of_each_corpus_in_the_trained_rows",
    ),
    Mutant(
        name="replayed steps are drawn twice",
        file="ray_ulysses/report/run_record.py",
        old="kept=counted.kept.rows",
        new="kept=np.concatenate((counted.kept.rows, counted.lost.rows))",
        killer="tests/unit/report/test_report.py::test_each_step_is_drawn_once_as_it_counts",
    ),
    Mutant(
        name="a first configuration scales a model's own scaling again",
        file="ray_ulysses/run/first_config.py",
        old='stored.get("rope_type", "default") == "default" and',
        new="",
        killer="tests/unit/run/test_first_config.py"
        "::test_positions_are_extended_where_they_end_and_a_scaling_of_the_models_own_is_not_scaled_again",
    ),
    Mutant(
        name="a run is submitted while its job runs",
        file="ray_ulysses/run/submissions.py",
        old="        if not one.is_ended:",
        new='        if one.status == "PENDING":',
        killer="tests/unit/run/test_submissions.py::test_a_run_whose_job_has_not_ended_is_not_submitted_again",
    ),
    Mutant(
        name="records are put again whose answer was lost",
        file="ray_ulysses/tracking/segmented_journal.py",
        old="if self._store.read_whole(key) != self._sealed:",
        new="if key:",
        killer="tests/unit/tracking/test_segmented_journal.py"
        "::test_whichever_put_fails_no_record_is_lost_torn_or_repeated",
    ),
    Mutant(
        name="a journal's pages are listed once, although segments are merged between two of them",
        file="ray_ulysses/tracking/journal_files.py",
        old="if any(file.missing is not None for file in segmented.values()):",
        new="if False:",
        killer="tests/unit/tracking/test_segmented_journal.py::test_a_merge_between_two_pages_of_a_list_is_no_damage",
    ),
    Mutant(
        name="updates that a tracker took before it failed are sent again",
        file="ray_ulysses/tracking/tail.py",
        old="self._acknowledge(fresh[error.num_taken][0])",
        new="self._acknowledge(0)",
        killer="tests/unit/tracking/test_other_trackers.py"
        "::test_a_client_that_fails_in_the_middle_of_a_batch_gets_no_event_twice",
    ),
    Mutant(
        name="segments of a journal are read beside the one that takes their place",
        file="ray_ulysses/tracking/journal_files.py",
        old="        if segment.last <= reached:",
        new="        if segment.last < segment.first:",
        killer="tests/unit/tracking/test_segmented_journal.py"
        "::test_many_segments_become_one_and_nothing_is_read_twice_or_missed",
    ),
    Mutant(
        name="an export in an object store is committed before its weights are there",
        file="ray_ulysses/export/directory.py",
        old="if path.name != RECORD_FILE)",
        new=")",
        killer="tests/unit/export/test_upload.py"
        "::test_whichever_request_of_an_upload_fails_what_is_there_is_whole_or_has_no_record",
    ),
    Mutant(
        name="a log is printed again after a lost connection",
        file="ray_ulysses/cluster/job_client.py",
        old="piece[max(0, self._written - position) :]",
        new="piece",
        killer="tests/unit/cluster/test_job_client.py::test_a_log_is_written_once_over_lost_connections_and_until_the_job_ends",
    ),
    Mutant(
        name="a submitted job is killed three seconds after a stop",
        file="ray_ulysses/cluster/job_client.py",
        old='{"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}',
        new="{}",
        killer="tests/unit/cluster/test_job_client.py"
        "::test_a_job_brings_its_configuration_and_has_time_to_save_when_it_is_stopped",
    ),
    Mutant(
        name="a submitted job leaves nothing to the planner",
        file="ray_ulysses/config/schema.py",
        old="exclude_unset=True))",
        new="))",
        killer="tests/unit/cluster/test_job_client.py"
        "::test_what_a_configuration_leaves_to_the_planner_is_left_to_it_in_the_job",
    ),
    Mutant(
        name="an override sets every place of an anchor",
        file="ray_ulysses/config/loading.py",
        old="return {name: _unshared(below) for name, below in value.items()}",
        new="return value",
        killer="tests/unit/config/test_overrides.py::test_places_that_share_an_anchor_are_set_one_by_one",
    ),
    Mutant(
        name="the price of a run is that of its last stage",
        file="ray_ulysses/report/plan.py",
        old="(max(0, min(steps[1], stop) - steps[0] + 1), seconds)",
        new="(max(0, stop - report.data.base_step), seconds)",
        killer="tests/unit/report/test_plan.py::test_the_time_of_a_run_is_that_of_all_its_stages_up_to_its_stop",
    ),
    Mutant(
        name="the best checkpoint is that of other data",
        file="ray_ulysses/checkpoint/retention.py",
        old="return self.stage, self.measured",
        new='return self.stage, ""',
        killer="tests/unit/checkpoint/test_retention.py"
        "::test_losses_from_before_a_branch_to_other_data_are_not_compared_with_those_after_it",
    ),
    Mutant(
        name="a run whose lines nobody reads ends with them",
        file="ray_ulysses/commands/output.py",
        old="stream.flush()\n        except (OSError, ValueError)",
        new="stream.flush()\n        except ZeroDivisionError",
        killer="tests/unit/commands/test_streams.py::test_a_run_goes_on_where_nothing_takes_its_lines",
    ),
    Mutant(
        name="one worker in bf16 takes the stage that was measured in fp32",
        file="ray_ulysses/config/schema.py",
        old=' or config.model.dtype != "fp32"',
        new="",
        killer="tests/unit/planner/test_choice.py::test_one_worker_takes_stage_1_where_that_was_measured",
    ),
    Mutant(
        name="the optimizer's update beside activations that are gone by then",
        file="ray_ulysses/planner/memory.py",
        old='    ("always", "update"),\n',
        new='    ("always", "passes", "update"),\n',
        killer="tests/unit/planner/test_memory.py::test_peak_is_the_largest_sum_alive_together",
    ),
    Mutant(
        name="copies to the host that nothing hides",
        file="ray_ulysses/planner/throughput.py",
        old="        forward_s = compute_s * 2 / self.passes\n",
        new="        forward_s = compute_s = 0.0\n",
        killer="tests/unit/planner/test_throughput.py::test_copies_are_hidden_behind_the_pass_beside_which_they_run",
    ),
    Mutant(
        name="bf16 gradients held beside those in fp32",
        file="ray_ulysses/engine/zero.py",
        old='"immediate_grad_update": True',
        new='"immediate_grad_update": False',
        killer="tests/distributed/test_accumulation.py::"
        "test_equal_micro_batches_add_up_to_the_gradient_of_one_in_every_stage[none]",
    ),
)


class Workshop:
    """A copy of the tree in which bugs are planted; the original is never touched.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self.root.mkdir()
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, self.root / part, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
            else:
                shutil.copy2(source, self.root / part)
        # An edit within the same second and of the same length must not meet an older compiled file.
        self._environment = {**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        self._environment.setdefault("OMP_NUM_THREADS", "1")

    def check_import(self) -> None:
        """Refuse to go on if Python would import the installed package and not the copy."""
        code = "import ray_ulysses, tests.mutants; print(ray_ulysses.__file__); print(tests.mutants.__file__)"
        answer = self._run(["-c", code])
        paths = [Path(line) for line in answer.stdout.split()]
        if len(paths) != 2 or not all(path.resolve().is_relative_to(self.root.resolve()) for path in paths):
            raise SystemExit(f"the copy is not what Python imports:\n{answer.stdout}{answer.stderr}")

    def slow_ones(self, ids: Sequence[str]) -> set[str]:
        """Return the tests of which `make test` runs no case: of them all cases must turn red or stay green."""
        command = ["-m", "pytest", "-q", "--collect-only", "-m", "not slow", "-p", "no:cacheprovider"]
        found = self._run([*command, *ids]).stdout.splitlines()
        return {one for one in ids if not any(line == one or line.startswith(f"{one}[") for line in found)}

    def tests_exit(self, ids: Iterable[str], *, slow: bool = False) -> tuple[int, str]:
        """Run tests in the copy, as `make test` selects them or slow ones; return pytest's exit code and last words."""
        command = ["-m", "pytest", "-q", "-x", "-m", "slow" if slow else "not slow", "-p", "no:cacheprovider"]
        tests = list(ids)
        command += ["--no-header", "--tb=line", *tests]
        limit_s = TIMEOUT_S * len(tests)
        try:
            answer = self._run(command, limit_s)
        except subprocess.TimeoutExpired:
            return -1, f"no answer within {limit_s:.0f} s"
        return answer.returncode, (answer.stdout + answer.stderr)[-3000:]

    def judge(self, mutant: Mutant, *, slow: bool) -> tuple[Verdict, str]:
        """Plant a bug, run its test, take the bug out again."""
        path = self.root / mutant.file
        text = path.read_text(encoding="utf-8")
        path.write_text(mutant.planted(text), encoding="utf-8")
        try:
            code, said = self.tests_exit([mutant.killer], slow=slow)
        finally:
            path.write_text(text, encoding="utf-8")
        return verdict_of(code), said

    def _run(self, arguments: Sequence[str], limit_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command,
            cwd=self.root,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )


def verdict_of(exit_code: int) -> Verdict:
    """Return what pytest's exit code says of a mutant: only a test that ran and failed has killed it."""
    if exit_code == _TESTS_FAILED:
        return "killed"
    return "SURVIVED" if exit_code == 0 else "BROKEN"


def killer_file(mutant: Mutant) -> Path:
    """Return the file of the test that must turn red."""
    return ROOT / mutant.killer.split("::")[0]


def killer_function(mutant: Mutant) -> str:
    """Return the name of the test that must turn red, without its parameters."""
    return re.sub(r"\[.*", "", mutant.killer.split("::")[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge every mutant; return 1 if one survived or could not be judged."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="judge the mutants whose name holds one of these words"
    )
    parser.add_argument("--show", action="store_true", help="print how each test failed")
    parser.add_argument("--list", action="store_true", help="list the mutants and their tests, run nothing")
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if any(word in mutant.name for word in options.only)]
    width = max((len(mutant.name) for mutant in chosen), default=0)
    if options.list or not chosen:
        for mutant in chosen:
            print(f"{mutant.name:<{width}}  {mutant.killer}")
        return 0 if chosen else 2
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        workshop = Workshop(Path(folder))
        workshop.check_import()
        killers = sorted({mutant.killer for mutant in chosen})
        slow = workshop.slow_ones(killers)
        for group in (sorted(set(killers) - slow), sorted(slow)):
            code, said = workshop.tests_exit(group, slow=set(group) <= slow) if group else (0, "")
            if code != 0:
                print(f"the tests must be green before a bug is planted:\n{said}")
                return 1
        print(f"{'verdict':<9} {'seconds':>7}  {'bug':<{width}}  turned red")
        failed = 0
        for mutant in chosen:
            start = time.monotonic()
            verdict, said = workshop.judge(mutant, slow=mutant.killer in slow)
            print(
                f"{verdict:<9} {time.monotonic() - start:>7.1f}  {mutant.name:<{width}}  {killer_function(mutant)}",
                flush=True,
            )
            failed += verdict != "killed"
            if options.show or verdict != "killed":
                print(said)
    print(f"{len(chosen) - failed} of {len(chosen)} planted bugs were noticed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
