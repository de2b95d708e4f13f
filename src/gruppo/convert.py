"""Configurations of TRL, Open Instruct and Twinkle as one of a run: names by the table, and a rule where values change.

>>> made = convert("trl", ["--num_generations", "4", "--per_device_train_batch_size", "8", "--beta", "0.04"])
>>> made.values["group_size"], made.values["prompts_per_step"], made.values["beta"]
(4, 2, 0.04)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any, Literal

import yaml

from gruppo.errors import InputError
from gruppo.peer_names import ABSENT, ELSEWHERE, REFUSED, Reason
from gruppo.run.reader import read_yaml
from gruppo.trainer.config import OPTIONS

__all__ = ["Conversion", "convert"]

Peer = Literal["trl", "open_instruct", "twinkle"]

DEFAULTS: dict[Peer, dict[str, Any]] = {
    "trl": {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_processes": 1, "num_generations": 8,
        "num_iterations": 1, "max_completion_length": 256, "max_steps": -1, "num_train_epochs": 3, "save_steps": 500,
        "learning_rate": 1e-6, "lr_scheduler_type": "linear", "gradient_checkpointing": True, "seed": 42, "beta": 0.0,
        "loss_type": "dapo", "importance_sampling_level": "token", "epsilon": 0.2, "scale_rewards": "group",
        "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "eval_strategy": "no", "save_strategy": "steps",
        "ref_model_sync_steps": 512, "ref_model_mixup_alpha": 0.6, "vllm_mode": "colocate", "vllm_server_port": 8000,
        "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
        "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05,
    },
    "open_instruct": {
        "num_unique_prompts_rollout": 16, "num_samples_per_prompt_rollout": 4, "response_length": 256,
        "max_prompt_token_length": 256, "per_device_train_batch_size": 1, "total_episodes": 100_000,
        "num_mini_batches": 1, "lr_scheduler_type": "linear", "local_eval_every": 100, "loss_fn": "dapo",
        "clip_lower": 0.2, "clip_higher": 0.272, "beta": 0.05, "load_ref_policy": True, "kl_estimator": "kl3",
        "alpha": 0.6, "rho_clamp_upper_bound": 2.0, "advantage_normalization_type": "centered", "async_steps": 0,
        "filter_zero_std_samples": True, "apply_verifiable_reward": True, "verification_reward": 10.0,
        "r1_style_format_reward": 1.0, "vllm_num_engines": 1,
    },
    "twinkle": {
        "num_generations": 8, "batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 200, "save_steps": 50,
        "learning_rate": 1e-5, "scheduler_cls": "CosineAnnealingLR", "epsilon": 0.2, "advantage_scale": "group",
        "advantage_type": "GRPOAdvantage", "sampler_type": "vLLMSampler", "seed": 42, "tau_pos": 1.0, "tau_neg": 1.05,
        "gradient_checkpointing": True, "loss_cls": "GRPOLoss", "lora_r": 8, "lora_alpha": 32, "lora_dropout": 0.05,
        "subset_name": "default",
    },
}  # fmt: skip
"""Defaults of each trainer that differ from gruppo's, or that a rule computes with."""

NEUTRAL = {
    **dict.fromkeys(("top_p", "vllm_top_p", "eval_top_p", "repetition_penalty", "eval_pass_at_k"), (1,)),
    "top_k": (-1,),
    "top_entropy_quantile": (1,),
    "optim": ("adamw_torch", "adamw_torch_fused"),
    "lora_target_modules": ("all-linear", ["all-linear"]),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "loss_denominator": ("token",),
    "env_max_steps": (50,),
}
"""Values that change nothing."""

BOUNDS = Reason(
    "truncate caps at 2, and mask keeps 0.5 to 5; for other bounds write a function, your.module:your_function",
    "correction_cap correction_options",
)


@dataclass
class Conversion:
    """Options of a run made from those of another trainer, with a comment on each.

    A rule takes out of `given` what changes its value; `finish` looks up the rest in the table of names.
    """

    peer: str
    given: dict[str, Any]
    defaults: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    """The options of the run."""
    comments: dict[str, str] = field(default_factory=dict)
    """Source of each option, and how it differs."""
    yours: list[str] = field(default_factory=list)
    """Options that the user must set."""
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        written = {name: value for name, value in self.given.items() if value is not None}
        self.written = frozenset(written)
        self.given = self.defaults | written
        for name, value in written.items():
            if isinstance(value, str | list) and isinstance(self.defaults.get(name), int | float):
                raise InputError(f"{name}={value!r} is not a number or a truth value; add the one that it is as a flag")

    def take(self, name: str, default: Any = None) -> Any:
        """The value of an option, which no later rule sees."""
        return self.given.pop(name, default)

    def put(self, own: str, value: Any, source: str, differs: object = "") -> None:
        """An option of the run, with what it comes from."""
        is_default = source in self.defaults and source not in self.written
        parts = [source * (source != own), f"the default of {self.peer}" * is_default, f"differs: {differs}"]
        self.values[own] = value
        self.comments[own] = "; ".join(part for part in (parts if differs else parts[:2]) if part)

    def put_whole(self, own: str, number: float, source: str) -> int:
        """A number of steps or prompts, rounded up if it is not whole."""
        whole = max(ceil(number), 1)
        self.put(own, whole, source, "" if whole == number else f"{number:g} is rounded up")
        return whole

    def put_minibatches(self, number: float, prompts: int, source: str) -> int:
        """The number of optimizer steps for each batch of rollouts; they take whole prompts here."""
        nearest = next(n for n in range(min(prompts, max(int(number), 1)), 0, -1) if prompts % n == 0)
        if number != 1:
            why = "" if nearest == number else f"{number:g} there; here they divide the {prompts} prompts of a step"
            self.put("minibatches", nearest, source, why)
        return nearest

    def ask(self, option: str, why: str) -> None:
        self.yours.append(f"{option}: {why}")

    def finish(self) -> "Conversion":
        """Look up what no rule took, and ask for what every run needs."""
        for name, value in self.given.items():
            own, _, note = ELSEWHERE.get(name, name).partition(": ")
            refused = ABSENT.get(name) or REFUSED.get(name)
            if value in NEUTRAL.get(name, ()) or (not value and (refused or note)):
                continue  # it changes nothing, or is off
            if refused:
                self.left_out.append(f"{name}={value}: {refused}")
            elif note:
                self.ask(own, f"{name}={value} there; here {note}")
            elif own in OPTIONS:
                self.put(own, value, name)
            else:
                self.left_out.append(f"{name}={value}: not known here")
        weights, rewards = self.values.get("reward_weights"), self.values.get("rewards", ())
        if weights and len(weights) != len(rewards):
            self.ask("rewards", f"the functions of the script, one for each of reward_weights: {weights}")
            if rewards:
                del self.values["reward_weights"]
        for option in ("model", "data", "rewards"):
            if option not in self.values and not any(line.startswith(f"{option}: ") for line in self.yours):
                self.ask(option, "not in the source")
        return self

    def text(self) -> str:
        """A config file with a comment on each option."""
        lines = [f"# From {self.peer}. Comments say where an option comes from, and how it differs."]
        for title, sentences in (("Set these yourself", self.yours), ("Left out", self.left_out)):
            lines += [f"# {title}:"] * bool(sentences) + [f"#   {' '.join(text.split())}" for text in sentences]
        for name in (name for name in OPTIONS if name in self.values):
            value, comment = self.values[name], " ".join(self.comments[name].split())
            line = yaml.safe_dump({name: value}, default_flow_style=True, allow_unicode=True, width=inf)[1:-2]
            lines.append(f"{line}  # {comment}" if comment else line)
        return "\n".join(lines) + "\n"


def convert(peer: Peer, words: Sequence[str]) -> Conversion:
    """The options of a run for a YAML or JSON file of another trainer, for its flags, or for both; flags win."""
    if not words or (len(words) == 1 and words[0].endswith((".py", ".sh"))):
        got = f"{words[0]} is a script, which is not read" if words else "there is nothing to convert"
        raise InputError(f"{got}; give a .yaml or .json file, or the command that starts the script, with its flags")
    is_file = words[0].endswith((".yaml", ".yml", ".json"))
    options = _read_file(words[0]) | read_flags(words[1:]) if is_file else read_flags(words)
    if peer == "twinkle":  # whose files have groups of options
        groups = [value if isinstance(value, dict) else {name: value} for name, value in options.items()]
        options = {name: _value(value) for group in groups for name, value in group.items()}
    name, rules = PEERS[peer]
    made = Conversion(name, options, DEFAULTS[peer])
    try:
        rules(made)
    except (TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise InputError(f"an option has a value that {name} itself would not take: {error}") from error
    return made.finish()


def _read_file(path: str) -> dict[str, Any]:
    return {str(name): _value(value) for name, value in read_yaml(path).items()}  # JSON is YAML


def read_flags(words: Sequence[str]) -> dict[str, Any]:
    """`--name value ...` and `--name=value` as options; a flag alone is true. The launcher is skipped.

    >>> read_flags(["accelerate", "launch", "--num_processes", "2", "x.py", "--beta=0.1", "--use_vllm", "--lr", "1e-6"])
    {'num_processes': 2, 'beta': 0.1, 'use_vllm': True, 'lr': 1e-06}
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if equals else []
        elif name and not (word.endswith(".py") and found[name]):  # the script, after the flags of its launcher
            found[name].append(word)
        else:
            name = ""
    file = _read_file(found.pop("config")[0]) if found.get("config") else {}
    return file | {name: _value(v[0] if len(v) == 1 else v) if v else True for name, v in found.items()}


def _value(value: Any) -> Any:
    """A value of a flag, or of YAML, which takes 1e-5 for a text. `none` is a choice, e.g. of scale_rewards."""
    if isinstance(value, list):
        return [_value(item) for item in value]
    if not isinstance(value, str):
        return value
    words = {"true": True, "True": True, "false": False, "False": False, "None": None, "null": None}
    if value in words:
        return words[value]
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


# --- rules -----------------------------------------------------------------------------------------------------------


def _hub(name: str, config: str | None, split: str | None) -> str:
    """A data set as `data` takes it: a file stays a file."""
    if name.endswith((".jsonl", ".csv", ".parquet")):
        return name
    name = name if "://" in name else f"hf://{name}"
    return name + (f"/{config}" if config else "") + (f":{split}" if split and split != "train" else "")


def _adapter(c: Conversion, switch: str) -> None:
    if c.take(switch):
        c.put("lora", True, switch)
        if targets := c.given.get("lora_target_modules"):  # TRL's examples have commas, with which PEFT finds no layer
            c.given["lora_target_modules"] = [str(name).rstrip(",") for name in _as_list(targets)]
    else:
        for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"):
            c.take(name)


def _schedule(c: Conversion, name: str) -> None:
    theirs = str(c.take(name))
    own = theirs.lower().replace("_with_warmup", "").removesuffix("lr").removesuffix("annealing")
    is_same = own in ("constant", "linear", "cosine")
    c.put("lr_schedule", own if is_same else "cosine", name, "" if is_same else f"it is the nearest to {theirs}")


def _loss(
    c: Conversion, loss: str, source: str, clip: Sequence[str], tau: Sequence[str] = (), differs: str = ""
) -> None:
    """The loss, with the clip range or the temperatures that it has."""
    low, high = (c.take(name) for name in clip)
    high = low if high is None else high
    temperatures = [c.take(name) for name in tau]
    if loss == "bnpo":
        differs = "the mean is over the tokens of the whole update, there over those of a micro-batch"
    c.put("loss", loss, source, differs)
    if loss == "sapo":
        c.put("tau", temperatures, ", ".join(tau))
    elif loss == "cispo" and c.peer != "TRL":
        c.put("clip_range", high, f"{clip[1]}; the cap is 1 + clip_range")
    elif loss == "cispo" and high > 1:
        c.put("clip_range", round(high - 1, 12), f"{clip[1]}={high}, the cap; here it is 1 + clip_range")
    elif loss == "cispo":
        c.ask("clip_range", f"the cap there is {high}; here it is 1 + clip_range")
    elif loss != "vespo":
        c.put("clip_range", low if high == low else [low, high], ", ".join(clip))


def _engine(c: Conversion, sampler: str, source: str, differs: str = "") -> None:
    """vLLM, with its own options where the run starts it."""
    c.put("sampler", sampler, source, differs)
    theirs = [name for name in c.given if ELSEWHERE.get(name, "").startswith("vllm_options")]
    if theirs and "http" not in sampler:
        c.put("vllm_options", {name.removeprefix("vllm_"): c.take(name) for name in theirs}, ", ".join(theirs))


def _from_trl(c: Conversion) -> None:
    _adapter(c, "use_peft")
    if c.take("bf16"):
        c.put("dtype", "bfloat16", "bf16")
    _trl_data(c)
    _trl_batch(c)
    _trl_loss(c)
    _trl_sampler(c)
    boards = _as_list(c.take("report_to", "tensorboard"))
    for board in ("tensorboard", "wandb", "trackio"):
        if (board in boards) != OPTIONS[board].default:
            c.put(board, board in boards, "report_to")


def _trl_data(c: Conversion) -> None:
    name, config, split = c.take("dataset_name"), c.take("dataset_config"), c.take("dataset_train_split")
    test = c.take("dataset_test_split", "test")
    if name:
        c.put("data", _hub(name, config, split), "dataset_name")
    if c.take("eval_strategy") in ("no", False):
        c.take("eval_steps")
        c.put("eval_prompts", 0, "eval_strategy")
    elif name:
        c.put("eval_data", _hub(name, config, test), "dataset_test_split")
    built_in = {"accuracy_reward": "math_match", "think_format_reward": "think_format"}
    rewards, differs = [], ""
    for reward in map(str, _as_list(c.take("reward_funcs", []))):
        if own := built_in.get(reward.removeprefix("trl.rewards.")):
            rewards.append(own)
            differs = "built in here; TRL's own work too, by module:function"
        elif "." in reward and "/" not in reward:
            rewards.append(":".join(reward.rsplit(".", 1)))
        else:
            c.ask("rewards", f"{reward}: name it module:function; a reward model by its folder or hub name")
    if rewards:
        c.put("rewards", rewards, "reward_funcs", differs)


def _trl_batch(c: Conversion) -> None:
    """Completions of a device become prompts of a step, and optimizer steps become steps: batches of rollouts."""
    if "num_processes" not in c.written:
        c.ask("prompts_per_step", "the number of processes is not in the source, 1 is assumed: --num_processes N")
    per_device, accumulate = c.take("per_device_train_batch_size"), c.take("gradient_accumulation_steps")
    group, processes, passes = c.given["num_generations"], c.take("num_processes"), c.take("num_iterations")
    batch, per_generation = c.take("generation_batch_size"), c.take("steps_per_generation", accumulate)
    if batch is not None:
        per_generation = batch / (per_device * processes)
    source = f"{per_device} per device x {processes} processes x {per_generation:g} steps per generation / {group}"
    prompts = c.put_whole("prompts_per_step", per_device * processes * per_generation / group, source)
    source = f"{per_generation:g} steps per generation / gradient_accumulation_steps={accumulate}"
    updates = passes * c.put_minibatches(per_generation / accumulate, prompts, source)
    if passes > 1:
        c.put("epochs_per_batch", passes, "num_iterations")
    if longest := c.take("max_prompt_length"):
        c.put("max_prompt_tokens", longest, "max_prompt_length", "longer prompts are left out; TRL cuts them")
    tokens = per_device * ((longest or 512) + c.given["max_completion_length"])
    c.put("tokens_per_microbatch", tokens, f"{per_device} sequences, for memory alone")

    saves = c.take("save_strategy")
    if saves != "steps":
        c.take("save_steps")
        c.ask("save_every", f"save_strategy={saves} there; here every N steps, and at the end")
    if not c.take("sync_ref_model") or not c.given["beta"]:  # then the reference stays, or nothing reads it
        c.take("ref_model_sync_steps")
    c.take("max_steps" if c.given["max_steps"] <= 0 else "num_train_epochs")
    for name in ("max_steps", "save_steps", "eval_steps", "ref_model_sync_steps"):
        if number := c.take(name):
            c.put_whole(ELSEWHERE[name], number / updates, _per_batch(name, number, updates))
    _schedule(c, "lr_scheduler_type")


def _per_batch(name: str, number: float, updates: int) -> str:
    return f"{name}={number}" + (f" / {updates} optimizer steps for each batch of rollouts" if updates > 1 else "")


def _trl_loss(c: Conversion) -> None:
    kind, level = str(c.take("loss_type")), c.take("importance_sampling_level")
    loss, source, differs = kind.replace("dr_grpo", "drgrpo"), f"loss_type={kind}", ""
    if level != "token" and kind != "luspo":
        loss, source = "gspo" if level == "sequence" else "gspo_token", f"{source}, importance_sampling_level={level}"
        differs = "" if kind == "grpo" else "the mean is over sequences of means over their tokens"
    clip, tau = ("epsilon", "epsilon_high"), ("sapo_temperature_pos", "sapo_temperature_neg")
    _loss(c, loss, source, clip, tau, differs)
    corrected, mix = c.take("use_bias_correction_kl"), c.take("ref_model_mixup_alpha")
    if c.given["beta"]:
        differs = "" if corrected is not None else "k3; newer TRL takes ratio_k3 by default"
        c.put("kl_estimator", "ratio_k3" if corrected else 2, "use_bias_correction_kl", differs)
    if "ref_every" in c.values:
        why = f"{mix} there; a mixture of two adapters is not one of the models" if "lora" in c.values else ""
        c.put("ref_mix", 1.0 if why else mix, "ref_model_mixup_alpha", why)
    scale = c.take("scale_rewards")
    if scale in (False, "none"):
        c.put("normalization", "centered", f"scale_rewards={scale}")
    elif scale == "mean":
        c.put("advantage", "maxrl", "scale_rewards=mean", "without TRL's eps")
    else:
        c.put("advantage_options", {"eps": 1e-4}, "TRL's eps")
        if scale == "batch":
            c.put("scale", "batch", "scale_rewards")


def _trl_sampler(c: Conversion) -> None:
    url, host = c.take("vllm_server_base_url"), c.take("vllm_server_host", "localhost")
    port, mode = c.take("vllm_server_port"), c.take("vllm_mode")
    corrects, by = c.take("vllm_importance_sampling_correction"), c.take("vllm_importance_sampling_mode")
    cap = c.take("vllm_importance_sampling_clip_max", c.take("vllm_importance_sampling_cap", 3.0))
    if not c.take("use_vllm"):
        return
    if mode == "colocate":
        _engine(c, "vllm", "use_vllm, vllm_mode=colocate")
    else:
        url = url or f"http://{host.replace('0.0.0.0', 'localhost')}:{port}"
        _engine(c, f"vllm:{url}", "vllm_mode=server", "it is `vllm serve` (docs/vllm.md), not `trl vllm-serve`")
    if corrects:
        own = {"token_truncate": "truncate", "token_mask": "mask", "sequence_truncate": "truncate_product"}.get(by)
        why = BOUNDS if own else "whole sequences are dropped there; here the ratio of each token is capped at 2"
        c.put("correction", own or "truncate", f"vllm_importance_sampling_mode={by}, bound {cap}", why)
    else:
        c.put("correction", "none", "vllm_importance_sampling_correction=False")


def _from_open_instruct(c: Conversion) -> None:
    _open_instruct_data(c)
    prompts, group = c.given["num_unique_prompts_rollout"], c.given["num_samples_per_prompt_rollout"]
    packed, per_device = c.take("pack_length"), c.take("per_device_train_batch_size")
    if packed is not None:
        c.put("tokens_per_microbatch", packed * per_device, "pack_length x per_device_train_batch_size")
    episodes = c.take("total_episodes")
    c.put_whole("steps", episodes / (prompts * group), f"total_episodes={episodes} / {prompts * group} in a step")
    c.put_minibatches(c.take("num_mini_batches"), prompts, "num_mini_batches")
    _schedule(c, "lr_scheduler_type")
    filters = c.take("filter_zero_std_samples") and not c.take("no_filter_zero_std_samples")
    if c.take("active_sampling"):
        c.put("dynamic_sampling", 10, "active_sampling", "a step samples at most 10 batches of prompts")
    elif filters:
        c.put("dynamic_sampling", 1, "filter_zero_std_samples")
    _open_instruct_loss(c)
    _open_instruct_sampler(c)
    c.put("eval_every", max(c.take("local_eval_every"), 0), "local_eval_every")
    if c.given.get("keep_last_n_checkpoints") == -1:
        c.put("keep_checkpoints", 1000, f"keep_last_n_checkpoints={c.take('keep_last_n_checkpoints')}, which is all")
    for name, why in (
        ("learning_rate", "its default differs between versions"),
        ("max_grad_norm", "newer versions then clip no gradient; here the norm is at most 1"),
    ):
        if name not in c.written:
            c.ask(ELSEWHERE.get(name, name), f"{name} is not in the source; {why}")


def _open_instruct_data(c: Conversion) -> None:
    for own, name, split in (("data", "dataset_mixer_list", "train"), ("eval_data", "dataset_mixer_eval_list", "test")):
        mixed, split = _as_list(c.take(name, [])), str(_as_list(c.take(f"{name}_splits", split))[0])
        if mixed:
            is_one = len(mixed) == 1 or (len(mixed) == 2 and mixed[1] == 1)
            why = Reason("it is one data set, with all of its rows", "data_weights mixture datasets")
            c.put(own, _hub(str(mixed[0]), None, split), name, "" if is_one else why)
    c.put("prompt_column", "messages", "its rows")
    c.put("answer_column", "ground_truth", "its rows")
    right, form = c.take("verification_reward"), c.take("r1_style_format_reward")
    rewards = {"math_match": float(right)} if c.take("apply_verifiable_reward") else {}
    rewards |= {"think_format": float(form)} if c.take("apply_r1_style_format_reward") else {}
    if rewards:
        why = Reason("one verifier judges all rows; there a row names its own", "verifier_column reward_column")
        c.put("rewards", list(rewards), "apply_verifiable_reward", why)
        c.put("reward_weights", list(rewards.values()), "verification_reward")


def _open_instruct_loss(c: Conversion) -> None:
    kind, region, by = c.take("loss_fn"), c.take("dppo_divergence_threshold", 0.1), c.take("dppo_divergence_type", "tv")
    cap = c.take("truncated_importance_sampling_ratio_cap", c.take("rho_clamp_upper_bound"))
    if kind == "dppo":
        for name in ("use_vllm_logprobs", "clip_lower", "clip_higher"):
            c.take(name)
        c.put("loss", f"dppo_{by}", f"loss_fn=dppo, dppo_divergence_type={by}")
        c.put("loss_options", {"region": region, "anchor": "sampler"}, "dppo_divergence_threshold")
    else:
        _loss(c, kind, "loss_fn", ("clip_lower", "clip_higher"))
        own = "truncate" if cap else "none"
        c.put("correction", own, f"rho_clamp_upper_bound={cap:g}", BOUNDS if cap not in (0, 2) else "")
    if c.given["advantage_normalization_type"] == "standard":
        c.put("advantage_options", {"ddof": 0}, "the standard deviation of a population")
    estimator, every, mix = c.take("kl_estimator"), c.take("ref_policy_update_freq"), c.take("alpha")
    if not c.take("load_ref_policy"):
        c.given["beta"] = 0.0
    if c.given["beta"]:
        c.put("kl_estimator", {"kl1": 0, "kl2": 1, "kl3": 2, "kl4": 3}.get(estimator, estimator), "kl_estimator")
    if c.given["beta"] and every:
        c.put("ref_every", every, "ref_policy_update_freq")
        c.put("ref_mix", mix, "alpha")


def _open_instruct_sampler(c: Conversion) -> None:
    """One engine in the trainer's process, or a server beside it for rollouts ahead."""
    behind, streams = c.take("async_steps"), c.take("inflight_updates")
    engines, learners = c.take("vllm_num_engines"), _as_list(c.take("num_learners_per_node", []))
    _engine(c, "vllm:start" if behind or streams else "vllm", "vllm_num_engines")
    if streams:
        c.put("streaming", True, "inflight_updates")
        c.put("max_staleness", behind or 1, "async_steps", "no token is older than this")
    elif behind:
        c.put("max_staleness", behind, "async_steps", "all rollouts are this old; there it is the most")
    if engines > 1:
        c.ask(
            "sampler", f"vllm_num_engines={engines}: start the servers, then vllm:http://one:8000,http://another:8000"
        )
    if sum(learners) > 1:
        command = f"torchrun --nproc-per-node {learners[0]} -m gruppo train"
        c.ask("num_learners_per_node", f"{learners}: `{command}`, with vLLM as a server (docs/distributed.md)")


def _from_twinkle(c: Conversion) -> None:
    _adapter(c, "use_lora")
    name, subset, split = c.take("dataset_id"), c.take("subset_name"), c.take("split")
    if name and not name.startswith("ms://"):
        c.put("data", _hub(name, None if subset == "default" else subset, split), "dataset_id")
    elif name:
        c.ask("data", f"{name} is of ModelScope; save its rows as JSONL with `prompt` and `answer`")
    for name in _as_list(c.take("reward_fns", [])):
        c.ask("rewards", f"{name}: make it a function f(prompts, completions, **columns) and name it module:function")
    if (thinks := c.take("enable_thinking")) is not None:
        c.put("chat_template_kwargs", {"enable_thinking": thinks}, "enable_thinking")
    if held_out := c.take("eval_samples"):
        c.put("eval_prompts", held_out, "eval_samples")

    group, prompts = c.given["num_generations"], c.take("batch_size") * c.take("gradient_accumulation_steps")
    c.put("prompts_per_step", prompts, "batch_size x gradient_accumulation_steps")
    part = c.take("mini_batch_size", prompts * group)
    source = f"{prompts * group} completions / mini_batch_size={part}"
    updates = c.put_minibatches(prompts * group / part, prompts, source)
    for own, name in (("steps", "max_steps"), ("save_every", "save_steps")):
        number = c.take(name)
        c.put_whole(own, number / updates, _per_batch(name, number, updates))
    _schedule(c, "scheduler_cls")

    loss = c.take("loss_cls").removesuffix("Loss").lower()
    if loss == "cispo" and (high := c.take("epsilon_high")):
        c.left_out.append(f"epsilon_high={high}: Twinkle's CISPO does not read it; the cap is 1 + epsilon")
    _loss(c, loss, "loss_cls", ("epsilon", "epsilon_high"), ("tau_pos", "tau_neg"))
    if c.given.get("beta"):
        c.put("kl_estimator", 2, "its penalty is k3")
    c.put("advantage", c.take("advantage_type").removesuffix("Advantage").lower(), "advantage_type")
    scale = c.take("advantage_scale")
    c.put("normalization", "centered" if scale == "none" else "standard", f"advantage_scale={scale}")
    if scale == "batch":
        c.put("scale", "batch", "advantage_scale=batch")
    if c.take("sampler_type") == "vLLMSampler":
        _engine(c, "vllm", "sampler_type", "it shares the trainer's GPU; vllm:start has one of its own")
        why = "the ratio is over the trainer, and the sampler's is capped at 2; there it is over the sampler"
        c.put("correction", "truncate", "the sampler's log-probs", why)


PEERS: dict[Peer, tuple[str, Callable[[Conversion], None]]] = {
    "trl": ("TRL", _from_trl),
    "open_instruct": ("Open Instruct", _from_open_instruct),
    "twinkle": ("Twinkle", _from_twinkle),
}
