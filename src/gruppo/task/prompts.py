"""Prompts of a run: rows rendered as text or through the tokenizer's chat template, tokenised and measured.

>>> from transformers import AutoTokenizer
>>> from gruppo.task.builtin import builtin_model_path
>>> tokenizer = AutoTokenizer.from_pretrained(builtin_model_path())
>>> prompts = load_prompts([{"prompt": "47+85=", "answer": "132"}], tokenizer)
>>> prompts[0].token_ids, prompts[0].columns
((1, 8, 11, 14, 12, 9, 15), {'answer': '132'})
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from gruppo.errors import InputError
from gruppo.reward.call import STANDARD
from gruppo.task.dataset import BAD_ROW_REMEDY, BadRowPolicy, DroppedRow, Row, Rows, TooLongRow
from gruppo.task.order import HOLDOUT_STREAM, shuffle
from gruppo.task.row_check import prompt_kind
from gruppo.task.sources import resolve_source
from gruppo.task.template import Rendered, begun_turn, render_chats
from gruppo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENCODE_CHUNK = 1024

ToolsOf = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
"""The tools of a row, in OpenAI's form, by its columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts, and the rows that did not become one."""

    prompts: tuple[Prompt, ...]
    dropped: tuple[DroppedRow, ...] = ()
    reading: tuple[str, ...] = ()
    """Sentences on how rows became prompts: the columns that were recognised, and the template."""

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    def left_out(self) -> str:
        """A sentence on the rows that did not become a prompt; empty if all did.

        >>> PromptSet(prompts=(), dropped=(TooLongRow("a.jsonl:3", "prompt has 203 tokens, limit 60"),)).left_out()
        '1 row is left out, 1 of them for its length; the first: a.jsonl:3: prompt has 203 tokens, limit 60'
        """
        if not self.dropped:
            return ""
        long = sum(isinstance(row, TooLongRow) for row in self.dropped)
        count = "1 row is" if len(self.dropped) == 1 else f"{len(self.dropped)} rows are"
        reason = f", {long} of them for {'its' if long == 1 else 'their'} length" if long else ""
        return f"{count} left out{reason}; the first: {self.dropped[0].row}: {self.dropped[0].reason}"

    def split_holdout(self, n: int, seed: int | None) -> tuple["PromptSet", "PromptSet"]:
        """Training prompts and `n` held-out ones; the same for the same seed and number of prompts. Without a seed the
        first are held out.

        A training prompt with the same tokens as a held-out one is dropped from training, with a reason: the
        held-out score would otherwise count what was trained on.
        """
        if not 0 <= n < len(self.prompts):
            raise InputError(
                f"cannot hold out {n} of {len(self.prompts)} prompts; at least one must remain to train on"
            )
        drawn = range(n) if seed is None else shuffle(len(self.prompts), seed, HOLDOUT_STREAM)[:n].tolist()
        chosen = set(drawn)
        held_out = tuple(prompt for index, prompt in enumerate(self.prompts) if index in chosen)
        seen = {prompt.token_ids for prompt in held_out}
        rest = [prompt for index, prompt in enumerate(self.prompts) if index not in chosen]
        train = tuple(prompt for prompt in rest if prompt.token_ids not in seen)
        repeated = [f"row {prompt.index}" for prompt in rest if prompt.token_ids in seen]
        if not train:
            raise InputError(f"holding out {n} prompts leaves none to train on: the others repeat them")
        dropped = (DroppedRow(row, "the same prompt is held out") for row in repeated)
        kept = replace(self, prompts=train, dropped=(*self.dropped, *dropped))
        return kept, replace(self, prompts=held_out, dropped=())


def check_columns(rows: Rows) -> None:
    """Refuse columns with the name of something else that rewards receive; `self` is a method's object."""
    clash = [name for name in rows.columns if name in STANDARD | {"self"}]
    if clash:
        raise InputError(
            f"{rows.source}: rewards receive something else under the name {clash[0]!r}; "
            f"rename the column: column_map={{{clash[0]!r}: 'row_{clash[0]}'}}"
        )


def load_prompts(
    source: Any,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    prompt_column: str = "prompt",
    column_map: Mapping[str, str] | None = None,
    max_prompt_tokens: int | None = None,
    chat: bool = False,
    system: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools_of: ToolsOf | None = None,
    limit: int | None = None,
    on_bad_row: BadRowPolicy = "fail",
) -> PromptSet:
    """Reads a source and renders each row with the tokenizer.

    Args:
        source: whatever `gruppo.task.resolve_source` takes: a path, a name, a list of rows.
        max_prompt_tokens: longer prompts are dropped and listed.
        chat: put text prompts through the chat template, each as the turn of a user. `Prompt.source`, which rewards
            receive, stays the text.
        system: a system message for conversations that have none.
        chat_template_kwargs: further variables of the chat template, such as `{"enable_thinking": False}`.
        tools_of: the tools that the chat template tells the model of.
        limit: how many prompts to keep, from the beginning.
        on_bad_row: what to do with rows that cannot be used; prompts that are too long are always dropped.
    """
    for name, value in (("max_prompt_tokens", max_prompt_tokens), ("limit", limit)):
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
    rows = resolve_source(source, on_bad_row=on_bad_row, prompt_column=prompt_column, column_map=column_map)
    check_columns(rows)

    prompts: list[Prompt] = []
    dropped = list(rows.dropped)
    columns = tuple(name for name in rows.columns if name != "prompt")
    is_text = prompt_kind(rows[0]["prompt"]) == "string"  # one source is of one kind
    is_plain = is_text and not chat
    for row, rendered in _render(rows, tokenizer, is_plain, system, chat_template_kwargs, tools_of):
        if limit is not None and len(prompts) == limit:
            break
        if isinstance(rendered, InputError) or not rendered[0]:
            empty = "prompt has no tokens" if is_plain else "the chat template makes an empty prompt of it"
            reason = str(rendered) if isinstance(rendered, InputError) else empty
            if on_bad_row == "fail":
                raise InputError(f"{row.place}: {reason}; {BAD_ROW_REMEDY}")
            dropped.append(DroppedRow(row.place, reason))
            continue
        token_ids, text = rendered
        if max_prompt_tokens is not None and len(token_ids) > max_prompt_tokens:
            dropped.append(TooLongRow(row.place, f"prompt has {len(token_ids)} tokens, limit {max_prompt_tokens}"))
            continue
        prompts.append(
            Prompt(
                token_ids=token_ids,
                text=text,
                source=row.values["prompt"],
                # Rewards get one list per column: a row without the column holds None there.
                columns={name: row.values.get(name) for name in columns},
                index=row.index,
            )
        )
    if not prompts:
        remedy = "; raise the limit, or give shorter prompts" if isinstance(dropped[0], TooLongRow) else ""
        raise InputError(f"{rows.source} has no usable prompt; {dropped[0].row}: {dropped[0].reason}{remedy}")
    reading = rows.recognised()
    begun = sum(not isinstance(prompt.source, str) and bool(begun_turn(prompt.source)) for prompt in prompts)
    if begun:
        reading.append(
            f"{begun:,} of {len(prompts):,} prompts end in the assistant's turn, which a completion continues"
        )
    if is_text and chat:
        reading.append("text prompts go through the chat template")
    elif is_plain and getattr(tokenizer, "chat_template", None):
        reading.append("text prompts go in as they are; chat=true (--chat) puts them through the model's chat template")
    return PromptSet(prompts=tuple(prompts), dropped=tuple(dropped), reading=tuple(reading))


def _render(
    rows: Rows,
    tokenizer: "PreTrainedTokenizerBase",
    is_plain: bool,
    system: str | None,
    template_kwargs: Mapping[str, Any] | None,
    tools_of: ToolsOf | None,
) -> Iterator[tuple[Row, Rendered | InputError]]:
    """Each row with its prompt, or with the reason why there is none."""

    def tools_of_row(row: Row) -> Sequence[Mapping[str, Any]]:
        return tools_of(dict.fromkeys(rows.columns) | row.values) if tools_of else ()

    for name, value in (("a system message", system), ("chat_template_kwargs", template_kwargs)):
        if is_plain and value:
            raise InputError(
                f"{name} needs conversations, and these prompts are text; set chat=true to make each the turn of a user"
            )
    for start in range(0, len(rows), ENCODE_CHUNK):
        chunk = rows.rows[start : start + ENCODE_CHUNK]
        # Neighbours with the same tools are rendered together.
        for tools, same in groupby(chunk, tools_of_row):
            part = list(same)
            prompts = [row.values["prompt"] for row in part]
            if not is_plain:
                conversations = [conversation(prompt, system) for prompt in prompts]
                yield from zip(part, render_chats(conversations, tokenizer, template_kwargs, tools), strict=True)
            elif tools:
                raise InputError(
                    "tools need conversations, and these prompts are text; set chat=true (--chat) to make each the "
                    "turn of a user"
                )
            else:
                yield from zip(part, zip(encode_texts(prompts, tokenizer), prompts, strict=True), strict=True)


def conversation(prompt: Any, system: str | None) -> list[dict[str, Any]]:
    """The messages of a prompt; text is the turn of a user."""
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    # Arrow gives every message the keys of all of them, None where there was none; templates would print it.
    turns = [{key: value for key, value in turn.items() if value is not None} for turn in given]
    if system is not None and turns[0]["role"] not in ("system", "developer"):
        turns.insert(0, {"role": "system", "content": system})
    return turns


def encode_texts(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> list[tuple[int, ...]]:
    """Token ids of plain prompts, with the special tokens that the tokenizer adds itself."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    encoded: Any = tokenizer(list(texts), verbose=False)
    result = []
    for text, ids in zip(texts, encoded["input_ids"], strict=True):
        if len(ids) >= 2 and bos is not None and ids[0] == ids[1] == bos:
            ids = ids[1:]  # the text begins with the start token, and the tokenizer put one before it
        if ids and eos is not None and ids[-1] == eos != bos and not text.endswith(str(tokenizer.eos_token)):
            raise InputError(
                f"the tokenizer puts its end token {tokenizer.eos_token!r} after prompts, which leaves nothing "
                "to complete; load it with add_eos_token=False"
            )
        result.append(tuple(ids))
    return result
