"""Grade-school math with LoRA on one GPU: Qwen3 learns to end with the right number.

    python examples/04_gsm8k_lora.py --data gsm8k/train.jsonl                  Qwen3-0.6B, one GPU
    python examples/04_gsm8k_lora.py --data gsm8k/train.jsonl --tiny           a random model of the same
                                                                              architecture, a few steps on a CPU

The data file has the columns `question` and `answer` (steps, then `#### number`), as published. `--tiny` learns nothing
worth having; it shows that the whole path works before a GPU is rented.
"""

import argparse
from pathlib import Path

from gruppo.trainer import GRPOTrainer, TrainConfig

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", required=True, help="GSM8K as JSONL")
parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="folder or hub id")
parser.add_argument("--output", default="runs/gsm8k", help="run directory")
parser.add_argument("--tiny", action="store_true", help="a random small model, three steps, on a CPU")


def one_gpu(data: str, model: str, output: str) -> TrainConfig:
    """A real run: 64 prompts x 8 completions per step, an adapter, DAPO's loss."""
    return TrainConfig(
        model=model,
        data=f"gsm8k:{data}",
        rewards=("number_match",),
        prompts_per_step=64,
        group_size=8,
        tokens_per_microbatch=32_768,
        max_new_tokens=512,
        max_prompt_tokens=512,
        loss="dapo",
        lora=True,
        lora_rank=32,
        lora_alpha=64,
        lr=2e-5,
        warmup_steps=10,
        steps=200,
        dtype="bfloat16",
        gradient_checkpointing=True,
        eval_prompts=256,
        eval_every=25,
        save_every=25,
        output=output,
    )


def tiny(data: str, output: str, folder: Path) -> TrainConfig:
    """The same path with a random two-layer Qwen3 over bytes."""
    make_byte_model(folder)
    config = one_gpu(data, str(folder), output)
    small = {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 16, "max_prompt_tokens": None, "steps": 3}
    small |= {"eval_prompts": 4, "eval_every": 0, "dtype": "float32", "tokens_per_microbatch": 4096, "threads": 1}
    return config.model_copy(update=small)


def make_byte_model(folder: Path) -> None:
    """A random Qwen3 whose tokens are bytes, with a chat template, written as any model folder is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|end|>", "<|user|>", "<|assistant|>"]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(specials + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)


if __name__ == "__main__":
    given = parser.parse_args()
    if given.tiny:
        # Beside the run, and not in a temporary folder: the adapter names its base by this path.
        config = tiny(given.data, given.output, Path(f"{given.output}-base"))
    else:
        config = one_gpu(given.data, given.model, given.output)
    result = GRPOTrainer(config).train()
    print(f"finished step {result.step}; the run is in {given.output}")
