"""Rows become prompts: rendered, tokenised, measured.

    >>> from transformers import AutoTokenizer
    >>> from gruppo.task.builtin import builtin_model_path
    >>> tokenizer = AutoTokenizer.from_pretrained(builtin_model_path())
    >>> prompts = load_prompts([{"prompt": "47+85=", "answer": "132"}], tokenizer)
    >>> prompts[0].token_ids, prompts[0].columns
    ((1, 8, 11, 14, 12, 9, 15), {'answer': '132'})

A prompt that is too long is left out and listed, never cut: a cut question has another answer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from gruppo.errors import InputError
from gruppo.task.chat import check_chat_template, encode_texts, render_chat, with_system
from gruppo.task.dataset import BAD_ROW_REMEDY, BadRowPolicy, DroppedRow, Row, Rows, TooLongRow
from gruppo.task.load import resolve_source
from gruppo.task.order import HOLDOUT_STREAM, prompt_indices, shuffle
from gruppo.task.row import prompt_kind
from gruppo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PromptSet", "Template", "load_prompts", "prompt_indices"]

Template = Literal["auto", "chat", "plain"]
"""`auto`: strings as they are, conversations through the chat template. `chat`: strings too, as user turns.
`plain`: strings as they are, conversations refused."""

RESERVED_COLUMNS = ("prompts", "completions", "completion_ids", "step", "rng_seed", "log_extra", "log_metric")
"""Names under which reward functions receive something else than a column."""

ENCODE_CHUNK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts, and the rows that did not become one."""

    prompts: tuple[Prompt, ...]
    dropped: tuple[DroppedRow, ...] = ()

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    def split_holdout(self, n: int, seed: int) -> tuple["PromptSet", "PromptSet"]:
        """Training prompts and `n` held-out ones; the same for the same seed and number of prompts.

        A training prompt with the same tokens as a held-out one is dropped from training, with a reason: the
        held-out score would otherwise count what was trained on.
        """
        if not 0 <= n < len(self.prompts):
            raise InputError(
                f"cannot hold out {n} of {len(self.prompts)} prompts; at least one must remain to train on"
            )
        chosen = set(shuffle(len(self.prompts), seed, HOLDOUT_STREAM)[:n].tolist())
        held_out = tuple(prompt for index, prompt in enumerate(self.prompts) if index in chosen)
        seen = {prompt.token_ids for prompt in held_out}
        train, dropped = [], []
        for index, prompt in enumerate(self.prompts):
            if index in chosen:
                continue
            if prompt.token_ids in seen:
                dropped.append(DroppedRow(f"row {prompt.index}", "the same prompt is held out"))
            else:
                train.append(prompt)
        if not train:
            raise InputError(f"holding out {n} prompts leaves none to train on: the others repeat them")
        return PromptSet(prompts=tuple(train), dropped=(*self.dropped, *dropped)), PromptSet(prompts=held_out)


def load_prompts(
    source: Any,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    prompt_column: str = "prompt",
    column_map: Mapping[str, str] | None = None,
    max_prompt_tokens: int | None = None,
    template: Template = "auto",
    system: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    limit: int | None = None,
    on_bad_row: BadRowPolicy = "fail",
) -> PromptSet:
    """Reads a source and renders each row with the tokenizer.

    Args:
        source: whatever `gruppo.task.load.resolve_source` takes: a path, a name, a list of rows.
        max_prompt_tokens: longer prompts are dropped and listed.
        system: a system message for conversations that have none.
        chat_template_kwargs: further variables of the chat template, such as `{"enable_thinking": False}`.
        limit: how many prompts to keep, from the beginning.
        on_bad_row: what to do with rows that cannot be used; prompts that are too long are always dropped.
    """
    _check_options(max_prompt_tokens, template, limit)
    rows = resolve_source(source, on_bad_row=on_bad_row, prompt_column=prompt_column, column_map=column_map)
    clash = [name for name in rows.columns if name in RESERVED_COLUMNS]
    if clash:
        raise InputError(
            f"{rows.source}: rewards receive something else under the name {clash[0]!r}; "
            f"rename the column: column_map={{{clash[0]!r}: 'row_{clash[0]}'}}"
        )

    prompts: list[Prompt] = []
    dropped = list(rows.dropped)
    columns = tuple(name for name in rows.columns if name != "prompt")
    for row, rendered in _render(rows, tokenizer, template, system, chat_template_kwargs):
        if limit is not None and len(prompts) == limit:
            break
        if isinstance(rendered, str):
            if on_bad_row == "fail":
                raise InputError(f"{row.place}: {rendered}; {BAD_ROW_REMEDY}")
            dropped.append(DroppedRow(row.place, rendered))
            continue
        token_ids, text = rendered
        if max_prompt_tokens is not None and len(token_ids) > max_prompt_tokens:
            reason = f"prompt has {len(token_ids)} tokens, limit {max_prompt_tokens}"
            dropped.append(TooLongRow(row.place, reason))
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
        raise InputError(f"{rows.source} has no usable prompt; {dropped[0].row}: {dropped[0].reason}")
    return PromptSet(prompts=tuple(prompts), dropped=tuple(dropped))


def _check_options(max_prompt_tokens: int | None, template: str, limit: int | None) -> None:
    if template not in ("auto", "chat", "plain"):
        raise InputError(f"template must be 'auto', 'chat' or 'plain', got {template!r}")
    for name, value in (("max_prompt_tokens", max_prompt_tokens), ("limit", limit)):
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")


def _render(
    rows: Rows,
    tokenizer: "PreTrainedTokenizerBase",
    template: Template,
    system: str | None,
    template_kwargs: Mapping[str, Any] | None,
) -> Iterator[tuple[Row, tuple[tuple[int, ...], str] | str]]:
    """Each row with its token ids and text, or with the reason why there are none."""
    kind = prompt_kind(rows[0]["prompt"])  # one source is of one kind
    if kind == "message list" and template == "plain":
        raise InputError(f"{rows.source} holds conversations, which template='plain' cannot render; use 'auto'")
    if kind == "string" and template != "chat":
        for name, value in (("a system message", system), ("chat_template_kwargs", template_kwargs)):
            if value:
                raise InputError(
                    f"{name} needs conversations, and these prompts are text; give them as messages: "
                    '[{"role": "user", "content": ...}]'
                )
        remaining = iter(rows.rows)
        while chunk := list(islice(remaining, ENCODE_CHUNK)):
            texts = [row.values["prompt"] for row in chunk]
            for row, text, token_ids in zip(chunk, texts, encode_texts(texts, tokenizer), strict=True):
                yield row, (token_ids, text) if token_ids else "prompt has no tokens"
        return
    check_chat_template(tokenizer)
    for row in rows.rows:
        prompt = row.values["prompt"]
        messages = [{"role": "user", "content": prompt}] if kind == "string" else prompt
        try:
            rendered = render_chat(with_system(messages, system), tokenizer, template_kwargs)
        except InputError as error:
            rendered = str(error)
        yield row, rendered
