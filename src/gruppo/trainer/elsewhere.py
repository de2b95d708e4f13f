"""Options of other trainers: the name of each here, and why some have none. Errors and `gruppo convert` read it.

A value is the name here, alone where the value means the same, or with a note after a colon.
"""

_FILTER = (
    "training draws from the whole vocabulary: a token outside the filter could never be learned, and the loss would "
    "score tokens over another set than they were drawn from. Leave it out and use temperature; `gruppo sample` has it"
)
_DROPOUT = (
    "with it the same weights score the same tokens otherwise, and the ratio would not be 1 on-policy. Leave it out"
)
REFUSED = {"top_p": _FILTER, "top_k": _FILTER, "min_p": _FILTER, "lora_dropout": _DROPOUT}
"""Options that other trainers have and this one refuses, with the reason."""

TRL = {
    "num_generations": "group_size",
    "max_completion_length": "max_new_tokens",
    "max_prompt_length": "max_prompt_tokens",
    "learning_rate": "lr",
    "lr_scheduler_type": "lr_schedule",
    "warmup_ratio": "warmup_steps: a number of optimizer steps",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "num_iterations": "epochs_per_batch",
    "steps_per_generation": "minibatches",
    "generation_batch_size": "prompts_per_step: which counts prompts",
    "per_device_train_batch_size": "tokens_per_microbatch: which affects memory only",
    "gradient_accumulation_steps": "tokens_per_microbatch: which affects memory only",
    "epsilon": "clip_range",
    "epsilon_high": "clip_range: its second number",
    "loss_type": "loss",
    "importance_sampling_level": "loss: gspo has ratios of whole sequences",
    "scale_rewards": "normalization",
    "mask_truncated_completions": "mask_truncated",
    "ref_model_sync_steps": "ref_every",
    "ref_model_mixup_alpha": "ref_mix",
    "reward_funcs": "rewards",
    "train_dataset": "data",
    "dataset_name": "data",
    "eval_dataset": "eval_data",
    "model_name_or_path": "model",
    "output_dir": "output",
    "early_stopping_patience": "patience",
    "load_best_model_at_end": "keep_best",
    "save_steps": "save_every",
    "eval_steps": "eval_every",
    "save_total_limit": "keep_checkpoints",
    "report_to": "tensorboard: wandb and trackio are options of their own too",
    "use_vllm": "sampler: vllm is one",
    "bf16": "dtype",
    "use_peft": "lora",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_targets",
    "modules_to_save": "lora_modules_to_save",
    "load_in_4bit": "quantize: nf4 is 4 bits",
}
"""TRL's GRPOConfig, and what its scripts take besides."""

TRL_TRAINER = {
    "args": "config: a TrainConfig, the first argument",
    "reward_funcs": "rewards",
    "train_dataset": "data",
    "eval_dataset": "eval_data",
    "processing_class": "tokenizer",
}
"""Arguments of TRL's GRPOTrainer."""

OPEN_INSTRUCT = {
    "num_unique_prompts_rollout": "prompts_per_step",
    "num_samples_per_prompt_rollout": "group_size",
    "response_length": "max_new_tokens",
    "max_prompt_token_length": "max_prompt_tokens",
    "total_episodes": "steps: a number of rollout batches",
    "num_epochs": "epochs_per_batch",
    "num_mini_batches": "minibatches",
    "warm_up_steps": "warmup_steps",
    "clip_lower": "clip_range: its first number",
    "clip_higher": "clip_range: its second number",
    "loss_fn": "loss",
    "advantage_normalization_type": "normalization",
    "active_sampling": "dynamic_sampling",
    "filter_zero_std_samples": "dynamic_sampling: 1 leaves groups without signal out",
    "truncated_importance_sampling_ratio_cap": "correction: truncate caps at 2",
    "rho_clamp_upper_bound": "correction: truncate caps at 2",
    "ref_policy_update_freq": "ref_every",
    "pack_length": "tokens_per_microbatch: which affects memory only",
    "dataset_mixer_list": "data",
    "dataset_mixer_eval_list": "eval_data",
    "stop_strings": "stop",
    "local_eval_every": "eval_every",
    "checkpoint_state_freq": "save_every",
    "keep_last_n_checkpoints": "keep_checkpoints",
    "eval_pass_at_k": "eval_samples",
    "with_tracking": "wandb",
    "model_dtype": "dtype",
    "verification_reward": "reward_weights",
}
"""Flags of Open Instruct's grpo_fast.py."""

ELSEWHERE = TRL | OPEN_INSTRUCT

_ONE_PROCESS = "a run is one process on one GPU"
_HUB = "`gruppo export` writes the model; nothing is uploaded"
_LOGGED = "every step is logged, and completions go to Parquet files of the run"
_LAUNCH = "of the launcher"

ABSENT = {
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "ddp_timeout", "ddp_find_unused_parameters", "ds3_gather_for_generation",
         "deepspeed_stage", "deepspeed_zpg", "deepspeed_offload_param", "deepspeed_offload_optimizer", "num_nodes",
         "num_learners_per_node", "sequence_parallel_size", "gather_whole_model", "single_gpu_mode", "vllm_num_engines",
         "vllm_sync_backend", "backend_timeout", "fsdp_shard_degree"),
        _ONE_PROCESS,
    ),
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hf_entity", "hf_repo_id",
         "log_completions_hub_repo", "try_launch_beaker_eval_jobs_on_weka", "try_auto_save_to_beaker",
         "gs_bucket_path"),
        _HUB,
    ),
    **dict.fromkeys(
        ("logging_steps", "logging_strategy", "logging_first_step", "logging_dir", "log_completions", "log_level",
         "num_completions_to_print", "log_unique_prompts", "save_traces", "rollouts_save_path", "verbose",
         "record_entropy"),
        _LOGGED,
    ),
    **dict.fromkeys(("config_file", "main_process_port", "machine_rank", "num_machines", "mixed_precision"), _LAUNCH),
    **dict.fromkeys(
        ("run_name", "exp_name", "wandb_project_name", "wandb_entity", "wandb_project"), "a run is named by its output"
    ),
    **dict.fromkeys(
        ("use_liger_kernel", "use_liger_loss", "use_liger_grpo_loss", "cast_lm_head_to_fp32", "lm_head_fp32"),
        "the head never holds all logits, and log-probs and losses are float32",
    ),
    **dict.fromkeys(
        ("load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "use_bnb_nested_quant"),
        "a base is quantised to nf4 or not at all",
    ),
    **dict.fromkeys(
        ("tools", "environment_factory", "max_tool_calling_iterations", "tool_parser_type", "env_pool_size",
         "env_max_steps"),
        "completions have one turn",
    ),
    **dict.fromkeys(
        ("system_prompt_override_file", "chat_template", "chat_template_name", "chat_template_path",
         "user_prompt_transform"),
        "the tokenizer's own chat template is used; `system` and `chat_template_kwargs` change what it gets",
    ),
    **dict.fromkeys(
        ("llm_judge_model", "llm_judge_timeout", "code_api_url", "apply_evolving_rubric_reward",
         "reward_model_name_or_path",
         "apply_adaptive_rubric_reward", "remap_verifier", "reward_aggregator"),
        "a reward is a Python function; reward models, judges and sandboxes are called inside one",
    ),
    "attn_implementation": "the model's own attention is used",
    "do_eval": "eval_every and eval_prompts decide it",
    "do_train": "`gruppo train` trains",
    "save_freq": "the model is saved at the end, and checkpoints every save_every steps",
    "disable_dropout": "dropout is always off",
    "trust_remote_code": "code from a model repository is never run",
    "remove_unused_columns": "all columns reach the rewards",
    "gradient_checkpointing_kwargs": "checkpointing has no options",
    "repetition_penalty": "it would draw from another distribution than the one that is scored",
    "vllm_max_model_length": "it follows from the longest prompt and max_new_tokens",
    "vllm_enforce_eager": "an option of vLLM: vllm_options",
    "vllm_enable_prefix_caching": "vLLM's default",
    "vllm_enable_sleep_mode": "an engine in the process always sleeps while the trainer works",
    "vllm_server_timeout": "sampler_deadline bounds each call",
    "tokenizer_name_or_path": "the tokenizer is that of the model",
    "send_slack_alerts": "the exit code of a run tells how it ended",
    "torch_compile": "`compile` is on where there is a GPU",
}  # fmt: skip
"""Options without a counterpart, and why."""
