"""Configurations of TRL, Open Instruct and Twinkle: the options of a run that stand for them, worked out by hand."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from gruppo.cli.main import run
from gruppo.convert import convert
from gruppo.errors import InputError
from gruppo.trainer import TrainConfig
from gruppo.trainer.build import build_advantage, build_loss
from gruppo.trainer.config import OPTIONS
from gruppo.trainer.elsewhere import ABSENT, ELSEWHERE

HERE = Path(__file__).parent

EXPECTED: dict[str, dict[str, Any]] = {
    "trl/math_lora_vllm.yaml": {
        "model": "Qwen/Qwen2.5-1.5B-Instruct", "lora": True, "lora_rank": 32, "lora_alpha": 64,
        "lora_targets": ["q_proj", "v_proj"], "dtype": "bfloat16", "gradient_checkpointing": True,
        "data": "hf://open-r1/OpenR1-Math-220k/default", "max_prompt_tokens": 512,
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
        "save_every": 25, "eval_every": 12, "loss": "dapo", "clip_range": [0.2, 0.28], "beta": 0.0,
        "advantage_options": {"eps": 1e-4}, "mask_truncated": True, "lr": 1e-6, "lr_schedule": "constant",
        "warmup_steps": 20, "weight_decay": 0.1, "adam_beta2": 0.95, "adam_epsilon": 1e-15, "max_grad_norm": 1.0,
        "seed": 42, "tensorboard": False, "output": "runs/dapo",
    },
    "trl/gspo.sh": {
        "model": "Qwen/Qwen3-8B", "gradient_checkpointing": True, "data": "hf://trl-lib/DeepMath-103K",
        "rewards": ["my.rewards:solved"], "prompts_per_step": 8,  # 8 sequences x 4 processes x 4 steps / 16
        "group_size": 16, "max_new_tokens": 1024, "tokens_per_microbatch": 12288, "minibatches": 4, "steps": 100,
        "save_every": 125, "loss": "gspo", "clip_range": [3e-4, 4e-4], "beta": 0.0, "advantage_options": {"eps": 1e-4},
        "sampler": "vllm:http://10.0.0.7:8000", "correction": "truncate", "lr": 1e-6, "lr_schedule": "constant",
        "seed": 42, "output": "runs/gspo",
    },
    "trl/dr_grpo.yaml": {
        "model": "Qwen/Qwen2.5-Math-1.5B", "gradient_checkpointing": False, "data": "data/math.jsonl",
        "rewards": ["my.rewards:solved"], "prompts_per_step": 32,  # 2 x 8 processes x 16 / 8
        "group_size": 8, "max_new_tokens": 3000, "tokens_per_microbatch": 7024, "steps": 200, "save_every": 500,
        "loss": "drgrpo", "clip_range": 0.2, "beta": 0.001, "kl_estimator": "ratio_k3", "ref_every": 64,
        "ref_mix": 0.6, "normalization": "centered", "lr": 1e-6, "lr_schedule": "constant", "seed": 42,
        "output": "runs/drgrpo",
    },
    "trl/cispo.yaml": {
        "model": "meta-llama/Llama-3.1-8B-Instruct", "dtype": "bfloat16", "gradient_checkpointing": True,
        "data": "hf://AI-MO/NuminaMath-TIR/default", "chat_template_kwargs": {"enable_thinking": False},
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
        "eval_every": 100, "eval_samples": 32, "keep_checkpoints": 100, "save_every": 100, "temperature": 1.0,
        "seed": 1, "gradient_checkpointing": True, "wandb": True,
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
        "truncated_factor": 0.0, "prompts_per_step": 48, "group_size": 16, "max_new_tokens": 2048,
        "tokens_per_microbatch": 4096, "stop": ["</answer>"], "steps": 100, "minibatches": 2, "epochs_per_batch": 1,
        "warmup_steps": 20,  # a tenth of 100 x 2 optimizer steps
        "loss": "dapo", "clip_range": [0.2, 0.2], "beta": 0.01, "kl_estimator": 2, "ref_every": 50, "ref_mix": 0.5,
        "sampler": "vllm", "vllm_options": {"tensor_parallel_size": 2}, "correction": "none",
        "advantage_options": {"ddof": 0}, "lr": 5e-7,
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
    "twinkle/gsm8k_lora.py": {
        "model": "ms://Qwen/Qwen2.5-3B-Instruct", "lora": True, "lora_rank": 32, "lora_alpha": 64,
        "data": "gsm8k:hf://openai/gsm8k/main", "max_prompt_tokens": 2048, "rewards": ["number_match"],
        "loss": "grpo", "clip_range": 0.2, "normalization": "standard", "max_new_tokens": 4096, "sampler": "vllm",
        "correction": "truncate", "group_size": 8, "prompts_per_step": 4, "steps": 200, "lr": 1e-5,
        "lr_schedule": "cosine",
    },
    "twinkle/short_math.py": {
        "model": "ms://Qwen/Qwen3.5-4B", "chat_template_kwargs": {"enable_thinking": False},
        "system": "Solve the problem and put your final answer within \\boxed{}.", "loss": "grpo",
        "clip_range": [0.2, 0.28], "beta": 0.01, "kl_estimator": 2, "normalization": "standard",
        "max_new_tokens": 4096, "temperature": 1.0, "sampler": "vllm", "correction": "truncate", "group_size": 8,
        "prompts_per_step": 8, "minibatches": 4,  # 8 x 8 completions / 16
        "steps": 250, "save_every": 250, "lr": 1e-5, "lr_schedule": "constant",
    },
    "twinkle/documented_loss.py": {
        "model": "ms://Qwen/Qwen3.5-4B", "loss": "sapo", "clip_range": 0.3, "tau": 1.0, "beta": 0.01,
        "kl_estimator": 2, "normalization": "standard", "sampler": "vllm", "correction": "truncate", "group_size": 4,
    },
    "twinkle/rloo_cispo.py": {
        "model": "Qwen/Qwen3-0.6B", "data": "hf://openai/gsm8k/main:test", "loss": "cispo", "clip_range": 3.0,
        "advantage": "rloo", "normalization": "centered", "max_new_tokens": 512, "temperature": 0.9,
        "stop": ["</answer>"], "group_size": 6, "prompts_per_step": 16, "steps": 300, "lr": 3e-6,
        "lr_schedule": "cosine", "warmup_steps": 10, "max_grad_norm": 0.5,
    },
    "twinkle/drgrpo.py": {
        "model": "hf://Qwen/Qwen3-1.7B", "lora": True, "lora_rank": 16, "lora_alpha": 16,
        "lora_targets": ["q_proj", "k_proj", "v_proj"], "loss": "drgrpo", "clip_range": 0.1, "entropy_coef": 0.001,
        "scale": "batch", "max_new_tokens": 1024, "temperature": 0.6, "group_size": 12, "prompts_per_step": 32,
        "steps": 100, "lr": 2e-5, "lr_schedule": "linear",
    },
}  # fmt: skip

SENTENCES: dict[str, list[str]] = {
    "trl/math_lora_vllm.yaml": [
        "#   prompts_per_step: the number of processes is not in the source, 1 is assumed: --num_processes N",
        "#   num_train_epochs=1 -> epochs: 1",
        "#   max_prompt_length=512 -> max_prompt_tokens: 512: longer prompts are left out; TRL cuts them",
        "#   use_bias_correction_kl -> kl_estimator: 2: k3; newer TRL multiplies it with the ratio by default, which "
        "is kl_estimator: ratio_k3",
        "#   lora_dropout=0.05: with dropout the same weights give the same tokens other log-probs each time, and the "
        "on-policy ratio would not be 1. Leave it out",
        "#   save_every: save_strategy=epoch there; here every N steps, and at the end",
    ],
    "trl/dapo.yaml": [
        "#   shard: deepspeed=zero3.json there; here FSDP2, on ranks that torchrun starts",
        "#   eval_steps=50 / 4 per rollout batch -> eval_every: 12: 12.5 steps, rounded",
    ],
    "trl/cispo.yaml": [
        "#   epsilon_high=5.0 is the cap itself, here 1 + clip_range -> clip_range: 4.0",
        "#   load_in_4bit=True: only a base under an adapter is quantised",
        "#   my_own_option=3: not known here",
    ],
    "trl/dr_grpo.yaml": [
        "#   optim=paged_adamw_8bit: the optimizer is AdamW with float32 state: lr, weight_decay, adam_beta1, "
        "adam_beta2, adam_epsilon",
    ],
    "open_instruct/dapo_math.sh": [
        "#   inflight_updates=True, async_steps=4 -> max_staleness: 4, streaming: True: steps take what is complete, "
        "as there; no token is older than max_staleness steps",
        "#   num_learners_per_node=4: 4 ranks: start it with `torchrun --nproc-per-node 4 -m gruppo train`, and vLLM "
        "as a server",
        "#   sampler: vllm_num_engines=4: as many servers, sampler: vllm:http://one:8000,http://...",
        "#   active_sampling=True -> dynamic_sampling: 10: as there, within 10 batches per step",
    ],
    "open_instruct/tulu_kl.sh": [
        "#   advantage_normalization_type=standard: the standard deviation of a population -> advantage_options: "
        "{'ddof': 0}",
        "#   vllm_tensor_parallel_size=2 -> vllm_options: {'tensor_parallel_size': 2}",
    ],
    "open_instruct/cispo.sh": [
        "#   the ratio of trainer and sampler is capped at 5 -> correction: truncate: truncate caps at 2",
    ],
    "twinkle/documented_loss.py": [
        "#   clip_range=0.3 -> clip_range: 0.3: as documented; its code drops the keyword and clips at 0.2",
    ],
    "twinkle/rloo_cispo.py": [
        "#   epsilon_high=5.0: its code ignores it in CISPO; here the upper side is the cap",
    ],
    "twinkle/short_math.py": [
        "#   set_lr_scheduler(default) -> lr_schedule: constant: a schedule of Megatron; the rate stays",
    ],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_configuration_becomes_one_of_a_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    peer = name.partition("/")[0]
    assert run(["convert", peer, str(HERE / name)]) == 0
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
    assert "num_train_epochs=3 (the default of TRL) -> epochs: 3" in made.exact
    assert not any(line.startswith("steps: ") for line in made.yours)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (
            ["--loss_type", "grpo", "--delta", "4"],
            {"loss": "two_sided", "loss_options": {"delta": 4}, "clip_range": 0.2},
        ),
        (["--top_entropy_quantile", "0.2"], {"loss": "top_entropy", "loss_options": {"share": 0.2}, "clip_range": 0.2}),
        (["--loss_type", "sapo", "--sapo_temperature_neg", "1.1"], {"loss": "sapo", "tau": [1.0, 1.1]}),
        (["--loss_type", "luspo", "--importance_sampling_level", "sequence"], {"loss": "luspo", "clip_range": 0.2}),
        (["--loss_type", "vespo"], {"loss": "vespo"}),
        (["--multi_objective_aggregation", "normalize_then_sum"], {"advantage": "gdpo"}),
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
        (["trl"], "convert needs a configuration: a .yaml or .sh file, or the arguments of the script"),
        (["trl", "absent.yaml"], "config file absent.yaml does not exist"),
        (["open_instruct", "absent.sh"], "absent.sh cannot be read"),
        (["twinkle", "x.yaml"], "convert twinkle needs one Python file"),
        (["trl", "--num_generations", "$N"], "num_generations='$N' is not a number or a truth value; give it after"),
        (["trl", "--num_generations", "0"], "an option has a value that trl itself would not take: "),
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


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    (tmp_path / "a.py").write_text(f"open({str(made)!r}, 'w')\nMAX_STEPS = 3\n")
    assert convert("twinkle", [str(tmp_path / "a.py")]).values == {"steps": 3}
    (tmp_path / "a.sh").write_text(f"touch {made}\nX=$(touch {made})\npython grpo.py --beta 0.5 --run_name $X\n")
    assert convert("trl", [str(tmp_path / "a.sh")]).values["beta"] == 0.5
    assert not made.exists()


def test_commas_that_a_shell_leaves_at_names_of_layers_are_taken_off() -> None:
    """As in the examples of TRL's own gspo.py; PEFT would find no layer `q_proj,`."""
    made = convert("trl", ["--use_peft", "--lora_target_modules", "q_proj,", "v_proj"])
    assert made.values["lora_targets"] == ["q_proj", "v_proj"]
    assert [line for line in made.differs if "without the commas" in line and "'q_proj,'" in line]


SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
NAME = "Qwen/Qwen2.5-1.5B-Instruct"
args = GRPOConfig(output_dir="runs/" + "gsm8k", run_name=NAME + "-1", learning_rate=5e-6, adam_beta2=0.99,
    lr_scheduler_type="cosine", bf16=True, per_device_train_batch_size=1, gradient_accumulation_steps=4,
    num_generations=2, max_prompt_length=256, max_completion_length=786, num_train_epochs=RATE)
peft_config = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.05)
model = AutoModelForCausalLM.from_pretrained(NAME, torch_dtype=torch.bfloat16).to("cuda")
trainer = GRPOTrainer(model=model, reward_funcs=[right], args=args, train_dataset=rows, PEFT)
"""
OF_SCRIPT = {
    "model": "Qwen/Qwen2.5-1.5B-Instruct", "output": "runs/gsm8k", "lr": 5e-6, "adam_beta2": 0.99,
    "lr_schedule": "cosine", "dtype": "bfloat16", "group_size": 2, "prompts_per_step": 2, "max_prompt_tokens": 256,
    "max_new_tokens": 786, "epochs": 1, "loss": "dapo",
}  # fmt: skip
UNSLOTH = """
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained(model_name="Qwen/Qwen3-4B", max_seq_length=2048, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=32, lora_alpha=64, target_modules=["q_proj"], random_state=3407)
trainer = GRPOTrainer(model=model, args=GRPOConfig(num_generations=8, max_steps=250))
"""


def test_a_python_script_gives_what_it_gives_grpoconfig(tmp_path: Path) -> None:
    """Parsed, not run; its values were not those of TRL's defaults, which were called what the script says."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("RATE", "1").replace("PEFT", ""))
    values = convert("trl", [str(path)]).values
    assert {name: values[name] for name in OF_SCRIPT} == OF_SCRIPT and "lora" not in values
    path.write_text(SCRIPT.replace("RATE", "1").replace("PEFT", "peft_config=peft_config"))
    made = convert("trl", [str(path), "--beta", "0.1"])
    expected = OF_SCRIPT | {"lora": True, "lora_rank": 16, "lora_alpha": 8, "lora_targets": ["q_proj", "v_proj"]}
    assert {name: made.values[name] for name in (*expected, "beta")} == expected | {"beta": 0.1}  # PEFT's alpha is 8
    assert any(line.startswith("lora_dropout=0.05: with dropout") for line in made.absent)


def test_what_a_script_computes_is_asked_for_and_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("RATE", "options.epochs").replace("PEFT", ""))
    with pytest.raises(InputError, match=r"train\.py computes num_train_epochs, and is not run; give each value after"):
        convert("trl", [str(path)])
    assert convert("trl", [str(path), "--num_train_epochs", "2"]).values["epochs"] == 2
    path.write_text("parser = TrlParser(GRPOConfig)\n")
    with pytest.raises(InputError, match=r"train\.py has no call of GRPOConfig to read; give what starts it"):
        convert("trl", [str(path)])
    assert convert("trl", [str(path), "--num_train_epochs", "2"]).values["epochs"] == 2
    with pytest.raises(InputError, match=r"other\.py is not a configuration"):
        convert("trl", ["other.py"])


def test_a_script_of_unsloth_has_its_model_and_adapter_in_calls(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(UNSLOTH)
    made = convert("trl", [str(path)])
    expected = {"model": "Qwen/Qwen3-4B", "quantize": "nf4", "lora": True, "lora_rank": 32, "lora_alpha": 64}
    expected |= {"lora_targets": ["q_proj"], "group_size": 8, "steps": 250}
    assert {name: made.values[name] for name in expected} == expected
    assert any("max_seq_length=2048 there; here and max_prompt_tokens" in line for line in made.yours)


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
    assert "vllm_options: vllm_enforce_eager=True there; here enforce_eager, as vLLM calls it" in made.yours
    assert "shard: fsdp=full_shard there; here FSDP2, on ranks that torchrun starts" in made.yours
    assert [line for line in made.absent if "not known here" in line] == ["odd=1: not known here"]


def test_every_name_of_the_table_has_one_meaning() -> None:
    assert not ELSEWHERE.keys() & ABSENT.keys()
    assert not ABSENT.keys() & OPTIONS.keys()


@pytest.mark.parametrize(
    ("peer", "words"),
    [("trl", ["--loss_type", "bnpo"]), ("twinkle", ["loss.py"])],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bnpo_is_over_the_update_here_and_over_a_micro_batch_there(
    peer: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loss.py").write_text("model.set_loss('BNPOLoss', epsilon=0.2)\n")
    assert run(["convert", peer, *words]) == 0
    made = " ".join(capsys.readouterr().out.replace("#", " ").split())
    assert "over the whole update here" in made and "loss: bnpo" in made
