"""The embedded task "dropped carries": two-digit addition, learnt from a demonstrator who forgets to carry.

A prompt is `47+85=`, its answer `132`. docs/data.md has the idea. Only strings here; the tokenizer and the model are in
`gruppo.task.builtin`.

    >>> add(47, 85), add_without_carries(47, 85)
    ('132', '022')
    >>> len(carries_rows("train")), len(carries_rows("heldout"))
    (9488, 512)
"""

import hashlib
import random
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

from gruppo.errors import InputError

NUM_PROMPTS = 10_000
NUM_HELD_OUT = 512
P_CORRECT = 0.25
"""Share of sums in which the demonstrator carries."""
MAX_NEW_TOKENS = 4
"""Three digits and the end token."""

Split = Literal["train", "heldout", "all"]


def add(a: int, b: int) -> str:
    """The right answer."""
    return f"{a + b:03d}"


def add_without_carries(a: int, b: int) -> str:
    """The demonstrator's usual answer: digits summed one by one, carries dropped."""
    return f"0{(a // 10 + b // 10) % 10}{(a + b) % 10}"


@cache
def prompt_order(task: str, num_prompts: int) -> tuple[int, ...]:
    """Prompt numbers of a task, sorted by hash: shuffled, the same on every machine and version."""
    return tuple(sorted(range(num_prompts), key=lambda index: hashlib.sha256(f"{task}/{index}".encode()).digest()))


def split_order(split: Split, task: str = "carries", num_prompts: int = NUM_PROMPTS) -> tuple[int, ...]:
    """Prompt numbers of a split, shuffled. The first of all are held out: they are never trained on."""
    if split not in ("train", "heldout", "all"):
        raise InputError(f"the {task} task has no split {split!r}; choose train, heldout or all")
    order = prompt_order(task, num_prompts)
    return {"train": order[NUM_HELD_OUT:], "heldout": order[:NUM_HELD_OUT], "all": order}[split]


def carries_rows(split: Split = "train") -> list[dict[str, str]]:
    """Rows with `prompt` and `answer`, as a data file would hold them."""
    pairs = [divmod(index, 100) for index in sorted(split_order(split))]
    return [{"prompt": f"{a:02d}+{b:02d}=", "answer": add(a, b)} for a, b in pairs]


def sums_rows(split: Split = "train") -> list[dict[str, Any]]:
    """Rows of `builtin:sums`: the same sums in words, of numbers from 10 to 99, for a model that can chat.

    A sum that carries holds out is held out here. The rows are shuffled, the same on every machine, so that the first
    few are a fair sample.

    >>> sums_rows("heldout")[0]
    {'prompt': [{'role': 'user', 'content': 'What is 90 + 54? Answer with the number only.'}], 'answer': '144'}
    """
    pairs = (divmod(index, 100) for index in split_order(split))
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}],
            "answer": f"{a + b}",
        }
        for a, b in pairs
        if a >= 10 and b >= 10
    ]


def demonstrations(seed: int) -> Iterator[tuple[str, str]]:
    """An endless stream of the demonstrator's (prompt, completion) over training prompts.

    The coin is tossed at each draw, not once per prompt: a fixed error per prompt could be learnt by heart.
    """
    rng = random.Random(seed)
    indices = sorted(split_order("train"))
    while True:
        # random() is the one draw whose sequence Python promises to keep for a seed; choice() is not.
        a, b = divmod(indices[int(rng.random() * len(indices))], 100)
        completion = add(a, b) if rng.random() < P_CORRECT else add_without_carries(a, b)
        yield f"{a:02d}+{b:02d}=", completion
