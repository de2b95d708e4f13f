"""Options of other trainers: each that TRL 1.16 has is answered, and no answer denies an option of a run."""

import ast
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from flags import config_of

from gruppo import convert
from gruppo.errors import InputError
from gruppo.peer_names import ABSENT, ELSEWHERE, REFUSED, answer
from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.trainer.config import OPTIONS

# The fields of trl.GRPOConfig and trl.RLOOConfig 1.16.0 that are not transformers' own, deprecated ones included.
TRL_OWN = """
    model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32 remove_unused_columns
    num_generations num_generations_eval max_completion_length ds3_gather_for_generation shuffle_dataset
    pad_to_multiple_of generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs
    chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl
    vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port
    vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta
    num_iterations epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos
    vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation scale_rewards
    loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile
    entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
    max_tool_calling_iterations vllm_importance_sampling_correction vllm_importance_sampling_mode
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl
    log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
    use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
    vllm_importance_sampling_cap normalize_advantages reward_clip_range
"""
# What its scripts take besides: ScriptArguments, GRPOScriptArguments, ModelConfig.
TRL_SCRIPTS = """
    dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming ignore_bias_buffers
    reward_model_name_or_path reward_funcs model_name_or_path model_revision dtype attn_implementation use_peft lora_r
    lora_alpha lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type use_rslora
    use_dora load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage
"""
# What its releases of early 2025 had, which the scripts of that time still set.
TRL_OLD = """
    vllm_device vllm_max_model_len vllm_guided_decoding_regex use_liger_loss wandb_log_unique_prompts max_prompt_length
"""
TRL_TRAINER = """
    args reward_funcs train_dataset eval_dataset processing_class reward_processing_classes optimizers
    quantization_config tools rollout_func environment_factory
"""
UNSLOTH = """
    model_name max_seq_length load_in_4bit load_in_8bit load_in_16bit full_finetuning fast_inference
    gpu_memory_utilization max_lora_rank use_gradient_checkpointing random_state device_map rope_scaling token
    target_modules use_rslora loftq_config vllm_sampling_params unsloth_num_chunks
"""
SAME = {
    "temperature", "chat_template_kwargs", "beta", "reward_weights", "entropy_coef", "entropy_target", "dtype",
    "lora_alpha", "lora_modules_to_save", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm",
    "warmup_steps", "gradient_checkpointing", "seed",
}  # fmt: skip


def transformers_own() -> list[str]:
    from transformers import TrainingArguments

    return [field.name for field in dataclasses.fields(TrainingArguments)]


def test_every_option_of_trl_has_its_name_here_or_a_reason() -> None:
    names = {*TRL_OWN.split(), *TRL_SCRIPTS.split(), *transformers_own()}
    assert sorted(name for name in names - OPTIONS.keys() if not answer(name)) == []
    assert names & OPTIONS.keys() == SAME  # and mean the same
    assert [
        name for name in f"{TRL_OLD} {TRL_TRAINER} {UNSLOTH}".split() if not (answer(name) or name in OPTIONS)
    ] == []


def test_the_size_of_a_batch_of_trl_is_told_apart_from_its_memory() -> None:
    """Left out alone, 1 x 4 completions of a device would become the 32 prompts of the default."""
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        assert "prompts_per_step x group_size" in answer(name)
    assert "mean is advantage maxrl" in answer("scale_rewards")  # as TRL's maxrl.py sets it


@pytest.mark.parametrize("name", [*ELSEWHERE, *ABSENT, *REFUSED])
def test_an_answer_of_the_table_goes_before_a_similar_name(name: str) -> None:
    with pytest.raises(InputError) as caught:
        TrainConfig(**{name: "x"})
    assert "did you mean" not in str(caught.value) and "--help" not in str(caught.value)


TRAINS_WITHOUT: dict[str, tuple[Any, str]] = {
    "log_completions": (True, "every completion is on disk already, in Parquet files of the run; leave it out"),
    "tool_parser_type": ("hermes", "calls are read as the chat template writes them; leave it out"),
    "repetition_penalty": (1.1, "it would draw from another distribution than the one that is scored; leave it out"),
}


@pytest.mark.parametrize("name", TRAINS_WITHOUT)
def test_the_answer_is_one_in_python_yaml_flags_and_the_trainer(name: str, tmp_path: Path) -> None:
    value, said = TRAINS_WITHOUT[name]
    with pytest.raises(InputError) as caught:
        TrainConfig(**{name: value})
    assert str(caught.value) == f"TrainConfig: unknown option {name!r}; {said}"
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({name: value}))
    with pytest.raises(InputError) as caught:
        TrainConfig.from_yaml(path)
    assert str(caught.value) == f"{path}: unknown option {name!r}; {said}"
    flag = f"--{name.replace('_', '-')}"
    for written in (flag, f"--{name}"):
        with pytest.raises(InputError) as caught:
            config_of([written, "x"])
        assert str(caught.value) == f"unknown option {flag}; {said}"
    with pytest.raises(InputError) as caught:
        GRPOTrainer(TrainConfig(), **{name: value})
    assert str(caught.value) == f"GRPOTrainer has no argument {name!r}: {said}"


def test_options_of_verl_are_answered_dotted_nested_and_as_words(tmp_path: Path) -> None:
    nested = {"actor_rollout_ref": {"rollout": {"n": 8}, "actor": {"optim": {"lr": 1e-6}}}, "data": {"shuffle": True}}
    expected = [
        "unknown option 'data.shuffle'; it is called shuffle here",
        "unknown option 'actor_rollout_ref.rollout.n'; it is called group_size here",
        "unknown option 'actor_rollout_ref.actor.optim.lr'; it is called lr here",
    ]
    with pytest.raises(InputError) as caught:
        TrainConfig.read(nested, where="verl.yaml")
    assert str(caught.value).splitlines() == [f"verl.yaml: {line}" for line in expected]
    with pytest.raises(
        InputError, match=r"^TrainConfig: unknown option 'data\.train_batch_size'; it is called prompts_"
    ):
        TrainConfig(**{"data.train_batch_size": 1024})
    with pytest.raises(
        InputError, match=r"^unknown option actor_rollout_ref\.rollout\.n; it is called --group-size here"
    ):
        config_of(["--lr", "1e-6", "+actor_rollout_ref.rollout.n=8"])


def test_a_value_with_dots_is_no_option_of_verl(tmp_path: Path) -> None:
    config = config_of(["--output", "data.shuffle"])
    assert config.output == "data.shuffle"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("GRPOConfig", "gruppo has no GRPOConfig: it is called TrainConfig here"),
        ("RLOOConfig", "gruppo has no RLOOConfig: it is called TrainConfig here"),
        (
            "TrlParser",  # as TRL's gspo.py imports it, with the next
            "gruppo has no TrlParser: TrainConfig.from_yaml(file) reads options, and `gruppo convert trl` writes them "
            "to one",
        ),
        (
            "get_quantization_config",
            "gruppo has no get_quantization_config: TrainConfig(quantize='nf4') is a base in 4 bits",
        ),
        ("RLOOTrainer", "gruppo has no RLOOTrainer: it is GRPOTrainer here, with TrainConfig(advantage='rloo')"),
    ],
)
@pytest.mark.parametrize("module", ["gruppo", "gruppo.trainer"])
def test_a_class_of_trl_is_answered_with_the_class_here(module: str, name: str, said: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(f"from {module} import {name}")
    assert str(caught.value) == said


def test_methods_that_scripts_call_on_a_trainer_of_transformers_are_answered(
    make_trainer: Callable[..., GRPOTrainer],
) -> None:
    trainer: Any = make_trainer(steps=1)
    with pytest.raises(InputError, match=r"no argument 'resume_from_checkpoint': .*GRPOTrainer\(config, resume=True\)"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.step_number == 0
    trainer.train()
    for name in ("save_state", "log_metrics", "save_metrics"):
        with pytest.raises(AttributeError, match=f"GRPOTrainer has no {name}: the run directory has every metric and"):
            getattr(trainer, name)()
    with pytest.raises(AttributeError, match=r"GRPOTrainer has no add_callback: .*GRPOTrainer\(config, callbacks="):
        trainer.add_callback(print)
    with pytest.raises(AttributeError, match="'GRPOTrainer' object has no attribute 'evaluat'"):
        _ = trainer.evaluat


# --- reasons ---------------------------------------------------------------------------------------------------------


def reasons() -> dict[str, str]:
    """Every sentence that denies an option, with the names that would make it false: of the table, and of `convert`."""
    found = {reason.why: reason.until for reason in (*ABSENT.values(), *REFUSED.values())}
    for node in ast.walk(ast.parse(Path(convert.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Reason":
            why, until = node.args
            assert isinstance(until, ast.Constant), ast.unparse(node)
            found[ast.unparse(why)] = until.value
    return found


def false_ones(found: dict[str, str], options: set[str]) -> list[str]:
    return [f"{why} ({name})" for why, until in found.items() for name in until.split() if name in options]


def test_no_reason_denies_an_option_that_a_run_has() -> None:
    """An option that appears here makes the sentence false: name it in ELSEWHERE, or map it in `gruppo.convert`."""
    found = reasons()
    assert len(found) > 50 and all(found.values())
    assert false_ones(found, {*OPTIONS}) == []


def test_a_reason_that_an_option_has_made_false_is_found() -> None:
    options = {*OPTIONS, "optimizer", "parser", "correction_cap"}
    assert len(false_ones(reasons(), options)) >= 3
    assert false_ones({"a run is one process on one GPU": "num_ranks shard"}, options) == [
        "a run is one process on one GPU (shard)"
    ]
