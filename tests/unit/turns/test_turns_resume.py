"""Runs with a tool that are stopped, killed amid a call of it, and resumed: the bits of the run that never stopped."""

import hashlib
import json
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import turn_tools
from safetensors.torch import load_file
from warm_process import WarmProcess

from gruppo import faults
from gruppo.cli.main import main
from gruppo.faults import Fault
from gruppo.rollout.schedule import reading
from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.types import Trajectory

pytestmark = pytest.mark.slow

VARIANTS: dict[str, dict[str, Any]] = {
    "rounds": {"kl_in_reward": 0.01},
    "ahead": {"max_staleness": 1, "dynamic_sampling": 2},
}


DATA = Path(__file__).parent / "products.jsonl"


def options(output: Path, variant: str) -> dict[str, Any]:
    usual = {"model": "builtin-chat", "data": str(DATA), "tools": ["turn_tools:multiply"]}
    usual |= {"output": str(output), "max_new_tokens": 30, "max_turns": 3, "rewards": ["exact_match", "length_penalty"]}
    usual |= {"steps": 6, "save_every": 3, "prompts_per_step": 2, "group_size": 4, "lr": 1e-3, "temperature": 1.5}
    usual |= {"eval_prompts": 4, "eval_every": 3, "completions_every": 1, "tensorboard": False, "threads": 1}
    return usual | VARIANTS[variant]


def product(run: Path) -> dict[str, str]:
    """The sha256 of all that must be equal."""
    files = [run / "metrics.jsonl", *sorted((run / "completions").iterdir())]
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (weights,) = (run / "model").glob("*.safetensors")
    tensors = sorted(load_file(weights).items())
    digest = hashlib.sha256(b"".join(name.encode() + t.contiguous().numpy().tobytes() for name, t in tensors))
    return found | {"weights": digest.hexdigest()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The runs that were not stopped."""
    made = {}
    for variant in VARIANTS:
        run = tmp_path_factory.mktemp("whole") / variant
        with closing(GRPOTrainer(TrainConfig(**options(run, variant)), quiet=True)) as trainer:
            trainer.train()
        made[variant] = product(run)
    return made


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_with_tools_that_failed_after_step_4_is_resumed_to_the_same_bits(variant, whole, tmp_path):
    run = tmp_path / "run"
    with closing(GRPOTrainer(TrainConfig(**options(run, variant)), quiet=True)) as trainer:
        faults.PLAN.append(Fault("train", 4, "raise"))
        with pytest.raises(RuntimeError, match="fault planned"):
            trainer.train()
    with closing(GRPOTrainer(TrainConfig.of_run(run), resume=True, quiet=True)) as trainer:
        assert trainer.step_number in (3, 4)
        trainer.train()
    assert product(run) == whole[variant]


def test_episodes_that_wait_in_a_checkpoint_keep_their_messages_and_what_was_sampled(tmp_path):
    run = tmp_path / "run"
    with closing(GRPOTrainer(TrainConfig(**options(run, "ahead") | {"steps": 4}), quiet=True)) as trainer:
        for _ in range(2):
            trainer.step()
        trainer.schedule.save(tmp_path, 2)
        number, future, _ = trainer.schedule._pending[0]
        assert number == 3
        waiting = [r for group in future.result().groups for r in group.rollouts]
        with reading(tmp_path, trainer.source.prompts) as (_, (groups,)):
            read = [r for group in groups for r in group.rollouts]
    assert any(message["role"] == "tool" for r in read for message in r.trajectory.messages)
    for before, after in zip(waiting, read, strict=True):
        one, other = before.trajectory, after.trajectory
        for name in Trajectory.__dataclass_fields__.keys() - {"messages", "env_reward"}:
            assert getattr(one, name) == getattr(other, name), name
        assert json.dumps(one.messages) == json.dumps(other.messages)
        assert (before.reward, before.rewards, before.correct) == (after.reward, after.rewards, after.correct)


def words(run, variant):
    found = ["train"]
    for name, value in options(run, variant).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    return found


@pytest.mark.parametrize(("variant", "number"), [("rounds", "SIGKILL"), ("rounds", "SIGTERM"), ("ahead", "SIGKILL")])
def test_a_run_that_is_ended_amid_a_call_of_its_tool_is_resumed_to_the_same_bits(variant, number, whole, tmp_path):
    run, ended = tmp_path / "run", getattr(signal, number)
    third = run / "checkpoints" / "step-000003"
    life = WarmProcess(tmp_path / "log", turn_tools.gruppo_with_signal, words(run, variant), third, ended)
    assert life.wait() == (-9 if ended == signal.SIGKILL else 75), life.output
    life.close()
    assert third.exists() and len((run / "metrics.jsonl").read_text().splitlines()) < 7
    before = turn_tools.calls
    with pytest.raises(SystemExit, match="0"):
        main(["resume", str(run)])
    assert turn_tools.calls > before
    assert product(run) == whole[variant]
