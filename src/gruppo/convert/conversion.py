"""Conversion: the options of a run that stand for a peer's, with a sentence on each."""

from dataclasses import dataclass, field
from math import ceil
from typing import Any, get_args

from gruppo.errors import InputError
from gruppo.trainer.config import OPTIONS, TrainConfig
from gruppo.trainer.elsewhere import ABSENT, REFUSED, Reason


@dataclass
class Conversion:
    """Rules take options of a peer out of `given`; what they leave is looked up in the table of names by `finish`."""

    peer: str
    given: dict[str, Any]
    """Options of the peer that no rule has taken yet."""
    names: dict[str, str]
    """Their names here (`gruppo.trainer.elsewhere`)."""
    values: dict[str, Any] = field(default_factory=dict)
    """The options of the run."""
    exact: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    yours: list[str] = field(default_factory=list)
    """Options that the source does not settle, and that the user must set."""

    def take(self, name: str, default: Any = None) -> Any:
        """The value of an option, which is taken; `default` where it is not given or null."""
        value = self.given.pop(name, None)
        if isinstance(value, str | list) and isinstance(default, int | float):
            raise InputError(f"{name}={value!r} is not a number or a truth value; give it after the file: --{name} ...")
        return default if value is None else value

    def shown(self, name: str, value: Any) -> str:
        return f"{name}={value}" if name in self._given_first else f"{name}={value} (the default of {self.peer})"

    def __post_init__(self) -> None:
        self.given = {name: value for name, value in self.given.items() if value is not None}
        self._given_first = frozenset(self.given)

    def same(self, theirs: str, **options: Any) -> None:
        """Options that mean the same."""
        self.values |= options
        self.exact.append(f"{theirs} -> {_written(options)}")

    def near(self, theirs: str, why: str | Reason, **options: Any) -> None:
        """Options that are the nearest, and in what they differ."""
        self.values |= options
        self.differs.append(f"{theirs}{' -> ' + _written(options) if options else ''}: {why}")

    def none(self, theirs: str, why: Reason) -> None:
        """An option that gruppo does not have: `why` says until when that is so."""
        self.absent.append(f"{theirs}: {why}")

    def unknown(self, theirs: str, why: str = "not known here") -> None:
        self.absent.append(f"{theirs}: {why}")

    def ask(self, option: str, why: str) -> None:
        self.yours.append(f"{option}: {why}")

    def whole(self, theirs: str, number: float, **nearest: Any) -> int:
        """A number that must be whole; rounded up, with a sentence, where it is not."""
        if number != int(number):
            self.near(theirs, f"{number:g} is not whole; rounded up", **nearest)
        return max(ceil(number), 1)

    def every(self, theirs: str, number: float, option: str) -> None:
        """An interval in steps; rounded, with a sentence, where it is not whole."""
        if number == int(number) and number >= 1:
            self.same(theirs, **{option: int(number)})
        else:
            self.near(theirs, f"{number:g} steps, rounded", **{option: max(round(number), 1)})

    def filters(self, neutral: dict[str, tuple[Any, ...]]) -> None:
        """Sampling filters, which are refused unless their value keeps every token."""
        for name, values in neutral.items():
            value = self.take(name)
            if value is not None and value not in values:
                self.none(f"{name}={value}", REFUSED["top_p"])

    def finish(self) -> "Conversion":
        """Look up what no rule took."""
        for name, value in self.given.items():
            own, _, note = self.names.get(name, name).partition(": ")
            if name in ABSENT:
                self.none(f"{name}={value}", ABSENT[name])
            elif own in OPTIONS and not note:
                self.same(f"{name}={value}", **{own: value})
            elif note:
                self.ask(own, f"{name}={value} there; here {note}")
            else:
                self.unknown(f"{name}={value}")
        self.given = {}
        weights, rewards = self.values.get("reward_weights"), self.values.get("rewards", ())
        if weights and len(weights) != len(rewards):
            self.ask("rewards", f"the functions of the script, one for each of reward_weights: {weights}")
            if rewards:
                del self.values["reward_weights"]
        for option in ("model", "data", "rewards", "steps"):
            if option == "steps" and "epochs" in self.values:
                continue
            if option not in self.values and not any(line.startswith(f"{option}: ") for line in self.yours):
                self.ask(option, "not in the source; set it")
        return self

    def text(self) -> str:
        """A config file with the sentences as comments."""
        import yaml

        parts = {"set these yourself": self.yours, "differs": self.differs, "no counterpart": self.absent}
        lines = [f"# Converted from {self.peer}."]
        for title, sentences in ({"maps exactly": self.exact} | parts).items():
            lines += [f"# {title}:", *(f"#   {sentence}" for sentence in sentences)] if sentences else []
        body = yaml.safe_dump(self.values, sort_keys=False, allow_unicode=True) if self.values else ""
        return "\n".join(lines) + "\n" + body


SCHEDULES = get_args(TrainConfig.model_fields["lr_schedule"].annotation)


def _written(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in options.items())


def hub_data(name: str, config: str | None = None, split: str | None = None) -> str:
    """A data set by its name as `data` takes it: a file stays a file."""
    if name.endswith((".jsonl", ".csv", ".parquet")) or "://" in name:
        return name
    return f"hf://{name}" + (f"/{config}" if config else "") + (f":{split}" if split and split != "train" else "")


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
