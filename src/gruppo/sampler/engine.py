"""What vLLMSampler asks of an engine, whether it lives in this process or behind HTTP."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gruppo.errors import SamplerError
from gruppo.sampler.params import SamplingParams
from gruppo.types import Prompt, StopReason


class EngineLost(SamplerError):
    """The engine died, hung or cannot be reached: it is to be brought back, given its weights, and asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`num_samples` completions of a prompt. Sample i is drawn from `seed + i`, whatever else is in the batch."""

    prompt: Prompt
    num_samples: int
    seed: int

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.prompt.token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine says it drew."""

    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    text: str
    stop_reason: StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What an engine says it read from a folder of weights."""

    tensors: int
    bytes: int


class Engine(Protocol):
    """Generates and scores under the weights it was given last."""

    name: str

    def wait_until_ready(self, deadline_s: float) -> None:
        """Return once it answers."""
        ...

    def generate(
        self, requests: Sequence[Request], params: SamplingParams, stop_ids: Sequence[int], deadline_s: float
    ) -> list[list[Completion]]:
        """The completions of each request, in order. Raises EngineLost when the deadline passes."""
        ...

    def logps_of(self, rows: Sequence[Sequence[int]], deadline_s: float) -> list[list[float]]:
        """Log-probs at temperature 1 of each row's tokens but the first."""
        ...

    def load_weights(self, folder: Path, deadline_s: float) -> Received | None:
        """Take all weights from a folder. None: the engine has no way to say what it read."""
        ...

    def load_adapter(self, folder: Path, version: int, deadline_s: float) -> Received | None:
        """Take the adapter in a folder, in the place of the last one."""
        ...

    def sleep(self) -> None:
        """Give memory back until the next call, where the platform can."""
        ...

    def revive(self, deadline_s: float) -> None:
        """Come back after EngineLost, with the weights of the start."""
        ...

    def close(self) -> None: ...


Poll = Callable[[], None]
"""Called wherever an engine waits; may raise to leave."""
