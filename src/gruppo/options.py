"""Options of a run in groups, one per part of it. `TrainConfig` is all of them together, flat.

Not in the packages that they configure: those import torch, and `gruppo train --help` should not have to. Checks that
concern one group are here, those between groups in `trainer/config.py`.
"""

import re
from collections.abc import Mapping
from os.path import expanduser
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gruppo.errors import InputError
from gruppo.process.by_name import is_address, write_spec

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Place = Annotated[str, AfterValidator(lambda text: _at_home(text))]
"""A path, or a name of something elsewhere; ~ is the home folder."""
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""Several names; in YAML and Python one name does for a list of one."""
Named = Annotated[str, BeforeValidator(lambda value, info: _name_of(value, info))]
"""A name of ours or `module:name`; in Python a class or function does, which is written as its name."""
AllNamed = Annotated[
    Names,
    BeforeValidator(
        lambda value, info: [_name_of(v, info) for v in (value if isinstance(value, list | tuple) else [value])]
    ),
]
MAX_THREADS = 1024
"""More threads than any machine has cores: starting them ends the process."""
MAX_RANK = 65_536
"""More than any layer has rows."""
Plain = bool | int | float | str  # in this order: a flag's "False" is a truth value before it is a text


class Options(BaseModel):
    """Frozen values; unknown names, NaN and infinity are refused. The text below a field is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _check_kind(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true for a number and 1 for a truth value: `steps: yes` in YAML would train one step."""
        kinds = kinds_of(cls.model_fields[info.field_name or ""].annotation)
        is_number, is_truth = bool(kinds & {int, float}), bool in kinds
        parts = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else (value,)
        if is_number and not is_truth and any(isinstance(part, bool) for part in parts):
            raise PydanticCustomError("kind", "it is true or false; write a number")
        if is_truth and not is_number and isinstance(value, int | float) and not isinstance(value, bool):
            raise PydanticCustomError("kind", "it is a number; write true or false")
        return value


class AdvancedOptions(Options):
    """What few runs set. In YAML and Python it stands under `advanced`, as in advanced: {adam_beta2: 0.95}; the flag is
    --advanced adam_beta2 0.95."""

    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Share of AdamW's mean gradient that a step keeps."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Share of AdamW's mean squared gradient that a step keeps."""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of that mean, by which AdamW divides."""
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """Target KL per completion; `kl_in_reward` is adjusted to track it. Unset: fixed coefficient."""
    kl_horizon: Positive = 10_000
    """Number of completions over which kl_in_reward may change by a fifth."""
    entropy_target: Annotated[float, Field(gt=0)] | None = None
    """Target entropy. While the policy's entropy is at or below it, the bonus is active and its coefficient grows;
    above it the bonus is off. Unset: fixed coefficient."""
    entropy_change: Annotated[float, Field(gt=0)] = 0.005
    """Amount by which entropy_coef grows or shrinks per step under entropy_target."""
    ref_mix: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the policy that is mixed into the reference when it moves. 1 copies the policy."""
    truncated_factor: Annotated[float, Field(ge=0, le=1)] | None = None
    """Factor on the reward of a completion that hit the token limit, unless it would raise the reward."""
    retire_solved: Count = 0
    """Retire a prompt after this many consecutive visits on which every completion was correct. 0 disables it."""
    patience: Count = 0
    """Stop early after this many evaluations in a row without a better held-out score. 0 disables it."""
    stop_at_score: float | None = None
    """Stop early once the held-out score reaches this value: the accuracy, or the reward where none decides what is
    correct."""
    reward_workers: Positive = 2
    """Number of processes that run your own reward functions."""
    completions_limit: Positive = 4096
    """Most completions in the file of one step: whole groups, those that are trained on before others."""
    keep_activations: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of its activations that a compiled block keeps for the backward pass; what is cheapest to compute again is
    not kept. Unset: 0.9, where norms and activation functions are computed again and no product."""
    compile: bool | None = None
    """Compile the decoder blocks for scoring and training. Unset: on a GPU. It affects speed and memory only."""
    offload: bool = False
    """With gradient_checkpointing on a GPU: keep the inputs of the blocks in pinned host memory."""
    ranks_exact: bool = False
    """On several ranks: add gradients in the order of the micro-batches and take their norm row by row, so that any
    number of ranks gives the same bits, also of one process with this option. Costs a reduction per micro-batch."""
    rank_deadline: Annotated[float, Field(gt=0, le=30 * 86400)] = 1800.0
    """Seconds that a rank may take for its part of a step before the others count it as lost."""
    sampler_deadline: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that vLLM may take for a step's rollouts before it counts as lost."""
    max_turn_tokens: Positive | None = None
    """Token limit of one turn of an episode. Unset: what `max_new_tokens` leaves."""
    turn_deadline: Annotated[float, Field(gt=0)] = 30.0
    """Seconds that an environment or a tool may take for one answer before its episode counts as lost."""
    episode_deadline: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that an environment may take for all answers of an episode."""
    tracker_deadline: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that TensorBoard, W&B or trackio may take for one call before the run goes on without it."""


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a run in which later parts win, each advanced one for itself. Those may stand beside the others too,
    as in the config of a run that is older than `advanced`.

    >>> merged({"lr": 1, "ref_mix": 0.5}, {"advanced": {"adam_beta1": 0.8}})
    {'lr': 1, 'advanced': {'ref_mix': 0.5, 'adam_beta1': 0.8}}
    """
    found: dict[str, Any] = {}
    for part in parts:
        flat = {name: value for name, value in part.items() if name in AdvancedOptions.model_fields}
        given, before = part.get("advanced", {}), found.get("advanced", {})
        given = given.model_dump(exclude_unset=True) if isinstance(given, AdvancedOptions) else given
        found |= {name: value for name, value in part.items() if name not in flat}
        if twice := flat.keys() & given if isinstance(given, dict) else ():
            raise InputError(f"{min(twice)} and advanced.{min(twice)} are one option; leave the first out")
        if isinstance(given, dict) and (inner := {**before, **given, **flat}):
            found["advanced"] = inner
    return found


class ModelOptions(Options):
    """The model, and how it computes."""

    model: Place = "builtin"
    """Folder, GGUF file, hf://org/name, ms://org/name, hub id, 'builtin' (0.17 M parameters, adds two numbers, badly)
    or 'builtin-chat' (0.18 M, can call the tool of builtin:calculator)."""
    tokenizer: Place | None = None
    """Folder or hub id of another tokenizer, with its chat template. Unset: the model's own."""
    revision: str | None = None
    """Commit, tag or branch of a model from a hub. Unset: the newest. The config of the run holds the commit."""
    lora: bool = False
    """Train an adapter instead of the weights. A model folder that holds an adapter continues with that one."""
    lora_rank: Annotated[int, Field(ge=1, le=MAX_RANK)] | None = None
    """Rank of the adapter. Unset: 8."""
    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    """The adapter is scaled by lora_alpha / lora_rank. Unset: 16."""
    lora_targets: Names | None = None
    """Layers that get the adapter. Unset: all linear layers except the head."""
    lora_modules_to_save: Names | None = None
    """Modules that train whole beside the adapter and are saved with it, e.g. lm_head. Unset: none."""
    quantize: Literal["nf4"] | None = None
    """Load the base in 4 bits (NF4 of bitsandbytes) and train an adapter on it: QLoRA. Unset: as `dtype` gives it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format the model computes in; `auto` is bfloat16 on a GPU that has it, else float32. Master weights,
    optimizer state, sums of gradients, log-probs and losses are always float32."""
    layout: Literal["auto", "padded", "packed", "shared"] = "auto"
    """Batch layout. `shared` computes each prompt once per group; `auto` uses it when repeating the prompts would cost
    at least 20 % more, otherwise `padded`; `packed` puts all sequences into one row. It affects speed only: a model
    that scores differently in such a row runs padded, and the log says so."""
    tokens_per_microbatch: Positive | None = None
    """Tokens of one forward pass. It affects memory only, never the result. Unset: the whole step at once."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of the decoder blocks and recompute the rest in the backward pass: the least memory, about a
    third more time."""

    @property
    def pinned_model(self) -> str:
        """The model id with its revision."""
        return self.model if self.revision is None else f"{self.model}@{self.revision}"

    @property
    def tokenizer_id(self) -> str:
        """Where the tokenizer is from: named by itself, or with the model."""
        return self.tokenizer or self.pinned_model


class DataOptions(Options):
    """Prompts."""

    data: Place = "builtin:carries"
    """Prompts: a .jsonl, .csv or .parquet file, hf://org/name, gsm8k:FILE, reasoning_gym:NAME, builtin:carries,
    builtin:sums, builtin:calculator."""
    eval_data: Place | None = None
    """Prompts to evaluate on. Unset: `eval_prompts` prompts are held out of `data`."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    answer_column: str = "answer"
    """Column with the right answer, which the built-in rewards read as `answer`; a dotted name is a column inside
    another. Left at `answer` where there is no such column: `ground_truth`, `solution` or verl's
    `reward_model.ground_truth`."""
    column_map: dict[str, str] = Field(default_factory=dict)
    """Columns to rename: pairs of the name in the data and the name that rewards get, e.g. id row_id."""
    on_bad_row: Literal["fail", "drop"] = "fail"
    """Rows that cannot be used: `fail` stops before anything is loaded, `drop` leaves them out and counts them."""
    chat: bool = False
    """Put text prompts through the model's chat template, each as the turn of a user. Lists of messages always go."""
    system: str | None = None
    """System message put before every chat prompt that has none."""
    chat_template_kwargs: dict[str, Plain] = Field(default_factory=dict)
    """Further variables of the model's chat template, e.g. enable_thinking False."""
    max_prompt_tokens: Positive | None = None
    """Longer prompts are dropped and counted, never cut."""
    shuffle: bool = True
    """Visit the prompts in a random order, a new one in each pass. Off: in the order of the data, as for a curriculum;
    held-out prompts are drawn at random all the same."""

    @field_validator("data", "eval_data", mode="before")
    @classmethod
    def _check_is_a_name(cls, data: Any) -> Any:
        """Refuse several sources, and objects, which are not options."""
        if isinstance(data, list | tuple) and data and all(isinstance(name, str) for name in data):
            raise PydanticCustomError("name", "it is one source; join the files into one")
        if data is not None and not isinstance(data, str):
            raise PydanticCustomError(
                "name", "it is a name here; rows and data sets go to GRPOTrainer(config, data=...)"
            )
        return data


class RewardOptions(Options):
    """Reward functions, and which of them decides what is right."""

    rewards: Names | None = None
    """Reward functions: built-in names, module:function or module:Class, reward models by folder or hub id, servers as
    http://host:port/path. Options follow the name: number_match:column=solution. Unset: number_match for gsm8k data
    and builtin:sums, the task's own score for reasoning_gym, else exact_match."""
    reward_weights: tuple[float, ...] | None = None
    """One weight per reward. Unset: all 1."""
    reward_deadline: Annotated[float, Field(gt=0)] = 10.0
    """Seconds that a reward may take for one call, and for one completion alone, before its process is killed."""
    correct_by: str | None = None
    """Name of the reward that decides which answers are correct. Unset: the first verifier. Without either, nothing
    does: a run then reports held-out reward instead of held-out accuracy."""
    correct_at: float | None = None
    """Lowest value of that reward, before weights and penalties, that counts as correct. Unset: 1."""

    @field_validator("rewards", mode="before")
    @classmethod
    def _read_mappings(cls, rewards: Any) -> Any:
        """`{number_match: {column: solution}}` of YAML as text."""
        if not isinstance(rewards, list | tuple):
            return rewards
        return [_as_spec(reward) if isinstance(reward, dict) else reward for reward in rewards]

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        if self.rewards == ():
            raise ValueError("rewards needs at least one function, e.g. exact_match")
        for name in self.rewards or ():
            is_address(name)  # refuses a password
        # Without rewards they are functions that GRPOTrainer is given, which counts them itself.
        if self.rewards and self.reward_weights is not None and len(self.reward_weights) != self.num_rewards:
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} entries for {self.num_rewards} rewards; give one each"
            )
        return self

    @property
    def num_rewards(self) -> int:
        """Number of reward functions; the default of a data source is one."""
        return 1 if self.rewards is None else len(self.rewards)


def _as_spec(reward: dict[Any, Any]) -> str:
    name, options = next(iter(reward.items()), ("", None))
    if len(reward) != 1 or not isinstance(name, str) or not isinstance(options, dict | None):
        raise ValueError("a reward with options is one name with a mapping: {number_match: {column: solution}}")
    return write_spec(name, options or {})


class RolloutOptions(Options):
    """Which completions are sampled for a step, and by what."""

    prompts_per_step: Positive = 32
    """Prompts per step."""
    group_size: Annotated[int, AfterValidator(lambda size: _group(size))] = 8
    """Completions per prompt; at least 2, since a group is compared with itself."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of sampling, and of scoring what was sampled."""
    max_new_tokens: Positive = 256
    """Token limit of a completion, over all of its turns. Unset: 256, or a quarter of a context that is shorter than
    1024."""
    stop: Annotated[Names, AfterValidator(lambda texts: _not_empty(texts))] = ()
    """Texts that end a completion."""
    tools: Names = ()
    """Tools that the model may call, each my_module:function with type hints and a docstring (docs/turns.md)."""
    environment: Named | None = None
    """What answers the model's turns: my_module:Class or my_module:make, for an environment of gruppo, of TRL or of
    Gymnasium's kind (docs/turns.md). Unset: a completion is one turn, unless there are tools."""
    max_turns: Positive = 10
    """Turns of the model in an episode, where there are tools or an environment."""
    dynamic_sampling: Count = 0
    """Dynamic sampling: replace groups with identical rewards, sampling at most this many batches of prompts per step.
    0 disables it."""
    sampler: str = "torch"
    """torch; vllm (an engine in this process); vllm:start (a server started for the run); vllm:http://host:8000,...
    (running servers); or your.module:YourSampler."""
    max_staleness: Count = 0
    """Sample this many steps ahead, in the background, while earlier steps train: a step takes as long as the slower of
    the two, and its rollouts come from weights of that many steps before. The sampler needs a device of its own, such
    as a server of vLLM."""
    streaming: bool = False
    """With `max_staleness`: a step takes the groups that are complete first, and longer ones stay in flight while it
    trains. A group of which a token is older than `max_staleness` steps is dropped, and its prompt sampled again. For
    completions of very different lengths; a run is not repeated bit for bit then."""
    vllm_options: dict[str, Plain] = Field(default_factory=dict)
    """Further arguments for a vLLM that the run starts, e.g. gpu_memory_utilization 0.5."""

    @model_validator(mode="after")
    def _check_sampler(self) -> Self:
        read_sampler(self.sampler)
        for name in sorted(self.vllm_options.keys() & _OF_THE_SERVER.keys()):
            raise ValueError(
                f"vllm_options has {name}={self.vllm_options[name]!r}: {_OF_THE_SERVER[name]}; leave it out"
            )
        if self.vllm_options and self.sampler not in ("vllm", "vllm:start"):
            raise ValueError(f"vllm_options are for sampler=vllm or vllm:start, not for sampler={self.sampler!r}")
        if self.max_staleness and self.sampler == "vllm":
            raise ValueError(
                f"max_staleness={self.max_staleness} samples while it trains, and the engine of sampler='vllm' rests "
                "meanwhile; use sampler='vllm:start'"
            )
        if self.streaming and not self.max_staleness:
            raise ValueError(
                "streaming=true needs max_staleness of at least 1: groups that stay in flight while a step trains are "
                "older than its weights; give max_staleness=1, or leave streaming out"
            )
        return self


class AdvantageOptions(Options):
    """How rewards become advantages."""

    advantage: Named = "grpo"
    """grpo, rloo, drgrpo, lite_ppo, reinforce_pp, reinforce_pp_baseline, remax, gdpo, opo, gpg, maxrl, beta_norm,
    pass_at_k, best_of_group, length_shaped, lead, or your.module:YourAdvantage."""
    advantage_options: dict[str, int | float | str] = Field(default_factory=dict)
    """Options of the estimator by name, such as k of pass_at_k, or eps."""
    normalization: Literal["standard", "centered"] | None = None
    """For grpo, rloo and best_of_group: whether to divide by a standard deviation. Unset: standard."""
    scale: Literal["group", "batch", "none"] | None = None
    """For grpo and rloo: which standard deviation to divide by. Unset: the group's."""
    overlong_cache: Count = 0
    """Width in tokens of DAPO's soft overlong penalty, which rises from 0 to 1 over the last tokens before
    `max_new_tokens`. 0 disables it."""
    kl_in_reward: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the log-ratio to the reference, summed over a completion and subtracted from its reward."""


class LossOptions(Options):
    """The loss, and the reference that it may compare with."""

    loss: Named = "grpo"
    """grpo, gspo, sapo, cispo, bnpo, drgrpo, dapo, ... (`gruppo losses` lists all), or your.module:YourLoss."""
    loss_options: dict[str, Plain] = Field(default_factory=dict)
    """Options of the loss by name, such as threshold of m2po or share of top_entropy. A pair of numbers is a list in
    YAML and two numbers with a comma in a flag: --loss-options bounds 1,5 for clip_cov."""
    clip_range: float | tuple[float, float] | None = None
    """How far the ratio may move from 1: one number, or low and high. Unset: the loss's own default."""
    tau: float | tuple[float, float] | None = None
    """Temperature of SAPO's gate, or one for each sign of the advantage."""
    correction: str = "auto"
    """Importance correction for the sampler-trainer mismatch: none, truncate, mask, and more (docs/losses.md), or
    your.module:your_function. `auto` is truncate with vllm, unless the loss corrects itself."""
    mask_truncated: bool = False
    """Leave completions that hit the token limit out of the loss. They still count in their group's mean."""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the KL penalty towards the reference, which is the model at the start."""
    kl_estimator: int | str = 2
    """0 k1, 1 k2, 2 k3, 3 ratio*k1, or a name: abs_kl, ratio_k3, k3_straight_through."""
    ref_every: Count = 0
    """Move the reference towards the policy every N steps. 0: it stays the model at the start."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""

    @field_validator("loss_options", mode="before")
    @classmethod
    def _write_pairs(cls, options: Any) -> Any:
        """`[1, 5]` as `1,5`, the form that a flag has for it."""
        if not isinstance(options, dict):
            return options
        return {name: ",".join(map(repr, value)) if _is_numbers(value) else value for name, value in options.items()}


class OptimOptions(Options):
    """How long a run trains, and with what optimizer."""

    steps: Positive = 200
    """Number of steps; each samples one batch of rollouts."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training prompts, instead of `steps`: 0.5, 3. They become a number of steps when the run has read
    its data. Further batches of `dynamic_sampling` do not count."""
    epochs_per_batch: Positive = 1
    """Passes over each batch of rollouts."""
    minibatches: Positive = 1
    """Optimizer steps per pass; each takes whole groups."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Learning rate. Unset: 1e-6, with LoRA 1e-5."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up: constant, or falling towards 0 by the last step."""
    warmup_steps: Count = 0
    """Optimizer steps over which the learning rate rises to its value."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients with a larger norm are scaled down to it."""

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError(f"epochs={self.epochs:g} and steps={self.steps} both say how long to train; leave one out")
        return self

    @property
    def optimizer_steps(self) -> int:
        return self.steps * self.epochs_per_batch * self.minibatches


class EvalOptions(Options):
    """Held-out evaluation."""

    eval_every: Count = 0
    """Evaluate every N steps, and always before the first and after the last. 0: only then."""
    eval_prompts: Count | None = None
    """Number of held-out prompts. 0 disables evaluation. Unset: 128, or a fifth of a data set of fewer than 640."""
    eval_samples: Count = 0
    """Sampled completions per held-out prompt, for pass@k. 0: the greedy completion only."""
    keep_best: bool = False
    """Also save the model with the best held-out score so far, as `best` in the run directory."""

    @model_validator(mode="after")
    def _check_evaluation(self) -> Self:
        if self.eval_samples and self.eval_prompts == 0:
            raise ValueError("eval_samples needs eval_prompts of at least 1")
        return self


class RunOptions(Options):
    """What a run leaves behind, and what makes it repeatable."""

    output: Place = "runs/run"
    """Run directory: config, metrics, completions, checkpoints, the model. It must not hold a run that was saved."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Seed of everything random: prompts, samples, a new adapter."""
    threads: Annotated[int, Field(ge=0, le=MAX_THREADS)] = 0
    """CPU threads; a run is bitwise repeatable with the same number of them. 0: torch's choice."""
    shard: Literal["auto", "none", "full"] = "auto"
    """On several ranks: full keeps each rank's rows of the weights and gathers a block when it runs; none keeps all
    weights on every rank and adds up gradients only. auto: none where weights, gradients and optimizer take at most a
    third of a rank's memory, else full. One process has all weights in any case."""
    save_every: Positive = 50
    """Save a checkpoint every N steps, and at the end."""
    keep_checkpoints: Positive = 2
    """Number of checkpoints to keep; older ones are deleted once a newer one is safe on disk."""
    completions_every: Count = 1
    """Write the completions of every Nth step to Parquet. 0 disables it."""
    metrics: AllNamed = ()
    """Metrics of your own, your.module:YourMetric (docs/extending.md), beside those that every run reports."""
    tensorboard: bool = True
    """Write a TensorBoard file into the run directory."""
    wandb: bool = False
    """Log to Weights & Biases."""
    trackio: bool = False
    """Log to trackio."""
    advanced: AdvancedOptions = Field(default_factory=AdvancedOptions)
    """Options that few runs set, each by its name, such as adam_beta2 0.95."""

    @property
    def trackers(self) -> tuple[str, ...]:
        """The boards that are switched on."""
        return tuple(name for name in ("tensorboard", "wandb", "trackio") if getattr(self, name))


_ADDRESS = "the server that a run starts listens on a socket that its user alone can open"
_OF_THE_SERVER = {
    "trust_remote_code": "code from a model folder is never run",
    **dict.fromkeys(("host", "port", "uds", "api_key", "root_path", "ssl_keyfile", "ssl_certfile"), _ADDRESS),
}
"""Options of vLLM that a run does not hand on, with the reason."""


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(type(n) in (int, float) for n in value)


def read_pair(value: Plain) -> Plain | tuple[float, ...]:
    """A pair of numbers that is written as `1,5`; any other value stays as it is.

    >>> read_pair("1,5"), read_pair("sampler"), read_pair(0.2)
    ((1.0, 5.0), 'sampler', 0.2)
    """
    if not isinstance(value, str) or "," not in value:
        return value
    try:
        return tuple(map(float, value.split(",")))
    except ValueError:
        return value


def kinds_of(annotation: Any) -> set[Any]:
    """The types that the values of an annotation have, also inside tuples and mappings.

    >>> sorted(kind.__name__ for kind in kinds_of(Positive | tuple[float, ...] | None))
    ['NoneType', 'float', 'int']
    """
    parts = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return kinds_of(parts[0])
    if annotation is AdvancedOptions:
        return set().union(*(kinds_of(field.annotation) for field in AdvancedOptions.model_fields.values()))
    return set().union(*map(kinds_of, parts)) - {...} if parts else {annotation}


def members(annotation: Any) -> list[Any]:
    """The types of an annotation that are joined by `|`, without their checks and without None.

    >>> members(Positive | tuple[float, ...] | None)
    [<class 'int'>, tuple[float, ...]]
    """
    parts = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return members(parts[0])
    if get_origin(annotation) in (Union, UnionType):
        return [member for part in parts for member in members(part)]
    return [] if annotation is NoneType else [annotation]


def _name_of(value: Any, info: ValidationInfo) -> Any:
    """The name of a class or function that a config can hold; what is neither has none."""
    path = getattr(value, "__qualname__", None)
    if isinstance(value, str) or (path is None and not callable(value) and not hasattr(value, "accumulate")):
        return value
    if path is None:
        text = "a config holds names; give it to GRPOTrainer(config, {field}=...)"
        raise PydanticCustomError("object", text, {"field": info.field_name})
    if "<" in path:
        raise PydanticCustomError(
            "place", "it is defined inside a function, where no name finds it; move it out of there"
        )
    return f"{value.__module__}:{path}"


def _group(size: int) -> int:
    if size < 2:
        raise PydanticCustomError("group", "a group needs at least two completions to compare")
    return size


def _not_empty(texts: tuple[str, ...]) -> tuple[str, ...]:
    if "" in texts:
        raise ValueError("an empty text would end every completion at once; leave it out")
    return texts


def read_sampler(sampler: str) -> tuple[str, tuple[str, ...]]:
    """The kind of sampler and, for vLLM, its servers: () means an engine in this process.

    >>> read_sampler("vllm:http://a:8000,http://b:8000"), read_sampler("my_engine:Mine")
    (('vllm', ('http://a:8000', 'http://b:8000')), ('own', ()))
    """
    if sampler in ("torch", "vllm"):
        return sampler, ()
    if not sampler.startswith("vllm:") and re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", sampler):
        return "own", ()
    kind, _, servers = sampler.partition(":")
    addresses = tuple(servers.split(","))
    if kind != "vllm" or not all(a == "start" or _is_address(a) for a in addresses):
        raise ValueError(
            f"sampler={sampler!r} is unknown; use torch, vllm, vllm:start, vllm:http://host:port[,http://...] or "
            "your.module:YourSampler"
        )
    return kind, addresses


def _is_address(address: str) -> bool:
    """Whether this is `http://host:port`.

    >>> [_is_address(a) for a in ("http://a:8000", "http://a", "http://", "http://a:99999", "http://a:b", "http://[::1")]
    [True, True, False, False, False, False]
    """
    try:
        parts = urlsplit(address)
        return parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, a bracket that is not closed
        return False


def _at_home(place: str) -> str:
    """The place with ~ written out, also after the kind of a source: `gsm8k:~/train.jsonl`."""
    kind, colon, path = place.rpartition(":")
    if not path.startswith("~"):
        return place
    found = expanduser(path)
    if found == path:
        raise ValueError(f"no home folder is known for {path.partition('/')[0]}; write the path out, or ./{path}")
    return f"{kind}{colon}{found}"
