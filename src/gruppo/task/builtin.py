"""The embedded model of the "dropped carries" task: tokenizer, architecture, weights, and how they are made.

`rebuild_base` made the weights in `task/builtin_model/`: the warm-up that imitates the careless demonstrator.

    >>> from transformers import AutoTokenizer
    >>> tokenizer = AutoTokenizer.from_pretrained(builtin_model_path())
    >>> tokenizer("47+85=")["input_ids"]
    [1, 8, 11, 14, 12, 9, 15]
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppo.errors import InputError
from gruppo.task.carries import carries_rows, demonstrations

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

logger = logging.getLogger(__name__)

_CARRIES, _CHAT = (Path(__file__).parent / name for name in ("builtin_model", "builtin_chat_model"))
EMBEDDED = {"builtin": _CARRIES, "builtin:carries": _CARRIES, "builtin-chat": _CHAT}
"""Folders of the shipped models."""

PAD, BOS, EOS, UNK = SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "0123456789+="
BASE_SEED = 12
"""Seed of the shipped weights."""

LEARNING_RATE = 3e-3
LR_WARMUP_STEPS = 20
BATCH_SIZE = 128


def builtin_model_path(name: str = "builtin") -> Path:
    """Folder of a shipped base model; `from_pretrained` takes it as it is."""
    return EMBEDDED[name]


def builtin_tokenizer() -> "PreTrainedTokenizerFast":
    """One id per character, 16 ids in all; adds the start token, pads on the left."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )


def builtin_config() -> "Qwen3Config":
    """A two-layer Qwen3 of 0.17 M parameters."""
    return tiny_qwen3(vocab_size=len(SPECIAL_TOKENS) + len(CHARACTERS), context=64, pad=0, bos=1, eos=2)


def tiny_qwen3(*, vocab_size: int, context: int, pad: int, bos: int | None, eos: int) -> "Qwen3Config":
    """Architecture of the embedded models."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,  # 64 / 4 = 16 would do for the task, but vLLM's CPU attention refuses it
        max_position_embeddings=context,
        # The default 0.02 is made for widths of thousands; at width 64 the warm-up then sits on a plateau.
        initializer_range=0.06,
        tie_word_embeddings=False,
        pad_token_id=pad,
        bos_token_id=bos,
        eos_token_id=eos,
        use_cache=True,
    )


def rebuild_base(
    folder: str | Path,
    seed: int = BASE_SEED,
    steps: int = 1000,
    log: Callable[[str], None] = logger.info,
) -> Path:
    """Warms a fresh model up on the demonstrations and saves it with its tokenizer into `folder`, in bfloat16.

    The same seed and number of CPU threads give the same bytes; other thread counts add in another order.
    """
    import torch

    tokenizer = builtin_tokenizer()
    stream = demonstrations(seed)

    def loss(model: Any) -> "Tensor":
        pairs = list(islice(stream, BATCH_SIZE))
        prompt_ids = torch.tensor(tokenizer([prompt for prompt, _ in pairs])["input_ids"])
        texts = [completion + EOS for _, completion in pairs]
        completion_ids = torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])
        return _completion_loss(model, prompt_ids, completion_ids)

    model = warm_up(builtin_config(), loss, seed, steps, log)
    accuracy = greedy_accuracy(model, tokenizer, carries_rows("heldout"))
    log(f"greedy accuracy on held-out prompts: {accuracy:.3f}")
    return save_base(model, tokenizer, folder)


def warm_up(
    config: "Qwen3Config", loss_of: Callable[[Any], "Tensor"], seed: int, steps: int, log: Callable[[str], None]
) -> "Qwen3ForCausalLM":
    """A fresh model after `steps` steps on `loss_of(model)`, each on demonstrations of its own."""
    import torch
    from transformers import Qwen3ForCausalLM

    if steps < 1:
        raise InputError(f"a base model needs at least one step, got steps={steps}")
    with torch.random.fork_rng(devices=[]):  # the caller's random state is not ours to move
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    for step in range(steps):
        progress = min(max(step - LR_WARMUP_STEPS, 0) / max(steps - LR_WARMUP_STEPS, 1), 1.0)
        factor = min((step + 1) / LR_WARMUP_STEPS, 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * factor
        loss = loss_of(model)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            log(f"warm-up step {step + 1}/{steps}: loss {loss.item():.4f}")
    return model.eval()


def save_base(model: "Qwen3ForCausalLM", tokenizer: "PreTrainedTokenizerFast", folder: str | Path) -> Path:
    """Saves a model in bfloat16, and its tokenizer; gives the folder."""
    import torch
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model.config.dtype = torch.bfloat16
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    # Not model.save_pretrained: it draws a progress bar for one small file.
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)  # safetensors ignores the umask
    return folder


def greedy_accuracy(model: Any, tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> float:
    """Share of `rows` whose most likely completion is exactly the answer and then the end token.

    The prompts, texts or conversations, must have one length in tokens.
    """
    import torch

    prompts: Any = [row["prompt"] for row in rows]
    if isinstance(prompts[0], str):
        encoded = tokenizer(prompts)
    else:
        encoded = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)
    ids = torch.tensor(encoded["input_ids"])
    answers = [row["answer"] + tokenizer.eos_token for row in rows]
    wanted = tokenizer(answers, add_special_tokens=False)["input_ids"]
    num_prompt_tokens = ids.shape[1]
    with torch.no_grad():
        for _ in range(max(map(len, wanted))):
            logits = model(input_ids=ids, logits_to_keep=1).logits
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    found = ids[:, num_prompt_tokens:].tolist()
    return sum(ids[: len(answer)] == answer for ids, answer in zip(found, wanted, strict=True)) / len(rows)


def _completion_loss(model: Any, prompt_ids: "Tensor", completion_ids: "Tensor") -> "Tensor":
    """Mean cross-entropy of the completion tokens; the prompt is given, so it is not learnt."""
    from torch import cat
    from torch.nn.functional import cross_entropy

    ids = cat([prompt_ids, completion_ids], dim=1)
    # The logits at a slot predict the next token, so the completion's begin at the prompt's last slot.
    logits = model(input_ids=ids[:, :-1], logits_to_keep=completion_ids.shape[1]).logits
    return cross_entropy(logits.flatten(0, 1), completion_ids.flatten())
