"""Order of the prompts as a function of the step: nothing to save, nothing to restore.

Steps walk through the permutation of epoch 0, then through that of epoch 1, and so on.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

from gruppo.errors import InputError

if TYPE_CHECKING:
    from numpy import ndarray

EPOCH_STREAM = 0
HOLDOUT_STREAM = 1
REFILL_STREAM = 2
EVAL_STREAM = 3


def shuffle(count: int, seed: int, *stream: int) -> "ndarray":
    """A permutation of 0 ... count-1 that depends on the seed and the stream numbers and nothing else."""
    import numpy as np

    if seed < 0:
        raise InputError(f"seed must not be negative, got {seed}")
    # NumPy promises to keep the raw stream; `Generator.permutation` may change.
    keys = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=stream)).random_raw(count)
    return np.argsort(keys, kind="stable")


def prompt_indices(
    num_prompts: int, step: int, prompts_per_step: int, seed: int, *, shuffled: bool = True
) -> list[int]:
    """Indices of the prompts of a step (steps count from 0).

    Each epoch visits every prompt once, and no step has a prompt twice.

    >>> [prompt_indices(5, step, 2, seed=0) for step in range(5)]
    [[2, 0], [4, 3], [1, 3], [4, 0], [2, 1]]
    >>> [prompt_indices(5, step, 2, seed=0, shuffled=False) for step in range(5)]
    [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]
    """
    if num_prompts < 1 or step < 0 or prompts_per_step < 1:
        raise InputError(
            f"need num_prompts >= 1, step >= 0 and prompts_per_step >= 1, "
            f"got {num_prompts}, {step} and {prompts_per_step}"
        )
    if prompts_per_step > num_prompts:
        # The random numbers of a completion are a function of (step, prompt): a prompt twice in a step would
        # give the same completions twice.
        raise InputError(
            f"prompts_per_step={prompts_per_step} is more than the {num_prompts} prompts there are; "
            f"set it to at most {num_prompts}"
        )
    if not shuffled:
        return _in_order(num_prompts, step * prompts_per_step, prompts_per_step)
    epoch, offset = divmod(step * prompts_per_step, num_prompts)
    indices = _epoch_order(num_prompts, epoch, prompts_per_step, seed)[offset : offset + prompts_per_step].tolist()
    missing = prompts_per_step - len(indices)
    if missing:
        indices += _epoch_order(num_prompts, epoch + 1, prompts_per_step, seed)[:missing].tolist()
    return indices


def refill_indices(
    num_prompts: int, step: int, prompts_per_step: int, seed: int, *, shuffled: bool = True
) -> list[int]:
    """All prompts in the order in which a step takes further ones, when those of `prompt_indices` do not suffice.

    >>> refill_indices(5, 0, 2, seed=0), refill_indices(5, 0, 2, seed=0, shuffled=False)
    ([1, 3, 0, 4, 2], [2, 3, 4, 0, 1])
    """
    if not shuffled:
        return _in_order(num_prompts, (step + 1) * prompts_per_step, num_prompts)
    return shuffle(num_prompts, seed, REFILL_STREAM, step).tolist()


def _in_order(num_prompts: int, first: int, count: int) -> list[int]:
    """So many places, from the `first`, of an endless line of passes over the prompts."""
    return [(first + i) % num_prompts for i in range(count)]


@lru_cache(maxsize=4)
def _epoch_order(num_prompts: int, epoch: int, prompts_per_step: int, seed: int) -> "ndarray":
    """The permutation of an epoch. In its first step, prompts that this step has from the epoch before move back."""
    import numpy as np

    def from_epoch_before(epoch: int) -> int:
        """Number of prompts of the step that enters this epoch that still belong to the one before."""
        return epoch * num_prompts % prompts_per_step

    # An order depends on the one before only if the border cuts a step: go back to where it does not.
    first = epoch
    while from_epoch_before(first):
        first -= 1
    if num_prompts >= 2 * prompts_per_step:
        first = max(first, epoch - 1)  # the end of an epoch is then out of reach of its own rearrangement

    order = shuffle(num_prompts, seed, EPOCH_STREAM, first)
    for later in range(first + 1, epoch + 1):
        taken = order[num_prompts - from_epoch_before(later) :]
        order = shuffle(num_prompts, seed, EPOCH_STREAM, later)
        head = order[:prompts_per_step]
        again = np.isin(head, taken)
        order[:prompts_per_step] = np.concatenate([head[~again], head[again]])
    order.flags.writeable = False  # it is shared through the cache
    return order
