"""Micro-batches: the sequences that share a forward.

The split is for memory and speed only: losses divide by the totals of the step, so no result depends on it.
"""

from collections.abc import Sequence

from gruppo.errors import InputError


def split_by_tokens(lengths: Sequence[int], tokens_per_microbatch: int) -> list[list[int]]:
    """Split sequences of these lengths into as few micro-batches as fit the budget, of nearly equal token counts.

    Longest first, each into the emptiest micro-batch; the number of micro-batches grows until all fit. A sequence
    longer than the budget gets a micro-batch of its own. The result is indices into `lengths`, one list per
    micro-batch, each in order.

    >>> split_by_tokens([4, 3, 2, 1], tokens_per_microbatch=5)
    [[0, 3], [1, 2]]
    """
    if tokens_per_microbatch < 1:
        raise InputError(f"tokens_per_microbatch must be at least 1, got {tokens_per_microbatch}")
    alone = [[i] for i, n in enumerate(lengths) if n >= tokens_per_microbatch]
    rest = sorted((i for i, n in enumerate(lengths) if n < tokens_per_microbatch), key=lambda i: -lengths[i])
    if not rest:
        return alone
    num_bins = -(-sum(lengths[i] for i in rest) // tokens_per_microbatch) or 1
    while True:
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        load = [0] * num_bins
        for i in rest:
            emptiest = min(range(num_bins), key=load.__getitem__)
            bins[emptiest].append(i)
            load[emptiest] += lengths[i]
        if max(load) <= tokens_per_microbatch:
            return sorted(alone + [sorted(b) for b in bins if b])
        num_bins += 1


def split_padded(lengths: Sequence[int], tokens_per_microbatch: int) -> list[list[int]]:
    """Split for rows padded to the longest of their micro-batch: rows x longest stays within the budget.

    Sequences of similar length go together, longest first; a sequence longer than the budget goes alone.

    >>> split_padded([4, 1, 3, 1], tokens_per_microbatch=8)
    [[0, 2], [1, 3]]
    """
    if tokens_per_microbatch < 1:
        raise InputError(f"tokens_per_microbatch must be at least 1, got {tokens_per_microbatch}")
    parts: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[parts[-1][0]] if parts else 0  # the first of a part is its longest
        if parts and longest * (len(parts[-1]) + 1) <= tokens_per_microbatch:
            parts[-1].append(i)
        else:
            parts.append([i])
    return [sorted(part) for part in parts]


def split_shared(
    groups: Sequence[int], prompt_slots: Sequence[int], own_slots: Sequence[int], tokens_per_microbatch: int
) -> list[list[int]]:
    """Split for prompts that are computed once per group and micro-batch.

    A group stays together as long as its prompt and all its completions fit the budget; a larger one is split into
    as few parts as fit. The budget counts the slots of a prompt once per group and part, and the own slots of each
    sequence.

    >>> split_shared([0, 0, 1, 1], [4, 4, 4, 4], [2, 2, 5, 6], tokens_per_microbatch=10)
    [[0, 1], [2], [3]]
    """
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    parts: list[list[int]] = []
    sizes: list[int] = []
    for indices in members.values():
        prompt = prompt_slots[indices[0]]
        room = max(tokens_per_microbatch - prompt, 1)  # a completion that does not fit beside its prompt goes alone
        own = [own_slots[i] for i in indices]
        pieces = [list(range(len(own)))] if sum(own) <= room else split_by_tokens(own, room)
        parts += [[indices[j] for j in piece] for piece in pieces]
        sizes += [prompt + sum(own[j] for j in piece) for piece in pieces]
    return sorted(sorted(i for p in bin_ for i in parts[p]) for bin_ in split_by_tokens(sizes, tokens_per_microbatch))
