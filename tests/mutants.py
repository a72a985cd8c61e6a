"""Plants the bugs that this field is known for, one at a time, and checks that each turns its test red.

``python -m tests.mutants`` (``make mutants``) works on a copy of the tree, prints a table and exits with 1 if a bug
survives. ``--only WORD`` selects the bugs whose name contains a word, ``--show`` prints how each test failed, and
``--list`` runs nothing.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("ray_ulysses", "tests", "benchmarks", "examples", "pyproject.toml")
TIMEOUT_S = 240.0
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_TESTS_FAILED = 1  # pytest's exit code; 0 is green, everything above 1 means that the tests did not run

Verdict = Literal["killed", "SURVIVED", "BROKEN"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug to plant by syntax tree: formatting, comments and line numbers do not matter."""

    law: Literal[1, 2, 3, 4]
    """The law of the product that it breaks."""
    name: str
    """What goes wrong, in the field's words."""
    place: str
    """`room/file.py:function` or `room/file.py:Class.method`."""
    old: str
    """An expression, or statements, found exactly once in that function; `if test: ...` stands for any body."""
    new: str
    """What replaces it."""
    killer: str
    """Id of the test that must turn red, below `tests/`."""

    @property
    def file(self) -> str:
        """Path of the file to change, from the root of the repository."""
        return f"ray_ulysses/{self.place.partition(':')[0]}"

    @property
    def killer_id(self) -> str:
        """Id of the test for pytest, from the root of the repository."""
        return f"tests/{self.killer}"

    def planted(self, text: str) -> str:
        """Return the file's text with the bug in it.

        Raises:
            ValueError: The function, or its old code, is not found exactly once.
        """
        tree = ast.parse(text)
        old, new = ast.parse(self.old).body, ast.parse(self.new).body
        edits = list(_edits(self._function(tree), old, new))
        if len(edits) != 1:
            raise ValueError(f"mutant {self.name!r}: {self.old!r} occurs {len(edits)} times in {self.place}, not once")
        holder, field, value = edits[0]
        setattr(holder, field, value)
        return ast.unparse(ast.fix_missing_locations(tree))

    def _function(self, tree: ast.AST) -> ast.AST:
        for name in self.place.partition(":")[2].split("."):
            found = [node for node in ast.walk(tree) if isinstance(node, _DEFINITIONS) and node.name == name]
            if len(found) != 1:
                raise ValueError(f"mutant {self.name!r}: {len(found)} definitions of {name} for {self.place}, not one")
            tree = found[0]
        return tree


def _edits(scope: ast.AST, old: list[ast.stmt], new: list[ast.stmt]) -> Iterator[tuple[ast.AST, str, object]]:
    """Yield (node, field, value) for each place of the old code; setting the field puts the new code there."""
    for node in ast.walk(scope):
        for field, value in ast.iter_fields(node):
            match old, new:
                case [ast.Expr(value=before)], [ast.Expr(value=after)]:
                    for at, one in enumerate(value if isinstance(value, list) else []):
                        if _same(one, before):
                            yield node, field, [*value[:at], after, *value[at + 1 :]]
                    if _same(value, before):
                        yield node, field, after
                case [ast.If(test=test, body=[ast.Expr(value=ast.Constant(value=body))])], [ast.If() as after] if (
                    body is ...
                ):
                    if isinstance(node, ast.If) and field == "test" and _same(value, test):
                        yield node, field, after.test
                case _ if isinstance(value, list):
                    for at in range(len(value) - len(old) + 1):
                        if all(map(_same, value[at : at + len(old)], old)):
                            yield node, field, [*value[:at], *new, *value[at + len(old) :]]


def _same(one: object, other: ast.AST) -> bool:
    return isinstance(one, ast.AST) and ast.dump(one) == ast.dump(other)


HEADS = "distributed/test_heads.py::test_a_step_on_documents_equals_that_of_one_process"
TAKES_OVER = "test_from_any_step_on_and_after_any_number_of_rows_read_directly_the_rows_are_the_direct_readers"

MUTANTS = (
    Mutant(
        1,
        "a document's vector has only the tokens of one slice",
        "engine/heads.py:_pooled",
        "batch.mesh.sp_size > 1",
        "False",
        HEADS,
    ),
    Mutant(
        1,
        "a document's mean is divided by the tokens of the slice",
        "engine/heads.py:_pooled",
        "sums_DH / torch.tensor(lengths, dtype=dtype, device=device)[:, None]",
        "sums_DH / max(1, len(hidden_NH))",
        HEADS,
    ),
    Mutant(
        1,
        "a pooler reads the first token of a slice",
        "engine/heads.py:document_logits",
        "pooler is not None",
        "False",
        HEADS,
    ),
    Mutant(
        2,
        "a query's negatives are the positives of its own rank",
        "engine/heads.py:_gathered",
        "mesh.world_size == 1",
        "True",
        HEADS,
    ),
    Mutant(
        3,
        "a document without its last token keeps its class",
        "data/plan/drawing.py:_draw_block",
        "length - 1 + has_next + (overlong == DROP_WHOLE)",
        "length - 1 + has_next",
        "unit/data/plan/test_plan.py::test_what_becomes_of_overlong_documents_is_counted",
    ),
    Mutant(
        1,
        "ESM counts the masked tokens of a slice instead of the document",
        "attention/token_dropout.py:_unmasked_shares",
        "batch.mesh.sp_size > 1",
        "False",
        "distributed/test_seam_parity.py::test_masked_language_models_equal_one_process_on_slices_and_rings",
    ),
    Mutant(
        1,
        "bidirectional attention keeps the causal mask",
        "attention/ring.py:_call",
        "layer.causal and block.spans is not None",
        "block.spans is not None",
        "unit/attention/test_encoders.py::test_packed_documents_have_the_logits_of_each_alone_and_do_not_depend_on_their_neighbours[roberta]",
    ),
    Mutant(
        1,
        "bidirectional windows have only their earlier side",
        "attention/ring.py:_own",
        "None if layer.causal else left",
        "None",
        "unit/attention/test_encoders.py::test_packed_documents_have_the_logits_of_each_alone_and_do_not_depend_on_their_neighbours[modernbert]",
    ),
    Mutant(
        1,
        "documents of an encoder see one another",
        "attention/ring.py:_own",
        "return _Tokens(slice(None), slice(None), left, None if layer.causal else left, layer.spans)",
        "return _Tokens(slice(None), slice(None), left, None if layer.causal else left, None)",
        "unit/attention/test_encoders.py::test_packed_documents_have_the_logits_of_each_alone_and_do_not_depend_on_their_neighbours[roberta]",
    ),
    Mutant(
        1,
        "a ring drops the later keys of bidirectional attention",
        "attention/ring.py:_blocks",
        "rectangle.step == step and not (layer.causal and rectangle.distance < 0)",
        "rectangle.step == step and rectangle.distance >= 0",
        "unit/attention/test_documents.py::test_the_kernel_calls_of_a_ring_see_each_visible_pair_once",
    ),
    Mutant(
        1,
        "a window over a ring reaches one later key too far",
        "attention/ring.py:_trimmed",
        "right = num_queries - num_keys + (distance + skipped) + window - 1",
        "right = num_queries - num_keys + (distance + skipped) + window",
        "unit/attention/test_documents.py::test_the_kernel_calls_of_a_ring_see_each_visible_pair_once",
    ),
    Mutant(
        1,
        "RoBERTa's positions start at 0",
        "attention/ulysses.py:apply_ulysses",
        "kwargs['position_ids'] = batch.position_ids_BL + first_position",
        "pass",
        "unit/attention/test_encoders.py::test_packed_documents_have_the_logits_of_each_alone_and_do_not_depend_on_their_neighbours[roberta]",
    ),
    Mutant(
        1,
        "labels of masked tokens are shifted",
        "attention/batch.py:shard_batch",
        "1 if shift_labels else 0",
        "1",
        "unit/attention/test_batch.py::test_an_unshifted_label_stays_at_its_token_and_padding_has_none[3]",
    ),
    Mutant(
        1,
        "optimizer.eps is ignored",
        "run/settings.py:zero_settings",
        "config.optimizer.eps",
        "1e-08",
        "distributed/test_plain_loop.py::test_every_step_is_that_of_a_plain_loop[stage-3-alone]",
    ),
    Mutant(
        1,
        "multi-dimensional biases get weight decay",
        "engine/optimizer.py:_is_exempt",
        "is_norm(module) or last in _EXEMPT or 'bias' in last",
        "is_norm(module) or last in _EXEMPT",
        "unit/engine/test_optimizer.py::test_all_but_norms_biases_and_state_space_coefficients_decays[gpt_oss]",
    ),
    Mutant(
        2,
        "Muon orthogonalizes each rank's elements of a matrix instead of the whole matrix",
        "engine/muon.py:MuonAdamW._orthogonalized",
        """
dist.all_to_all_single(received, sent, sizes, sent_sizes, group=view.process_group)
if own is not None:
    received = orthogonalized(received.view(own.rows, own.columns)).reshape(-1)
dist.all_to_all_single(sent, received, sent_sizes, sizes, group=view.process_group)
""",
        "sent = torch.cat([orthogonalized(one.view(1, -1)).reshape(-1) for one in sent.split(sent_sizes)])",
        "distributed/test_optimizers.py::test_muon_is_the_published_algorithm_on_whole_matrices_and_each_expert[4-zero-3-then-1-zero-1]",
    ),
    Mutant(
        1,
        "optimizer.groups[].lr_scale is ignored",
        "trainer/loop.py:_take_step",
        "rate * group['lr_scale']",
        "rate",
        "distributed/test_optimizers.py::test_groups_and_frozen_layers_are_those_of_a_plain_loop[2-zero-3]",
    ),
    Mutant(
        1,
        "optimizer.groups[].weight_decay is ignored",
        "engine/optimizer.py:parameter_groups",
        "decay = group.weight_decay",
        "pass",
        "distributed/test_optimizers.py::test_groups_and_frozen_layers_are_those_of_a_plain_loop[2-zero-3]",
    ),
    Mutant(
        2,
        "Muon's momentum is lost when a run resumes",
        "engine/zero_state.py:import_state",
        "stepped_parts(tensors, view, group, moments)",
        "(one for one in stepped_parts(tensors, view, group, moments) if not one.key.startswith('momentum_buffer'))",
        "distributed/test_optimizers.py::test_muon_is_the_published_algorithm_on_whole_matrices_and_each_expert[4-zero-3-then-1-zero-1]",
    ),
    Mutant(
        1,
        "bf16 moments are rounded with the same random bits at every step",
        "engine/bf16_moments.py:_key",
        "f'{seed}/{step}/{name}'",
        "f'{seed}/{name}'",
        "unit/engine/test_bf16_moments.py::test_moments_that_are_rounded_at_random_are_right_on_average",
    ),
    Mutant(
        1,
        "the gradient is scaled by sp_size",
        "engine/loss.py:loss_scale",
        "mesh.world_size",
        "mesh.world_size * mesh.sp_size",
        "distributed/test_seam_parity.py::test_a_step_equals_that_of_one_process",
    ),
    Mutant(
        1,
        "an untied output head is tied as the configuration says",
        "engine/stored_weights.py:resolve_tie",
        "hf_config.tie_word_embeddings = False",
        "hf_config.tie_word_embeddings = True",
        "distributed/test_weights.py::test_a_head_of_its_own_is_kept_though_the_configuration_ties_it",
    ),
    Mutant(
        1,
        "gradients of replicated KV heads are not summed",
        "attention/exchange.py:_put_back",
        "own[:, head].add_ if is_added else own[:, head].copy_",
        "own[:, head].copy_",
        "distributed/test_exchange.py::test_the_exchange_is_plain_slicing_forward_and_backward[one-kv-head-for-all]",
    ),
    Mutant(
        1,
        "gradients of replicated KV heads are summed in bf16",
        "attention/exchange.py:gradient_buffers",
        "like.dtype if plan.kv_copies == 1 else torch.promote_types(like.dtype, torch.float32)",
        "like.dtype",
        "distributed/test_exchange.py::test_gradients_of_a_copied_head_are_added_in_fp32",
    ),
    Mutant(
        1,
        "heads are dealt to ranks in turns",
        "attention/exchange.py:_own",
        "slice(heads.first, heads.stop)",
        "slice(heads.first % 2, None, 2)",
        "distributed/test_exchange.py::test_the_exchange_is_plain_slicing_forward_and_backward[kv-heads-divide]",
    ),
    Mutant(
        1,
        "an uneven split of heads is returned in reverse",
        "attention/exchange.py:return_heads",
        "plan.ranks[source]",
        "plan.ranks[-1 - source]",
        "distributed/test_exchange.py::test_the_exchange_is_plain_slicing_forward_and_backward[heads-do-not-divide]",
    ),
    Mutant(
        1,
        "a ring step adds outputs without rescaling",
        "attention/ring.py:_merge",
        "out_THE.mul_(kept).add_(part_THE.to(out_THE.dtype) * added)",
        "out_THE.add_(part_THE.to(out_THE.dtype))",
        "distributed/test_seam_parity.py::test_every_kind_of_attention_equals_that_of_one_process_on_slices_and_rings[4]",
    ),
    Mutant(
        1,
        "a ring drops the gradients of keys from other ranks",
        "attention/ring.py:attend_backward",
        "grad_kv += incoming.wait()",
        "incoming.wait()",
        "distributed/test_seam_parity.py::test_every_kind_of_attention_equals_that_of_one_process_on_slices_and_rings[4]",
    ),
    Mutant(
        1,
        "a ring applies a window across a gap",
        "attention/documents.py:_tables",
        "len(parts) == 2 and (not (windowed and has_gap))",
        "len(parts) == 2",
        "unit/attention/test_documents.py::test_the_kernel_calls_of_a_ring_see_each_visible_pair_once",
    ),
    Mutant(
        1,
        "attention sinks are not sliced by head",
        "attention/ulysses.py:ulysses_attention",
        "s_aux[mine.first:mine.stop]",
        "s_aux[:mine.num_heads]",
        "distributed/test_seam_parity.py::test_every_kind_of_attention_equals_that_of_one_process_on_slices_and_rings[3]",
    ),
    Mutant(
        1,
        "soft-capping has no derivative",
        "attention/kernels/math.py:_backward",
        "score_grads_KGtu = score_grads_KGtu.mul_(slope_KGtu)",
        "pass",
        "unit/attention/test_kernels.py::test_a_kernel_equals_the_definition_forward_and_backward[math-packed-None-softcap]",
    ),
    Mutant(
        1,
        "recurrent state crosses document borders",
        "attention/mixers.py:_mix",
        "[stop - start for start, stop in pairwise(borders)]",
        "[borders[-1]]",
        "unit/attention/test_mixers.py::test_a_layer_on_a_packed_row_gives_what_its_module_gives_each_document[qwen3_next]",
    ),
    Mutant(
        1,
        "a convolution crosses the border of a short document",
        "attention/mixers.py:_mix",
        "borders = context.documents.full.spans.borders",
        "found = context.documents.full.spans.borders; borders = [one for one in found if one - 1 not in found]",
        "unit/attention/test_mixers.py::test_a_layer_on_a_packed_row_gives_what_its_module_gives_each_document[lfm2]",
    ),
    Mutant(
        1,
        "decays are exchanged in the wrong order",
        "attention/mixer_layouts.py:_qwen3_next",
        "(Block(module.num_k_heads, 2 * group),)",
        "(Block(module.num_v_heads), Block(module.num_v_heads))",
        "distributed/test_hybrids.py::test_every_hybrid_equals_one_process_on_each_document[2-each-kind]",
    ),
    Mutant(
        1,
        "the gradient of a sum over ranks is not summed",
        "attention/exchange.py:_sum_gradient",
        "torch.ops.ray_ulysses.sum_over_ranks(grad, ctx.group)",
        "grad",
        "distributed/test_hybrids.py::test_every_hybrid_equals_one_process_on_each_document[2-each-kind]",
    ),
    Mutant(
        1,
        "recurrent layers repeat their exchange in the recomputation",
        "attention/recompute.py:checkpoint_contexts",
        "{operators.scatter_heads.default, operators.scatter_channels.default}",
        "{operators.scatter_heads.default}",
        "distributed/test_hybrids.py::test_a_layer_that_carries_state_takes_as_many_collectives_as_attention",
    ),
    Mutant(
        1,
        "the temperature uses positions within the shard",
        "attention/ulysses.py:context_maker.make_context",
        "batch.position_ids_BL",
        "torch.arange(batch.position_ids_BL.shape[1])[None]",
        "unit/attention/test_architectures.py::test_packed_documents_train_as_each_does_alone[llama4_text]",
    ),
    Mutant(
        1,
        "attention is recomputed in the backward pass",
        "attention/recompute.py:_Replay.__torch_dispatch__",
        "operator not in self._storage",
        "operator is not None",
        "distributed/test_recompute.py::test_collectives_bytes_and_attention_forwards_of_a_layer",
    ),
    Mutant(
        1,
        "gradients of gathered logits are not summed over ranks",
        "parallel/collectives.py:_GatherSequence.backward",
        "dist.all_reduce(grad, group=ctx.group)",
        "pass",
        "distributed/test_exchange.py::test_a_gathered_sequence_is_in_order_and_its_gradient_is_summed_over_ranks",
    ),
    Mutant(
        1,
        "positions start at zero on every rank",
        "attention/batch.py:shard_batch",
        "held_tokens(position_ids_BS, mesh)",
        "position_ids_BS[:, :position_ids_BS.shape[1] // mesh.sp_size].contiguous()",
        "unit/attention/test_batch.py::test_positions_are_global_and_restart_in_each_document",
    ),
    Mutant(
        1,
        "length-dependent RoPE sees only its shard",
        "attention/rope.py:_of_length",
        "position_ids_BL.new_full((*position_ids_BL.shape[:-1], 1), length - 1)",
        "position_ids_BL[..., -1:]",
        "unit/attention/test_rope.py::test_every_document_gets_the_frequencies_that_it_has_alone",
    ),
    Mutant(
        1,
        "the label at a shard border is lost",
        "attention/batch.py:shard_batch",
        "held_tokens(shifted_BS, mesh)",
        "torch.nn.functional.pad(held_tokens(shifted_BS, mesh)[:, :-1], (0, 1), value=IGNORE_INDEX)",
        "unit/attention/test_batch.py::test_a_label_is_the_next_token_of_the_same_document_even_across_a_shard_border",
    ),
    Mutant(
        1,
        "the last token of a document predicts the next document",
        "attention/batch.py:_inside_documents",
        "shifted_BS[row, start:end - shift] = labels_BS[row, start + shift:end]",
        """
last = min(end, labels_BS.shape[1] - shift)
shifted_BS[row, start:last] = labels_BS[row, start + shift:last + shift]
""",
        "unit/attention/test_batch.py::test_a_label_is_the_next_token_of_the_same_document_even_across_a_shard_border",
    ),
    Mutant(
        1,
        "documents of a packed row attend to one another",
        "attention/documents.py:_global_spans",
        "row_lengths",
        "[sum(row_lengths)] * bool(row_lengths)",
        "unit/attention/test_ulysses.py::test_no_token_attends_across_documents[llama]",
    ),
    Mutant(
        1,
        "a sliding window is one token too wide in a kernel",
        "attention/kernels/call.py:KernelCall.blocks",
        "query_at - self.left",
        "query_at - self.left - 1",
        "unit/attention/test_kernels.py::test_a_kernel_equals_the_definition_forward_and_backward[sdpa-packed-3-plain]",
    ),
    Mutant(
        1,
        "a sliding window is one token too wide in a ring",
        "attention/ring.py:_own",
        "layer.window - 1",
        "layer.window",
        "unit/attention/test_documents.py::test_the_kernel_calls_of_a_ring_see_each_visible_pair_once",
    ),
    Mutant(
        1,
        "a weighted loss is divided by the number of tokens",
        "trainer/step.py:_weighed",
        "float(total)",
        "tokens",
        "distributed/test_plain_loop.py::test_every_step_is_that_of_a_plain_loop[stage-3-alone]",
    ),
    Mutant(
        1,
        "the loss is a mean of means",
        "engine/loss.py:training_loss",
        "losses_N.sum() if z_losses_N is None else losses_N.sum() + z_losses_N.sum()",
        "losses_N.mean() if z_losses_N is None else losses_N.sum() + z_losses_N.sum()",
        "unit/trainer/test_step.py::test_the_loss_is_a_mean_over_all_tokens_of_the_step_and_its_gradient_that_of_the_mean",
    ),
    Mutant(
        1,
        "the z-loss includes ignored labels",
        "engine/tiled_loss.py:_cross_entropy",
        "torch.where(is_counted_T, z_loss * log_z_T.square(), zero)",
        "z_loss * log_z_T.square()",
        "unit/engine/test_tiled_loss.py::test_a_z_loss_is_that_of_the_models_own_logits[7-granite]",
    ),
    Mutant(
        1,
        "the router loss is computed per shard",
        "engine/router_loss.py:router_loss_sum",
        "dist.all_reduce(sums, group=batch.mesh.group('sp'))",
        "pass",
        "distributed/test_seam_parity.py::test_the_router_loss_of_shared_rows_equals_that_of_one_process",
    ),
    Mutant(
        1,
        "a tiled norm keeps only the last tile's gradient",
        "engine/tiled_mlp.py:_Tiles.backward",
        "add_gradients(sums, found)",
        "sums = [None if one is None else one.float() for one in found]",
        "unit/engine/test_tiled_mlp.py::test_a_norm_over_tiles_has_the_same_bits_and_sums_its_weight_gradient_in_fp32[torch.float32]",
    ),
    Mutant(
        1,
        "a tiled loss keeps only the last tile's gradient",
        "engine/tiled_loss.py:add_gradients",
        "total.add_",
        "total.copy_",
        "unit/engine/test_tiled_loss.py::test_tiles_change_no_loss_no_gradient_and_no_prediction[granite]",
    ),
    Mutant(
        1,
        "dropout depends on a row's place in the step",
        "trainer/step.py:_seeded_batch",
        "row.row % 2 ** 64",
        "torch.initial_seed() % 2**64",
        "unit/trainer/test_step.py::test_random_draws_belong_to_the_row_not_its_place",
    ),
    Mutant(
        1,
        "offloaded activations are freed before they are copied",
        "engine/activation_offload.py:_Kept.leave_device",
        "_wait(copies, self.running)",
        "self.running.clear()",
        "unit/engine/test_activation_offload.py::test_copies_that_happen_as_late_as_they_may_change_no_bit[layer_inputs]",
    ),
    Mutant(
        2,
        "the learning rate depends on where the run stops",
        "engine/optimizer.py:learning_rate",
        "horizon_steps - first",
        "min(horizon_steps, 6) - first",
        "unit/engine/test_optimizer.py::test_the_rate_warms_up_linearly_and_falls_along_half_a_cosine",
    ),
    Mutant(
        2,
        "a resumed run starts at the wrong row",
        "data/plan/plan.py:Plan._cursor_in",
        "min((step - segment.base_step) * segment.settings.rows_per_step, segment.train.num_rows)",
        "max(0, step - segment.base_step - 1) * segment.settings.rows_per_step",
        "unit/data/plan/test_plan.py::test_cursors_name_the_next_row_and_are_recognised",
    ),
    Mutant(
        2,
        "a reader always starts at the first step",
        "data/read/row_source.py:DirectSource.step",
        "self._slices_from(step)",
        "self._slices_from(1)",
        "unit/data/read/test_streamed_source.py::test_a_source_starts_at_every_step",
    ),
    Mutant(
        2,
        "rows read directly come again through the stream",
        "data/read/streamed_source.py:StreamedSource._streamed",
        "handover.num_direct",
        "0",
        "unit/data/read/test_streamed_source.py::test_rows_that_were_read_directly_while_the_stream_was_ready_are_dropped_from_it",
    ),
    Mutant(
        2,
        "filler rows shift the stream",
        "data/read/streamed_source.py:StreamedSource._streamed",
        "handover.num_direct += 1",
        "handover.num_direct += row is not None",
        f"unit/data/read/test_streamed_source.py::{TAKES_OVER}[(0, 3, 1, 2, 1)]",
    ),
    Mutant(
        2,
        "Ray Data drops the loss weights",
        "data/read/blocks.py:Received.label_weights",
        "self._weights is None",
        "True",
        "unit/data/read/test_streamed_source.py::test_a_slice_travels_whole",
    ),
    Mutant(
        2,
        "documents at the end of a block are mixed up",
        "data/plan/drawing.py:_draw_block",
        "(documents[place - first], found[place - first])",
        "(documents[place % CHUNK], found[place % CHUNK])",
        "unit/data/plan/test_packing.py::test_every_document_and_fragment_is_drawn_at_its_place[1023]",
    ),
    Mutant(
        2,
        "evaluation runs one step late",
        "trainer/loop.py:_due",
        "step",
        "step - 1",
        "unit/trainer/test_step.py::test_what_is_done_every_so_many_steps_is_done_at_their_multiples",
    ),
    Mutant(
        2,
        "a stage starts one step early",
        "data/plan/stages.py:_continued",
        "plan.num_steps",
        "plan.num_steps - 1",
        "unit/data/plan/test_stages.py::test_a_stage_of_tokens_ends_with_the_step_that_reaches_them",
    ),
    Mutant(
        2,
        "a stage's own schedule counts from step 0",
        "planner/stages.py:_stage",
        "first_step if has_own else 0",
        "0",
        "unit/run/test_stages.py::test_a_run_at_a_border_is_in_the_stage_that_follows",
    ),
    Mutant(
        1,
        "each expert has the adapter of the next one",
        "engine/adapter.py:_forward_with_sum",
        "torch.baddbmm(weight, left, right, alpha=scale)",
        "torch.baddbmm(weight, left.roll(1, 0), right.roll(1, 0), alpha=scale)",
        "unit/engine/test_adapter.py::test_each_expert_has_its_own_adapter",
    ),
    Mutant(
        1,
        "an adapter has the alpha of another module",
        "engine/adapter.py:lora_config",
        "_pattern(adapted.alphas, adapter.alpha)",
        "_pattern(dict(zip(adapted.alphas, [*adapted.alphas.values()][::-1])), adapter.alpha)",
        "unit/engine/test_adapter.py::test_single_targets_have_their_own_rank_and_scale",
    ),
    Mutant(
        1,
        "gradients of adapters are not summed over the ranks",
        "engine/zero.py:build_engine",
        "engine.swap_folder = swap_folder",
        "engine.swap_folder = swap_folder; engine.optimizer.average_tensor = lambda *given: None",
        "distributed/test_seam_parity.py::test_adapters_on_experts_and_a_dora_have_the_gradients_of_one_process",
    ),
    Mutant(
        1,
        "secondary shards of the weights outlive the optimizer's step",
        "engine/zero.py:build_engine",
        "engine.swap_folder = swap_folder",
        "engine.swap_folder = swap_folder; engine.optimizer.invalidate_secondary_tensor = lambda: None",
        "distributed/test_secondary.py::test_a_later_step_on_two_nodes_equals_one_process",
    ),
    Mutant(
        1,
        "secondary shards are made of memory into which weights are not loaded yet",
        "engine/model.py:_partitioner",
        "parameter.ds_secondary_tensor = None",
        "pass",
        "distributed/test_secondary.py::test_a_later_step_on_two_nodes_equals_one_process",
    ),
    Mutant(
        1,
        "secondary shards are shared by ranks of several nodes",
        "engine/zero.py:zero_config",
        "zero['zero_hpz_partition_size'] = settings.secondary_size",
        "zero['zero_hpz_partition_size'] = 2 * settings.secondary_size",
        "distributed/test_secondary.py::test_a_later_step_on_two_nodes_equals_one_process",
    ),
    Mutant(
        1,
        "a merge adds the adapter of another expert",
        "export/stream.py:WeightReader._update",
        "b.view(b.shape[0], -1, count)[..., number]",
        "b.view(b.shape[0], -1, count)[..., number - 1]",
        "unit/export/test_adapters.py::test_adapters_of_experts_single_ranks_and_doras_equal_those_of_peft"
        "[mixtral-experts]",
    ),
    Mutant(
        2,
        "each rank draws its own adapter",
        "engine/adapter.py:add_adapter",
        "torch.manual_seed(seed)",
        "pass",
        "unit/engine/test_adapter.py::test_the_first_weights_depend_on_the_seed_alone",
    ),
    Mutant(
        1,
        "the second value of an NF4 byte is taken for the first",
        "engine/quantized_base.py:_nf4_pairs",
        "[values.repeat_interleave(16), values.repeat(16)]",
        "[values.repeat(16), values.repeat_interleave(16)]",
        "unit/engine/test_quantized_base.py::test_a_weight_in_bf16_keeps_its_rows_of_zeros_and_most_of_its_bits[nf4-0.1]",
    ),
    Mutant(
        1,
        "a block of a quantized weight takes the scale of another",
        "engine/quantized_base.py:dequantize",
        "values.view(len(scales), -1).mul_(scales[:, None]).view(shape)",
        "values.view(len(scales), -1).mul_(scales.roll(1)[:, None]).view(shape)",
        "unit/engine/test_quantized_base.py::test_the_values_are_those_of_torchaos_own_tensors",
    ),
    Mutant(
        4,
        "the fingerprint of a quantized base leaves out the last bits",
        "engine/base_fingerprint.py:_digest",
        "words[first : first + _CHUNK].long()",
        "words[first : first + _CHUNK].long() >> 8",
        "unit/engine/test_quantized_base.py::"
        "test_the_fingerprint_depends_on_every_frozen_tensor_to_the_last_bit_and_on_no_trained_one",
    ),
    Mutant(
        1,
        "dequantized experts are saved for the backward pass",
        "engine/quantized_base.py:QuantizedExperts.forward",
        "self.recomputes",
        "False",
        "unit/engine/test_quantized_base.py::"
        "test_logits_and_gradients_are_those_of_the_dequantized_weights_and_none_of_these_is_kept[mixtral]",
    ),
    Mutant(
        2,
        "shared weights are separated by a restart",
        "engine/model.py:allocate_weights",
        "parameter not in allocated",
        "True",
        "unit/engine/test_empty_model.py::test_shared_frozen_and_marked_parameters_stay_what_they_are",
    ),
    Mutant(
        1,
        "a loaded tensor's shares go to the ranks in reverse order",
        "engine/load_weights.py:_deal",
        "range(0, size * dist.get_world_size(), size)",
        "reversed(range(0, size * dist.get_world_size(), size))",
        "distributed/test_quantized_weights.py::test_every_rank_gets_the_weights_that_transformers_dequantizes[2]",
    ),
    Mutant(
        1,
        "rows and columns of block scales are swapped",
        "engine/quantized_source.py:_by_rows_of_blocks.ByRowsOfBlocks._dequantize_one",
        "scales[..., number : number + 1, :]",
        "scales[..., number : number + 1].mT",
        "unit/engine/test_quantized_weights.py::test_weights_equal_bitwise_those_that_transformers_dequantizes[qwen3-fp8-bf16]",
    ),
    Mutant(
        1,
        "the last block of a row is left out if it is partial",
        "engine/quantized_source.py:_by_rows_of_blocks.ByRowsOfBlocks._dequantize_one",
        "range(grid[0])",
        "range(rows // block[0])",
        "unit/engine/test_quantized_weights.py::test_the_last_blocks_of_a_matrix_may_be_partial",
    ),
    Mutant(
        1,
        "every expert gets the first one's weights",
        "engine/load_weights.py:_converted",
        "result[name][number] = value[0]",
        "result[name][:] = value[0]",
        "unit/engine/test_quantized_weights.py::test_weights_equal_bitwise_those_that_transformers_dequantizes[gpt_oss-mxfp4-bf16]",
    ),
    Mutant(
        1,
        "the routers' correction biases are loaded in bf16",
        "engine/model.py:_keep_in_fp32",
        "tensor.data.to(torch.float32)",
        "tensor.data",
        "unit/engine/test_quantized_weights.py::test_weights_equal_bitwise_those_that_transformers_dequantizes[glm4_moe-fp8-static-bf16]",
    ),
    Mutant(
        2,
        "a source starts over in every epoch",
        "data/plan/planning.py:_Planning._chosen",
        "self._uses += chosen",
        "self._uses += False",
        "unit/data/plan/test_branches.py::test_a_source_goes_on_where_it_stopped",
    ),
    Mutant(
        2,
        "positions of a slice start at zero",
        "data/read/reader.py:slice_row",
        "np.arange(inside, inside + count)",
        "np.arange(count)",
        "unit/data/read/test_reader.py::test_the_digest_of_a_row_is_the_same_for_every_sp_size",
    ),
    Mutant(
        2,
        "a token is masked by its place in the row",
        "data/read/reader.py:slice_row",
        "mask(piece, tokens[: piece.length], is_allowed[: piece.length])",
        "mask(Piece(document=0, start=first + at, length=0, has_next_label=False), "
        "tokens[: piece.length], is_allowed[: piece.length])",
        "unit/data/read/test_masking.py::test_a_document_has_the_same_mask_in_every_packing_and_another_in_each_epoch",
    ),
    Mutant(
        2,
        "a token is masked by the rank's slice",
        "data/read/reader.py:slice_row",
        "mask(piece, tokens[: piece.length], is_allowed[: piece.length])",
        "mask(Piece(document=sp_rank, start=0, length=0, has_next_label=False), "
        "tokens[: piece.length], is_allowed[: piece.length])",
        "unit/data/read/test_masking.py::test_a_row_has_the_same_masks_at_every_layout[sp2-ring1]",
    ),
    Mutant(
        2,
        "each piece of a document is masked alike",
        "data/read/reader.py:RowReader._masked",
        "piece.start",
        "0",
        "unit/data/read/test_masking.py::test_a_document_that_is_split_has_the_same_mask_wherever_it_is_split",
    ),
    Mutant(
        2,
        "masks depend on the other corpora of a run",
        "data/read/reader.py:RowReader._masked",
        "int(self._firsts[source])",
        "0",
        "unit/data/read/test_masking.py::test_the_number_of_a_document_in_its_corpus_decides_its_mask",
    ),
    Mutant(
        2,
        "each epoch has the same masks",
        "data/read/reader.py:RowReader.slice_of",
        "self._plan.epoch_of(row)",
        "0",
        "unit/data/read/test_masking.py::test_a_document_has_the_same_mask_in_every_packing_and_another_in_each_epoch",
    ),
    Mutant(
        2,
        "tokens of experts are not summed over ranks",
        "trainer/step.py:_agree",
        'dist.all_reduce(sums, group=mesh.group("loss"))',
        'dist.all_reduce(sums[: len(losses)], group=mesh.group("loss"))',
        "distributed/test_routers.py::test_a_run_counts_and_balances_as_a_plain_loop[slices, tiles-6]",
    ),
    Mutant(
        2,
        "the sign of a router's bias update is reversed",
        "engine/router_health.py:RouterWatch.balance",
        "torch.sign(tokens_E.sum() - tokens_E * router.num_experts)",
        "torch.sign(tokens_E * router.num_experts - tokens_E.sum())",
        "unit/engine/test_router_health.py::test_a_bias_grows_for_experts_below_the_mean_and_shrinks_for_those_above",
    ),
    Mutant(
        2,
        "a router counts the tokens of a recomputed forward again",
        "engine/router_health.py:RouterWatch.counting",
        "try:\n    yield\nfinally:\n    num_tokens, self.is_token_N = self.is_token_N.numel(), None\n"
        "if any(router.num_seen != num_tokens for router in self._routers):\n    self._give_up()",
        "yield\nfor router in self._routers:\n    router.num_seen = 0",
        "unit/engine/test_router_health.py::test_a_token_counts_once_when_layers_are_tiled_recomputed_or_compiled"
        "[checkpointed]",
    ),
    Mutant(
        3,
        "a sequence that begins behind a unit's range is read by two units",
        "data/sources/records.py:fasta_records",
        "if at >= last: ...",
        "if False: ...",
        "unit/data/sources/test_fasta.py::test_ranges_yield_each_record_once[3]",
    ),
    Mutant(
        3,
        "a row is dealt to two ranks",
        "data/plan/steps.py:assign_rows",
        "ordered[first:first + dp_size]",
        "ordered[max(first - 1, 0):][:min(dp_size, len(ordered) - first)]",
        "unit/data/read/test_reader.py::test_every_planned_token_is_received_exactly_once_at_any_sequence_of_worlds",
    ),
    Mutant(
        3,
        "steps overlap by one row",
        "data/plan/plan.py:Plan.step_rows",
        "range(first, min(first + size, segment.base_row + segment.train.num_rows))",
        "range(max(0, first - 1), min(first + size, segment.base_row + segment.train.num_rows))",
        "unit/data/read/test_reader.py::test_every_planned_token_is_received_exactly_once_at_any_sequence_of_worlds",
    ),
    Mutant(
        3,
        "the digest is an XOR",
        "data/read/digest.py:add_digests",
        "sum(digests) % MODULUS",
        "int(np.bitwise_xor.reduce(np.array(digests, dtype='uint64')))",
        "unit/data/read/test_reader.py::test_rows_that_swap_contents_a_repeated_row_and_a_lost_one_are_noticed",
    ),
    Mutant(
        3,
        "the digest covers something else than the model's input",
        "trainer/step.py:read_back",
        "batch.input_ids_BL",
        "batch.input_ids_BL * 0",
        "unit/trainer/test_step.py::test_the_checksum_is_of_the_tensors_that_the_model_is_given",
    ),
    Mutant(
        3,
        "evaluation documents are trained on",
        "data/plan/drawing.py:_is_skipped",
        "_is_held_out(document, key, threshold) != want_held",
        "want_held and (not _is_held_out(document, key, threshold))",
        "unit/data/plan/test_plan.py::test_evaluation_documents_are_never_trained_on",
    ),
    Mutant(
        3,
        "a branch trains documents again",
        "data/plan/drawing.py:_is_skipped",
        "taken.size > 0 and taken[document]",
        "False",
        "unit/data/plan/test_branches.py::test_every_target_is_trained_once_an_epoch_through_any_branches",
    ),
    Mutant(
        3,
        "a branch loses the rest of a document",
        "data/plan/stages.py:_left_of",
        "~is_trained & is_split[pieces.document]",
        "~is_trained & ~is_split[pieces.document]",
        "unit/data/plan/test_branches.py::test_every_target_is_trained_once_an_epoch_through_any_branches",
    ),
    Mutant(
        3,
        "a labelled span is read one token late",
        "data/read/reader.py:slice_row",
        "piece.start + inside + 1",
        "piece.start + inside",
        "unit/data/read/test_reader.py::test_labels_are_the_spans_at_every_split",
    ),
    Mutant(
        3,
        "rows skipped after a bad step come back with the next branch",
        "data/plan/stages.py:_skipped_before",
        "range(branch.skipped[0] - before.base_row, branch.skipped[1] - before.base_row)",
        "range(0)",
        "unit/data/plan/test_branches.py::test_rows_that_are_left_out_are_trained_in_no_later_segment_of_their_epoch_and_nothing_else_is_lost",
    ),
    Mutant(
        3,
        "a piece is packed into a row without room",
        "data/plan/packing.py:_fit_wide",
        "tops[number] < 0 or free[tops[number]] < length",
        "tops[number] < 0",
        "unit/data/plan/test_packing.py::test_wide_fit_is_the_plain_rule_however_it_is_cut_into_blocks",
    ),
    Mutant(
        3,
        "document offsets of a text batch are one text late",
        "data/prepare/unit_writer.py:_Collected.write_texts",
        "writer.add(ids) + np.cumsum(lengths) - lengths",
        "writer.add(ids) + np.cumsum(lengths)",
        "unit/data/prepare/test_preparation.py::test_the_corpus_is_the_same_however_texts_are_gathered[bytes-ends]",
    ),
    Mutant(
        3,
        "the label at the end of a slice is lost",
        "data/read/reader.py:slice_row",
        "min(count, piece.num_labels - inside)",
        "min(count - 1, piece.num_labels - inside)",
        "unit/data/read/test_reader.py::test_every_planned_token_is_received_exactly_once_at_any_sequence_of_worlds",
    ),
    Mutant(
        3,
        "a source's share ignores documents that were begun",
        "data/plan/planning.py:_Planning._chosen",
        "drawing.available_tokens(number) + resumed[number]",
        "drawing.available_tokens(number)",
        "unit/data/plan/test_branches.py::test_what_is_left_of_documents_counts_in_the_share_of_their_source[weights0]",
    ),
    Mutant(
        3,
        "documents that were trained on count as held out",
        "data/plan/drawing.py:mark_held_out",
        "marks[document] &= _is_held_out(document, key, threshold)",
        "marks[document] = _is_held_out(document, key, threshold)",
        "unit/data/plan/test_branches.py::test_what_a_plan_says_is_held_out_no_step_trains_and_every_evaluation_reads",
    ),
    Mutant(
        3,
        "a checkpoint is committed before its steps are in the journal",
        "trainer/record.py:Recorder.sync",
        "self._flush()",
        "pass",
        "unit/trainer/test_record.py::test_no_checkpoint_relies_on_unwritten_records",
    ),
    Mutant(
        4,
        "training's live state is overwritten by staging",
        "checkpoint/staging.py:Staging.stage",
        "self._in_place and isinstance(source, ShardedState)",
        "isinstance(source, ShardedState)",
        "unit/checkpoint/test_background.py::test_the_written_state_is_the_one_at_the_time_of_the_save",
    ),
    Mutant(
        4,
        "a late checkpoint of a fenced attempt is loaded",
        "checkpoint/fence.py:Lineage.holds",
        "all((start >= step for later, start in self.started_from.items() if later > attempt))",
        "True",
        "unit/checkpoint/test_fence.py::test_a_commit_that_slipped_through_is_not_part_of_the_run_and_not_in_the_way",
    ),
    Mutant(
        4,
        "a fenced attempt commits",
        "checkpoint/fence.py:is_overtaken",
        "read_lineage(store).newest_attempt > attempt",
        "False",
        "unit/checkpoint/test_fence.py::test_a_dead_attempt_can_not_commit_once_another_has_been_claimed",
    ),
    Mutant(
        4,
        "a fenced attempt deletes checkpoints",
        "checkpoint/retention.py:Retention.apply",
        "lineage.newest_attempt > newest.attempt",
        "False",
        "unit/checkpoint/test_retention.py::test_an_attempt_that_was_overtaken_deletes_nothing",
    ),
    Mutant(
        4,
        "shards are deleted although their manifest was committed",
        "checkpoint/save.py:_commit",
        "found == content",
        "False",
        "unit/checkpoint/test_faults.py::test_a_manifest_whose_answer_was_lost_is_committed",
    ),
    Mutant(
        4,
        "a shard is committed unverified",
        "checkpoint/save.py:_write_own",
        "find_damage(store, step_folder(step), shard, read_content=True)",
        "None",
        "unit/checkpoint/test_faults.py::test_bytes_that_change_on_their_way_to_the_disk_are_never_committed",
    ),
    Mutant(
        4,
        "part of a block is loaded unverified",
        "checkpoint/load.py:_Reader._check",
        "check_blocks(batch.shard, read_range.stored, sums, blocks, read_range.start)",
        "read_range.first > 0 or check_blocks(batch.shard, read_range.stored, sums, blocks, read_range.start)",
        "unit/checkpoint/test_save_and_load.py::test_a_flip_in_a_part_that_is_read_is_found_and_one_beside_it_is_not_read",
    ),
    Mutant(
        4,
        "the best checkpoint is deleted",
        "checkpoint/retention.py:best_steps",
        "sorted(known)",
        "sorted(known, reverse=True)",
        "unit/checkpoint/test_retention.py::test_the_best_and_every_nth_outlive_the_last",
    ),
    Mutant(
        4,
        "a run with damaged checkpoints restarts from step 0",
        "run/start_point.py:decide_start",
        "if damaged: ...",
        "if False: ...",
        "unit/trainer/test_resume.py::test_only_damaged_states_are_refused",
    ),
    Mutant(
        4,
        "a shard of the wrong size counts as whole",
        "checkpoint/choice.py:examine",
        "listed.get(f'{folder}/{shard.file}') == shard.num_bytes",
        "f'{folder}/{shard.file}' in listed",
        "unit/checkpoint/test_choice.py::test_shards_that_are_missing_or_of_another_size_are_found_by_sizes_alone[a-truncated-shard]",
    ),
    Mutant(
        4,
        "an unreadable checkpoint is set aside",
        "checkpoint/choice.py:set_aside",
        "damage.kind in ('unreadable', 'foreign')",
        "False",
        "unit/checkpoint/test_faults.py::test_what_can_not_be_read_now_is_passed_over_and_not_destroyed",
    ),
    Mutant(
        4,
        "a ZeRO-1 partition is stored at the wrong offset",
        "engine/partition_view.py:intersect",
        "begin - position",
        "0",
        "distributed/test_checkpoint_layouts.py::test_every_stage_and_world_loads_every_other_and_goes_on",
    ),
    Mutant(
        4,
        "secondary shards of frozen weights outlive the load of a state",
        "engine/partition_view.py:Zero3View.weights",
        "parameter.ds_secondary_tensor = None",
        "pass",
        "distributed/test_checkpoint_layouts.py::test_a_state_does_not_depend_on_secondary_shards",
    ),
    Mutant(
        4,
        "another run's optimizer state is loaded with its weights",
        "run/start_point.py:RecoverySources.open",
        "resume_state == 'optimizer'",
        "True",
        "distributed/test_saving.py::test_a_run_of_another_context_length_starts_from_the_weights",
    ),
    Mutant(
        4,
        "a shard in peer memory has no second copy",
        "peer_memory/store.py:PeerMemoryStore._write_shard",
        "partner != writer and self._is_copied(key, writer, partner)",
        "partner != writer",
        "unit/peer_memory/test_store.py::test_any_single_agent_may_be_lost[a]",
    ),
    Mutant(
        4,
        "a manifest in peer memory is decided by the nearest agent",
        "peer_memory/store.py:PeerMemoryStore._write_small",
        "sorted(self.nodes)",
        "self.nodes",
        "unit/peer_memory/test_store.py::test_a_manifest_is_seen_by_all_from_its_decision_on_although_its_writer_died_before_spreading_it",
    ),
    Mutant(
        4,
        "a step has two manifests in peer memory",
        "peer_memory/store.py:PeerMemoryStore._write_small",
        "self._of_all(self.nodes, lambda client: client.sizes(key)).values()",
        "()",
        "unit/peer_memory/test_store.py::test_a_repeated_step_replaces_a_dead_attempts_manifest_that_the_first_node_does_not_have",
    ),
    Mutant(
        4,
        "a dead attempt's manifest in peer memory hides its successor's",
        "peer_memory/store.py:PeerMemoryStore._find_newest",
        "max(heads.values(), key=attempt_of)",
        "next(iter(heads.values()))",
        "unit/peer_memory/test_store.py::test_a_readmitted_node_with_a_dead_attempts_manifest_does_not_hide_the_state_of_the_next",
    ),
    Mutant(
        4,
        "lent memory is overwritten while an agent keeps it",
        "peer_memory/files.py:LentBuffer.is_returned",
        "self._mapped[self.num_bytes:] != LENT",
        "True",
        "unit/peer_memory/test_lent_memory.py::test_staging_leaves_a_state_alone_until_its_successor_is_kept",
    ),
    Mutant(
        4,
        "a dead agent's memory is written again",
        "checkpoint/staging.py:Staging._is_writable",
        "self._forget(number)",
        "return True",
        "unit/peer_memory/test_lent_memory.py::test_staging_takes_new_memory_where_an_agent_is_gone_with_the_old",
    ),
    Mutant(
        4,
        "a damaged chunk is kept in peer memory",
        "peer_memory/files.py:MemoryFile.accept",
        "checksum(room) != wanted",
        "checksum(room) != wanted and (not room)",
        "unit/peer_memory/test_agent.py::test_a_chunk_that_arrived_damaged_is_refused_and_its_memory_given_back",
    ),
    Mutant(
        4,
        "a fenced attempt's state is taken from peer memory",
        "run/start_point.py:RecoverySources._own_states",
        "newest_committed(self.memory, 'sizes', unless=self.unusable, lineage=lineage)",
        "newest_committed(self.memory, 'sizes', unless=self.unusable)",
        "unit/trainer/test_resume.py::test_the_storage_vetoes_peer_memory",
    ),
    Mutant(
        4,
        "a partly loaded state is trained from step 0",
        "trainer/resume.py:resume",
        "if chosen is None: ...",
        "if chosen is None and source != 'peer memory': ...",
        "unit/trainer/test_resume.py::test_a_partly_loaded_state_is_no_obstacle_to_the_next_attempt",
    ),
    Mutant(
        4,
        "the only state in peer memory is dropped before its successor",
        "trainer/peer_memory_keeper.py:PeerMemoryKeeper.resumed",
        "self._take_over(self._peer_memory.store, self._listed(self._peer_memory.store))",
        "self._kept = -1\nself._take_over(self._peer_memory.store, self._listed(self._peer_memory.store))",
        "unit/trainer/test_peer_memory_keeper.py::test_the_state_that_an_attempt_started_from_is_kept_until_its_successor_is",
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
        """Return the tests without a case that `make test` runs; these are run with their slow cases."""
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
            code, said = self.tests_exit([mutant.killer_id], slow=slow)
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
    """Return the verdict for an exit code of pytest: only a test that ran and failed has killed a mutant."""
    if exit_code == _TESTS_FAILED:
        return "killed"
    return "SURVIVED" if exit_code == 0 else "BROKEN"


def killer_file(mutant: Mutant) -> Path:
    """Return the file of the test that must turn red."""
    return ROOT / mutant.killer_id.split("::")[0]


def killer_function(mutant: Mutant) -> str:
    """Return the name of the test that must turn red, without its parameters."""
    return re.sub(r"\[.*", "", mutant.killer.split("::")[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant every bug; return 1 if one survived or its test could not run."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="plant the bugs whose name contains one of these words"
    )
    parser.add_argument("--show", action="store_true", help="print how each test failed")
    parser.add_argument("--list", action="store_true", help="list the bugs and their tests, run nothing")
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
        killers = sorted({mutant.killer_id for mutant in chosen})
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
            verdict, said = workshop.judge(mutant, slow=mutant.killer_id in slow)
            print(
                f"{verdict:<9} {time.monotonic() - start:>7.1f}  {mutant.name:<{width}}  {killer_function(mutant)}",
                flush=True,
            )
            failed += verdict != "killed"
            if options.show or verdict != "killed":
                print(said)
    print(f"{len(chosen) - failed} of {len(chosen)} planted bugs were caught")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
