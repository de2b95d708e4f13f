"""The embedded chat model of the calculator task: tokenizer, architecture, weights, and how they are made.

`rebuild_chat_base` made the weights in `task/builtin_chat_model/`: the warm-up that imitates the demonstrator of
`gruppo.task.calculator`. Its conversations are ChatML, and its tool calls those of Hermes and Qwen.
"""

import logging
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppo.task.builtin import builtin_model_path, greedy_accuracy, save_base, tiny_qwen3, warm_up
from gruppo.task.calculator import calculator_rows, demonstrations

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast, Qwen3Config

logger = logging.getLogger(__name__)

PAD, UNK, TURN, END = SPECIAL_TOKENS = ("<pad>", "<unk>", "<|im_start|>", "<|im_end|>")
ROLES = ("system", "user", "assistant", "tool")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CALL = ('{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}")
"""A call of the one tool but for its numbers: a token each, so that a call is 11 tokens long."""
WORDS = (*SPECIAL_TOKENS, *ROLES, *TAGS, *CALL)
CHARACTERS = ("\n", *map(chr, range(32, 127)))
CONTEXT = 256

BASE_SEED = 0
"""Seed of the shipped weights."""
BATCH_SIZE = 64


def chat_tokenizer() -> "PreTrainedTokenizerFast":
    """One id per character, role, tag and part of a call, 111 in all; pads on the left."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*WORDS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNK))
    words = "|".join(re.escape(word) for word in WORDS[len(SPECIAL_TOKENS) :])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{words}|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNK,
        extra_special_tokens=[TURN],
        padding_side="left",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=(builtin_model_path("builtin-chat") / "chat_template.jinja").read_text(encoding="utf-8"),
    )


def chat_config() -> "Qwen3Config":
    """A two-layer Qwen3 of 0.18 M parameters."""
    pad, eos = SPECIAL_TOKENS.index(PAD), SPECIAL_TOKENS.index(END)
    return tiny_qwen3(vocab_size=len(WORDS) + len(CHARACTERS), context=CONTEXT, pad=pad, bos=None, eos=eos)


def rebuild_chat_base(
    folder: str | Path,
    seed: int = BASE_SEED,
    steps: int = 600,
    log: Callable[[str], None] = logger.info,
) -> Path:
    """Warms a fresh model up on the demonstrations and saves it with its tokenizer into `folder`, in bfloat16.

    The same seed and number of CPU threads give the same bytes; other thread counts add in another order.
    """
    tokenizer = chat_tokenizer()
    stream = demonstrations(seed)
    model = warm_up(
        chat_config(), lambda model: _turn_loss(model, tokenizer, list(islice(stream, BATCH_SIZE))), seed, steps, log
    )
    accuracy = greedy_accuracy(model, tokenizer, calculator_rows("heldout"))
    log(f"greedy accuracy on held-out prompts, in one turn: {accuracy:.3f}")
    return save_base(model, tokenizer, folder)


def _turn_loss(model: Any, tokenizer: Any, conversations: list[Any]) -> "Tensor":
    """Mean cross-entropy of the assistant's turns with their end tokens; the rest is given, so it is not learnt."""
    from torch.nn.functional import cross_entropy

    batch = tokenizer.apply_chat_template(
        conversations,
        return_dict=True,
        return_assistant_tokens_mask=True,
        padding=True,
        tokenizer_kwargs={"padding_side": "right"},
        return_tensors="pt",
    )
    ids, is_own = batch["input_ids"], batch["assistant_masks"].bool()
    logits = model(input_ids=ids[:, :-1]).logits  # what comes after a token does not reach it: padding needs no mask
    return cross_entropy(logits[is_own[:, 1:]], ids[:, 1:][is_own[:, 1:]])
