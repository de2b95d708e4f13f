"""Metrics of turns: how many an episode has, what its calls come to, and how it ends."""

from collections.abc import Sequence

from gruppo.types import Trajectory


def turn_metrics(sequences: Sequence[Trajectory]) -> dict[str, float]:
    """The `turns/` keys (docs/metrics.md) over those of the trajectories that are episodes; nothing without any.

    Shares of calls are absent where there is no call.
    """
    episodes = [(s, s.messages) for s in sequences if s.messages is not None]
    if not episodes:
        return {}
    turns = [sum(m["role"] == "assistant" for m in messages) for _, messages in episodes]
    said = [message for _, messages in episodes for message in messages]
    calls = [call for message in said for call in message.get("tool_calls") or ()]
    num, num_calls = len(episodes), len(calls)
    failed = sum(message["role"] == "tool" and message.get("is_error", False) for message in said)
    unread = sum(bool(call.get("error")) for call in calls)
    return {
        "turns/mean": sum(turns) / num,
        "turns/max": float(max(turns)),
        "turns/calls": num_calls / num,
        **({"turns/call_error_frac": failed / num_calls, "turns/unparsed_frac": unread / num_calls} if calls else {}),
        "turns/lost_frac": sum(s.is_lost for s, _ in episodes) / num,
        "turns/cut_frac": sum(s.is_truncated for s, _ in episodes) / num,
        "turns/given_tokens": sum(len(s.tokens) - s.num_sampled for s, _ in episodes) / num,
    }
