"""Parts of a run, made from its config. Everything cheap that can be wrong is checked before the model is loaded."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import ceil
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gruppo.advantage import ADVANTAGES, Advantage
from gruppo.errors import GruppoError, InputError
from gruppo.loss import CORRECTIONS, LOSSES, PolicyLoss
from gruppo.metric import Metric, metric_for
from gruppo.model import LoraSpec, TransformersModel
from gruppo.model.lora import lora_of
from gruppo.options import DataOptions, ModelOptions, read_pair, read_sampler
from gruppo.parallel.ranks import Ranks, world_of_launcher
from gruppo.process.by_name import import_object
from gruppo.process.streams import shell_word
from gruppo.reward import RewardScorer, RewardShape, load_reward
from gruppo.rollout.handover import CopiedModel, HandOver, PublishedWeights
from gruppo.rollout.schedule import Ahead, Schedule
from gruppo.rollout.source import RolloutSource, SolvedPrompts
from gruppo.rollout.stream import Streamed
from gruppo.sampler import TorchSampler, vLLMSampler
from gruppo.sampler.base import SamplingParams, check_ids, sampler_class
from gruppo.sampler.vllm.placed import servers_of_launcher
from gruppo.task import PromptSet, load_prompts
from gruppo.task.reader import first_rows, is_stream
from gruppo.trainer.advantages import AdvantageAssigner
from gruppo.trainer.config import TrainConfig
from gruppo.trainer.estimate import replicates
from gruppo.trainer.inputs import MARK, Inputs
from gruppo.trainer.resume import prompts_digest
from gruppo.trainer.state import AdaptiveEntropy, AdaptiveKL, RunState
from gruppo.turns.chat import ChatCodec
from gruppo.turns.environment import ENVIRONMENT_REWARD, Environments
from gruppo.turns.player import Player, TurnLimits
from gruppo.types import Prompt
from gruppo.weights import WeightStore
from gruppo.weights.source import (
    context_length,
    end_tokens,
    end_tokens_of,
    holds_adapter,
    longest_prompt,
    vocabulary_size,
    weights_digest,
)

if TYPE_CHECKING:
    from gruppo.model.ranked import Actor, RankedModel


def check_ranks(config: TrainConfig, inputs: Inputs, ranks: Ranks | None) -> None:
    """Refuse what several processes cannot do, and processes of a launcher that the run was not told of."""
    if ranks is None:
        if world_of_launcher() > 1:
            raise InputError(
                f"WORLD_SIZE={world_of_launcher()}: torchrun or another launcher has started several processes, and "
                "each would train a run of its own; start them with the command: torchrun ... -m gruppo train"
            )
        return
    if not isinstance(inputs.model, str):
        raise InputError("a model object is for one process: on several ranks give a name or folder, which each loads")
    for name, value in {"loss": inputs.loss, "metrics": inputs.metrics}.items():
        if any(not isinstance(each, str | type) for each in ([value] if name == "loss" else value) if each is not None):
            raise InputError(f"{name}: an object is for one process; on several ranks give a name, which each imports")
    given = {"quantize": config.quantize, "offload": config.advanced.offload}
    for name, value in (given | {"ref_every": config.ref_every, "streaming": config.streaming}).items():
        if value:
            raise InputError(f"{name}={value!r} is for one process; on several ranks leave it out")
    if config.sampler == "vllm":
        raise InputError("sampler='vllm' is an engine inside of one process; on several ranks use sampler=vllm:start")


def fit_context(config: TrainConfig, inputs: Inputs) -> TrainConfig:
    """The config with a token limit that a short context has room for, unless the limit was set."""
    context = context_length(inputs.model)
    if "max_new_tokens" in config.model_fields_set or context is None or context >= 4 * config.max_new_tokens:
        return config
    return TrainConfig.read(config.model_dump(exclude_unset=True) | {"max_new_tokens": max(context // 4, 1)})


def build_player(
    config: TrainConfig,
    environments: Environments | None,
    model: Any,
    tokenizer: Any,
    poll: Callable[[], None] = lambda: None,
) -> Player | None:
    """What plays the episodes of a run with turns; None for a run without. A template that cannot is refused here.

    Args:
        model: its id, or the object.
    """
    if environments is None:
        return None
    more = config.advanced
    if isinstance(model, str):
        stop_ids = end_tokens(model, tokenizer)
    else:
        stop_ids = end_tokens_of(getattr(model, "generation_config", None), model.config, tokenizer)
    codecs = {}
    for name, tools in environments.tools.items():
        codecs[name] = ChatCodec(tokenizer, sorted(stop_ids), tools, config.chat_template_kwargs)
        codecs[name].check("tool" if tools else "user")
    limits = TurnLimits(
        max_turns=config.max_turns,
        max_turn_tokens=more.max_turn_tokens,
        max_context=context_length(model),
        turn_deadline=more.turn_deadline,
        episode_deadline=more.episode_deadline,
    )
    return Player(environments, codecs, limits, system=config.system, poll=poll)


def count_steps(config: TrainConfig, prompts: "Prompts") -> "tuple[TrainConfig, Prompts]":
    """The config with a number of steps in the place of `epochs`, and prompts whose plan says so."""
    if config.epochs is None:
        return config, prompts
    num = len(prompts.train)
    # As it is written: 0.1 of 1000 prompts is 100, not a hair more.
    steps = max(ceil(Fraction(str(config.epochs)) * num / config.prompts_per_step), 1)
    values = config.model_dump(exclude_unset=True, exclude={"epochs"}) | {"steps": steps}
    sentence = f"{config.epochs:g} epoch{'s' * (config.epochs != 1)} of {num} prompts = {steps} steps"
    train = replace(prompts.train, reading=(*prompts.train.reading, sentence))
    return TrainConfig.read(values), replace(prompts, train=train)


def all_of(*makers: Callable[[], Any]) -> list[Any]:
    """What each of these makes. The errors of all that fail are one."""
    made, errors = [], []
    for make in makers:
        try:
            made.append(make())
        except InputError as error:
            errors.append(error)
    if len(errors) > 1:
        raise InputError("\n".join(map(str, errors)))
    if errors:
        raise errors[0]
    return made


def build_loss(config: TrainConfig, given: Any = None) -> PolicyLoss:
    """The loss with the options that were set, or one that was made already; an option it does not take is an error."""
    if given is not None:
        return _checked_loss(config, given)
    given = {name: getattr(config, name) for name in ("clip_range", "tau") if getattr(config, name) is not None}
    cls, parameters = _named("loss", config.loss, LOSSES, given)
    options: dict[str, Any] = {"beta": config.beta, "kl_estimator": config.kl_estimator}
    options |= {"entropy_coef": config.entropy_coef, **given}
    if "max_completion_length" in parameters:
        options["max_completion_length"] = config.max_new_tokens
    clashes = sorted(options.keys() & config.loss_options.keys())
    if clashes:
        raise InputError(f"loss_options has {clashes[0]!r}, which is an option of its own: give {clashes[0]}=...")
    options |= {name: read_pair(value) for name, value in config.loss_options.items()}
    loss = _made("loss", config.loss, cls, options)
    if not isinstance(loss, PolicyLoss):
        raise InputError(f"loss={config.loss!r} gives a {type(loss).__name__}, not a loss of gruppo.loss")
    correction = _correction(config, loss)
    if correction is not None:
        # Made anew: a loss puts a correction where it belongs, which for some is not in front of the policy term.
        loss = _made("loss", config.loss, cls, options | {"correction": correction})
    for name in ("loss", "correction"):
        value = getattr(config, name)
        if ":" in value:
            _try(f"{name}={value!r}", loss)
    return loss


def _checked_loss(config: TrainConfig, loss: Any) -> PolicyLoss:
    """A loss that was made already. It has its own options: those of the config would change nothing."""
    if not isinstance(loss, PolicyLoss):
        raise InputError(f"loss must be a loss of gruppo.loss, a class of one or a name, got {type(loss).__name__}")
    own = ("clip_range", "tau", "loss_options", "beta", "kl_estimator", "entropy_coef", "advanced.entropy_target")
    _refuse_options(config, own, "loss")
    if config.correction not in ("auto", "none"):
        raise InputError(f"correction={config.correction!r} is for a loss that is named; make the object with it")
    if _has_gap(config) and config.correction == "auto" and loss.correction is None and not loss.reads_sampler:
        raise InputError(
            "the sampler's log-probs are not the trainer's here, and the loss object does not correct for it; make it "
            "with a correction of gruppo.loss.CORRECTIONS, or give correction='none'"
        )
    _try(f"loss={type(loss).__name__}", loss)
    return loss


def _refuse_options(config: TrainConfig, names: Iterable[str], kind: str) -> None:
    """Raise for options that belong to a loss or an advantage that the config names, where an object was given."""
    usual = TrainConfig()
    for name in names:
        value = attrgetter(name)(config)
        if value != attrgetter(name)(usual):
            raise InputError(
                f"{name}={value!r} goes with the name of {kind}; an object has options of its own. "
                "Leave it out, or make the object with it"
            )


def _has_gap(config: TrainConfig) -> bool:
    return not sampler_of(config).is_exact or config.max_staleness > 0


def _try(what: str, call: Callable[..., Any]) -> None:
    """Call code of the user's own with two made-up sequences: what it cannot compute is seen before a run begins."""
    logps = torch.tensor([[-1.0, -0.5], [-0.75, -0.25]])
    given = dict.fromkeys(("old_logps", "ref_logps", "sampler_logps"), logps.clone())
    outputs = {"logps": logps.requires_grad_(), "entropies": torch.ones(2, 2)}
    try:
        call({"labels": torch.zeros(2, 2, dtype=torch.int64)}, outputs, advantages=[1.0, -1.0], **given)
    except GruppoError:
        raise
    except Exception as error:
        raise InputError(
            f"{what} fails on made-up log-probs: {type(error).__name__}: {error}; see docs/extending.md for "
            "what it gets and returns"
        ) from error


def _correction(config: TrainConfig, loss: PolicyLoss) -> Any:
    """The weights for the gap between sampler and trainer. auto: only where there is one and the loss has none."""
    name = config.correction
    if name == "auto":
        name = "truncate" if _has_gap(config) and not loss.reads_sampler else "none"
    if name == "none":
        return None
    if loss.correction is not None:
        raise InputError(f"loss={config.loss!r} has a correction of its own; use correction=auto, not {name!r}")
    if name not in CORRECTIONS and ":" not in name:
        raise InputError(
            f"correction={name!r} is unknown; use auto, none, {', '.join(CORRECTIONS)}, or your.module:your_function"
        )
    return CORRECTIONS[name] if name in CORRECTIONS else import_object(name, "correction")


def _named(kind: str, name: str, known: Mapping[str, Any], given: Iterable[str]) -> tuple[Any, Mapping[str, Any]]:
    """The loss or advantage of a name, ours or `your.module:Thing`, and its parameters; all `given` must be there."""
    if name.startswith(MARK):
        raise InputError(f"{kind}={name!r} was a Python object, which a run directory cannot hold; name one instead")
    if name not in known and ":" not in name:
        own = f"your.module:Your{kind.capitalize()}"
        raise InputError(f"{kind}={name!r} is unknown; use one of {', '.join(known)}, or {own}")
    cls = known[name] if name in known else import_object(name, kind)
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError) as error:  # no callable, or one of C without a signature
        raise InputError(
            f"{kind}={name!r} names a {type(cls).__name__}, which cannot be called; name a class or function with a "
            "signature (docs/extending.md)"
        ) from error
    for option in given:
        if option not in parameters:
            takers = [n for n, c in known.items() if option in inspect.signature(c).parameters]
            raise InputError(f"{kind}={name!r} does not take {option}; {', '.join(takers)} do")
    return cls, parameters


def _made(kind: str, name: str, cls: Any, options: dict[str, Any]) -> Any:
    try:
        return cls(**options)
    except GruppoError:
        raise
    except Exception as error:  # code of the user's own raises anything
        given = ", ".join(options) or "no options"
        raise InputError(
            f"{kind}={name!r} cannot be made with {given}: {error}; {kind}_options takes its own (docs/extending.md)"
        ) from error


def build_rewards(config: TrainConfig, inputs: Inputs, poll: Any = None) -> RewardScorer:
    """The rewards with what decides which answers are right; options that need to know it are refused without."""
    weights = config.reward_weights or (1.0,) * len(inputs.rewards)
    each = zip(inputs.rewards, weights, strict=True)
    rewards = all_of(*(partial(load_reward, spec, weight=weight) for spec, weight in each))
    scorer = RewardScorer(
        rewards,
        workers=config.advanced.reward_workers,
        deadline_s=config.reward_deadline,
        correct_by=config.correct_by,
        correct_at=config.correct_at,
        poll=poll,
    )
    needs = {"eval_samples": config.eval_samples, "retire_solved": config.advanced.retire_solved}
    for name, value in needs.items():
        if value and scorer.correct_by is None:
            raise InputError(f"{name}={value} cannot be used here: {scorer.verdict}")
    return scorer


def try_rewards(scorer: RewardScorer, prompts: Sequence[Prompt], *, has_turns: bool = False) -> None:
    """Check that each reward finds its columns, and call it once: it must return one value per completion.

    The completions are made up. Their values do not matter, nor does an error on them: the first step judges those.
    """
    names = {name for p in prompts for name in p.columns}
    own = {ENVIRONMENT_REWARD: [None] * 2} if has_turns else {}
    scorer.check_columns(sorted(names | own.keys()))
    prompt = prompts[0]  # twice the same: a group goes to one call, so that a value too few is seen
    scorer.score(
        [prompt.source] * 2,
        ["", "0"],
        completion_ids=[(), (0,)],
        prompt_texts=[prompt.text] * 2,
        columns={name: [prompt.columns.get(name)] * 2 for name in names} | own,
        step=1,
    )


@dataclass(frozen=True, slots=True)
class Prompts:
    train: PromptSet
    held_out: PromptSet


def prompt_options(options: DataOptions, environments: Environments | None = None) -> dict[str, Any]:
    """Options of `load_prompts`; templates tell the model of the tools of its environment."""
    answers = {} if options.answer_column == "answer" else {options.answer_column: "answer"}
    return {
        "prompt_column": options.prompt_column,
        "column_map": options.column_map | answers,
        "max_prompt_tokens": options.max_prompt_tokens,
        "chat": options.chat,
        "system": options.system,
        "chat_template_kwargs": options.chat_template_kwargs,
        "on_bad_row": options.on_bad_row,
        "tools_of": environments and environments.tools_of,
    }


def build_prompts(config: TrainConfig, inputs: Inputs, tokenizer: Any) -> Prompts:
    """Training and held-out prompts."""
    options = prompt_options(config, inputs.environments)
    options["max_prompt_tokens"] = longest_prompt(inputs.model, config.max_new_tokens, config.max_prompt_tokens)
    num_held_out = config.eval_prompts
    data, eval_data, streamed = inputs.data, inputs.eval_data, is_stream(inputs.data)
    if streamed:
        # The batches of all steps, and what dynamic sampling may take beyond the last.
        wanted = (config.steps - 1 + max(config.dynamic_sampling, 1)) * config.prompts_per_step
        beside = min(128, wanted // 4) if num_held_out is None else num_held_out
        data = first_rows(data, wanted + (beside if eval_data is None else 0))
    train = load_prompts(data, tokenizer, **options)
    if streamed:
        sentence = f"the first {len(data):,} rows of the stream are read, and prompts keep its order"
        train = replace(train, reading=(*train.reading, sentence))
    if num_held_out is None:
        num_held_out = 128 if eval_data is not None else min(128, len(train) // 5)
    if not num_held_out:
        if config.advanced.patience or config.keep_best:
            raise InputError(
                f"{len(train)} prompts leave none to evaluate on, which patience and keep_best need; give eval_data"
            )
        held_out = PromptSet(prompts=())
    elif eval_data is not None:
        eval_data = first_rows(eval_data, num_held_out) if is_stream(eval_data) else eval_data
        held_out = load_prompts(eval_data, tokenizer, limit=num_held_out, **options)
    else:
        if num_held_out >= len(train):
            raise InputError(
                f"eval_prompts={num_held_out} leaves none of the {len(train)} prompts of {config.data} to train "
                "on; lower it, or give eval_data"
            )
        train, held_out = train.split_holdout(num_held_out, None if streamed else config.seed)
    if config.prompts_per_step > len(train):
        raise InputError(
            f"prompts_per_step={config.prompts_per_step} is more than the {len(train)} prompts to train on; lower it"
        )
    check_ids((*train.prompts, *held_out.prompts), vocabulary_size(inputs.model), tokenizer)
    return Prompts(train, held_out)


def sampler_of(config: TrainConfig) -> type[Any]:
    """The class of the sampler that the config names, one of `Sampler`'s."""
    kind, _ = read_sampler(config.sampler)
    return {"torch": TorchSampler, "vllm": vLLMSampler}.get(kind) or sampler_class(config.sampler)


def build_hand_over(
    config: TrainConfig, model: "Actor", prompts: Prompts, sync_folder: Path, poll: Callable[[], None]
) -> HandOver:
    """The sampler that the config names, with the way on which it gets the weights."""
    kind, servers = read_sampler(config.sampler)
    if kind != "vllm":
        cls = sampler_of(config)
        make = partial(cls, poll=poll)
        if cls.reads_files:
            own = make(model)
            return PublishedWeights(model, own, WeightStore(sync_folder, own.canary_rows))
        if config.max_staleness and model.device.type != "cpu":
            raise InputError(
                f"max_staleness={config.max_staleness} samples while it trains, and sampler={config.sampler} does both "
                "on one GPU; use sampler=vllm:start with another GPU, or max_staleness=0"
            )
        samples_apart = config.max_staleness or model.ranks.world > 1
        return CopiedModel(model, make) if samples_apart else HandOver(model, make(model))
    longest = max(len(p.token_ids) for part in (prompts.train, prompts.held_out) for p in part.prompts)
    length = longest + config.max_new_tokens + 1  # no longer than the longest prompt needs
    if config.has_turns:  # answers of any length stand between the turns
        length = context_length(config.pinned_model) or length
    sampler = vLLMSampler(
        config.pinned_model,
        servers=servers_of_launcher() or servers,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=length,
        lora=model.lora,
        options=dict(config.vllm_options),
        deadline_s=config.advanced.sampler_deadline,
        poll=poll,
        # Groups in flight, and a greedy completion of each for estimators that need it.
        at_once=2 * (1 + config.max_staleness) * config.prompts_per_step if config.streaming else 1,
        tokenizer=model.tokenizer,
    )
    return PublishedWeights(model, sampler, WeightStore(sync_folder, sampler.canary_rows))


def sampling_params(config: TrainConfig) -> SamplingParams:
    """How the completions of a run are drawn."""
    return SamplingParams(
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        stop=config.stop,
        seed=config.seed,
        step=0,
    )


def build_schedule(
    config: TrainConfig,
    source: RolloutSource,
    weights: HandOver,
    poll: Callable[[], None],
    report: Callable[..., None],
) -> Schedule:
    """When the rollouts of a step are sampled."""
    if not config.max_staleness:
        return Schedule(source, weights)
    bounds: dict[str, Any] = {"staleness": config.max_staleness, "last": config.steps, "poll": poll}
    if not config.streaming:
        return Ahead(source, weights, **bounds)
    updates = config.epochs_per_batch * config.minibatches
    return Streamed(source, weights, updates=updates, report=report, **bounds)


def build_model(config: TrainConfig, inputs: Inputs, loss: PolicyLoss, tokenizer: Any) -> TransformersModel:
    """The actor with loss, optimizer, schedule and metrics."""
    model = TransformersModel(inputs.model, **_model_options(config, inputs, tokenizer))
    _set_loss(model, config, loss)
    _set_optimizer(model, config, inputs)
    return model


def build_ranked(
    config: TrainConfig,
    inputs: Inputs,
    loss: PolicyLoss,
    tokenizer: Any,
    ranks: Ranks,
    share_signal: Callable[[int], int],
) -> "RankedModel":
    """The same over several ranks; `share_signal` as in `RankedModel`."""
    from gruppo.model.rank_part import ReplicatedModel, ShardedModel
    from gruppo.model.ranked import RankedModel

    kind = ReplicatedModel if replicates(config, inputs.model, ranks) else ShardedModel
    options = _model_options(config, inputs, tokenizer)
    part = kind(inputs.model, ranks=ranks, exact=config.advanced.ranks_exact, **options)
    _set_loss(part, config, loss)
    part.spread(keeps_copy=not sampler_of(config).reads_files)
    _set_optimizer(part, config, inputs)
    return RankedModel(part, deadline_s=config.advanced.rank_deadline, share_signal=share_signal)


def _model_options(config: TrainConfig, inputs: Inputs, tokenizer: Any) -> dict[str, Any]:
    return {
        "lora": _new_adapter(config, inputs, config.seed),
        "dtype": config.dtype,
        "quantize": config.quantize,
        "tokens_per_microbatch": config.tokens_per_microbatch,
        "temperature": config.temperature,
        "gradient_checkpointing": config.gradient_checkpointing,
        "offload": config.advanced.offload,
        "keep_activations": config.advanced.keep_activations,
        "compile": config.advanced.compile,
        "layout": config.layout,
        "tokenizer": tokenizer,
    }


def _set_loss(model: TransformersModel, config: TrainConfig, loss: PolicyLoss) -> None:
    if model.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what stays in float32
    model.set_loss(loss)
    if config.kl_in_reward:
        model.reference()  # frozen now: the weights at the start


def _set_optimizer(model: TransformersModel, config: TrainConfig, inputs: Inputs) -> None:
    """Optimizer, schedule and metrics."""
    more = config.advanced
    options: dict[str, Any] = {"betas": (more.adam_beta1, more.adam_beta2), "eps": more.adam_epsilon}
    options |= {} if config.lr is None else {"lr": config.lr}
    if more.ranks_exact:
        model.weights.by_rows = True
        # On a CPU the fused kernel rounds otherwise at the end of a tensor, and shards end elsewhere.
        options |= {"fused": model.device.type == "cuda"}
    model.set_optimizer("AdamW", weight_decay=config.weight_decay, **options)
    model.set_lr_scheduler(config.lr_schedule, warmup_steps=config.warmup_steps, total_steps=config.optimizer_steps)
    for metric in (metric_for(model.loss), *build_metrics(inputs.metrics)):
        model.add_metric(metric)


def build_digests(inputs: Inputs, prompts: Prompts) -> dict[str, Any]:
    """What the prompts and the base weights of a run are, where the weights are files."""
    base = weights_digest(inputs.model) if isinstance(inputs.model, str) else None
    return {
        "prompts to train on": prompts_digest(prompts.train.prompts),
        "held-out prompts": prompts_digest(prompts.held_out.prompts),
        **({} if base is None else {"base weights": base}),
    }


def build_metrics(given: Iterable[Any]) -> list[Metric]:
    """Metrics of the user's own: names, classes and objects."""
    made = []
    for name in given:
        metric = import_object(name, "metrics") if isinstance(name, str) else name
        metric = metric() if isinstance(metric, type) else metric
        if not isinstance(metric, Metric):
            raise InputError(f"metrics={name!r} names {metric!r}, not a gruppo.metric.Metric (docs/extending.md)")
        _try(f"metrics={name!r}", metric.accumulate)
        metric.reset()
        made.append(metric)
    return made


def _new_adapter(options: ModelOptions, inputs: Inputs, seed: int) -> LoraSpec | None:
    """The adapter to put on the model; None for full weights, and for a model that brings its own."""
    names = ("rank", "alpha", "targets", "modules_to_save")
    given = {name: value for name in names if (value := getattr(options, f"lora_{name}")) is not None}
    if holds_adapter(inputs.model) if isinstance(inputs.model, str) else lora_of(inputs.model):
        if given:
            name = next(iter(given))
            raise InputError(
                f"lora_{name}={given[name]!r} is for a new adapter, and model {options.model!r} holds one already: "
                "leave it out to go on with that one, or start from "
                f"`gruppo export {shell_word(options.model)} FOLDER --merge`"
            )
        return None
    if not options.lora:
        if given:
            name = next(iter(given))
            raise InputError(f"lora_{name}={given[name]!r} is for an adapter, and lora is off; set lora=true")
        return None
    if given.get("targets") == ("all-linear",):
        given["targets"] = "all-linear"
    return LoraSpec(**given, seed=seed)


def build_advantage(config: TrainConfig, made: Any = None) -> Advantage:
    """The estimator with the options that were set, or one that was made already. It is tried once on made-up rewards:
    a wrong option fails here."""
    if made is not None:
        return _tried(config, _checked_advantage(config, made))
    given = () if config.normalization is None else ("normalization",)
    cls, parameters = _named("advantage", config.advantage, ADVANTAGES, given)
    own: dict[str, Any] = {
        "normalization": config.normalization or "standard",
        "correct_at": 1.0 if config.correct_at is None else config.correct_at,
        "weights": config.reward_weights or (1.0,) * config.num_rewards,
    }
    options = {name: value for name, value in own.items() if name in parameters} | dict(config.advantage_options)
    return _tried(config, _made("advantage", config.advantage, cls, options))


def _checked_advantage(config: TrainConfig, estimate: Any) -> Any:
    """An estimator that was made already. `scale` is an argument of its call, and still counts."""
    if not callable(estimate):
        raise InputError(f"advantage must be an estimator, a class of one or a name, got {type(estimate).__name__}")
    own = ["advantage_options", "normalization"]
    _refuse_options(config, [*own, "reward_weights"] if getattr(estimate, "per_reward", False) else own, "advantage")
    return estimate


def _tried(config: TrainConfig, estimate: Any) -> Advantage:
    num = config.group_size
    right = [False] * (num - 1) + [True]
    inputs = {"lengths": list(range(1, num + 1)), "greedy_rewards": [0.0] * num, "correct": right}
    more: dict[str, Any] = {} if config.scale is None else {"scale": config.scale}
    for name in (*getattr(estimate, "needs", ()), *getattr(estimate, "uses", ())):
        if name not in inputs:
            raise InputError(f"advantage={config.advantage!r} needs {name!r}; there are {', '.join(inputs)}")
        more[name] = inputs[name]
    rewards: list[Any] = [float(is_right) for is_right in right]
    if getattr(estimate, "per_reward", False):
        rewards = [[reward] * config.num_rewards for reward in rewards]
    try:
        result = estimate(rewards, group_ids=[0] * num, **more)
    except TypeError as error:
        given = ", ".join(["group_ids", *more])
        raise InputError(
            f"advantage={config.advantage!r} cannot be called with rewards and {given}: {error} (docs/extending.md)"
        ) from error
    if tuple(getattr(result, "shape", ())) != (num,):
        raise InputError(f"advantage={config.advantage!r} must give a tensor with one value per reward, got {result!r}")
    return estimate


def build_assigner(config: TrainConfig, estimate: Advantage, scorer: RewardScorer) -> AdvantageAssigner:
    """The estimator with the penalties that come before it."""
    if scorer.correct_by is None and len(scorer.rewards) > 1 and hasattr(estimate, "correct_at"):
        raise InputError(f"advantage={config.advantage!r} compares right answers with wrong ones, and {scorer.verdict}")
    return assigner_of(config, estimate, {reward.name: reward.weight for reward in scorer.rewards}, scorer.correct_by)


def assigner_of(
    config: TrainConfig, estimate: Advantage, weights: dict[str, float], correct_by: str | None
) -> AdvantageAssigner:
    """The same for rewards of these weights, of which one says what is right."""
    return AdvantageAssigner(
        estimate=estimate,
        shape=RewardShape(
            max_length=config.max_new_tokens,
            overlong_cache=config.overlong_cache,
            truncated_factor=config.advanced.truncated_factor,
        ),
        weights=weights,
        correct_by=correct_by,
        scale=config.scale,
        mask_truncated=config.mask_truncated,
    )


def build_state(config: TrainConfig, model: "Actor", num_prompts: int) -> RunState:
    """The state of a run besides the model, as it is before the first step."""
    more = config.advanced
    return RunState(
        solved=SolvedPrompts(after=more.retire_solved, num_prompts=num_prompts, keep=config.prompts_per_step),
        kl=AdaptiveKL(config.kl_in_reward, more.kl_target, more.kl_horizon),
        entropy=AdaptiveEntropy(config.entropy_coef, more.entropy_target, more.entropy_change),
        reference=model.reference() if config.ref_every else None,
    )
