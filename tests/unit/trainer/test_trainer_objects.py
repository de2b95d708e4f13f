"""A run made of Python objects: the same numbers as by names, and a directory that says what it cannot hold."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flags import config_of
from peft import LoraConfig, get_peft_model
from warm_process import run_python

from gruppo.errors import InputError
from gruppo.reward import ExactMatch, load_reward
from gruppo.task.builtin import builtin_model_path
from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.trainer.inputs import resolve_inputs
from gruppo.weights.source import load_model, load_tokenizer

Make = Callable[..., GRPOTrainer]


@pytest.fixture
def run(small_config: Callable[..., TrainConfig], tmp_path: Path) -> Iterator[Make]:
    made: list[GRPOTrainer] = []

    def make(name: str = "objects", *, resume: bool = False, options: Any = None, **objects: Any) -> GRPOTrainer:
        config = small_config(output=str(tmp_path / name), lr=3e-3, temperature=2.0, **(options or {}))
        made.append(GRPOTrainer(config, quiet=True, resume=resume, **objects))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def objects(sums: Path) -> dict[str, Any]:
    import torch

    return {
        "model": load_model(str(builtin_model_path()), dtype=torch.float32),
        "tokenizer": load_tokenizer("builtin"),
        "rewards": [ExactMatch()],
        "data": [json.loads(line) for line in sums.read_text().splitlines()],
    }


def test_objects_give_the_run_that_names_give(run: Make, sums: Path) -> None:
    by_name, by_object = run("names"), run(**objects(sums))
    for _ in range(3):
        first, second = by_name.step(), by_object.step()
        shared = first.keys() & second.keys()
        assert {k: v for k, v in first.items() if k in shared} == {k: second[k] for k in shared}
        assert {k for k in first if not k.startswith("reward/")} == {k for k in second if not k.startswith("reward/")}
    tokens = [[r.trajectory.tokens for g in trainer.groups for r in g.rollouts] for trainer in (by_name, by_object)]
    assert tokens[0] == tokens[1]


def test_a_function_of_a_notebook_runs_in_this_process_and_says_so(
    run: Make, sums: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    def even(completions: list[str], **_: Any) -> list[float]:
        seen.extend(completions)
        return [float(text[-1:] in "02468") for text in completions]

    with caplog.at_level(logging.WARNING):
        trainer = run(rewards=[load_reward(even, weight=2.0), "exact_match"])
    # pytest's own script is the main one, and `even` stands inside of this function.
    assert (
        "Reward `even` is defined inside of a function, so it cannot be killed if it hangs. Move it to a module."
        in caplog.text
    )
    trainer.step()
    rollouts = [r for g in trainer.groups for r in g.rollouts]
    assert seen[-16:] == [r.trajectory.text for r in rollouts]
    for rollout in rollouts:
        right = rollout.trajectory.text == rollout.trajectory.prompt.columns["answer"]
        assert rollout.rewards == {"even": float(rollout.trajectory.text[-1:] in "02468"), "exact_match": float(right)}
        assert rollout.reward == 2 * rollout.rewards["even"] + rollout.rewards["exact_match"]


def test_a_function_of_a_notebook_that_hangs_is_given_up_at_the_deadline(run: Make) -> None:
    hanging: list[str] = []

    def hangs_on_one_prompt(prompts: list[str], completions: list[str], step: int) -> list[float]:
        if step == 0:
            hanging[:] = hanging or prompts[:1]
            while hanging[0] in prompts:
                pass
        return [1.0] * len(completions)

    trainer = run(rewards=[hangs_on_one_prompt], options={"reward_deadline": 0.1})
    metrics = trainer.step()
    scores = [(r.trajectory.prompt.text == hanging[0], r.reward) for g in trainer.groups for r in g.rollouts]
    assert scores.count((True, 0.0)) == 4 and scores.count((False, 1.0)) == 12
    assert metrics["reward/hangs_on_one_prompt/timeout_frac"] == 4 / 16
    assert trainer.step()["reward/mean"] == 1.0


def test_one_name_is_one_reward(run: Make) -> None:
    assert run(rewards="number_match").config.rewards == ("number_match",)


def test_a_reward_brings_its_name_and_weight(run: Make) -> None:
    trainer = run(rewards=[load_reward("exact_match", name="sums", weight=0.25)])
    assert trainer.config.reward_weights == (0.25,)  # for estimators that weigh rewards themselves
    metrics = trainer.step()
    assert metrics["reward/mean"] == pytest.approx(0.25 * metrics["reward/sums/mean"])


def test_the_directory_says_what_it_cannot_hold_and_python_goes_on(run: Make, sums: Path, tmp_path: Path) -> None:
    whole = run("whole", **objects(sums), options={"steps": 4, "save_every": 2})
    whole.train()
    part = run("part", **objects(sums), options={"steps": 2, "save_every": 2})
    part.train()
    config = TrainConfig.of_run(tmp_path / "part")
    assert config.model == "object:Qwen3ForCausalLM" and config.rewards == ("object:exact_match",)
    assert config.data == f"object:list of {len(objects(sums)['data'])}"
    with pytest.raises(InputError, match=r"made with Python objects.*model='Qwen3ForCausalLM', data='list of"):
        GRPOTrainer(config, resume=True)
    config = TrainConfig.of_run(tmp_path / "part", {"steps": 4})
    with_objects = GRPOTrainer(config, resume=True, quiet=True, **objects(sums))
    with_objects.train()
    assert with_objects.run.metrics() == whole.run.metrics()


def test_weights_of_the_config_are_those_of_functions(run: Make) -> None:
    """As TRL has it: the weights in the config, the functions in the trainer."""

    def long(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    def even(completions: list[str], **_: Any) -> list[float]:
        return [float(text[-1:] in "02468") for text in completions]

    trainer = run(rewards=[even, long], options={"reward_weights": (1.0, 0.25)})
    trainer.step()
    for rollout in [r for g in trainer.groups for r in g.rollouts]:
        text = rollout.trajectory.text
        assert rollout.reward == (text[-1:] in "02468") + len(text) / 4
    with pytest.raises(InputError, match="reward_weights has 3 entries for 2 rewards; give one each"):
        run("three", rewards=[even, long], options={"reward_weights": (1.0, 0.25, 1.0)})
    with pytest.raises(InputError, match="reward_weights has 2 entries for 1 rewards; give one each"):
        run("default", options={"reward_weights": (1.0, 0.25)})


def test_a_lora_config_of_peft_is_the_adapter(run: Make, sums: Path) -> None:
    trainer = run(**objects(sums), peft_config=LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"]))
    assert trainer.model.lora is not None
    assert (trainer.model.lora.rank, trainer.model.lora.alpha) == (3, 6)
    assert {name.split(".")[-4] for name in trainer.model.weights.named()} == {"q_proj", "v_proj"}
    with pytest.raises(InputError, match=r"lora_dropout=0\.1: with dropout.*Leave it out"):
        run("dropout", **objects(sums), peft_config=LoraConfig(lora_dropout=0.1))
    with pytest.raises(InputError, match=r"peft_config has use_rslora=True.*GRPOTrainer\(model=get_peft_model"):
        run("rslora", **objects(sums), peft_config=LoraConfig(use_rslora=True))
    whole = LoraConfig(target_modules=["q_proj"], modules_to_save=["o_proj"])
    trainer = run("whole", **objects(sums), peft_config=whole)
    assert trainer.config.lora_modules_to_save == ("o_proj",)
    assert {name.split(".")[-4] for name in trainer.model.weights.named()} == {"q_proj", "o_proj"}
    adapted = objects(sums)
    adapted["model"] = get_peft_model(adapted["model"], LoraConfig(r=5, target_modules=["q_proj"]))
    trainer = run("adapted", **adapted)
    assert trainer.model.lora is not None and trainer.model.lora.rank == 5


def test_a_model_object_without_a_tokenizer_is_refused(run: Make, sums: Path) -> None:
    given = objects(sums) | {"tokenizer": None}
    with pytest.raises(InputError, match=r"a model object needs its tokenizer: GRPOTrainer\(model=\.\.\., tokenizer="):
        run(**given)
    with pytest.raises(InputError, match="sampler='vllm' loads the model itself"):
        run(**objects(sums), options={"sampler": "vllm"})


def test_the_result_of_a_run_is_a_short_line(run: Make) -> None:
    result = run(options={"steps": 2, "eval_prompts": 8}).train()
    assert repr(result) == (
        f"TrainResult(done after step 2, held-out accuracy {result.before.accuracy:.3f} -> {result.after.accuracy:.3f})"
    )


@pytest.mark.parametrize(
    ("words", "reward"),
    [
        (["--data", "gsm8k:train.jsonl"], "number_match"),
        (["--data", "gsm8k:hf://openai/gsm8k/main?style=plain"], "number_match"),
        (["--data", "reasoning_gym:leg_counting?size=5"], "gruppo.task.reasoning_gym:score"),
        (["--data", "problems.jsonl"], "exact_match"),
        ([], "exact_match"),
        (["--data", "gsm8k:train.jsonl", "--rewards", "math_match"], "math_match"),
        (["--data", "gsm8k:train.jsonl", "--reward-weights", "0.5"], "number_match"),
    ],
)
def test_a_run_that_names_no_reward_takes_that_of_its_data(words: list[str], reward: str) -> None:
    config, objects = resolve_inputs(config_of(words))
    assert config.rewards == objects.rewards == (reward,)
    config, objects = resolve_inputs(config)  # as a run that goes on reads it from its directory
    assert config.rewards == objects.rewards == (reward,)


def test_data_given_in_python_bring_their_reward_too() -> None:
    config, _ = resolve_inputs(TrainConfig(), data="gsm8k:train.jsonl")
    assert (config.data, config.rewards) == ("gsm8k:train.jsonl", ("number_match",))
    config, _ = resolve_inputs(TrainConfig(data="gsm8k:train.jsonl"), data=[{"prompt": "1", "answer": "1"}])
    assert config.rewards == ("exact_match",)


def test_arguments_of_trls_trainer_are_answered_with_their_names() -> None:
    trainer: Any = GRPOTrainer
    with pytest.raises(InputError) as caught:
        trainer(model="builtin", reward_funcs=len, train_dataset=[], args=None, lr=1e-5)
    assert str(caught.value) == (
        "GRPOTrainer has no argument 'reward_funcs': it is called rewards here; nor 'train_dataset': it is called data "
        "here; nor 'args': it is called config here (a TrainConfig, the first argument); nor 'lr': it is an option, "
        "for TrainConfig(lr=...)"
    )
    with pytest.raises(TypeError, match="unexpected keyword argument 'modle'"):
        trainer(modle="builtin")


def test_functions_of_a_script_are_warned_of_in_one_line(run: Make, caplog: pytest.LogCaptureFixture) -> None:
    def one(completions: list[str]) -> list[float]:
        return [1.0] * len(completions)

    def two(completions: list[str]) -> list[float]:
        return [2.0] * len(completions)

    with caplog.at_level(logging.WARNING):
        run(rewards=[one, two])
    (record,) = [record.getMessage() for record in caplog.records if "cannot be killed" in record.getMessage()]
    assert record.startswith("Rewards `one`, `two` are defined inside of a function, so they cannot be killed")


def test_the_plan_counts_the_prompts_that_are_held_out(run: Make) -> None:
    rows = [{"prompt": f"{i}+{i}=", "answer": f"{2 * i:03}"} for i in range(10, 70)]
    trainer = run(data=rows, options={"eval_prompts": None})
    held_out = (trainer.run.path / "heldout.jsonl").read_text().splitlines()
    assert len(held_out) == 12
    assert trainer.plan().lines(trainer.config)[1].endswith(", and 12 are held out")


SCRIPT = """
{top}
from gruppo.trainer import GRPOTrainer, TrainConfig

def right(completions, **columns):
    return [1.0] * len(completions)

def short(completions, **columns):
    return [1.0] * len(completions)

GRPOTrainer(TrainConfig(output="run", steps=1, eval_prompts=0, max_new_tokens=4, tensorboard=False, threads=1),
            rewards={rewards}, quiet=True).close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("top", "rewards", "said"),
    [
        (
            "",
            "[right]",
            "Reward `right` is defined in the script itself, so it cannot be killed if it hangs. Move it to a module, "
            'or guard the script with `if __name__ == "__main__":`.',
        ),
        (
            "",
            "[right, short]",
            "Rewards `right`, `short` are defined in the script itself, so they cannot be killed if they hang. Move "
            'them to a module, or guard the script with `if __name__ == "__main__":`.',
        ),
        (
            "del __file__",  # as in a notebook
            "[right]",
            "Reward `right` is defined interactively, so it cannot be killed if it hangs. Move it to a module.",
        ),
    ],
)
def test_the_warning_of_a_reward_of_the_script_is_one_sentence_with_what_helps(
    top: str, rewards: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(top=top, rewards=rewards))
    done = run_python(["script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [said]


GUARDED = """
from gruppo.trainer import GRPOTrainer, TrainConfig

if __name__ == "__main__":

    def right(completions, **columns):
        return [1.0] * len(completions)

    options = {"steps": 1, "eval_prompts": 0, "max_new_tokens": 4, "tensorboard": False, "threads": 1}
    trainer = GRPOTrainer(TrainConfig(output="run", **options), rewards=[right], quiet=True)
    print(trainer.train().metrics[-1]["reward/right/mean"])
    trainer.save_model("model")
"""


@pytest.mark.slow
def test_a_reward_under_the_guard_of_a_script_runs_in_the_script(tmp_path: Path) -> None:
    """No worker process can import it: many scripts define their rewards there."""
    (tmp_path / "script.py").write_text(GUARDED)
    ran = run_python(["script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0 and ran.stdout.splitlines()[-1] == "1.0", ran.stderr
    assert 'Move it to a module, or above the `if __name__ == "__main__":`.' in ran.stderr
    assert (tmp_path / "model" / "config.json").is_file()
