"""Inputs of a run: a model, rewards and data that are given in Python, where a config has only names.

A config with objects holds `object:NAME` in their place: the run directory says what was trained, and what it cannot
load again by itself.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gruppo.errors import InputError
from gruppo.peer_names import DROPOUT
from gruppo.reward import Reward, load_reward
from gruppo.reward.load import is_under_guard, sendable
from gruppo.task.dataset import is_stream
from gruppo.task.sources import default_reward
from gruppo.trainer.config import TrainConfig
from gruppo.turns.adapters import environments_of
from gruppo.turns.environment import Environments
from gruppo.weights.source import pin

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MARK = "object:"
OF_ENVIRONMENT = "environment"
"""The reward that hands on what the environment gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Model, rewards and data of a run: the objects that it was given, else what its config names."""

    model: "PreTrainedModel | str"
    tokenizer: "PreTrainedTokenizerBase | None"
    """None: that of the model."""
    rewards: tuple[str | Reward, ...]
    data: Any
    eval_data: Any
    loss: Any = None
    """A loss that was made already; None: by its name."""
    advantage: Any = None
    """An estimator that was made already; None: by its name."""
    metrics: tuple[Any, ...] = ()
    """Names, and metrics that were made already."""
    environments: Environments | None = None
    """What answers the model's turns; None: a completion is one turn."""


def resolve_inputs(
    config: TrainConfig,
    *,
    model: Any = None,
    tokenizer: Any = None,
    rewards: Sequence[str | Reward | Callable[..., Any]] | None = None,
    data: Any = None,
    eval_data: Any = None,
    peft_config: Any = None,
    loss: Any = None,
    advantage: Any = None,
    metrics: Sequence[Any] | None = None,
    tools: Sequence[Any] | None = None,
    environment: Any = None,
    environment_factory: Any = None,
) -> tuple[TrainConfig, Inputs]:
    """The config of a run with these objects, and the objects. Names among them go into the config, and so does the
    reward of the data where none is named."""
    changes: dict[str, Any] = {} if peft_config is None else _adapter(peft_config)
    if tokenizer is not None and config.tokenizer is not None:
        raise InputError(f"tokenizer={config.tokenizer!r} in the config and a tokenizer object are two; give one")
    given: dict[str, Any] = {"tokenizer": tokenizer}
    if model is not None and not isinstance(model, str):
        if tokenizer is None:
            raise InputError("a model object needs its tokenizer: GRPOTrainer(model=..., tokenizer=...)")
        if config.sampler.startswith("vllm"):
            raise InputError(
                f"sampler={config.sampler!r} loads the model itself and needs a folder, not a model object"
            )
    sources = {"model": model, "data": data, "eval_data": eval_data}
    for name, value in sources.items():
        if isinstance(value, str):
            changes[name] = value
        elif value is not None:
            given[name], changes[name] = value, MARK + _described(value)
    for name, value in {"loss": loss, "advantage": advantage}.items():
        if isinstance(value, str | type):
            changes[name] = value
        elif value is not None:
            given[name], changes[name] = value, MARK + type(value).__name__
    if metrics is not None:
        each = [metrics] if isinstance(metrics, str | type) else list(metrics)
        changes["metrics"] = [m if isinstance(m, str | type) else MARK + type(m).__name__ for m in each]
        given["metrics"] = tuple(each)
    if is_stream(data):
        changes |= _in_order(config)
    if tools is not None:
        given["tools"] = tuple(tools)
        changes["tools"] = [tool if isinstance(tool, str) else MARK + _named(tool) for tool in tools]
    for name, value in {"environment": environment, "environment_factory": environment_factory}.items():
        if isinstance(value, str):
            changes["environment"] = value
        elif value is not None:
            given[name] = value
            each = value.values() if isinstance(value, dict) else [value]
            changes["environment"] = MARK + ", ".join(map(_named, each))
    if rewards is not None:
        given["rewards"] = tuple(map(_reward, [rewards] if callable(rewards) or isinstance(rewards, str) else rewards))
        _warn_of_local([reward for reward in given["rewards"] if isinstance(reward, Reward) and reward.is_timed])
        weights = [1.0 if isinstance(r, str) else r.weight for r in given["rewards"]]
        if config.reward_weights is None and any(weight != 1 for weight in weights):
            changes["reward_weights"] = weights  # where an estimator that compares rewards apart reads them too
        changes["rewards"] = [r if isinstance(r, str) else MARK + r.name for r in given["rewards"]]
    made = TrainConfig.read(config.model_dump(exclude_unset=True) | changes) if changes else config
    lists = ("rewards", "metrics", "tools")
    missing = [
        f"{name}={text.removeprefix(MARK)!r}"
        for name in ("model", "data", "eval_data", "loss", "advantage", "environment", *lists)
        for text in (getattr(made, name) or () if name in lists else [str(getattr(made, name))])
        if text.startswith(MARK) and given.get(name) is None and not (name == "environment" and environment_factory)
    ]
    if missing:
        raise InputError(
            f"this run was made with Python objects, which its directory cannot hold: {', '.join(missing)}. Go on in "
            "Python: GRPOTrainer(TrainConfig.of_run(directory), resume=True, ...) with the same objects"
        )
    environments, factory = None, given.pop("environment_factory", None)
    if made.has_turns:
        own = None if factory is not None and environment is None else made.environment
        environments = environments_of(given.pop("environment", own), given.pop("tools", made.tools), factory)
    if rewards_changes := _rewards(made, given, environments):
        made = TrainConfig.read(made.model_dump(exclude_unset=True) | rewards_changes)
    if "model" not in given:
        plain, revision = pin(made.model, made.revision)
        if (plain, revision) != (made.model, made.revision):
            made = TrainConfig.read(made.model_dump(exclude_unset=True) | {"model": plain, "revision": revision})
    elif made.revision is not None:
        raise InputError(f"revision={made.revision!r} is for a model that is loaded by its name; leave it out")
    named: dict[str, Any] = {name: getattr(made, name) for name in ("rewards", "data", "eval_data")}
    named |= {"model": made.pinned_model, "metrics": made.metrics, "environments": environments}
    return made, Inputs(**(named | given))


def environments_by_name(config: TrainConfig) -> Environments | None:
    """What answers the model's turns, as a config names it; None: nothing does."""
    if not config.has_turns:
        return None
    names = [*config.tools, *([] if config.environment is None else [config.environment])]
    if objects := [name.removeprefix(MARK) for name in names if name.startswith(MARK)]:
        raise InputError(
            f"the tools or the environment of this run were Python objects, which its directory cannot hold: "
            f"{', '.join(objects)}; name them: --tools module:function, --environment module:Class"
        )
    return environments_of(config.environment, config.tools)


def _rewards(config: TrainConfig, given: dict[str, Any], environments: Environments | None) -> dict[str, Any]:
    """Rewards that nobody named: that of the environment, else that of the data."""
    gives_reward = environments is not None and environments.gives_reward
    if config.rewards is None:
        return {"rewards": [OF_ENVIRONMENT if gives_reward else default_reward(config.data)]}
    if not gives_reward or OF_ENVIRONMENT in config.rewards:
        return {}
    if "rewards" in given:
        given["rewards"] = (*given["rewards"], OF_ENVIRONMENT)
    changes: dict[str, Any] = {"rewards": [*config.rewards, OF_ENVIRONMENT]}
    return changes if config.reward_weights is None else changes | {"reward_weights": [*config.reward_weights, 1.0]}


def _in_order(config: TrainConfig) -> dict[str, Any]:
    """What follows from data that is a stream: its rows come once, in its order."""
    if config.epochs is not None:
        raise InputError(
            f"epochs={config.epochs:g} needs the number of prompts, and a stream does not tell how many it has; give "
            "steps, or the rows as a list"
        )
    if config.shuffle and "shuffle" in config.model_fields_set:
        raise InputError(
            "shuffle=true needs all prompts, and of a stream only what the run can use is read; leave shuffle out, and "
            "shuffle the stream itself: one of `datasets` has a method for it, with a buffer"
        )
    return {"shuffle": False}


def _reward(spec: str | Reward | Callable[..., Any]) -> str | Reward:
    """A reward function that a worker process cannot import runs in this one, with a deadline."""
    if isinstance(spec, str):
        return spec
    reward = load_reward(spec)
    if reward.isolated:
        try:
            sendable(reward)
        except InputError:
            return replace(reward, isolated=False, is_timed=True)
    return reward


def _warn_of_local(rewards: Sequence[Reward]) -> None:
    """One sentence for all rewards that run in this process."""
    if not rewards:
        return
    is_one, names = len(rewards) == 1, ", ".join(f"`{reward.name}`" for reward in rewards)
    it, is_, hangs = ("it", "is", "it hangs") if is_one else ("them", "are", "they hang")
    has_file = hasattr(sys.modules["__main__"], "__file__")
    # A lambda, or a function inside a function, has no name to import it by, wherever it is.
    is_named = all("<" not in getattr(reward.function, "__qualname__", "") for reward in rewards)
    where = "inside of a function" if not is_named else "in the script itself" if has_file else "interactively"
    is_under = any(is_under_guard(reward.function) for reward in rewards)
    other = "above the" if is_under else "guard the script with"
    guard = f', or {other} `if __name__ == "__main__":`' if is_named and has_file else ""
    logger.warning(
        f"Reward{'' if is_one else 's'} %s {is_} defined {where}, so {'it' if is_one else 'they'} cannot be killed if "
        f"{hangs}. Move {it} to a module{guard}.",
        names,
    )


def _adapter(peft_config: Any) -> dict[str, Any]:
    """Options of a LoraConfig of PEFT."""
    if not hasattr(peft_config, "lora_alpha"):
        raise InputError(f"peft_config must be a LoraConfig of PEFT, got {type(peft_config).__name__}")
    if peft_config.lora_dropout:
        raise InputError(f"lora_dropout={peft_config.lora_dropout}: {DROPOUT}")
    targets = peft_config.target_modules or "all-linear"
    given = {
        "lora_rank": peft_config.r,
        "lora_alpha": peft_config.lora_alpha,
        "lora_targets": [targets] if isinstance(targets, str) else sorted(targets),
        "lora_modules_to_save": peft_config.modules_to_save,
    }
    used = {"r", "lora_alpha", "target_modules", "modules_to_save"}
    notes = {"task_type", "inference_mode", "peft_version", "base_model_name_or_path", "revision"}
    plain = type(peft_config)()
    for name, value in vars(peft_config).items():
        if name not in used | notes and value != getattr(plain, name):
            raise InputError(
                f"peft_config has {name}={value!r}, and of a LoraConfig only r, lora_alpha, target_modules and "
                "modules_to_save are used; leave it out, or give a model that PEFT has adapted already: "
                "GRPOTrainer(model=get_peft_model(model, peft_config), ...)"
            )
    return {"lora": True, **given}


def _named(value: Any) -> str:
    return str(getattr(value, "__name__", type(value).__name__))


def _described(value: Any) -> str:
    """A name for a config: the class, and how many there are."""
    name = type(value).__name__
    return f"{name} of {len(value)}" if hasattr(value, "__len__") else name
