"""Names of other trainers' options: the name of each here, or the reason why it has none.

The one table that error messages, `gruppo convert` and docs/coming_from.md read. A bare name means that the value has
the same meaning; otherwise a note follows after a colon.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an option of another trainer has no counterpart.

    Args:
        until: names, in one text, that an option of a run would have which made this false. A test fails as soon as
            there is one.
    """

    why: str
    until: str

    def __str__(self) -> str:
        return self.why


_FILTER = Reason(
    "training draws from the whole vocabulary: a token outside the filter could never be learned, and the loss would "
    "score tokens over another set than they were drawn from. Leave it out and use temperature; `gruppo sample` has it",
    "top_p top_k min_p",
)
DROPOUT = Reason(
    "with dropout the same weights give the same tokens other log-probs each time, and the on-policy ratio would not "
    "be 1. Leave it out",
    "lora_dropout dropout",
)
REFUSED = dict.fromkeys(("top_p", "top_k", "min_p", "vllm_top_p"), _FILTER) | {"lora_dropout": DROPOUT}
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
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps"),
        "tokens_per_microbatch: for memory alone; a step has prompts_per_step x group_size completions",
    ),
    "auto_find_batch_size": "tokens_per_microbatch: which affects memory only",
    "epsilon": "clip_range",
    "epsilon_high": "clip_range: its second number",
    "delta": "loss: two_sided, with loss_options delta",
    "loss_type": "loss",
    "importance_sampling_level": "loss: gspo has ratios of whole sequences",
    "top_entropy_quantile": "loss: top_entropy, with loss_options share",
    "sapo_temperature_pos": "tau: its first number",
    "sapo_temperature_neg": "tau: its second number",
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos"), "loss_options: positive, of vespo"),
    **dict.fromkeys(("vespo_k_neg", "vespo_lambda_neg"), "loss_options: negative, of vespo"),
    "scale_rewards": "normalization: none is centered; batch is scale batch, mean is advantage maxrl",
    "normalize_advantages": "normalization: standard or centered",
    "multi_objective_aggregation": "advantage: gdpo normalizes each reward, then adds them up",
    "mask_truncated_completions": "mask_truncated",
    "max_tool_calling_iterations": "max_turns: one more than it, since the turn after the last answer counts",
    "environment_factory": "environment: GRPOTrainer(environment_factory=...) takes TRL's classes as they are",
    "use_bias_correction_kl": "kl_estimator: ratio_k3",
    "sync_ref_model": "ref_every: 0 keeps the reference",
    "ref_model_sync_steps": "ref_every",
    "ref_model_mixup_alpha": "ref_mix",
    "use_adaptive_entropy": "entropy_target: a number switches it on",
    "entropy_coef_delta": "entropy_change",
    **dict.fromkeys(
        ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
         "vllm_importance_sampling_clip_min", "vllm_importance_sampling_cap"),
        "correction",
    ),
    "off_policy_mask_threshold": "correction: off_policy_mask",
    "reward_funcs": "rewards",
    "reward_model_name_or_path": "rewards: a folder or a hub's name is a reward model",
    "train_dataset": "data",
    "dataset_name": "data",
    "dataset_config": "data: hf://name/config:split",
    "dataset_train_split": "data: hf://name/config:split",
    "dataset_test_split": "eval_data: hf://name/config:split",
    "eval_dataset": "eval_data",
    "shuffle_dataset": "shuffle",
    "train_sampling_strategy": "shuffle: true or false",
    "data_seed": "seed: one for everything random",
    "model_name_or_path": "model",
    "tokenizer_name_or_path": "tokenizer",
    "model_revision": "revision",
    "torch_dtype": "dtype",
    "output_dir": "output",
    "early_stopping_patience": "patience",
    "load_best_model_at_end": "keep_best",
    "save_steps": "save_every",
    "save_strategy": "save_every: in steps",
    "eval_steps": "eval_every",
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), "eval_every: 0 evaluates before and after training"),
    "num_generations_eval": "eval_samples: 0 evaluates the greedy answer alone",
    "save_total_limit": "keep_checkpoints",
    "report_to": "tensorboard: wandb and trackio are options of their own too",
    "use_vllm": "sampler: vllm is one",
    "vllm_mode": "sampler: vllm is colocate, vllm:http://host:port a server",
    "vllm_device": "sampler: vllm shares the trainer's GPU, vllm:http://host:port is a server on another",
    **dict.fromkeys(("vllm_server_base_url", "vllm_server_host", "vllm_server_port"), "sampler: vllm:http://host:port"),
    "vllm_server_timeout": "sampler_deadline",
    "vllm_gpu_memory_utilization": "vllm_options: gpu_memory_utilization, as vLLM calls it",
    "vllm_tensor_parallel_size": "vllm_options: tensor_parallel_size, as vLLM calls it",
    "vllm_enforce_eager": "vllm_options: enforce_eager, as vLLM calls it",
    "vllm_enable_prefix_caching": "vllm_options: enable_prefix_caching, as vLLM calls it",
    "vllm_model_impl": "vllm_options: model_impl, as vLLM calls it",
    **dict.fromkeys(("bf16", "bf16_full_eval"), "dtype: bfloat16"),
    "use_peft": "lora",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_targets",
    "modules_to_save": "lora_modules_to_save",
    "load_in_4bit": "quantize: nf4 is 4 bits",
    "torch_compile": "compile",
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed"), "shard: FSDP2, on ranks that torchrun starts"),
    "ddp_timeout": "rank_deadline",
}  # fmt: skip
"""TRL's GRPOConfig with what it inherits, and what its scripts take besides."""

UNSLOTH = {
    "model_name": "model",
    "max_seq_length": "max_new_tokens: and max_prompt_tokens, which are counted apart",
    "fast_inference": "sampler: vllm is one",
    "gpu_memory_utilization": "vllm_options: gpu_memory_utilization, as vLLM calls it",
    "use_gradient_checkpointing": "gradient_checkpointing: with offload it keeps the inputs of blocks in host memory",
    "random_state": "seed",
    "max_lora_rank": "lora_rank",
    "target_modules": "lora_targets",
    "vllm_sampling_params": "temperature: stop and max_new_tokens are options of their own too",
    "unsloth_grpo_mini_batch": "tokens_per_microbatch: which affects memory only",
    "load_in_16bit": "dtype: bfloat16",
    "full_finetuning": "lora: false trains all weights",
}
"""Unsloth's FastLanguageModel, and what it adds to GRPOConfig."""

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
VERL = {
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "max_turns",
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.model.lora_rank": "lora_rank: with lora",
    "data.train_files": "data",
    "data.val_files": "eval_data",
    "data.prompt_key": "prompt_column",
    "data.train_batch_size": "prompts_per_step",
    "data.max_prompt_length": "max_prompt_tokens",
    "data.max_response_length": "max_new_tokens",
    "data.shuffle": "shuffle",
    _ROLLOUT + "n": "group_size",
    _ROLLOUT + "name": "sampler: vllm is one",
    _ROLLOUT + "temperature": "temperature",
    _ROLLOUT + "gpu_memory_utilization": "vllm_options: gpu_memory_utilization, as vLLM calls it",
    _ROLLOUT + "tensor_model_parallel_size": "vllm_options: tensor_parallel_size, as vLLM calls it",
    _ACTOR + "optim.lr": "lr",
    _ACTOR + "ppo_mini_batch_size": "minibatches: prompts_per_step divided by it",
    _ACTOR + "ppo_micro_batch_size_per_gpu": "tokens_per_microbatch: which affects memory only",
    _ACTOR + "ppo_max_token_len_per_gpu": "tokens_per_microbatch: which affects memory only",
    _ACTOR + "ppo_epochs": "epochs_per_batch",
    _ACTOR + "clip_ratio": "clip_range",
    _ACTOR + "clip_ratio_low": "clip_range: its first number",
    _ACTOR + "clip_ratio_high": "clip_range: its second number",
    _ACTOR + "use_kl_loss": "beta: 0 is without",
    _ACTOR + "kl_loss_coef": "beta",
    _ACTOR + "kl_loss_type": "kl_estimator: 2 is its default, which is k3",
    _ACTOR + "entropy_coeff": "entropy_coef",
    _ACTOR + "loss_agg_mode": "loss: it names the aggregation too",
    _ACTOR + "policy_loss.loss_mode": "loss",
    "algorithm.adv_estimator": "advantage",
    "algorithm.norm_adv_by_std_in_grpo": "normalization: true is standard, false is centered",
    "algorithm.filter_groups.enable": "dynamic_sampling: the most batches of a step",
    "algorithm.kl_ctrl.kl_coef": "kl_in_reward",
    "algorithm.use_kl_in_reward": "kl_in_reward: 0 is without",
    "custom_reward_function.path": "rewards: module:function",
    "reward.custom_reward_function.path": "rewards: module:function",
    "trainer.total_epochs": "epochs",
    "trainer.total_training_steps": "steps",
    "trainer.save_freq": "save_every",
    "trainer.test_freq": "eval_every",
    "trainer.default_local_dir": "output",
    "trainer.logger": "tensorboard: wandb and trackio are options of their own too",
}
"""verl's, by their dotted names."""

TRL_TRAINER = {"args": "config: a TrainConfig, the first argument", "processing_class": "tokenizer"}
"""Arguments of TRL's GRPOTrainer that match an argument of the trainer here, not an option."""

OPEN_INSTRUCT = {
    "env_max_steps": "max_turns",
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
    "async_steps": "max_staleness",
    "inflight_updates": "streaming: with max_staleness",
    "ref_policy_update_freq": "ref_every",
    "pack_length": "tokens_per_microbatch: which affects memory only",
    "dataset_mixer_list": "data",
    "dataset_mixer_eval_list": "eval_data",
    "stop_strings": "stop",
    "local_eval_every": "eval_every",
    "checkpoint_state_freq": "save_every",
    "keep_last_n_checkpoints": "keep_checkpoints",
    "eval_pass_at_k": "eval_samples",
    "loss_denominator": "loss: drgrpo divides by sequences x max_new_tokens",
    "use_vllm_logprobs": "loss: prime and its kin take the ratio over the sampler",
    "no_resampling_pass_rate": "retire_solved: by visits, not by a rate",
    **dict.fromkeys(("non_stop_penalty", "non_stop_penalty_value"), "truncated_factor: 0 takes the reward away"),
    "with_tracking": "wandb",
    "model_dtype": "dtype",
    "verification_reward": "reward_weights",
    "vllm_num_engines": "sampler: vllm:http://one:8000,http://another:8000",
    "single_gpu_mode": "sampler: vllm is an engine in the trainer's process",
    "backend_timeout": "rank_deadline",
    **dict.fromkeys(
        ("deepspeed_stage", "deepspeed_zpg", "fsdp_shard_degree"), "shard: FSDP2, on ranks that torchrun starts"
    ),
}
"""Flags of Open Instruct's grpo_fast.py."""

TWINKLE = {
    "model_id": "model",
    "tokenizer_id": "tokenizer",
    "use_lora": "lora",
    "dataset_id": "data: hf://name/config:split",
    **dict.fromkeys(("subset_name", "split"), "data: hf://name/config:split"),
    "max_length": "max_prompt_tokens: for prompts alone; max_new_tokens limits completions",
    "enable_thinking": "chat_template_kwargs: enable_thinking",
    "default_system": "system",
    "batch_size": "prompts_per_step",
    "mini_batch_size": "minibatches: prompts_per_step x group_size divided by it",
    "micro_batch_size": "tokens_per_microbatch: which affects memory only",
    "eval_interval": "eval_every",
    "num_warmup_steps": "warmup_steps",
    "scheduler_cls": "lr_schedule: constant, linear or cosine",
    "loss_cls": "loss",
    "advantage_type": "advantage",
    "advantage_scale": "normalization: none is centered; batch is scale batch",
    "reward_fns": "rewards",
    "sampler_type": "sampler: vllm or torch",
    **dict.fromkeys(("tensor_parallel_size", "enforce_eager"), "vllm_options: under the same name"),
    "max_tokens": "max_new_tokens",
    "num_samples": "group_size",
    **dict.fromkeys(("tau_pos", "tau_neg"), "tau: a pair, the first for positive advantages"),
}  # fmt: skip
"""Twinkle's, where TRL has none of the same name."""

ELSEWHERE = TRL | UNSLOTH | OPEN_INSTRUCT | TWINKLE | VERL


def _each(why: str, until: str, names: str) -> dict[str, Reason]:
    """The reason for each of these names; one of a run with the same name would make it false too."""
    return dict.fromkeys(names.split(), Reason(why, f"{names} {until}".strip()))


ABSENT = {
    **_each(
        "each rank is a process: start a run with `torchrun --nproc-per-node N -m gruppo train` (docs/distributed.md)",
        "num_ranks ranks",
        "num_nodes num_learners_per_node num_processes num_machines machine_rank local_rank main_process_port "
        "config_file nproc_per_node nnodes world_size ddp_find_unused_parameters ddp_backend ddp_bucket_cap_mb "
        "ddp_broadcast_buffers ddp_static_graph ignore_bias_buffers accelerator_config gather_whole_model "
        "ds3_gather_for_generation trainer.n_gpus_per_node "
        "trainer.nnodes",
    ),
    **_each(
        "there is no sequence, tensor or pipeline parallelism in training",
        "sequence_parallel context_parallel pipeline_parallel tensor_parallel",
        "sequence_parallel_size parallelism_config tp_size pp_size cp_size ep_size ulysses_size",
    ),
    **_each("weights and optimizer stay on the device of their rank", "offload_optimizer offload_params",
            "deepspeed_offload_param deepspeed_offload_optimizer"),
    **_each("weights go to vLLM as files, and each transfer is checked", "sync_backend",
            "vllm_sync_backend vllm_group_port"),
    **_each(
        "a run uploads nothing: call trainer.push_to_hub after training, or take the folder of `gruppo export`",
        "",
        "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision hf_entity "
        "hf_repo_id try_launch_beaker_eval_jobs_on_weka try_auto_save_to_beaker gs_bucket_path "
        "log_completions_hub_repo",
    ),
    **_each(
        "every completion is on disk already, in Parquet files of the run",
        "",
        "log_completions num_completions_to_print log_unique_prompts wandb_log_unique_prompts save_traces "
        "rollouts_save_path trainer.log_val_generations trainer.rollout_data_dir",
    ),
    **_each(
        "every step is logged, to the run directory and the terminal",
        "log_every log_interval",
        "logging_steps logging_strategy logging_first_step logging_dir logging_nan_inf_filter log_level "
        "log_level_replica log_on_each_node verbose record_entropy disable_tqdm include_num_input_tokens_seen "
        "skip_memory_metrics debug disable_log_stats",
    ),
    **_each("a run is named by its output", "name",
            "run_name exp_name project wandb_project_name wandb_entity wandb_project trackio_space_id "
            "trackio_bucket_id trackio_static_space_id trainer.project_name trainer.experiment_name"),
    **_each(
        "the head never holds all logits, and log-probs and losses are float32",
        "",
        "use_liger_kernel use_liger_loss use_liger_grpo_loss liger_kernel_config cast_lm_head_to_fp32 lm_head_fp32 "
        "unsloth_num_chunks unsloth_logit_chunk_multiplier float32_mixed_precision",
    ),
    **_each(
        "a base is in 4 bits (nf4), with its constants quantised as well and products in `dtype`, or not quantised",
        "quantize_type",
        "load_in_8bit load_in_fp8 bnb_4bit_quant_type bnb_4bit_compute_dtype bnb_4bit_quant_storage "
        "use_bnb_nested_quant qat_scheme",
    ),
    **_each("numbers are float32 or bfloat16: dtype", "", "fp16 fp16_full_eval mixed_precision tf32"),
    **_each(
        "gruppo plays the episodes, since it keeps the tokens and log-probs of each turn: give tools or an environment",
        "",
        "rollout_func",
    ),
    **_each("calls are read as the chat template writes them", "parser", "tool_parser_type"),
    **_each("environments are made as they are needed, and play again", "env_pool", "env_pool_size"),
    **_each("tools or an environment switch turns on", "", "actor_rollout_ref.rollout.multi_turn.enable"),
    **_each("prompts and completions are text", "images image_column", "log_multimodal image_key"),
    **_each(
        "the tokenizer's own chat template is used; `system` and `chat_template_kwargs` change what it gets",
        "template",
        "system_prompt_override_file chat_template chat_template_name chat_template_path user_prompt_transform",
    ),
    **_each(
        "a reward is a function, a reward model or an http:// address; a judge or a sandbox is called by one",
        "judge judge_model",
        "llm_judge_model llm_judge_timeout code_api_url apply_evolving_rubric_reward apply_adaptive_rubric_reward "
        "remap_verifier",
    ),
    **_each("rewards are added up, each with its weight; advantage gdpo compares each by itself", "",
            "reward_aggregator additive_format_reward"),
    **_each("clip inside the reward function", "reward_clip", "reward_clip_range"),
    **_each("the tokenizer of a reward model is its own", "reward_tokenizer", "reward_processing_classes"),
    **_each(
        "the optimizer is AdamW with float32 state: lr, weight_decay, adam_beta1, adam_beta2, adam_epsilon",
        "optimizer",
        "optim optim_args optim_target_modules optimizers",
    ),
    **_each("lr_schedule is constant, linear or cosine, without parameters", "", "lr_scheduler_kwargs"),
    **_each("entropy_coef follows entropy_target in steps of entropy_change, without bounds", "",
            "entropy_coef_min entropy_coef_max"),
    **_each("an adapter adds to weights of linear layers and has no further options; give GRPOTrainer a model that "
            "PEFT has adapted already for others", "",
            "lora_target_parameters use_rslora use_dora loftq_config lora_task_type layers_to_transform "
            "init_lora_weights"),
    **_each("the model is what its folder holds: revision, dtype and quantize say how it is loaded", "",
            "model_init_kwargs quantization_config rope_scaling device_map resize_model_vocab token"),
    **_each("`layout` decides which attention kernel runs", "attention", "attn_implementation"),
    **_each("the balance loss of a mixture of experts is not added", "aux_loss_coef", "router_aux_loss_coef"),
    **_each("batches are padded, packed or shared: layout", "", "pad_to_multiple_of"),
    **_each("batches are cut by tokens_per_microbatch, in an evaluation by the sampler", "eval_batch_size",
            "per_device_eval_batch_size eval_accumulation_steps"),
    **_each("the accuracy of held-out answers decides, or their reward where nothing says what is right: correct_by",
            "", "metric_for_best_model greater_is_better"),
    **_each("an evaluation is made before the first step and after the last, and every eval_every steps between", "",
            "eval_on_start eval_delay do_eval do_predict"),
    **_each("the evaluation is greedy, and pass@k draws from the whole vocabulary", "eval_temperature", "eval_top_p"),
    **_each("`gruppo train` trains", "", "do_train"),
    **_each("a run goes on with `gruppo resume RUN`, in Python with GRPOTrainer(config, resume=True)", "",
            "resume resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint save_only_model "
            "save_on_each_node enable_jit_checkpoint"),
    **_each("the model is saved at the end, and checkpoints every save_every steps", "", "save_freq"),
    **_each("rows are read by the trainer itself, without a data loader", "num_workers",
            "dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers "
            "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor"),
    **_each("give GRPOTrainer an IterableDataset as data", "", "dataset_streaming"),
    **_each("it is for supervised training", "",
            "label_names label_smoothing_factor length_column_name neftune_noise_alpha prediction_loss_only "
            "include_for_metrics batch_eval_metrics eval_do_concat_batches eval_use_gather_object"),
    **_each("a step divides by the totals over all ranks in any case", "", "average_tokens_across_devices"),
    **_each("a run takes the GPU where there is one; CUDA_VISIBLE_DEVICES= hides it", "device", "use_cpu no_cuda"),
    **_each("with sampler torch a run repeats bit for bit on the same threads", "deterministic", "full_determinism"),
    **_each("the cache of the allocator is never emptied", "", "torch_empty_cache_steps"),
    **_each("`compile` compiles the decoder blocks and has no options", "", "torch_compile_backend "
            "torch_compile_mode"),
    **_each("sampler torch has its own cache and batches by itself", "", "use_cache cache_implementation "
            "use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config"),
    **_each("dropout is always off", "dropout", "disable_dropout"),
    **_each("code from a model repository is never run", "", "trust_remote_code"),
    **_each("all columns reach the rewards", "", "remove_unused_columns"),
    **_each("checkpointing has no options but offload", "", "gradient_checkpointing_kwargs"),
    **_each("it would draw from another distribution than the one that is scored", "",
            "repetition_penalty vllm_structured_outputs_regex vllm_guided_decoding_regex"),
    **_each("only temperature, max_new_tokens and stop shape a completion", "sampling_options",
            "generation_kwargs"),
    **_each("it follows from the longest prompt and max_new_tokens", "max_model_len",
            "vllm_max_model_length vllm_max_model_len"),
    **_each("an engine in the process always sleeps while the trainer works", "", "vllm_enable_sleep_mode"),
    **_each("the exit code of a run tells how it ended", "notify", "send_slack_alerts"),
}  # fmt: skip
"""Options without a counterpart, and why."""

CLASSES = {
    **dict.fromkeys(("GRPOConfig", "RLOOConfig"), "it is called TrainConfig here"),
    "RLOOTrainer": "it is GRPOTrainer here, with TrainConfig(advantage='rloo')",
    "FastLanguageModel": "a model is loaded by its name: TrainConfig(model=..., lora=True, quantize='nf4')",
    **dict.fromkeys(("ModelConfig", "ScriptArguments"), "its options are among those of TrainConfig"),
    "TrlParser": "TrainConfig.from_yaml(file) reads options, and `gruppo convert trl` writes them to one",
    "get_peft_config": "TrainConfig(lora=True), or GRPOTrainer(config, peft_config=...) with a config of PEFT",
    **dict.fromkeys(
        ("get_quantization_config", "get_kbit_device_map"), "TrainConfig(quantize='nf4') is a base in 4 bits"
    ),
}
"""Classes and functions of TRL and Unsloth, for whoever imports them from here."""

_ON_DISK = "the run directory has every metric and checkpoint, and the model, already; leave it out"
METHODS = {
    **dict.fromkeys(("save_state", "log_metrics", "save_metrics"), _ON_DISK),
    "add_callback": "callbacks are there from the start: GRPOTrainer(config, callbacks=[...])",
    "create_model_card": "no model card is written; leave it out",
}
"""Methods of a Trainer of transformers that GRPOTrainer does not have."""


def answer(name: str, dash: str = "") -> str:
    """Error text for an option of another trainer; "" if it is unknown.

    >>> answer("num_generations"), answer("epsilon_high", "--")
    ('it is called group_size here', 'it is called --clip-range here (its second number)')
    >>> answer("log_completions")
    'every completion is on disk already, in Parquet files of the run; leave it out'
    """
    if name in ABSENT:
        return f"{ABSENT[name]}; leave it out"
    if name in REFUSED:
        return f"it is refused: {REFUSED[name]}"
    own, _, note = (TRL_TRAINER | ELSEWHERE).get(name, "").partition(": ")
    own = dash + own.replace("_", "-") if dash else own
    return own and f"it is called {own} here" + (f" ({note})" if note else "")
