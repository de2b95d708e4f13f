"""From a prompt to token ids: plain text as it is, conversations through the tokenizer's chat template.

The ids are what the tokenizer gives for the whole prompt in one call. Encoding the rendered text once more
would put a second start token before the one that the template writes.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gruppo.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_OURS = frozenset({"conversation", "tokenize", "add_generation_prompt", "return_dict", "tokenizer_kwargs", "messages"})


def check_chat_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raises unless the tokenizer can render conversations."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            "the prompts are conversations, but this tokenizer has no chat template; use the tokenizer of an "
            "instruction-tuned model, set tokenizer.chat_template, or give the prompts as strings"
        )


def with_system(messages: Sequence[Mapping[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """The conversation, opened by `system` unless it brings a system message of its own."""
    # Arrow gives every message the keys of all of them, None where there was none; templates would print it.
    conversation = [{key: value for key, value in turn.items() if value is not None} for turn in messages]
    if system is None or conversation[0]["role"] in ("system", "developer"):
        return conversation
    return [{"role": "system", "content": system}, *conversation]


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: "PreTrainedTokenizerBase",
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[tuple[int, ...], str]:
    """Token ids and text of a conversation, ending where the assistant's turn begins.

    Args:
        template_kwargs: further variables of the template, such as `{"enable_thinking": False}`.

    Raises InputError when the template refuses the conversation, as some do when roles do not alternate.
    """
    from jinja2 import TemplateError

    check_chat_template(tokenizer)
    conversation = [dict(message) for message in messages]
    options = dict(template_kwargs or {})
    clash = sorted(options.keys() & _OURS)
    if clash:
        raise InputError(f"chat_template_kwargs has {clash[0]!r}, which is not the template's to decide; leave it out")
    try:
        encoded: Any = tokenizer.apply_chat_template(
            conversation,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            tokenizer_kwargs={"verbose": False},  # lengths are our caller's to judge
            **options,
        )
        text: Any = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **options)
    except TemplateError as error:
        raise InputError(f"the chat template refuses the conversation: {error}") from error
    return tuple(encoded["input_ids"]), text


def encode_texts(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> list[tuple[int, ...]]:
    """Token ids of plain prompts, with the special tokens that the tokenizer adds itself."""
    if not texts:
        return []
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
