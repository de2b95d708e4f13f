"""Episodes that are written by hand: a conversation becomes tokens with a tokenizer of words, as ChatML has them."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models
from written_runs import metrics_of, run_directory

from gruppo.run.directory import RunDirectory
from gruppo.types import Group, Message, Prompt, Rollout, Trajectory

WORD = re.compile(r"<[^<>\s]*>|\w+|\s|[^\w\s]")
Made = tuple[Prompt, Sequence[Rollout]]


def says(text: str, *calls: dict[str, Any], error: str = "") -> Message:
    """A turn of the policy with calls by name and arguments; `error`: a call that cannot be read."""
    made = [{"type": "function", "function": call} for call in calls] + ([{"error": error}] if error else [])
    return (
        {"role": "assistant", "content": text, "tool_calls": made} if made else {"role": "assistant", "content": text}
    )


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def answers(text: str, name: str = "multiply", *, is_error: bool = False) -> Message:
    return {"role": "tool", "content": text, "name": name, "is_error": is_error}


class Words:
    """Words as token ids."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {"<|pad|>": 0}

    def of(self, text: str) -> list[int]:
        whole = text.encode("utf-8", "replace").decode()  # a vocabulary has no half characters
        return [self.ids.setdefault(word, len(self.ids)) for word in WORD.findall(whole)]

    def save(self, folder: Path) -> None:
        tokenizer = Tokenizer(models.WordLevel(vocab=self.ids, unk_token="<|pad|>"))
        tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))


def episode(words: Words, prompt: Prompt, messages: Sequence[Message], draw: random.Random, **facts: Any) -> Rollout:
    """A rollout of a conversation, with numbers at the sampled tokens. A last answer was not given to the policy."""
    tokens: list[int] = []
    sampled: list[bool] = []
    for i, message in enumerate(messages):
        is_own = message["role"] == "assistant"
        if is_own:
            calls = [json.dumps(c.get("function", {"name": "multiply, {"})) for c in message.get("tool_calls", ())]
            text = message["content"] + "".join(f"<tool_call>\n{c}\n</tool_call>" for c in calls) + "<|im_end|>"
        elif not any(later["role"] == "assistant" for later in messages[i:]):
            continue
        else:
            mark = ("<tool_response>\n", "\n</tool_response>") if message["role"] == "tool" else ("", "")
            text = f"\n<|im_start|>user\n{mark[0]}{message['content']}{mark[1]}<|im_end|>\n"
            text += "<|im_start|>assistant\n" if messages[i + 1]["role"] == "assistant" else ""
        new = words.of(text)
        tokens += new
        sampled += [is_own] * len(new)
    num = sum(sampled)
    old = tuple(-draw.expovariate(2) for _ in range(num))
    own = {name: facts.pop(name) for name in ("stop_reason", "error") if name in facts}
    last = [message["content"] for message in messages if message["role"] == "assistant"][-1]
    trajectory = Trajectory(
        prompt=prompt,
        tokens=tuple(tokens),
        sampled=tuple(sampled),
        logps=old,
        text=last,
        messages=tuple(messages),
        **own,
    )
    reward = facts.get("reward")
    moved = tuple(x + draw.gauss(0, 0.02) for x in old)
    entropies = tuple(draw.random() for _ in old)
    known: dict[str, Any] = {"old_logps": old, "policy_logps": moved, "entropies": entropies}
    judged: dict[str, Any] = {"correct": None if reward is None else reward == 1, "rewards": {"answer": reward}}
    known |= {"errors": {"environment": trajectory.error} if trajectory.error else {}}
    return Rollout(trajectory=trajectory, **(known | judged | facts))


QUESTION = "What is 37 * 48?"
TRACE = 'Traceback (most recent call last):\n  File "shop.py", line 7, in step\nZeroDivisionError: division by zero'


def calculator(words: Words, draw: random.Random) -> Made:
    """A group with every end, calls that fail, and calls that cannot be read."""
    text = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    prompt = Prompt(token_ids=tuple(words.of(text)), text=text, columns={"answer": "1776"}, index=4)
    times = says("", call("multiply", a=37, b=48))
    wrong = says("Let me see. ", call("multiply", a=37, b="forty-eight"))
    type_error = answers("TypeError: can't multiply sequence by non-int of type 'str'", is_error=True)
    unread = says("", error="it is no JSON: Expecting ',' at character 12")
    made = [
        ([times, answers("1776"), says("The answer is 1776.")], {"reward": 1.0, "advantage": 1.2}),
        (
            [wrong, type_error, times, answers("1776"), says("It is 1776, I think.")],
            {"reward": 1.0, "advantage": 0.9, "stop_reason": "done"},
        ),
        ([says("It is 1676.")], {"reward": 0.0, "advantage": -0.8}),
        (
            [unread, answers("the call is no JSON: Expecting ',' at character 12", "tool", is_error=True)] * 2
            + [unread],
            {"reward": 0.0, "advantage": -0.8, "stop_reason": "turns"},
        ),
        ([says("Thirty-seven times forty-eight is " + "and " * 30)], {"reward": 0.0, "stop_reason": "length"}),
        (
            [says("", call("search", query="37 * 48")), answers("Lorem ipsum dolor. " * 20, "search")],
            {"reward": 0.0, "stop_reason": "context"},
        ),
        ([times], {"stop_reason": "env_error", "error": TRACE}),
        ([times, answers("1776"), times], {"stop_reason": "deadline", "error": "no answer within 30 s"}),
    ]
    return prompt, [episode(words, prompt, messages, draw, **facts) for messages, facts in made]


def game(words: Words, draw: random.Random) -> Made:
    """A guessing game without tools, of which each episode begins in its own way."""
    text = "<|im_start|>user\nGuess my number, from 1 to {}.<|im_end|>\n<|im_start|>assistant\n"
    prompts = [
        Prompt(token_ids=tuple(words.of(text.format(n))), text=text.format(n), columns={"answer": "5"}, index=9)
        for n in (8, 16)
    ]
    higher: Message = {"role": "user", "content": "higher"}
    right: Message = {"role": "user", "content": "You win!"}
    made = [
        ([says("4"), higher, says("6"), {"role": "user", "content": "lower"}, says("5"), right], 1.0, "done"),
        ([says("1"), higher, says("2"), higher, says("3")], 0.0, "turns"),
    ]
    rollouts = [
        episode(words, prompt, talk, draw, reward=reward, stop_reason=stop, advantage=reward - 0.5)
        for (talk, reward, stop), prompt in zip(made, prompts, strict=True)
    ]
    return prompts[0], rollouts


def write_episodes(path: Path, *more: Made, steps: int = 1, words: Words | None = None) -> RunDirectory:
    """A finished run of a calculator and a game."""
    draw, words = random.Random(0), words or Words()
    with run_directory(path, steps) as run:
        for step in range(1, steps + 1):
            groups = [calculator(words, draw), game(words, draw), *more]
            run.write_completions(step, [Group(prompt=p, rollouts=tuple(rollouts)) for p, rollouts in groups])
            run.log_metrics(step, metrics_of(step, draw) | turns_of(step, draw))
            run.log_timings(step, {"sample": 1.0, "env": 0.4, "reward": 0.1, "train": 2.0})
        run.set_status("done", steps)
        words.save(run.path / "model")
    return run


def turns_of(step: int, draw: random.Random) -> dict[str, float]:
    return {
        "turns/mean": 2 + draw.random() / 5,
        "turns/max": 5.0,
        "turns/calls": 1.2 + draw.random() / 5,
        "turns/call_error_frac": 0.3 / step + draw.random() / 20,
        "turns/unparsed_frac": 0.2 / step,
        "turns/lost_frac": 0.01 * draw.random(),
        "turns/cut_frac": 0.2 / step,
        "turns/given_tokens": 30.0 + draw.random(),
    }
