"""From a config to what turns prompts into advantages: the estimator, shapes, memory, and the two that use them."""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gruppo.advantage import ADVANTAGES, Advantage
from gruppo.errors import InputError
from gruppo.loss.adaptive import AdaptiveEntropy
from gruppo.reward import RewardPool
from gruppo.reward.load import import_object
from gruppo.reward.shape import RewardShape
from gruppo.trainer.config import TrainConfig
from gruppo.trainer.credit import Credit
from gruppo.trainer.entropy_bonus import EntropyBonus
from gruppo.trainer.memory import Memory
from gruppo.trainer.reward_kl import RewardKL
from gruppo.trainer.rounds import Gatherer
from gruppo.trainer.solved import SolvedPrompts
from gruppo.types import Prompt

if TYPE_CHECKING:
    from gruppo.model import TransformersModel


def build_advantage(config: TrainConfig) -> Advantage:
    """The estimator with the options that were set, tried once on made-up rewards: a wrong option fails here."""
    cls = ADVANTAGES.get(config.advantage)
    if cls is None:
        if ":" not in config.advantage:
            raise InputError(
                f"advantage={config.advantage!r} is unknown; use one of {', '.join(ADVANTAGES)}, or "
                "your.module:YourAdvantage"
            )
        cls = import_object(config.advantage, "advantage")
    parameters = inspect.signature(cls).parameters
    options: dict[str, Any] = dict(config.advantage_options)
    if config.normalization is not None and "normalization" not in parameters:
        takers = [n for n, c in ADVANTAGES.items() if "normalization" in inspect.signature(c).parameters]
        raise InputError(f"advantage={config.advantage!r} does not take normalization; {', '.join(takers)} do")
    own: dict[str, Any] = {"normalization": config.normalization or "standard", "correct_at": config.correct_at}
    if getattr(cls, "per_reward", False):
        if config.kl_in_reward:
            raise InputError(f"advantage={config.advantage!r} takes rewards apart; kl_in_reward has no place there")
        weights = config.reward_weights or (1.0,) * len(config.rewards)
        own["weights"] = weights if build_shape(config).does_nothing else (*weights, 1.0)
    options = {name: value for name, value in own.items() if name in parameters} | options
    try:
        estimate = cls(**options)
    except TypeError as error:
        raise InputError(
            f"advantage={config.advantage!r} cannot be made with {', '.join(options) or 'no options'}: {error}"
        ) from error
    _try_advantage(estimate, config)
    return estimate


def _try_advantage(estimate: Advantage, config: TrainConfig) -> None:
    num = config.group_size
    inputs = {"lengths": list(range(1, num + 1)), "greedy_rewards": [0.0] * num}
    more: dict[str, Any] = {} if config.scale is None else {"scale": config.scale}
    for name in getattr(estimate, "needs", ()):
        if name not in inputs:
            raise InputError(f"advantage={config.advantage!r} needs {name!r}; there are {', '.join(inputs)}")
        more[name] = inputs[name]
    rewards: list[Any] = [0.0] * (num - 1) + [1.0]
    if getattr(estimate, "per_reward", False):
        width = len(config.rewards) + (not build_shape(config).does_nothing)
        rewards = [[reward] * width for reward in rewards]
    result = estimate(rewards, group_ids=[0] * num, **more)
    if tuple(getattr(result, "shape", ())) != (num,):
        raise InputError(f"advantage={config.advantage!r} must give a tensor with one value per reward, got {result!r}")


def build_shape(config: TrainConfig) -> RewardShape:
    return RewardShape(
        max_length=config.max_new_tokens,
        overlong_cache=config.overlong_cache,
        truncated_factor=config.truncated_factor,
    )


def build_memory(config: TrainConfig, model: "TransformersModel", num_prompts: int) -> Memory:
    """What the run will remember besides the model, as it is before the first step."""
    return Memory(
        solved=SolvedPrompts(after=config.retire_solved, num_prompts=num_prompts, keep=config.prompts_per_step),
        kl=RewardKL(config.kl_in_reward, config.kl_target, config.kl_horizon),
        entropy=EntropyBonus(config.entropy_coef, config.entropy_coef, _entropy_rule(config)),
        reference=model.reference() if config.ref_every else None,
    )


def _entropy_rule(config: TrainConfig) -> AdaptiveEntropy | None:
    if config.entropy_target is None:
        return None
    return AdaptiveEntropy(target=config.entropy_target, change=config.entropy_change)


def build_gatherer(
    config: TrainConfig, prompts: Sequence[Prompt], sampler: Any, pool: RewardPool, memory: Memory
) -> Gatherer:
    return Gatherer(
        prompts=prompts,
        sampler=sampler,
        pool=pool,
        solved=memory.solved,
        prompts_per_step=config.prompts_per_step,
        group_size=config.group_size,
        max_batches=config.dynamic_sampling,
        seed=config.seed,
    )


def build_credit(
    config: TrainConfig, estimate: Advantage, model: "TransformersModel", gatherer: Gatherer, memory: Memory
) -> Credit:
    return Credit(
        config=config,
        estimate=estimate,
        shape=build_shape(config),
        model=model,
        gatherer=gatherer,
        memory=memory,
    )
