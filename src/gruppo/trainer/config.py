"""TrainConfig: every option of a run, for Python, YAML and flags alike, checked before anything heavy is loaded."""

import difflib
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from pydantic import ValidationError, model_validator

from gruppo import options
from gruppo.errors import InputError
from gruppo.peer_names import ABSENT, ELSEWHERE, REFUSED, TRL, answer
from gruppo.process.streams import shell_word
from gruppo.run.reader import RunReader, read_yaml

_WHERE = " where"
"""Key of the name that errors begin with; no option can be called so."""

ARGUMENTS = {
    "overwrite": "GRPOTrainer(config, overwrite=True); on the command line --overwrite",
    "resume": "GRPOTrainer(config, resume=True); on the command line gruppo resume RUN",
    "accept_changes": "GRPOTrainer(config, resume=True, accept_changes=True); on the command line --accept-changes",
    "quiet": "GRPOTrainer(config, quiet=True)",
    "callbacks": "GRPOTrainer(config, callbacks=[...])",
    "peft_config": "GRPOTrainer(config, peft_config=...)",
    "tokenizer": "GRPOTrainer(config, model=..., tokenizer=...)",
}
"""Arguments of GRPOTrainer that are no options, and how they are given."""

MAX_ROLLOUTS = 2**22
MAX_LINES = 20
"""Of an error on a config."""
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxtuple, _REPR.maxdict = 3, 8, 8, 8
_REPR.maxstring, _REPR.maxlong, _REPR.maxother = 200, 60, 200


# Bases in reverse: pydantic puts the fields of the last base first, and so do --help and YAML.
class TrainConfig(
    options.RunOptions,
    options.EvalOptions,
    options.OptimOptions,
    options.LossOptions,
    options.AdvantageOptions,
    options.RolloutOptions,
    options.RewardOptions,
    options.DataOptions,
    options.ModelOptions,
):
    """Options of a run: the groups of `gruppo/options.py` together."""

    if not TYPE_CHECKING:  # a type checker keeps the fields as parameters

        def __init__(self, **values: Any) -> None:
            where = values.pop(_WHERE, "TrainConfig")
            try:
                super().__init__(**options.merged(values))
            except ValidationError as error:
                advanced = [f"advanced.{name}" for name in options.AdvancedOptions.model_fields]
                raise InputError(explain(error, where, [*OPTIONS, *advanced])) from None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.clip_range is not None:
            from gruppo.loss.named import read_clip_range  # brings torch, which --help does not need

            read_clip_range(self.clip_range, low_acts=False)  # whether it does is checked with the loss
        if self.prompts_per_step % self.minibatches:
            divisors = [d for d in range(1, min(self.prompts_per_step, 10_000) + 1) if self.prompts_per_step % d == 0]
            raise ValueError(
                f"minibatches={self.minibatches} does not divide prompts_per_step={self.prompts_per_step}; "
                f"use one of {divisors}"
            )
        if self.prompts_per_step * self.group_size > MAX_ROLLOUTS:
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} with group_size={self.group_size} is more than "
                f"{MAX_ROLLOUTS:,} completions in a step, which no memory holds; lower one of them"
            )
        if self.overlong_cache > self.max_new_tokens:
            raise ValueError(
                f"overlong_cache={self.overlong_cache} is more than max_new_tokens={self.max_new_tokens}; lower it"
            )
        more = self.advanced
        if self.completions_every and more.completions_limit < self.group_size:
            raise ValueError(
                f"completions_limit={more.completions_limit} is less than group_size={self.group_size}, and a file "
                "takes whole groups; raise it, or set completions_every=0"
            )
        if self.quantize and self.sampler.startswith("vllm"):
            raise ValueError(
                f"quantize={self.quantize!r} cannot go with sampler={self.sampler!r}: vLLM would sample from the base "
                "in full precision, another policy than the one that trains. Use sampler=torch, or leave quantize out"
            )
        if self.lora_modules_to_save and self.sampler.startswith("vllm"):
            raise ValueError(
                f"lora_modules_to_save={list(self.lora_modules_to_save)} cannot go with sampler={self.sampler!r}: vLLM "
                "takes adapters without whole modules only. Use sampler=torch, or leave lora_modules_to_save out"
            )
        if self.streaming and self.lora and self.sampler.startswith("vllm"):
            raise ValueError(
                f"streaming=true cannot go with lora=true and sampler={self.sampler!r}: for requests that still run, "
                "vLLM reads the adapter before again, in the place of the new one. Use lora=false, or no streaming"
            )
        if self.streaming and self.has_turns:
            which = f"tools={list(self.tools)}" if self.tools else f"environment={self.environment!r}"
            raise ValueError(
                f"streaming=true cannot go with {which}: a group in flight is one turn so far. Leave streaming out; "
                "max_staleness alone samples episodes ahead"
            )
        if self.ref_every and self.lora and more.ref_mix < 1:
            raise ValueError(
                f"ref_mix={more.ref_mix:g} needs all weights: a mixture of two adapters' factors is not a mixture of "
                "the models. With lora use ref_mix=1"
            )
        if self.ref_every and not (self.beta or self.kl_in_reward):
            raise ValueError("ref_every moves a reference that nothing uses; set beta or kl_in_reward")
        if more.kl_target is not None and not self.kl_in_reward:
            raise ValueError("kl_target needs kl_in_reward above 0: the coefficient that it starts from")
        for given, value in {f"patience={more.patience}": more.patience, "keep_best": self.keep_best}.items():
            if value and self.eval_prompts == 0:
                raise ValueError(f"{given} needs eval_prompts of at least 1")
            if value and not self.eval_every:
                raise ValueError(f"{given} needs eval_every of at least 1: nothing is evaluated on the way")
        return self

    @property
    def has_turns(self) -> bool:
        """Whether a completion is an episode of several turns."""
        return bool(self.tools) or self.environment is not None

    @classmethod
    def read(cls, values: dict[str, Any], where: str = "config") -> "TrainConfig":
        """Check plain values; the error names every wrong field, what it got and what would do."""
        named: dict[str, Any] = {str(name): value for name, value in values.items()}  # YAML has numbers for names too
        named[_WHERE] = where
        return cls(**named)

    @classmethod
    def of_run(cls, directory: str | Path, overrides: dict[str, Any] | None = None) -> "TrainConfig":
        """The config of a run, with the directory's current place; `overrides` win."""
        run = RunReader(directory)
        try:
            return cls.read(options.merged(run.config(), overrides or {}), where=str(Path(directory) / "config.yaml"))
        except InputError:
            run.check_format()  # its options may be those of another version, which explains more
            raise

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: dict[str, Any] | None = None) -> "TrainConfig":
        """A config file; `overrides` win."""
        return cls.read(options.merged(read_yaml(path), overrides or {}), where=str(path))

    def to_yaml(self) -> str:
        import yaml

        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


OPTIONS = TrainConfig.model_fields | options.AdvancedOptions.model_fields
"""All options by name, the advanced last."""


def refuse_arguments(names: Iterable[str]) -> NoReturn:
    """Raises for arguments that GRPOTrainer does not have: with their names here, or as Python does."""
    own = [f"{name!r}: it is an option, for TrainConfig({name}=...)" for name in names if name in OPTIONS]
    theirs = [f"{name!r}: {answer(name)}" for name in names if name not in OPTIONS and answer(name)]
    if own or theirs:
        raise InputError(f"GRPOTrainer has no argument {'; nor '.join(theirs + own)}")
    raise TypeError(f"GRPOTrainer got an unexpected keyword argument {next(iter(names))!r}")


def explain(error: ValidationError, where: str, known: list[str]) -> str:
    """A pydantic error with one line per field: name, value, problem, remedy."""
    lines = []
    for item in error.errors():
        inner = [str(p) for p in item["loc"][1:] if not str(p).startswith(("function-", "float", "tuple", "int"))]
        field = ".".join([*map(str, item["loc"][:1]), *inner])
        if nested := _nested(field, item["input"]):
            lines += [f"{where}: unknown option {name!r}; {answer(name)}" for name in nested]
        elif item["type"] == "extra_forbidden" and field in REFUSED:
            lines.append(f"{where}: {field}={_shown(item['input'])} is refused: {REFUSED[field]}")
        elif item["type"] == "extra_forbidden" and field in ARGUMENTS:
            lines.append(f"{where}: {field} is an argument of GRPOTrainer: {ARGUMENTS[field]}")
        elif item["type"] == "extra_forbidden" and answer(field):
            lines.append(f"{where}: unknown option {field!r}; {answer(field)}")
        elif item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(field, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see `gruppo train --help`"
            lines.append(f"{where}: unknown option {field!r}; {hint}")
        elif field:
            lines.append(f"{where}: {field}={_shown(item['input'])}: {item['msg'].removeprefix('Value error, ')}")
        else:
            lines.append(f"{where}: {item['msg'].removeprefix('Value error, ')}")
    if where.endswith((".yaml", ".yml")) and sum(item["loc"][0] in TRL for item in error.errors() if item["loc"]) > 1:
        lines.append(
            f"{where} looks like a configuration of TRL; `gruppo convert trl {shell_word(where)}` prints it as one of "
            "gruppo"
        )
    lines = list(dict.fromkeys(lines))
    more = [f"{where}: and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
    return "\n".join([line if len(line) <= 1000 else f"{line[:1000]}..." for line in lines[:MAX_LINES]] + more)


def _nested(field: str, value: Any) -> list[str]:
    """Dotted names of another trainer that nested options have, as verl's do.

    >>> _nested("actor_rollout_ref", {"rollout": {"n": 8, "m": 8}})
    ['actor_rollout_ref.rollout.n']
    """
    found = []
    for name in (*ELSEWHERE, *ABSENT):
        if name.startswith(f"{field}."):
            inner = value
            for part in name.removeprefix(f"{field}.").split("."):
                inner = inner.get(part) if isinstance(inner, dict) else None
            found += [] if inner is None else [name]
    return found


def _shown(value: Any) -> str:
    """A value in a message, cut: `repr` of a hostile one is of any length, and that of an object of several lines."""
    text = _REPR.repr(value)
    return f"<{type(value).__name__}>" if "\n" in text else text
