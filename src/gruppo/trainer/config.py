"""TrainConfig: every option of a run, checked before anything heavy is loaded.

One schema, three entrances: Python (`TrainConfig(model=..., steps=...)`), YAML (`--config run.yaml`) and flags
(`--steps 100`). Unknown keys are errors.
"""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gruppo.errors import InputError
from gruppo.run.reader import RunReader, read_yaml

_FILTER = (
    "training draws from the whole vocabulary: a token outside the filter could never be learned, and the loss would "
    "score tokens over another set than they were drawn from. Leave it out and use temperature; `gruppo sample` has it"
)
REFUSED = {"top_p": _FILTER, "top_k": _FILTER, "min_p": _FILTER}
"""Options that other trainers have and this one refuses, with the reason."""

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]


class TrainConfig(BaseModel):
    """Options of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # --- what is trained, on what ---
    model: str = "builtin"
    """Folder, hf://org/name, ms://org/name, hub id, or 'builtin' (0.15 M parameters, adds two numbers, badly)."""
    data: str = "builtin:carries"
    """Prompts: a .jsonl, .csv or .parquet file, hf://org/name, gsm8k:FILE, reasoning_gym:NAME, builtin:carries."""
    eval_data: str | None = None
    """Prompts to evaluate on; none: `eval_prompts` prompts are held out of `data`."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    system: str | None = None
    """System message put before every chat prompt."""
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further variables of the model's chat template, e.g. enable_thinking False."""
    max_prompt_tokens: Positive | None = None
    """Longer prompts are dropped and counted, never cut."""
    rewards: tuple[str, ...] = ("exact_match",)
    """Reward functions: built-in names or module:function."""
    reward_weights: tuple[float, ...] | None = None
    """One weight per reward; none: all 1."""
    reward_deadline: Annotated[float, Field(gt=0)] = 10.0
    """Seconds a reward may take for one completion before its process is killed."""
    reward_workers: Positive = 2
    """Processes that run reward functions of yours."""

    # --- the three batch numbers ---
    prompts_per_step: Positive = 32
    """Prompts of one optimizer step."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Completions per prompt; at least 2, since a group is compared with itself."""
    tokens_per_microbatch: Positive | None = None
    """Tokens of one forward. For memory only: no result depends on it. None: all at once."""
    layout: Literal["auto", "padded", "packed", "shared"] = "auto"
    """Rows a forward runs on. shared: each prompt once per group; auto: that, where it is worth it, else padded;
    packed: all in one. For speed only: a model that scores otherwise in such rows runs padded, and the log says so."""

    # --- how long ---
    steps: Positive = 200
    """Rollout batches."""
    epochs_per_batch: Positive = 1
    """Passes over each rollout batch."""
    minibatches: Positive = 1
    """Optimizer steps per pass; each takes whole groups."""
    stop_at_score: float | None = None
    """Stop early once the held-out accuracy reaches this."""

    # --- loss and advantage ---
    loss: str = "grpo"
    """grpo, gspo, sapo, cispo, bnpo, drgrpo, dapo, ... (`gruppo losses` lists all), or your.module:YourLoss."""
    loss_options: dict[str, int | float | str | bool] = Field(default_factory=dict)
    """Options of the loss by name, such as threshold of m2po, or share of top_entropy."""
    clip_range: float | tuple[float, float] | None = None
    """Distance from 1 that the ratio may move, or low and high; none: the loss's own default."""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the KL penalty towards the model at the start."""
    kl_estimator: int | str = 2
    """0 k1, 1 k2, 2 k3, 3 ratio*k1, or a name: absolute, ratio_k3, k3_straight_through."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    entropy_target: Annotated[float, Field(gt=0)] | None = None
    """Let the bonus act only while the policy's entropy is at most this, and grow then; none: fixed."""
    entropy_change: Annotated[float, Field(gt=0)] = 0.005
    """How much entropy_coef grows or shrinks in a step under entropy_target."""
    tau: float | tuple[float, float] | None = None
    """Temperature of SAPO's gate, or one for each sign of the advantage."""
    advantage: str = "grpo"
    """grpo, rloo, drgrpo, lite_ppo, reinforce_pp, reinforce_pp_baseline, remax, gdpo, opo, gpg, maxrl, beta_norm,
    pass_at_k, best_of_group, length_shaped, lead, or your.module:YourAdvantage."""
    advantage_options: dict[str, int | float | str] = Field(default_factory=dict)
    """Options of the estimator by name, such as k of pass_at_k, or eps."""
    normalization: Literal["standard", "centered"] | None = None
    """For grpo, rloo and best_of_group: divide by a standard deviation, or not; none: standard."""
    scale: Literal["group", "batch", "none"] | None = None
    """For grpo and rloo: which standard deviation divides; none: the group's."""
    mask_truncated: bool = False
    """Leave completions that hit the token limit out of the loss (they still count in their group's mean)."""

    # --- what a reward becomes before it is compared ---
    overlong_cache: Count = 0
    """DAPO's soft overlong penalty: over the last so many tokens before max_new_tokens it grows from 0 to 1."""
    truncated_factor: Annotated[float, Field(ge=0, le=1)] | None = None
    """The reward of a completion that hit the token limit is multiplied by this, unless that would raise it."""
    kl_in_reward: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the log-ratio to the reference, summed over a completion and subtracted from its reward."""
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """Move kl_in_reward so that a completion's log-ratio to the reference is about this; none: fixed."""
    kl_horizon: Positive = 10_000
    """Completions over which kl_in_reward may change by a fifth."""
    ref_every: Count = 0
    """Move the reference towards the policy after every so many steps; 0: it stays the model at the start."""
    ref_mix: Annotated[float, Field(gt=0, le=1)] = 1.0
    """How far: 1 copies the policy, less mixes that share of it into the reference."""

    # --- which prompts ---
    dynamic_sampling: Count = 0
    """Drop groups whose rewards are all equal and sample further prompts, at most so many batches per step; 0: off."""
    retire_solved: Count = 0
    """Draw a prompt no more once all its completions were right on so many visits in a row; 0: never."""

    # --- weights and optimizer ---
    lora: bool = False
    """Train an adapter instead of the weights. A model folder that holds an adapter goes on with that one."""
    lora_rank: Positive | None = None
    """Rank of the adapter; none: 8."""
    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    """The adapter is scaled by lora_alpha / lora_rank; none: 16."""
    lora_targets: tuple[str, ...] | None = None
    """Layers that get the adapter; none: all linear ones but the head."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Learning rate; none: 1e-6, with LoRA 1e-5."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    """Optimizer steps over which the learning rate rises to its value."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    """In which the model computes. Master weights, optimizer state, log-probs and losses are float32 in any case."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward: less memory, more time."""

    # --- sampling ---
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """For sampling, and for scoring what was sampled."""
    max_new_tokens: Positive = 256
    stop: tuple[str, ...] = ()
    """Texts that end a completion."""
    sampler: str = "torch"
    """torch; vllm (inside this process); vllm:start (a server of our own); vllm:http://host:8000,... (running ones)."""
    sampler_deadline: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that vLLM may take for a step's rollouts before it counts as lost."""
    correction: str = "auto"
    """Weights for what sampler and trainer disagree on: none, truncate, mask, and more (docs/losses.md), or
    your.module:your_function; auto: truncate with vllm, unless the loss does it itself."""
    vllm_options: dict[str, int | float | str | bool] = Field(default_factory=dict)
    """Further arguments for vLLM where it is started here, e.g. gpu_memory_utilization 0.5."""

    # --- evaluation ---
    eval_every: Count = 0
    """Evaluate after every so many steps; always at the start and the end. 0: only there."""
    eval_prompts: Count = 128
    """Held-out prompts; 0: no evaluation."""
    eval_samples: Count = 0
    """Sampled completions per held-out prompt, for pass@k; 0: greedy only."""
    correct_by: str | None = None
    """The reward that decides which answers are right, by its name; none: the first verifier, else the first reward."""
    correct_at: float = 1.0
    """Least value of that reward, before weights and penalties, that counts as right."""

    # --- the run ---
    output: str = "runs/run"
    """Run directory: config, metrics, completions, checkpoints, the model. Must not exist."""
    seed: Count = 0
    threads: Count = 0
    """CPU threads; 0: torch's choice. Bitwise repeatability holds for one number."""
    save_every: Positive = 50
    """Checkpoint after every so many steps, and at the end."""
    keep_checkpoints: Positive = 2
    """Older ones are deleted once a newer one is safe on disk."""
    completions_every: Count = 1
    """Write the completions of every so many steps to Parquet; 0: never."""
    completions_limit: Positive = 4096
    """Most completions in the file of one step: whole groups, those that are trained on before others."""
    tensorboard: bool = True
    wandb: bool = False
    trackio: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.clip_range is not None:
            from gruppo.loss.variants import read_clip_range  # brings torch, which --help does not need

            read_clip_range(self.clip_range, low_acts=False)  # the loss knows whether it does
        if not self.rewards:
            raise ValueError("rewards needs at least one function, e.g. exact_match")
        if self.reward_weights is not None and len(self.reward_weights) != len(self.rewards):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} entries for {len(self.rewards)} rewards; give one each"
            )
        if self.prompts_per_step % self.minibatches:
            divisors = [d for d in range(1, self.prompts_per_step + 1) if self.prompts_per_step % d == 0]
            raise ValueError(
                f"minibatches={self.minibatches} does not divide prompts_per_step={self.prompts_per_step}; "
                f"use one of {divisors}"
            )
        read_sampler(self.sampler)
        if self.vllm_options and self.sampler not in ("vllm", "vllm:start"):
            raise ValueError(f"vllm_options are for sampler=vllm or vllm:start, not for sampler={self.sampler!r}")
        if self.eval_samples and not self.eval_prompts:
            raise ValueError("eval_samples needs eval_prompts of at least 1")
        if self.overlong_cache > self.max_new_tokens:
            raise ValueError(
                f"overlong_cache={self.overlong_cache} is more than max_new_tokens={self.max_new_tokens}; lower it"
            )
        if self.completions_every and self.completions_limit < self.group_size:
            raise ValueError(
                f"completions_limit={self.completions_limit} is less than group_size={self.group_size}, and a file "
                "takes whole groups; raise it, or set completions_every=0"
            )
        if self.kl_target is not None and not self.kl_in_reward:
            raise ValueError("kl_target needs kl_in_reward above 0: the coefficient that it starts from")
        if self.ref_every and self.lora and self.ref_mix < 1:
            raise ValueError(
                f"ref_mix={self.ref_mix:g} needs all weights: a mixture of two adapters' factors is not a mixture of "
                "the models. With lora use ref_mix=1"
            )
        if self.ref_every and not (self.beta or self.kl_in_reward):
            raise ValueError("ref_every moves a reference that nothing uses; set beta or kl_in_reward")
        return self

    @property
    def trackers(self) -> tuple[str, ...]:
        """The boards that are switched on."""
        return tuple(name for name in ("tensorboard", "wandb", "trackio") if getattr(self, name))

    @property
    def optimizer_steps(self) -> int:
        return self.steps * self.epochs_per_batch * self.minibatches

    @classmethod
    def read(cls, values: dict[str, Any], where: str = "config") -> "TrainConfig":
        """Check plain values; the error names every wrong field, what it got and what would do."""
        try:
            return cls(**{str(name): value for name, value in values.items()})  # YAML also has numbers for names
        except ValidationError as error:
            raise InputError(explain(error, where, list(cls.model_fields))) from None

    @classmethod
    def of_run(cls, directory: str | Path, overrides: dict[str, Any] | None = None) -> "TrainConfig":
        """The config of a run, with the directory where it now lies; `overrides` win."""
        values = RunReader(directory).config() | (overrides or {})
        return cls.read(values, where=str(Path(directory) / "config.yaml"))

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: dict[str, Any] | None = None) -> "TrainConfig":
        """A config file; `overrides` win."""
        return cls.read(read_yaml(path) | (overrides or {}), where=str(path))

    def to_yaml(self) -> str:
        import yaml

        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_sampler(sampler: str) -> tuple[str, tuple[str, ...]]:
    """The kind of sampler and, for vLLM, its servers: () means an engine in this process.

    >>> read_sampler("vllm:http://a:8000,http://b:8000")
    ('vllm', ('http://a:8000', 'http://b:8000'))
    """
    if sampler in ("torch", "vllm"):
        return sampler, ()
    kind, _, servers = sampler.partition(":")
    addresses = tuple(servers.split(","))
    if kind != "vllm" or not all(a == "start" or a.startswith("http://") for a in addresses):
        raise ValueError(
            f"sampler={sampler!r} is unknown; use torch, vllm, vllm:start or vllm:http://host:port[,http://...]"
        )
    return kind, addresses


def explain(error: ValidationError, where: str, known: list[str]) -> str:
    """A pydantic error as one line per field: name, value, what is wrong, what to do."""
    lines = []
    for item in error.errors():
        field = ".".join(str(p) for p in item["loc"] if not str(p).startswith(("function-", "float", "tuple", "int")))
        if item["type"] == "extra_forbidden" and field in REFUSED:
            lines.append(f"{where}: {field}={item['input']!r} is refused: {REFUSED[field]}")
        elif item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(field, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see `gruppo train --help`"
            lines.append(f"{where}: unknown option {field!r}; {hint}")
        elif field:
            lines.append(f"{where}: {field}={item['input']!r}: {item['msg']}")
        else:
            lines.append(f"{where}: {item['msg'].removeprefix('Value error, ')}")
    return "\n".join(dict.fromkeys(lines))
