"""`gruppo eval`, `gruppo sample` and `gruppo export`: a trained model is scored, tried and handed over."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from gruppo.cli.arguments import Arguments, HomePath, Word, parse, parse_options
from gruppo.errors import InputError
from gruppo.options import read_sampler
from gruppo.process.streams import shell_word
from gruppo.run.reader import RunReader, read_lines
from gruppo.trainer.config import TrainConfig

if TYPE_CHECKING:
    from rich.text import Text

    from gruppo.reward import RewardScorer
    from gruppo.rollout.evaluate import Evaluation
    from gruppo.sampler import Sampler
    from gruppo.task.prompts import PromptSet
    from gruppo.types import Group, Trajectory

MAX_SAMPLES = 65_536
BUILTIN_HELD_OUT = "builtin:carries?split=heldout"


class EvalArguments(Arguments):
    """Score a model on held-out prompts: greedy accuracy with a 95 % interval and, with --num-samples, unbiased pass@k.

    Of a run, its model, held-out rows and options are taken; flags win over them. Without a run, the embedded model is
    scored on the held-out rows of builtin:carries.

    gruppo eval runs/demo --num-samples 8
    gruppo eval --model Qwen/Qwen3-0.6B --data problems.jsonl --rewards number_match --chat
    """

    run: Annotated[HomePath | None, Word("RUN", is_positional=True)] = None
    """A run directory."""
    limit: int | None = None
    """Use only N of the prompts, chosen at random with --seed."""
    num_samples: int | None = None
    """Sampled completions per prompt, for pass@k. 0: the greedy completion only. Unset: as the run, else 0."""
    output: HomePath | None = None
    """New Parquet file for the completions. Unset: eval.parquet in the run, where one is given."""
    as_json: Annotated[bool, Word(flag="--json")] = False
    """Print one JSON object instead of a table."""
    trust: bool = False
    """Import the rewards that the run names although another user owns its directory or can write it."""


EVAL_OPTIONS = (
    *("model", "tokenizer", "data", "rewards", "temperature", "max_new_tokens", "stop", "correct_by", "correct_at"),
    *("prompt_column", "answer_column", "chat", "system", "chat_template_kwargs", "seed", "sampler", "dtype"),
    *("tools", "environment", "max_turns"),
)


def evaluate_model(arguments: Sequence[str]) -> int:
    given, options = parse_options(EvalArguments, arguments, "eval", EVAL_OPTIONS)
    config = eval_config(given, options)
    output = completions_file(given.output) or (given.run / "eval.parquet" if given.run else None)
    from gruppo.rollout.driver import Driver
    from gruppo.rollout.evaluate import evaluate
    from gruppo.task import load_prompts
    from gruppo.task.order import EVAL_STREAM, shuffle
    from gruppo.trainer.build import build_player, build_rewards, prompt_options, sampling_params
    from gruppo.trainer.inputs import resolve_inputs
    from gruppo.weights.source import load_tokenizer, longest_prompt

    config, inputs = resolve_inputs(config)
    with build_rewards(config, inputs) as scorer:
        reading = prompt_options(config, inputs.environments)
        reading["max_prompt_tokens"] = longest_prompt(config.pinned_model, 1, config.max_prompt_tokens)
        tokenizer = load_tokenizer(config.tokenizer_id)
        found = load_prompts(config.data, tokenizer, **reading)
        prompts = list(found)
        if given.limit is not None and given.limit < 1:
            raise InputError(f"limit must be at least 1, got {given.limit}")
        check_length(config, options)
        if given.limit is not None and given.limit < len(prompts):  # the rows of a file may be sorted
            prompts = [found[i] for i in sorted(shuffle(len(found), config.seed, EVAL_STREAM)[: given.limit].tolist())]
        sampler = open_sampler(config, max(len(prompt.token_ids) for prompt in prompts))
        params = sampling_params(config)
        try:
            player = build_player(config, inputs.environments, config.pinned_model, tokenizer)
            with nullcontext() if player is None else closing(player):
                driver = Driver(sampler=sampler, scorer=scorer, player=player)
                result = evaluate(prompts, driver, params, num_samples=config.eval_samples)
        finally:
            sampler.close()
    if given.as_json:
        print(json.dumps({"prompts": len(prompts), **result.metrics}))
    else:
        show_evaluation(config, found, len(prompts), scorer, result)
    if output is not None:  # after the numbers, which a full disk must not cost
        sys.stdout.flush()
        write_completions(output, result.groups())
        if not given.as_json:
            print(f"completions: {output}")
    return 0


def show_evaluation(
    config: TrainConfig, found: "PromptSet", num_prompts: int, scorer: "RewardScorer", result: "Evaluation"
) -> None:
    """Print what was scored and the numbers."""
    chosen = "" if num_prompts == len(found) else f" of {len(found)}"
    print(f"{num_prompts}{chosen} prompts of {config.data}" + (f", chosen with seed {config.seed}" if chosen else ""))
    rewards = ", ".join(reward.name for reward in scorer.rewards)
    judged = f"rewards {rewards}; {scorer.verdict}"
    for sentence in (*found.reading, found.left_out(), judged):
        if sentence:
            print(sentence)
    for name, value in result.metrics.items():
        if not name.endswith(("_low", "_high")):
            low, high = result.metrics.get(f"{name}_low"), result.metrics.get(f"{name}_high")
            interval = "" if low is None or high is None else f"   95 % interval {low:.4f} to {high:.4f}"
            print(f"{name:<16}{value:.4f}{interval}")
    if episodes := episode_numbers([rollout.trajectory for rollout in result.greedy]):
        print(episodes)


def episode_numbers(sequences: "Sequence[Trajectory]") -> str:
    """Turns and calls of greedy episodes in a sentence, and how many were cut or lost; empty where there are none."""
    from gruppo.rollout.turn_metrics import turn_metrics

    episodes = [sequence for sequence in sequences if sequence.messages is not None]
    if not (found := turn_metrics(episodes)):
        return ""
    cut, lost = (sum(getattr(each, name) for each in episodes) for name in ("is_truncated", "is_lost"))
    return (
        f"greedy episodes: {found['turns/mean']:.1f} turns and {found['turns/calls']:.1f} calls on average; of "
        f"{len(episodes)}, {cut} cut and {lost} lost"
    )


def eval_config(given: EvalArguments, options: dict[str, Any]) -> TrainConfig:
    """The options of the run, if there is one, with those that are given."""
    values: dict[str, Any] = {"model": "builtin", "data": BUILTIN_HELD_OUT}
    if given.run is not None:
        if "rewards" not in options or has_turns(given.run):  # what the run names is imported
            RunReader(given.run).check_owner(given.trust)
        values = of_run(given.run, options) | {"eval_data": None} | ({} if "data" in options else _held_out(given.run))
    if given.num_samples is not None:
        values |= {"eval_samples": given.num_samples, "eval_prompts": None}
    if "rewards" in options:  # the run's weights are of other rewards
        values |= {"reward_weights": None, "correct_by": None}
    elif objects := [name for name in values.get("rewards") or () if name.startswith("object:")]:
        raise InputError(
            f"the rewards of {given.run} were Python objects, which its directory cannot hold: {', '.join(objects)}; "
            "name rewards: --rewards module:function"
        )
    return TrainConfig.read(values | options, where="eval")


def of_run(directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a run for the model that it has trained, with sampler=torch unless another is given."""
    values = RunReader(directory).config() | {"model": str(directory), "tokenizer": None, "revision": None}
    return values if "vllm" in options.get("sampler", "") else values | {"sampler": "torch", "vllm_options": {}}


def has_turns(run: Path) -> bool:
    """Whether a run names tools or an environment, which are imported with its options."""
    values = RunReader(run).config()
    return bool(values.get("tools") or values.get("environment"))


def _held_out(run: Path) -> dict[str, Any]:
    """The held-out rows of a run as data: their columns have the names of the run already."""
    file = RunReader(run).held_out
    if not file.is_file():
        raise InputError(f"{run} has no held-out rows ({file.name}); give --data")
    return {"data": str(file), "prompt_column": "prompt", "answer_column": "answer", "column_map": {}}


def open_sampler(config: TrainConfig, longest: int) -> "Sampler":
    """A sampler of the model itself, for prompts of up to `longest` tokens."""
    import torch

    from gruppo.sampler import vLLMSampler
    from gruppo.trainer.build import sampler_of
    from gruppo.weights.source import context_length, load_tokenizer

    if config.threads:
        torch.set_num_threads(config.threads)
    kind, servers = read_sampler(config.sampler)
    if any(server != "start" for server in servers):
        raise InputError(
            f"sampler={config.sampler!r} has a model of its own, whichever one is named here; use torch, vllm or "
            "vllm:start"
        )
    tokenizer = load_tokenizer(config.tokenizer_id)
    if kind != "vllm":
        from gruppo.model import TransformersModel

        options: dict[str, Any] = {"temperature": config.temperature, "dtype": config.dtype, "trains": False}
        return sampler_of(config)(TransformersModel(config.pinned_model, tokenizer=tokenizer, **options))
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return vLLMSampler(
        config.pinned_model,
        tokenizer=tokenizer,
        servers=servers,
        dtype=("bfloat16" if has_bf16 else "float32") if config.dtype == "auto" else config.dtype,
        max_model_len=context_length(config.pinned_model) if config.has_turns else longest + config.max_new_tokens + 1,
        options=dict(config.vllm_options),
        deadline_s=config.advanced.sampler_deadline,
    )


def check_length(config: TrainConfig, options: dict[str, Any]) -> None:
    """Refuse a given token limit beyond the model's context, because its memory is reserved up front."""
    from gruppo.weights.source import context_length

    context = context_length(config.pinned_model) if "max_new_tokens" in options else None
    if context is not None and config.max_new_tokens > context:
        raise InputError(
            f"max_new_tokens={config.max_new_tokens} is more than the model's context of {context} tokens; lower it"
        )


def completions_file(path: Path | None) -> Path | None:
    """A file for completions, checked before they are sampled: nothing is overwritten."""
    if path is None:
        return None
    if path.suffix != ".parquet":
        raise InputError(f"output={str(path)!r} must end in .parquet")
    if path.exists():
        raise InputError(f"output={str(path)!r} exists already; choose another")
    return path


def write_completions(path: Path, groups: "Sequence[Group]") -> None:
    """Completions as the files of a run have them (docs/run_directory.md)."""
    from gruppo.run.completions import completions_table, parquet_bytes
    from gruppo.weights.files import replace_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, parquet_bytes(completions_table(0, groups)))
    except OSError as error:
        raise InputError(f"output={str(path)!r} cannot be written: {error}; choose another") from error


class SampleArguments(Arguments):
    """Draw completions.

    With --run, of its model, with the template, limits and stop texts that it sampled with; flags win over them.

    gruppo sample "47+85=" "12+34=" --num-samples 4
    gruppo sample "47+85=" --run runs/demo
    """

    prompts: Annotated[tuple[str, ...], Word("PROMPT", is_positional=True)] = ()
    """One or more prompts."""
    run: HomePath | None = None
    """A run directory."""
    num_samples: int = 1
    """Completions per prompt."""
    temperature: float | None = None
    """Temperature of sampling. 0 is greedy. Unset: as the run, else 1."""
    top_k: int = 0
    """Sample among the k most likely tokens. 0: all of them."""
    top_p: float = 1.0
    """Sample among the fewest tokens that hold this much probability."""
    min_p: float = 0.0
    """Sample among tokens with at least this share of the most likely token's probability."""
    seed: int = 0
    """Seed of sampling."""
    output: HomePath | None = None
    """New Parquet file for the completions."""
    trust: bool = False
    """Import the tools that the run names although another user owns its directory or can write it."""


SAMPLE_OPTIONS = (
    *("model", "tokenizer", "max_new_tokens", "stop", "chat", "system", "chat_template_kwargs", "sampler", "dtype"),
    *("tools", "environment", "max_turns"),
)


def sample(arguments: Sequence[str]) -> int:
    given, options = parse_options(SampleArguments, arguments, "sample", SAMPLE_OPTIONS)
    if not given.prompts:
        raise InputError('sample needs at least one prompt, e.g. gruppo sample "47+85="')
    if given.run is None and os.path.isfile(os.path.join(given.prompts[0], "config.yaml")):
        raise InputError(
            f"{given.prompts[0]!r} is a run directory, not a prompt; give it as --run {shell_word(given.prompts[0])}"
        )
    config = sample_config(given, options)
    output = completions_file(given.output)
    from rich.console import Console

    from gruppo.rollout.driver import Driver
    from gruppo.sampler import SamplingParams
    from gruppo.task import load_prompts
    from gruppo.trainer.build import build_player
    from gruppo.trainer.inputs import environments_by_name
    from gruppo.weights.source import load_tokenizer, longest_prompt

    environments = environments_by_name(config)
    tokenizer = load_tokenizer(config.tokenizer_id)
    params = SamplingParams(
        temperature=config.temperature if given.temperature is None else given.temperature,
        max_new_tokens=config.max_new_tokens,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        stop=config.stop,
        seed=given.seed,
    )
    found = load_prompts(
        [{"prompt": text} for text in given.prompts],
        tokenizer,
        max_prompt_tokens=longest_prompt(config.pinned_model, 1),
        chat=config.chat,
        system=config.system,
        chat_template_kwargs=config.chat_template_kwargs,
        tools_of=environments and environments.tools_of,
    )
    if found.dropped:
        raise InputError(f"{found.left_out()}; leave it out")
    for sentence in found.reading:
        print(sentence, file=sys.stderr)
    prompts = found.prompts
    check_length(config, options)
    if given.num_samples > MAX_SAMPLES:
        raise InputError(f"num_samples={given.num_samples} is more than {MAX_SAMPLES:,}; lower it")
    sampler = open_sampler(config, max(len(prompt.token_ids) for prompt in prompts))
    try:
        player = build_player(config, environments, config.pinned_model, tokenizer)
        with nullcontext() if player is None else closing(player):
            driver = Driver(sampler=sampler, scorer=None, player=player)
            groups, _ = driver.play(prompts, given.num_samples, params, step=0)
    finally:
        sampler.close()
    console = Console(highlight=False)
    for group in groups:
        for sequence in (rollout.trajectory for rollout in group.rollouts):
            console.print(sample_lines(sequence), soft_wrap=True)
    if output is not None:
        write_completions(output, groups)
    return 0


def sample_lines(sequence: "Trajectory") -> "Text":
    """A completion on one line, or an episode with a line for each call, answer and text."""
    from rich.text import Text

    from gruppo.run.console import spoken, visible

    facts = f"   log-prob {sum(sequence.logps or ()):.2f}, {sequence.num_sampled} tokens"
    prompt = visible(sequence.prompt.text)
    if sequence.messages is None:
        said = (visible(sequence.text, 10_000).plain, "bold")
        return Text.assemble(prompt, " -> ", said, f"{facts}, {sequence.stop_reason}")
    return Text("\n").join([Text.assemble(prompt, " ->"), *spoken(sequence), Text(f"{facts} of the policy")])


def sample_config(given: SampleArguments, options: dict[str, Any]) -> TrainConfig:
    """The options of the run, if there is one, with those that are given."""
    values: dict[str, Any] = {"model": "builtin", "max_new_tokens": 64}
    if given.run is not None:
        if has_turns(given.run):
            RunReader(given.run).check_owner(given.trust)
        values = of_run(given.run, options)
        # A list of messages goes through the template whether the run was told so or not.
        rows = read_lines(RunReader(given.run).held_out)[:1]
        values["chat"] = values.get("chat", False) or any(isinstance(row.get("prompt"), list) for row in rows)
    return TrainConfig.read(values | options, where="sample")


class ExportArguments(Arguments):
    """Copy a run's model into a folder of its own, for transformers, PEFT and vLLM.

    gruppo export runs/demo my-model
    gruppo export runs/lora my-merged-model --merge
    """

    source: Annotated[HomePath, Word("SOURCE", is_positional=True)]
    """A run directory, or a model folder."""
    output: Annotated[HomePath, Word("OUTPUT", is_positional=True)]
    """New folder to write."""
    merge: bool = False
    """Fold a LoRA adapter into the weights of its base."""


def export(arguments: Sequence[str]) -> int:
    given = parse(ExportArguments, arguments, "export")
    folder = given.source / "model" if (given.source / "model").is_dir() else given.source
    is_adapter = (folder / "adapter_config.json").is_file()
    if not is_adapter and not (folder / "config.json").is_file():
        raise InputError(
            f"{given.source} holds no model: no model/, config.json or adapter_config.json in it; give a run that has "
            "ended, or the folder of a model"
        )
    if given.merge and not is_adapter:
        raise InputError(f"{folder} holds no adapter to merge; leave out --merge")
    from gruppo.model import TransformersModel

    if given.merge:
        import torch

        from gruppo.model.checkpoint import save_pretrained, write_model
        from gruppo.model.lora import merge
        from gruppo.weights.source import load_dequantized, load_tokenizer

        adapted: Any = load_dequantized(str(folder), dtype=torch.float32)
        save_pretrained(partial(write_model, merge(adapted)), load_tokenizer(str(folder)), given.output, {})
    else:
        TransformersModel(str(folder), device="cpu").save(given.output)
    print(f"{given.output} holds the {'merged model' if given.merge else 'adapter' if is_adapter else 'model'}")
    return 0
