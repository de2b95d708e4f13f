"""The completions of one step as arguments for reward functions: checked once, cut into calls."""

from collections.abc import Mapping, Sequence
from typing import Any

from gruppo.errors import InputError
from gruppo.reward.base import PER_STEP, STANDARD, Parameters, as_completions, choose_arguments

_MAX_SHOWN = 200


class Request:
    """Everything that can be passed to a reward function in one step."""

    def __init__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]] | None,
        columns: Mapping[str, Sequence[Any]],
        step: int,
        rng_seed: int,
    ) -> None:
        self.num = len(completions)
        self.step = step
        self.rng_seed = rng_seed
        lists = {"prompts": prompts, "completion_ids": completion_ids, **columns}
        for name, values in lists.items():
            if values is not None and len(values) != self.num:
                raise InputError(f"{name} has {len(values)} entries for {self.num} completions; give one for each")
        self._texts = completions
        self._prompts = prompts
        self.available: dict[str, Any] = {
            **{name: values for name, values in columns.items() if name not in STANDARD},
            "prompts": prompts,
            "completions": as_completions(prompts, completions),
            "step": step,
            "rng_seed": rng_seed,
        }
        if completion_ids is not None:
            self.available["completion_ids"] = completion_ids

    def arguments(self, parameters: Parameters, indices: Sequence[int]) -> dict[str, Any]:
        """What a function with these parameters gets for some of the completions."""
        chosen = choose_arguments(parameters, self.available)
        return {
            name: value if name in PER_STEP else [value[index] for index in indices] for name, value in chosen.items()
        }

    def chunks(self, parts: int) -> list[range]:
        """Cut into about `parts` runs of equal size, never within a group: a function may compare its members.

        A group is a run of equal prompts.
        """
        aim = -(-self.num // parts)
        cuts = [0]
        for start in range(1, self.num):
            if start - cuts[-1] >= aim and self._starts_group(start):
                cuts.append(start)
        return [range(start, end) for start, end in zip(cuts, [*cuts[1:], self.num], strict=True)]

    def spread(self, indices: Sequence[int]) -> list[int]:
        """The same completions in an order that visits every group early: one bad group should not look like all."""
        place: dict[int, int] = {}
        for index in indices:
            starts = index - 1 not in place or self._starts_group(index)
            place[index] = 0 if starts else place[index - 1] + 1
        return sorted(indices, key=lambda index: (place[index], index))

    def describe(self, index: int | None) -> str:
        """A completion for an error text, short and without control characters."""
        if index is None:
            return "no completion"
        prompt, text = repr(self._prompts[index]), repr(self._texts[index])
        return f"completion {index} {_shorten(text)} of prompt {_shorten(prompt)}"

    def _starts_group(self, index: int) -> bool:
        this, before = self._prompts[index], self._prompts[index - 1]
        return this is not before and this != before


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"
