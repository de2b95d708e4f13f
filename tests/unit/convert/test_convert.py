"""Configurations of TRL, Open Instruct and Twinkle: the options of a run that stand for them, worked out by hand."""

import ast
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gruppo.cli.main import run
from gruppo.convert import Peer, convert
from gruppo.errors import InputError
from gruppo.peer_names import ABSENT, ELSEWHERE
from gruppo.trainer import TrainConfig
from gruppo.trainer.build import build_advantage, build_loss
from gruppo.trainer.config import OPTIONS

HERE = Path(__file__).parent

EXPECTED: dict[str, dict[str, Any]] = {
    "trl/math_lora_vllm.yaml": {
        "model": "Qwen/Qwen2.5-1.5B-Instruct", "lora": True, "lora_rank": 32, "lora_alpha": 64,
        "lora_targets": ["q_proj", "v_proj"], "dtype": "bfloat16", "gradient_checkpointing": True,
        "data": "hf://open-r1/OpenR1-Math-220k/default", "eval_prompts": 0, "max_prompt_tokens": 512,
        "rewards": ["math_match", "think_format", "my_rewards:brevity"], "reward_weights": [1.0, 0.5, 0.1],
        "prompts_per_step": 4,  # 16 sequences x 4 accumulations / 16 generations
        "group_size": 16, "max_new_tokens": 2048, "temperature": 0.7,
        "tokens_per_microbatch": 40960,  # 16 x (512 + 2048)
        "sampler": "vllm", "vllm_options": {"gpu_memory_utilization": 0.4}, "correction": "truncate",
        "loss": "dapo", "clip_range": 0.2, "beta": 0.04, "kl_estimator": 2, "advantage_options": {"eps": 1e-4},
        "lr": 2e-5, "lr_schedule": "cosine", "seed": 7, "tensorboard": False, "wandb": True, "output": "runs/math",
        "keep_checkpoints": 1, "epochs": 1,
    },
    "trl/dapo.yaml": {
        "model": "Qwen/Qwen2.5-Math-7B", "gradient_checkpointing": True, "data": "hf://trl-lib/DeepMath-103K",
        "eval_data": "hf://trl-lib/DeepMath-103K:test", "rewards": ["math_match"],
        "prompts_per_step": 4,  # 4 sequences x 8 steps per generation / 8 generations
        "group_size": 8, "max_new_tokens": 4096, "tokens_per_microbatch": 18432,  # 4 x (512 + 4096)
        "minibatches": 2, "epochs_per_batch": 2,
        "steps": 250,  # 1000 optimizer steps, 2 x 2 of them per batch of rollouts
        "save_every": 25, "eval_every": 13, "loss": "dapo", "clip_range": [0.2, 0.28], "beta": 0.0,
        "advantage_options": {"eps": 1e-4}, "mask_truncated": True, "lr": 1e-6, "lr_schedule": "constant",
        "warmup_steps": 20, "weight_decay": 0.1, "adam_beta2": 0.95, "adam_epsilon": 1e-15, "max_grad_norm": 1.0,
        "seed": 42, "tensorboard": False, "output": "runs/dapo",
    },
    "trl/gspo.sh": {
        "model": "Qwen/Qwen3-8B", "gradient_checkpointing": True, "data": "hf://trl-lib/DeepMath-103K",
        "eval_prompts": 0, "rewards": ["my.rewards:solved"],
        "prompts_per_step": 8,  # 8 sequences x 4 processes x 4 steps / 16
        "group_size": 16, "max_new_tokens": 1024, "tokens_per_microbatch": 12288, "minibatches": 4, "steps": 100,
        "save_every": 125, "loss": "gspo", "clip_range": [3e-4, 4e-4], "beta": 0.0, "advantage_options": {"eps": 1e-4},
        "sampler": "vllm:http://10.0.0.7:8000", "correction": "truncate", "lr": 1e-6, "lr_schedule": "constant",
        "seed": 42, "output": "runs/gspo",
    },
    "trl/dr_grpo.yaml": {
        "model": "Qwen/Qwen2.5-Math-1.5B", "gradient_checkpointing": False, "data": "data/math.jsonl",
        "eval_prompts": 0, "rewards": ["my.rewards:solved"], "prompts_per_step": 32,  # 2 x 8 processes x 16 / 8
        "group_size": 8, "max_new_tokens": 3000, "tokens_per_microbatch": 7024, "steps": 200, "save_every": 500,
        "loss": "drgrpo", "clip_range": 0.2, "beta": 0.001, "kl_estimator": "ratio_k3", "ref_every": 64,
        "ref_mix": 0.6, "normalization": "centered", "lr": 1e-6, "lr_schedule": "constant", "seed": 42,
        "output": "runs/drgrpo",
    },
    "trl/cispo.yaml": {
        "model": "meta-llama/Llama-3.1-8B-Instruct", "dtype": "bfloat16", "gradient_checkpointing": True,
        "data": "hf://AI-MO/NuminaMath-TIR/default", "eval_prompts": 0,
        "chat_template_kwargs": {"enable_thinking": False},
        "rewards": ["math_match"], "prompts_per_step": 32,  # 128 completions / 4
        "group_size": 4, "max_new_tokens": 512, "tokens_per_microbatch": 4096,
        "minibatches": 4,  # 128 / (4 x 2) = 16 steps per generation, 4 of them per optimizer step
        "steps": 75, "save_every": 125, "loss": "cispo",
        "clip_range": 4.0,  # the cap of 5 is 1 + 4
        "beta": 0.0, "advantage_options": {"eps": 1e-4}, "scale": "batch", "lr": 1e-6, "lr_schedule": "linear",
        "seed": 0,
    },
    "open_instruct/dapo_math.sh": {
        "model": "Qwen/Qwen3-4B-Base", "data": "hf://hamishivi/DAPO-Math-17k-Processed_filtered",
        "eval_data": "hf://allenai/aime_2025_openinstruct", "prompt_column": "messages",
        "answer_column": "ground_truth",
        "max_prompt_tokens": 2048, "rewards": ["math_match"], "reward_weights": [10.0], "prompts_per_step": 8,
        "group_size": 16, "max_new_tokens": 8192, "tokens_per_microbatch": 10240,
        "steps": 1000,  # 128000 episodes / (8 x 16)
        "dynamic_sampling": 10, "loss": "dapo", "clip_range": [0.2, 0.272], "beta": 0.0,
        "sampler": "vllm:start", "max_staleness": 4, "streaming": True,
        "correction": "truncate", "normalization": "centered", "lr": 1e-6, "lr_schedule": "constant",
        "eval_every": 100, "eval_samples": 32, "keep_checkpoints": 1000, "save_every": 100, "temperature": 1.0,
        "seed": 1, "gradient_checkpointing": True, "wandb": True, "mask_truncated": False,
    },
    "open_instruct/gsm8k_defaults.sh": {
        "model": "Qwen/Qwen2.5-0.5B-Instruct", "data": "hf://ai2-adapt-dev/rlvr_gsm8k_zs", "prompt_column": "messages",
        "answer_column": "ground_truth", "max_prompt_tokens": 256, "rewards": ["math_match"],
        "reward_weights": [10.0], "prompts_per_step": 16, "group_size": 4, "max_new_tokens": 256,
        "steps": 3125,  # 200000 / 64
        "dynamic_sampling": 1, "loss": "dapo", "clip_range": [0.2, 0.272], "beta": 0.05, "kl_estimator": 2,
        "sampler": "vllm", "correction": "truncate", "normalization": "centered", "lr": 3e-7, "lr_schedule": "linear",
        "eval_every": 100, "output": "runs/gsm8k",
    },
    "open_instruct/tulu_kl.sh": {
        "model": "allenai/Llama-3.1-Tulu-3-8B-DPO", "data": "hf://allenai/RLVR-MATH", "prompt_column": "messages",
        "answer_column": "ground_truth", "max_prompt_tokens": 2048, "rewards": ["math_match"], "reward_weights": [1.0],
        "prompts_per_step": 48, "group_size": 16, "max_new_tokens": 2048,
        "tokens_per_microbatch": 4096, "stop": "</answer>", "steps": 100, "minibatches": 2, "epochs_per_batch": 1,
        "loss": "dapo", "clip_range": 0.2, "beta": 0.01, "kl_estimator": 2, "ref_every": 50, "ref_mix": 0.5,
        "sampler": "vllm", "vllm_options": {"tensor_parallel_size": 2}, "correction": "none",
        "normalization": "standard", "advantage_options": {"ddof": 0}, "lr": 5e-7,
        "lr_schedule": "linear", "eval_every": 100, "seed": 3,
    },
    "open_instruct/cispo.sh": {
        "model": "Qwen/Qwen3-1.7B", "data": "data/train.jsonl", "prompt_column": "messages",
        "answer_column": "ground_truth", "max_prompt_tokens": 256, "rewards": ["math_match", "think_format"],
        "reward_weights": [10.0, 0.5], "prompts_per_step": 64, "group_size": 8, "max_new_tokens": 4096,
        "tokens_per_microbatch": 6144, "steps": 100, "dynamic_sampling": 1, "loss": "cispo",
        "clip_range": 4.0,  # the cap is 1 + clip_higher in both
        "beta": 0.0, "sampler": "vllm", "correction": "truncate", "normalization": "centered", "mask_truncated": True,
        "lr": 1e-6, "lr_schedule": "constant", "eval_every": 100, "seed": 42,
    },
    "open_instruct/dppo.sh": {
        "model": "Qwen/Qwen3-4B", "data": "hf://hamishivi/rlenv-math", "prompt_column": "messages",
        "answer_column": "ground_truth", "max_prompt_tokens": 256, "rewards": ["math_match"],
        "reward_weights": [10.0], "prompts_per_step": 16, "group_size": 4, "max_new_tokens": 16384, "steps": 10,
        "dynamic_sampling": 1, "loss": "dppo_kl", "loss_options": {"region": 0.05, "anchor": "sampler"}, "beta": 0.0,
        "sampler": "vllm", "normalization": "centered", "temperature": 0.7, "lr": 3e-7, "lr_schedule": "linear",
        "eval_every": 100,
    },
    "twinkle/gsm8k_lora.yaml": {
        "model": "ms://Qwen/Qwen2.5-3B-Instruct", "lora": True, "lora_rank": 32, "lora_alpha": 64,
        "gradient_checkpointing": True, "loss": "grpo", "clip_range": 0.2, "beta": 0.0, "advantage": "grpo",
        "normalization": "standard", "max_new_tokens": 4096, "sampler": "vllm",
        "vllm_options": {"gpu_memory_utilization": 0.8}, "correction": "truncate", "group_size": 8,
        "prompts_per_step": 4, "steps": 200, "save_every": 50, "lr": 1e-5, "lr_schedule": "cosine", "seed": 42,
    },
    "twinkle/short_math.sh": {
        "model": "ms://Qwen/Qwen3.5-4B", "data": "hf://openai/gsm8k/main", "gradient_checkpointing": True,
        "chat_template_kwargs": {"enable_thinking": False}, "system": "Put your final answer within \\boxed{}.",
        "loss": "grpo", "clip_range": [0.2, 0.28], "beta": 0.01, "kl_estimator": 2, "advantage": "grpo",
        "normalization": "standard", "max_new_tokens": 4096, "temperature": 1.0, "sampler": "vllm",
        "correction": "truncate", "group_size": 8, "prompts_per_step": 8,  # 4 x 2
        "minibatches": 4,  # 8 x 8 completions / 16
        "steps": 250, "save_every": 250, "eval_every": 25, "eval_prompts": 64, "lr": 1e-5, "lr_schedule": "constant",
        "seed": 42,
    },
    "twinkle/sapo.sh": {
        "model": "ms://Qwen/Qwen3.5-4B", "gradient_checkpointing": True, "loss": "sapo", "tau": [1.2, 1.05],
        "beta": 0.01, "kl_estimator": 2, "advantage": "grpo", "normalization": "standard", "scale": "batch",
        "group_size": 4, "prompts_per_step": 8, "steps": 200, "save_every": 50, "lr": 1e-5, "lr_schedule": "cosine",
        "seed": 7,
    },
    "twinkle/rloo_cispo.sh": {
        "model": "Qwen/Qwen3-0.6B", "data": "hf://openai/gsm8k/main:test", "gradient_checkpointing": True,
        "loss": "cispo", "clip_range": 3.0,  # the cap is 1 + epsilon
        "advantage": "rloo", "normalization": "centered", "max_new_tokens": 512, "temperature": 0.9,
        "stop": "</answer>", "group_size": 6, "prompts_per_step": 16, "steps": 300, "save_every": 50, "lr": 3e-6,
        "lr_schedule": "cosine", "warmup_steps": 10, "max_grad_norm": 0.5, "seed": 42,
    },
    "twinkle/drgrpo.sh": {
        "model": "hf://Qwen/Qwen3-1.7B", "lora": True, "lora_rank": 16, "lora_alpha": 16,
        "lora_targets": ["q_proj", "k_proj", "v_proj"], "gradient_checkpointing": True, "loss": "drgrpo",
        "clip_range": 0.1, "entropy_coef": 0.001, "advantage": "grpo", "normalization": "standard", "scale": "batch",
        "max_new_tokens": 1024, "temperature": 0.6, "group_size": 12, "prompts_per_step": 32, "steps": 100,
        "save_every": 50, "lr": 2e-5, "lr_schedule": "linear", "seed": 42,
    },
}  # fmt: skip

SENTENCES: dict[str, list[str]] = {
    "trl/math_lora_vllm.yaml": [
        "#   prompts_per_step: the number of processes is not in the source, 1 is assumed: --num_processes N",
        "epochs: 1  # num_train_epochs",
        "max_prompt_tokens: 512  # max_prompt_length; differs: longer prompts are left out; TRL cuts them",
        "kl_estimator: 2  # use_bias_correction_kl; differs: k3; newer TRL takes ratio_k3 by default",
        "#   lora_dropout=0.05: with dropout the same weights give the same tokens other log-probs each time, and the "
        "on-policy ratio would not be 1. Leave it out",
        "#   save_every: save_strategy=epoch there; here every N steps, and at the end",
        "#   warmup_steps: warmup_ratio=0.1 there; here a number of optimizer steps",
        "eval_prompts: 0  # eval_strategy; the default of TRL",
        "correction: truncate  # vllm_importance_sampling_mode=sequence_mask, bound 3.0; differs: whole sequences are "
        "dropped there; here the ratio of each token is capped at 2",
    ],
    "trl/dapo.yaml": [
        "#   shard: deepspeed=zero3.json there; here FSDP2, on ranks that torchrun starts",
        "eval_every: 13  # eval_steps=50 / 4 optimizer steps for each batch of rollouts; differs: 12.5 is rounded up",
    ],
    "trl/cispo.yaml": [
        "clip_range: 4.0  # epsilon_high=5.0, the cap; here it is 1 + clip_range",
        "#   quantize: load_in_4bit=True there; here nf4 is 4 bits",
        "#   my_own_option=3: not known here",
    ],
    "trl/dr_grpo.yaml": [
        "#   optim=paged_adamw_8bit: the optimizer is AdamW with float32 state: lr, weight_decay, adam_beta1, "
        "adam_beta2, adam_epsilon",
    ],
    "open_instruct/dapo_math.sh": [
        "max_staleness: 4  # async_steps; differs: no token is older than this",
        "#   num_learners_per_node: [4]: `torchrun --nproc-per-node 4 -m gruppo train`, with vLLM as a server "
        "(docs/distributed.md)",
        "#   sampler: vllm_num_engines=4: start the servers, then vllm:http://one:8000,http://another:8000",
        "dynamic_sampling: 10  # active_sampling; differs: a step samples at most 10 batches of prompts",
    ],
    "open_instruct/tulu_kl.sh": [
        "advantage_options: {ddof: 0}  # the standard deviation of a population",
        "vllm_options: {tensor_parallel_size: 2}  # vllm_tensor_parallel_size",
        "#   truncated_factor: non_stop_penalty=True there; here 0 takes the reward away",
    ],
    "open_instruct/cispo.sh": [
        "correction: truncate  # rho_clamp_upper_bound=5; differs: truncate caps at 2, and mask keeps 0.5 to 5; for "
        "other bounds write a function, your.module:your_function",
        "clip_range: 4.0  # clip_higher; the cap is 1 + clip_range",
    ],
    "twinkle/gsm8k_lora.yaml": [
        "#   data: ms://modelscope/gsm8k is of ModelScope; save its rows as JSONL with `prompt` and `answer`",
        "lora_rank: 32  # lora_r",
    ],
    "twinkle/rloo_cispo.sh": [
        "#   epsilon_high=5.0: Twinkle's CISPO does not read it; the cap is 1 + epsilon",
    ],
    "twinkle/short_math.sh": [
        "#   tp_size=2: there is no sequence, tensor or pipeline parallelism in training",
    ],
}


def words_of(name: str) -> list[str]:
    """A file of options, or the words that a shell makes of a command."""
    path = HERE / name
    return [str(path)] if path.suffix == ".yaml" else shlex.split(path.read_text().replace("\\\n", " "), comments=True)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_configuration_becomes_one_of_a_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    peer = name.partition("/")[0]
    assert run(["convert", peer, *words_of(name)]) == 0
    text = capsys.readouterr().out
    values = yaml.safe_load(text)
    assert values == EXPECTED[name]
    config = TrainConfig.read(values)
    build_loss(config)
    build_advantage(config)
    lines = text.splitlines()
    assert [line for line in SENTENCES.get(name, []) if line not in lines] == []


def test_there_are_five_of_each_and_every_file_is_tested() -> None:
    files = {str(path.relative_to(HERE)) for path in HERE.glob("*/*.*") if path.parent.name != "__pycache__"}
    assert files == set(EXPECTED)
    peers = [name.partition("/")[0] for name in EXPECTED]
    assert {peer: peers.count(peer) for peer in peers} == {"trl": 5, "open_instruct": 5, "twinkle": 5}


def test_flags_after_a_file_win_and_a_file_may_stand_in_the_flags(tmp_path: Path) -> None:
    path = HERE / "trl" / "dapo.yaml"
    assert convert("trl", [str(path), "--num_processes", "8", "--beta=0.1"]).values["prompts_per_step"] == 32
    words = ["accelerate", "launch", "--num_processes", "2", "train.py", "--config", str(path), "--beta", "0.1"]
    made = convert("trl", words)
    assert (made.values["prompts_per_step"], made.values["beta"]) == (8, 0.1)


def test_flags_alone_and_choices_called_none() -> None:
    made = convert("trl", ["--scale_rewards", "none", "--report_to", "none", "--max_steps", "None", "--use_vllm"])
    assert made.values["normalization"] == "centered"
    assert (made.values["tensorboard"], made.values["sampler"]) == (False, "vllm")
    assert "epochs: 3  # num_train_epochs; the default of TRL" in made.text().splitlines()


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--loss_type", "sapo", "--sapo_temperature_neg", "1.1"], {"loss": "sapo", "tau": [1.0, 1.1]}),
        (["--loss_type", "luspo", "--importance_sampling_level", "sequence"], {"loss": "luspo", "clip_range": 0.2}),
        (["--loss_type", "vespo"], {"loss": "vespo"}),
        (["--scale_rewards", "mean"], {"advantage": "maxrl"}),
        (["--importance_sampling_level", "sequence"], {"loss": "gspo", "clip_range": 0.2}),
        (["--beta", "0.1", "--sync_ref_model", "--use_peft"], {"ref_every": 512, "ref_mix": 1.0, "lora_rank": 16}),
        (["--use_vllm", "--vllm_importance_sampling_correction", "False"], {"correction": "none"}),
        (["--use_vllm", "--vllm_importance_sampling_mode", "sequence_truncate"], {"correction": "truncate_product"}),
    ],
)
def test_variants_of_trl_are_accepted(words: list[str], values: dict[str, Any]) -> None:
    made = convert("trl", words)
    assert {name: made.values.get(name) for name in values} == values
    config = TrainConfig.read(made.values)
    build_loss(config)
    build_advantage(config)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trl"], "there is nothing to convert; give a .yaml or .json file, or the command that starts the script"),
        (["trl", "absent.yaml"], "config file absent.yaml does not exist"),
        (["twinkle", "x.py"], "x.py is a script, which is not read; give a .yaml or .json file, or the command that"),
        (["trl", "--num_generations", "$N"], "num_generations='$N' is not a number or a truth value; add the one"),
        (["trl", "--num_generations", "0"], "an option has a value that TRL itself would not take: "),
        (["trl", "--max_steps", "inf"], "an option has a value that TRL itself would not take: "),
        (["trl", "--num_generations", "1"], "the converted options: group_size=1: a group needs"),
    ],
)
def test_what_cannot_be_converted_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        run(["convert", *words])
    assert str(error.value).startswith(message)


def test_a_converted_file_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, file = tmp_path / "sums.jsonl", tmp_path / "run.yaml"
    data.write_text("".join(f'{{"prompt": "{i:02}+01=", "solution": "{i + 1:03}"}}\n' for i in range(20)))
    words = f"--model_name_or_path builtin --dataset_name {data} --num_generations 4 --per_device_train_batch_size 8"
    words += f" --max_completion_length 4 --max_prompt_length 16 --max_steps 2 --output_dir {tmp_path / 'run'}"
    assert run(["convert", "trl", *words.split()]) == 0
    file.write_text(capsys.readouterr().out)
    assert run(["train", "--config", str(file), "--rewards", "exact_match", "--no-tensorboard", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "data: solution is read as answer" in out
    assert "2 prompts x 4 completions = 8 sequences per step" in out and "step 2/2" in out


def test_another_trainer_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InputError, match=r"peer='verl': Input should be 'trl', 'open_instruct' or 'twinkle'"):
        run(["convert", "verl", "x.yaml"])


def test_commas_that_a_shell_leaves_at_names_of_layers_are_taken_off() -> None:
    """As in the examples of TRL's own gspo.py; PEFT would find no layer `q_proj,`."""
    made = convert("trl", ["--use_peft", "--lora_target_modules", "q_proj,", "v_proj"])
    assert made.values["lora_targets"] == ["q_proj", "v_proj"]


def test_weights_of_rewards_that_are_in_the_script_wait_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trl.yaml"
    path.write_text("model_name_or_path: builtin\nnum_generations: 4\nreward_weights: [1.0, 0.5]\n")
    assert run(["convert", "trl", str(path)]) == 0
    text = capsys.readouterr().out
    assert "#   rewards: the functions of the script, one for each of reward_weights: [1.0, 0.5]" in text.splitlines()
    config = TrainConfig.read(yaml.safe_load(text))
    assert config.reward_weights == (1.0, 0.5) and config.rewards is None


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("", {"sampler": "vllm"}),
        ("--async_steps 0", {"sampler": "vllm"}),
        ("--async_steps 2", {"sampler": "vllm:start", "max_staleness": 2}),
        ("--inflight_updates", {"sampler": "vllm:start", "max_staleness": 1, "streaming": True}),
        ("--vllm_gpu_memory_utilization 0.6", {"sampler": "vllm", "vllm_options": {"gpu_memory_utilization": 0.6}}),
    ],
)
def test_rollouts_ahead_of_open_instruct_stay_so(words: str, values: dict[str, Any]) -> None:
    made = convert("open_instruct", ["--learning_rate", "1e-6", *words.split()]).values
    names = ("sampler", "max_staleness", "streaming", "vllm_options")
    assert {name: made[name] for name in names if name in made} == values
    TrainConfig.read(made)


def test_an_option_whose_value_means_something_else_is_left_to_the_user() -> None:
    made = convert("trl", ["--use_vllm", "--vllm_enforce_eager", "True", "--fsdp", "full_shard", "--odd", "1"])
    assert made.values["vllm_options"] == {"enforce_eager": True}
    assert "shard: fsdp=full_shard there; here FSDP2, on ranks that torchrun starts" in made.yours
    assert [line for line in made.left_out if "not known here" in line] == ["odd=1: not known here"]


def test_every_name_of_the_table_has_one_meaning() -> None:
    assert not ELSEWHERE.keys() & ABSENT.keys()
    assert not ABSENT.keys() & OPTIONS.keys()


@pytest.mark.parametrize(("peer", "words"), [("trl", "--loss_type bnpo"), ("twinkle", "--loss_cls BNPOLoss")])
def test_bnpo_is_over_the_update_here_and_over_a_micro_batch_there(peer: Peer, words: str) -> None:
    made = convert(peer, words.split())
    assert made.values["loss"] == "bnpo" and "differs: the mean is over the tokens of the whole" in made.text()


def test_options_that_need_thought_are_asked_for_with_what_they_are_here() -> None:
    words = "--delta 4 --top_entropy_quantile 0.2 --multi_objective_aggregation normalize_then_sum --warmup_ratio 0.1"
    made = convert("trl", words.split())
    assert made.yours[1:5] == [
        "loss: delta=4 there; here two_sided, with loss_options delta",
        "loss: top_entropy_quantile=0.2 there; here top_entropy, with loss_options share",
        "advantage: multi_objective_aggregation=normalize_then_sum there; here gdpo normalizes each reward, then adds "
        "them up",
        "warmup_steps: warmup_ratio=0.1 there; here a number of optimizer steps",
    ]


def test_what_is_switched_off_or_changes_nothing_is_not_told_of() -> None:
    words = "--push_to_hub False --top_p 1.0 --top_k -1 --min_p 0 --bf16 False --fsdp= --warmup_ratio 0.0 --delta None "
    words += "--optim adamw_torch"
    made, plain = convert("trl", words.split()), convert("trl", ["--seed", "42"])
    assert (made.values, made.left_out, made.yours) == (plain.values, [], plain.yours)


def test_a_json_file_is_read_as_yaml_is(tmp_path: Path) -> None:
    path = tmp_path / "trl.json"
    path.write_text(json.dumps({"num_generations": 4, "learning_rate": "2e-5", "loss_type": "sapo"}))
    values = convert("trl", [str(path)]).values
    assert (values["group_size"], values["lr"], values["tau"]) == (4, 2e-5, [1.0, 1.05])


def test_every_value_in_the_text_is_read_back_as_it_was() -> None:
    """Lines of the file are written one by one, with a comment after each."""
    words = ["--system", "Say # and: 'yes', {or} \n no", "--stop", "#", "--output_dir", "runs/a b", "--lr", "1e-6"]
    made = convert("trl", [*words, "--report_to", "wandb"])
    assert yaml.safe_load(made.text()) == made.values


def test_convert_loads_neither_torch_nor_what_trains() -> None:
    code = """
import sys
from gruppo.cli.main import run
run(["convert", "trl", "--epsilon", "0.3", "--num_generations", "4"])
loaded = {name.split(".")[1] for name in sys.modules if name.startswith("gruppo.")}
print(sorted({"torch", "transformers", "vllm"} & {*sys.modules}), sorted(loaded), file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    small = "cli convert errors keys options peer_names process run trainer"  # of trainer, its config
    torch, _, loaded = ran.stderr.partition("] ")
    assert torch == "[" and {*ast.literal_eval(loaded)} <= {*small.split()}
