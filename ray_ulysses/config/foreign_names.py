"""Names of other tools' settings, with our name, or the reason why there is no such setting."""

from __future__ import annotations

from ray_ulysses.config.learning import StageSection
from ray_ulysses.errors import Problem

_OURS = {
    "run.name": "run_name job_name",
    "run.storage": "output_dir save_dir dump_folder checkpoint_dir",
    "run.seed": "random_seed data_seed",
    "run.stop_step": "max_steps train_steps total_train_steps max_iters train_iters training_steps",
    "run.log_every_steps": "logging_steps logging_strategy log_freq log_interval steps_per_print",
    "run.eval_every_steps": "eval_steps eval_strategy evaluation_strategy eval_interval evals_per_epoch do_eval",
    "run.profile": "profiler enable_profiling profiler_steps profiler_steps_start wall_clock_breakdown",
    "model.path": "base_model model_name_or_path pretrained_model_name_or_path model_id model_id_or_path",
    "model.part": "freeze_vision_tower freeze_vit",
    "model.rope": "rope_scaling rope_parameters",
    "model.freeze": "freeze_parameters frozen_parameters",
    "model.adapter": "lora peft peft_config use_peft finetuning_type train_type tuner_type",
    "model.adapter.rank": "r lora_r lora_rank",
    "model.adapter.alpha": "lora_alpha",
    "model.adapter.rslora": "use_rslora peft_use_rslora",
    "model.adapter.dora": "use_dora peft_use_dora lora_use_dora lora_dora",
    "model.adapter.ranks": "rank_pattern lora_rank_pattern",
    "model.adapter.alphas": "alpha_pattern lora_alpha_pattern",
    "model.adapter.from": "adapter_name_or_path adapter_path lora_model_dir peft_checkpoint",
    "model.adapter.targets": "target_modules lora_target lora_target_modules lora_target_linear "
    "target_parameters lora_target_parameters",
    "model.adapter.modules_to_save": "lora_modules_to_save additional_target",
    "model.dtype": "bf16 pure_bf16 bfloat16 torch_dtype precision mixed_precision mixed_precision_param",
    "model.attention": "attn_implementation attn_impl flash_attn flash_attention use_flash_attn use_flash_attention_2 "
    "sdp_attention xformers_attention",
    "model.compile": "torch_compile",
    "model.resume_from": "resume_from_checkpoint initial_load_path load_checkpoint auto_resume_from_checkpoints",
    "data.path": "dataset datasets dataset_name dataset_path dataset_dir dataset_prepared_path train_file data_path",
    "data.sources": "dataset_mixture dataset_mixer interleave_probs mix_strategy",
    "data.context_tokens": "sequence_length seq_length seq_len sequence_len max_seq_length max_seq_len max_length "
    "cutoff_len model_max_length context_length block_size",
    "data.rows_per_step": "batch_size train_batch_size global_batch_size micro_batch_size local_batch_size "
    "per_device_train_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu "
    "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches",
    "data.packing": "sample_packing packing_strategy neat_packing packing_length pad_to_sequence_len",
    "data.overlong": "truncation truncation_mode truncation_strategy excess_length_strategy",
    "data.epochs": "num_train_epochs num_epochs max_epochs",
    "data.validation": "test_datasets eval_dataset val_dataset validation_dataset validation_data",
    "data.eval_fraction": "val_set_size val_size validation_split split_dataset_ratio test_size",
    "data.eval_rows": "eval_batch_size per_device_eval_batch_size max_eval_samples",
    "data.prefetch_rows": "dataloader_num_workers dataloader_prefetch_factor num_workers",
    "parallel.sp_size": "context_parallel_size context_parallel_degree cp_size cp_degree sequence_parallel_size "
    "sequence_parallel_degree sequence_parallel ulysses_size ulysses_degree sp_degree",
    "parallel.ring_size": "ring_degree ring_attn_func heads_k_stride",
    "optimizer.kind": "optim optimizer_name optimizer_type use_muon",
    "optimizer.groups": "lr_groups param_groups",
    "optimizer.lr": "learning_rate max_lr peak_lr base_lr",
    "optimizer.betas": "adam_beta1 adam_beta2 adam_betas beta1 beta2",
    "optimizer.eps": "adam_epsilon adam_eps epsilon",
    "optimizer.weight_decay": "wd",
    "optimizer.max_grad_norm": "gradient_clipping max_norm clip_grad grad_clip clip_grad_norm gradient_clip_val",
    "optimizer.router_loss": "router_aux_loss_coef aux_loss_coef moe_aux_loss_coeff",
    "schedule.kind": "lr_scheduler lr_scheduler_type scheduler scheduler_type lr_schedule lr_decay_style decay_type",
    "schedule.warmup_steps": "warmup lr_warmup_steps num_warmup_steps warmup_num_steps warmup_iters",
    "schedule.warmup_ratio": "lr_warmup_ratio warmup_fraction lr_warmup_fraction",
    "schedule.horizon_steps": "total_num_steps num_training_steps lr_decay_iters",
    "schedule.decay_steps": "num_decay_steps lr_wsd_decay_iters decay_ratio",
    "schedule.min_lr_ratio": "min_lr min_lr_rate min_lr_factor cosine_min_lr_ratio lr_end",
    "memory.gradient_checkpointing": "activation_checkpointing activation_checkpoint recompute",
    "memory.offload_activations": "activation_offloading activation_offload cpu_checkpointing",
    "memory.zero_stage": "zero_optimization stage fsdp fsdp_config fsdp_version sharding_strategy "
    "data_parallel_shard_degree",
    "memory.offload_optimizer": "cpu_offload enable_cpu_offload fsdp_offload_params offload_optimizer_device",
    "memory.offload_param": "offload_param_device offload_params",
    "memory.nvme_path": "offload_folder",
    "memory.loss_tile": "use_liger_kernel use_liger fused_linear_cross_entropy liger_fused_linear_cross_entropy",
    "memory.attention_head_groups": "attention_chunks",
    "memory.mlp_tile": "tiled_mlp tiled_mlp_num_shards tiled_mlp_original_mlp",
    "checkpoint.every_steps": "save_steps save_strategy save_interval save_freq saves_per_epoch checkpoint_interval",
    "checkpoint.keep_last": "save_total_limit keep_latest_k",
    "checkpoint.keep_best": "load_best_model_at_end",
    "run.early_stopping": "early_stopping_patience early_stopping_steps early_stopping_threshold early_stopping_rounds",
    "checkpoint.best_metric": "metric_for_best_model",
    "tracking.trackers": "report_to use_wandb enable_wandb enable_tensorboard log_with use_mlflow",
    "tracking.experiment": "wandb_project mlflow_experiment_name experiment_name project project_name",
    "tracking.uri": "mlflow_tracking_uri tracking_uri",
    "cluster.workers": "num_processes world_size nproc_per_node num_gpus n_gpus num_machines nnodes dp_size "
    "data_parallel_size data_parallel_replicate_degree",
    "cluster.gpus_per_worker": "use_cpu no_cuda",
    "elastic.collective_timeout_s": "ddp_timeout init_timeout_seconds train_timeout_seconds",
}
"""Foreign names by the setting that they correspond to."""
_NOTES = {
    "run.stop_step": "the step after which the command stops; by default, training ends with the data",
    "run.early_stopping": "a mapping with the patience, in evaluations, such as {patience: 3}",
    "model.adapter": "a mapping with rank, alpha and targets, or null to train all weights",
    "model.dtype": "bf16 or fp32",
    "optimizer.kind": "adamw, adamw_bf16_moments or muon",
    "model.resume_from": "the same run.name and run.storage resume automatically",
    "data.path": "the directory of a corpus that `ray-ulysses prepare` wrote",
    "data.rows_per_step": "the rows of a step over all workers; gradient accumulation follows from it",
    "data.packing": "documents are packed and never attend to one another",
    "memory.loss_tile": "the loss is always computed in tiles",
    "memory.zero_stage": "the state is sharded over all workers",
    "parallel.sp_size": "the number of ranks that share a row; a ring is chosen automatically",
    "schedule.min_lr_ratio": "a fraction of optimizer.lr",
    "cluster.workers": "one per GPU; parallel.sp_size workers share each row",
}
_NONE = {
    "optim_args": (
        "optimizers have no other arguments",
        "remove it; optimizer.lr, betas, eps and weight_decay are the settings of all kinds",
    ),
    "fp16 use_fp16 half float16 loss_scale initial_scale_power amp": (
        "fp16 is not supported: its range is too small for gradients without loss scaling",
        "set model.dtype: bf16, or fp32 on CPU",
    ),
    "fp8 enable_fp8 float8 load_in_4bit load_in_8bit quantization_config quantization_bit quant_method "
    "bnb_4bit_compute_dtype": (
        "weights are trained in bf16 or fp32; checkpoints in FP8 or MXFP4 are dequantized automatically",
        "remove it; docs/fine-tune.md lists the supported formats",
    ),
    "tp_size tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size autotp_size": (
        "there is no tensor parallelism: ranks share the tokens of a row, and ZeRO shards the weights",
        "remove it; set parallel.sp_size and memory.zero_stage",
    ),
    "pp_size pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size": (
        "there is no pipeline parallelism: ranks share the tokens of a row, and ZeRO shards the weights",
        "remove it; set parallel.sp_size and memory.zero_stage",
    ),
    "ep_size expert_parallel_size expert_parallel_degree expert_model_parallel_size": (
        "there is no expert parallelism: ZeRO shards the experts as it shards other weights",
        "remove it; set memory.zero_stage",
    ),
    "lora_dropout dropout attention_dropout hidden_dropout resid_pdrop": (
        "dropout is not supported: its masks would depend on the layout",
        "remove it",
    ),
    "label_smoothing label_smoothing_factor neftune_noise_alpha": (
        "the loss is the exact cross-entropy of each document",
        "remove it; optimizer.z_loss is the only regularizer of the logits, and objective.label_smoothing is for pairs",
    ),
    "group_by_length length_column_name": (
        "rows are packed from documents of any length, and rows of similar cost share a micro-batch",
        "remove it; data.packing and data.balance_steps control this",
    ),
    "trust_remote_code trust_remote_code_model": (
        "code from a model repository is never run: it would run on every worker, and its attention can't be replaced "
        "exactly",
        "remove it, and use a model whose architecture is implemented in Transformers",
    ),
    "tokenizer tokenizer_config tokenizer_name tokenizer_type tokenizer_path text_field dataset_text_field text_column "
    "chat_template template special_tokens train_on_inputs train_on_prompt completion_only_loss assistant_only_loss "
    "roles_to_train field_messages preprocessing_num_workers dataset_num_proc": (
        "documents are tokenized once, before training",
        "remove it, and use the options of `ray-ulysses prepare` or data.prepare",
    ),
    "push_to_hub hub_model_id hub_strategy save_safetensors save_only_model merge_lora": (
        "a run stores only checkpoints; `export` writes a model directory from one of them",
        "remove it, and use `ray-ulysses export` (--push-to-hub uploads the model)",
    ),
    "rl loss_type pref_loss": (
        "the loss is set by objective.kind, and there is no reinforcement learning",
        "remove it, and set objective.kind to next_token, mlm, classification, embedding, dpo, ipo, orpo, simpo or kto",
    ),
    "reward_model": ("there are no reward models and no reinforcement learning", "remove it"),
    "training trainer train job deepspeed deepspeed_config accelerate parallelism compute_environment": (
        "settings of other tools are not read",
        "move its content into our sections; docs/configuration.md lists every setting",
    ),
}
FOREIGN = {name: ours for ours, names in _OURS.items() for name in names.split()}
"""Our setting by foreign name."""
UNSUPPORTED = {name: both for names, both in _NONE.items() for name in names.split()}
"""The reason why there is no such setting, and the way out, by foreign name."""


def foreign_problem(path: str, value: object) -> Problem | None:
    """Return the problem of an unknown setting whose name other tools use, or None if no known tool uses it."""
    section, _, written = path.rpartition(".")
    name = written.lower().replace("-", "_")
    if (reason := UNSUPPORTED.get(f"{section}.{name}") or UNSUPPORTED.get(name)) is not None:
        return Problem(path=path, value=value, rule=reason[0], hint=reason[1])
    if (ours := FOREIGN.get(name)) is None:
        return None
    note = f", {_NOTES[ours]}" if ours in _NOTES else ""
    own = ours.rpartition(".")[2]
    if section.startswith("stages.") and own in StageSection.model_fields:
        ours = f"{section}.{own}"
    return Problem(path=path, value=value, rule="there is no such setting", hint=f"use {ours} instead{note}")
