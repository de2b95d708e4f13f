"""From a config to the parts of a run. Everything cheap that can be wrong is checked before the model is loaded."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppo.errors import InputError
from gruppo.loss import CORRECTIONS, LOSSES, PolicyLoss
from gruppo.loss.composition import check_composition
from gruppo.metric import metric_for
from gruppo.model.source import context_length
from gruppo.reward import RewardPool, load_reward
from gruppo.reward.load import import_object
from gruppo.task import PromptSet, load_prompts, resolve_source
from gruppo.trainer.config import TrainConfig, read_sampler
from gruppo.types import Prompt

if TYPE_CHECKING:
    from gruppo.model import TransformersModel
    from gruppo.sampler import Sampler


def build_loss(config: TrainConfig) -> PolicyLoss:
    """The loss with the options that were set; one that it does not take is an error."""
    cls: Any = LOSSES.get(config.loss)
    if cls is None:
        if ":" not in config.loss:
            raise InputError(
                f"loss={config.loss!r} is unknown; use one of {', '.join(LOSSES)}, or your.module:YourLoss"
            )
        cls = import_object(config.loss, "loss")
    parameters = inspect.signature(cls).parameters
    options: dict[str, Any] = {"beta": config.beta, "kl_estimator": config.kl_estimator}
    options["entropy_coef"] = config.entropy_coef
    for name in ("clip_range", "tau"):
        value = getattr(config, name)
        if value is not None:
            if name not in parameters:
                takers = [n for n, c in LOSSES.items() if name in inspect.signature(c).parameters]
                raise InputError(f"loss={config.loss!r} does not take {name}; {', '.join(takers)} do")
            options[name] = value
    if "max_completion_length" in parameters:
        options["max_completion_length"] = config.max_new_tokens
    clashes = sorted(options.keys() & config.loss_options.keys())
    if clashes:
        raise InputError(f"loss_options has {clashes[0]!r}, which is an option of its own: give {clashes[0]}=...")
    options |= config.loss_options
    try:
        loss = cls(**options)
    except TypeError as error:
        raise InputError(f"loss={config.loss!r} cannot be made with {', '.join(options)}: {error}") from error
    if not isinstance(loss, PolicyLoss):
        raise InputError(f"loss={config.loss!r} gives a {type(loss).__name__}, not a loss of gruppo.loss")
    set_correction(loss, config)
    return loss


def set_correction(loss: PolicyLoss, config: TrainConfig) -> None:
    """Weigh the gap between sampler and trainer. auto: only where there is one and the loss does not do it itself."""
    name = config.correction
    if name == "auto":
        has_gap = config.sampler != "torch"  # torch's numbers are the trainer's
        name = "truncate" if has_gap and not loss.reads_sampler else "none"
    if name == "none":
        return
    if loss.correction is not None:
        raise InputError(f"loss={config.loss!r} has a correction of its own; use correction=auto, not {name!r}")
    if name not in CORRECTIONS and ":" not in name:
        raise InputError(
            f"correction={name!r} is unknown; use auto, none, {', '.join(CORRECTIONS)}, or your.module:your_function"
        )
    loss.correction = CORRECTIONS[name] if name in CORRECTIONS else import_object(name, "correction")
    check_composition(loss)


def build_rewards(config: TrainConfig, on_wait: Any = None) -> RewardPool:
    weights = config.reward_weights or (1.0,) * len(config.rewards)
    rewards = [load_reward(spec, weight=weight) for spec, weight in zip(config.rewards, weights, strict=True)]
    return RewardPool(rewards, workers=config.reward_workers, deadline_s=config.reward_deadline, on_wait=on_wait)


def try_rewards(pool: RewardPool, prompts: Sequence[Prompt]) -> None:
    """Call each reward once on made-up completions: what it returns must be one value per completion.

    The values do not matter, nor does an error on such completions; that is for the first step to judge.
    """
    prompt = prompts[0]  # twice the same: a group goes to one call, so that a value too few is seen
    names = {name for p in prompts for name in p.columns}
    pool.score(
        [prompt.source] * 2,
        ["", "0"],
        completion_ids=[(), (0,)],
        columns={name: [prompt.columns.get(name)] * 2 for name in names},
        step=1,
    )


@dataclass(frozen=True, slots=True)
class Prompts:
    train: PromptSet
    held_out: PromptSet


def build_prompts(config: TrainConfig, tokenizer: Any) -> Prompts:
    """Training and held-out prompts."""
    longest = config.max_prompt_tokens
    context = context_length(config.model)
    if context is not None:
        room = context - config.max_new_tokens
        if room < 1:
            raise InputError(
                f"max_new_tokens={config.max_new_tokens} leaves no room for a prompt in the model's context of "
                f"{context} tokens; lower it"
            )
        longest = room if longest is None else min(longest, room)
    options: dict[str, Any] = {"max_prompt_tokens": longest, "system": config.system}
    rows = resolve_source(config.data, prompt_column=config.prompt_column)
    train = load_prompts(rows, tokenizer, **options)
    if not config.eval_prompts:
        held_out = PromptSet(prompts=())
    elif config.eval_data is not None:
        rows = resolve_source(config.eval_data, prompt_column=config.prompt_column)
        held_out = load_prompts(rows, tokenizer, limit=config.eval_prompts, **options)
    else:
        if config.eval_prompts >= len(train):
            raise InputError(
                f"eval_prompts={config.eval_prompts} leaves none of the {len(train)} prompts of {config.data} to train "
                "on; lower it, or give eval_data"
            )
        train, held_out = train.split_holdout(config.eval_prompts, config.seed)
    if config.prompts_per_step > len(train):
        raise InputError(
            f"prompts_per_step={config.prompts_per_step} is more than the {len(train)} prompts to train on; lower it"
        )
    return Prompts(train, held_out)


def build_sampler(
    config: TrainConfig, model: "TransformersModel", prompts: Prompts, sync_folder: Path, poll: Callable[[], None]
) -> "Sampler":
    """The sampler that the config names. vLLM needs no longer context than the longest prompt asks for."""
    from gruppo.sampler import TorchSampler, vLLMSampler

    kind, servers = read_sampler(config.sampler)
    if kind == "torch":
        return TorchSampler(model, on_token=poll)
    longest = max(len(p.token_ids) for part in (prompts.train, prompts.held_out) for p in part.prompts)
    return vLLMSampler(
        config.model,
        servers=servers,
        dtype=config.dtype,
        max_model_len=longest + config.max_new_tokens + 1,
        lora=model.lora,
        options=dict(config.vllm_options),
        sync_folder=sync_folder,
        deadline_s=config.sampler_deadline,
        poll=poll,
    )


def build_model(config: TrainConfig, loss: PolicyLoss, tokenizer: Any) -> "TransformersModel":
    """The actor with loss, optimizer, schedule and metric."""
    from gruppo.model import LoraSpec, TransformersModel

    targets = config.lora_targets
    lora = LoraSpec(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        targets=targets[0] if targets == ("all-linear",) else targets,
        seed=config.seed,
    )
    model = TransformersModel(
        config.model,
        lora=lora if config.lora else None,
        dtype=config.dtype,
        tokens_per_microbatch=config.tokens_per_microbatch,
        temperature=config.temperature,
        gradient_checkpointing=config.gradient_checkpointing,
        layout=config.layout,
        tokenizer=tokenizer,
    )
    model.set_loss(loss)
    if config.kl_in_reward:
        model.reference()  # frozen now: the weights at the start
    options: dict[str, Any] = {} if config.lr is None else {"lr": config.lr}
    model.set_optimizer("AdamW", weight_decay=config.weight_decay, **options)
    model.set_lr_scheduler(config.lr_schedule, warmup_steps=config.warmup_steps, total_steps=config.optimizer_steps)
    model.add_metric(metric_for(loss, top_k_kl=0))
    return model
