"""Chat templates: conversations as the text and the token ids of a prompt.

transformers renders a template in a sandbox, out of reach of the machine, and with no limit on time or memory.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gruppo.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIXED = frozenset({"conversation", "tokenize", "add_generation_prompt", "return_dict", "tokenizer_kwargs", "messages"})
"""Arguments of `apply_chat_template` that are not the caller's."""

Rendered = tuple[tuple[int, ...], str]
"""Token ids and text of a prompt."""


def render(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: "PreTrainedTokenizerBase",
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The text of a conversation. Raises InputError when the template refuses it, as some do when roles do not
    alternate.

    Args:
        tools: what the template tells the model that it can call, in OpenAI's form.
        add_generation_prompt: end where the assistant's turn begins; False: the conversation is complete.
    """
    from jinja2 import TemplateError  # comes with torch and transformers

    given: dict[str, Any] = dict(template_kwargs or {})
    if tools:
        given["tools"] = [dict(tool) for tool in tools]
    try:
        text: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            **given,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except TemplateError as error:
        raise InputError(f"the chat template refuses the conversation: {error}") from error
    except Exception as error:  # of the template, which is a program
        raise InputError(
            f"the chat template fails on the conversation: {type(error).__name__}: {error}; use the template of "
            "another model: tokenizer.chat_template = ..., or a folder with another chat_template"
        ) from error
    return text


def render_chats(
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    tokenizer: "PreTrainedTokenizerBase",
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[Rendered | InputError]:
    """The prompt of each conversation, or why there is none. It ends where the assistant's turn begins, or continues.

    A last message of the assistant stands as it is where the template begins the assistant's turn: what the model would
    have written there itself. Not by `continue_final_message`, with which some templates put an empty thought before
    that turn, or strip it.
    """
    if not getattr(tokenizer, "chat_template", None):
        remedy = "or set tokenizer.chat_template"
        if not tools:
            remedy = "set tokenizer.chat_template, or give the prompts as strings without chat=true"
        raise InputError(
            f"the prompts are conversations{' with tools' if tools else ''}, but this tokenizer has no chat template; "
            f"use the tokenizer of an instruction-tuned model, {remedy}"
        )
    clash = sorted((template_kwargs or {}).keys() & (_FIXED | {"tools"} if tools else _FIXED))
    if clash:
        raise InputError(f"chat_template_kwargs has {clash[0]!r}, which is not the template's to decide; leave it out")
    texts: list[str | InputError] = []
    for messages in conversations:
        start = begun_turn(messages)
        try:
            text = render(messages[:-1] if start else messages, tokenizer, template_kwargs, tools)
            texts.append(_gone_on(text, start))
        except InputError as error:
            texts.append(error)
    # A template writes the special tokens itself; lengths are our caller's to judge.
    found: Any = tokenizer(
        [text for text in texts if isinstance(text, str)] or [""], add_special_tokens=False, verbose=False
    )
    ids = iter(found["input_ids"])
    return [text if isinstance(text, InputError) else (tuple(next(ids)), text) for text in texts]


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: "PreTrainedTokenizerBase",
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Rendered:
    """The prompt of one conversation; raises InputError where there is none."""
    (rendered,) = render_chats([messages], tokenizer, template_kwargs, tools)
    if isinstance(rendered, InputError):
        raise rendered
    return rendered


def begun_turn(messages: Sequence[Mapping[str, Any]]) -> str:
    """The beginning of the assistant's turn that ends a conversation; empty if another turn does."""
    return messages[-1].get("content") or "" if messages[-1]["role"] == "assistant" else ""


def _gone_on(text: str, start: str) -> str:
    """The text with the start of the assistant's turn; a tag that both have, such as <think>, appears once.

    >>> _gone_on("<assistant><think>", "<think>Well,"), _gone_on("<assistant>", "Well,")
    ('<assistant><think>Well,', '<assistant>Well,')
    """
    tag = re.match(r"\s*(<[^<>\s]+>)", start)
    if tag and text.rstrip().endswith(tag[1]):
        return text.rstrip().removesuffix(tag[1]) + start.lstrip()
    return text + start
