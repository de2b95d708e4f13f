"""SamplingParams: how tokens are drawn."""

from dataclasses import dataclass

from gruppo.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Temperature 0 is greedy. Filters (top-k, top-p, min-p) change what is drawn, not the reported log-probs: those
    are always over the whole vocabulary at `temperature`, as the trainer scores them."""

    temperature: float = 1.0
    max_new_tokens: int = 256
    top_k: int = 0
    """Draw among the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Draw among the fewest tokens that hold this much probability."""
    min_p: float = 0.0
    """Draw among tokens with at least this share of the most likely token's probability."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion; they are cut from `text`, their tokens stay in `tokens`."""
    seed: int = 0
    step: int | None = None
    """With `seed`, prompt and sample number this decides every random draw. None: the number of calls without a step
    that the sampler has had, so that each call draws anew."""

    def __post_init__(self) -> None:
        bounds = {
            "temperature": (self.temperature >= 0, "0 (greedy) or more"),
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1)"),
        }
        for name, (is_good, expected) in bounds.items():
            if not is_good:
                raise InputError(f"{name} must be {expected}, got {getattr(self, name)!r}")

    @property
    def filters(self) -> bool:
        """Whether tokens are drawn from less than the whole vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0
