"""Trace of a training step: how much of gruppo a reader meets in it.

    python benchmarks/step_trace.py

Counts, over the second step of a run with default options on the embedded model: the files, the functions (`def` and
`lambda`; a comprehension counts with the function that it stands in), and the types that hold a sequence on its way
from the sampler to the optimizer. A type holds a sequence if one of its objects has the sequence's tokens or
log-probs, or an object that has them, and is handed on: some function returns it.
"""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import gruppo
from gruppo.trainer import GRPOTrainer, TrainConfig

ROOT = str(Path(gruppo.__file__).parent)


@dataclass(frozen=True, slots=True)
class Trace:
    """What ran in a step."""

    functions: dict[str, list[str]]
    """Names of the functions by file."""
    holders: list[str]
    """Names of the types that hold a sequence."""

    def __str__(self) -> str:
        lines = [f"{file:32} {len(names):3}  {', '.join(names)}" for file, names in sorted(self.functions.items())]
        total = sum(map(len, self.functions.values()))
        lines += ["", f"{len(self.functions)} files, {total} functions"]
        return "\n".join([*lines, f"{len(self.holders)} types hold a sequence: {', '.join(self.holders)}"])


def trace_step() -> Trace:
    """Trace the second step of a default run."""
    codes: set[CodeType] = set()
    made: list[Any] = []
    handed_on: dict[int, Any] = {}  # the objects stay alive, so that no other gets their id

    def hand_on(value: Any) -> None:
        handed_on[id(value)] = value
        if isinstance(value, tuple | list) and value and not isinstance(value[0], int | float):
            for item in value:
                hand_on(item)

    def watch(frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            codes.add(code)
        if event == "return" and code.co_filename.startswith(ROOT):
            hand_on(result)
        if event == "return" and code.co_name == "__init__":
            self = next(iter(frame.f_locals.values()))
            if type(self).__module__.startswith("gruppo"):
                made.append(self)

    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(output=f"{folder}/run", rewards=("exact_match",), max_new_tokens=6, tensorboard=False)
        trainer = GRPOTrainer(config, quiet=True)
        try:
            trainer.step()
            sys.setprofile(watch)
            trainer.step()
        finally:
            sys.setprofile(None)
            trainer.close()
    functions: dict[str, set[str]] = {}
    for code in codes:
        name = code.co_qualname.split(".<locals>.<")[0] if code.co_name != "<lambda>" else code.co_qualname
        functions.setdefault(code.co_filename[len(ROOT) + 1 :], set()).add(name)
    live = next(r for g in trainer.kept for r in g.rollouts if r.has_advantage and len(r.trajectory.tokens) >= 4)
    found = holders(made, live.trajectory, handed_on)
    return Trace({file: sorted(names) for file, names in functions.items()}, found)


def holders(made: list[Any], trajectory: Any, handed_on: dict[int, Any]) -> list[str]:
    """Types of the objects that hold the sequence and are handed on, in the order in which they first do."""
    tokens = list(trajectory.tokens)
    logps = torch.tensor(trajectory.logps)
    holding: set[int] = set()

    def holds(value: Any) -> bool:
        if id(value) in holding:
            return True
        if isinstance(value, tuple | list | dict):
            items = list(value.values()) if isinstance(value, dict) else list(value)
            if items and isinstance(items[0], int | float):
                return has_run(torch.tensor(items))
            return any(holds(item) for item in items)
        if hasattr(value, "__array__"):
            return has_run(torch.as_tensor(value).detach().flatten())
        return False

    def has_run(values: torch.Tensor) -> bool:
        if len(values) < len(tokens) or values.dtype == torch.bool:
            return False
        windows = values.unfold(0, len(tokens), 1)
        if values.is_floating_point():
            return bool(((windows - logps).abs() < 1e-4).all(1).any())
        return bool((windows.to(torch.int64) == torch.tensor(tokens)).all(1).any())

    found: dict[str, None] = {}
    for each in made:  # an object is made after those that it holds
        if any(holds(value) for value in members(each)):
            holding.add(id(each))
            if id(each) in handed_on:
                found[type(each).__name__] = None
    return list(found)


def members(thing: Any) -> Iterator[Any]:
    names = [f.name for f in fields(thing)] if is_dataclass(thing) else list(getattr(thing, "__dict__", ()))
    return (getattr(thing, name) for name in names if hasattr(thing, name))


if __name__ == "__main__":
    print(trace_step())
