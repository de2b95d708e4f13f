"""What makes a step of `gruppo demo --llm` fast: its training half on real weights, with each part left out in turn.

    python benchmarks/real_step.py                 # SmolLM2 from the package index, 16 groups of 8 x 16 tokens
    python benchmarks/real_step.py --rounds 7 --threads 2

One batch is sampled, and all contenders take its gradient by turns: as the demo does it, with repeated prompts, in
float32, with both, and as plain transformers would (padded rows, float32, logits of every slot).
"""

import argparse
import time

import torch
from timing import busy_note, interleave, table
from torch.nn.functional import log_softmax

from gruppo.model import TransformersModel
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.task.carries import sums_rows
from gruppo.types import InputFeature
from gruppo.weights.gguf import folder_of
from gruppo.weights.smollm2 import smollm2

CONTENDERS = {
    "as the demo does it": {"layout": "shared", "dtype": "bfloat16"},
    "repeated prompts": {"layout": "padded", "dtype": "bfloat16"},
    "float32": {"layout": "shared", "dtype": "float32"},
    "both": {"layout": "padded", "dtype": "float32"},
}


def sampled(folder):
    """Rollouts of the untrained model, each with an advantage, as if every group had a signal."""
    model = TransformersModel(folder, device="cpu", dtype="bfloat16")
    prompts = [
        model.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        for row in sums_rows("train")[:16]
    ]
    started = time.perf_counter()
    drawn = TorchSampler(model).sample(prompts, 8, SamplingParams(temperature=1.0, max_new_tokens=16, seed=1))
    print(f"sampling 128 completions in bfloat16: {time.perf_counter() - started:.2f} s")
    sequences = [sequence for response in drawn for sequence in response.sequences]
    return [InputFeature(prompt_ids=s.prompt_ids, completion_ids=s.tokens) for s in sequences]


def plain_step(model, features, advantages):
    """Padded on the right, all logits: the shortest program that takes the same gradient."""
    rows = [[*f.prompt_ids, *f.completion_ids] for f in features]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    logps = log_softmax(model(input_ids=ids, attention_mask=mask).logits[:, :-1].float(), -1)
    logps = logps.gather(2, ids[:, 1:, None])[..., 0]
    loss = 0
    for row, feature, advantage in zip(logps, features, advantages, strict=True):
        first, num = len(feature.prompt_ids) - 1, len(feature.completion_ids)
        loss = loss - advantage * row[first : first + num].mean() / len(features)
    loss.backward()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    note = busy_note()
    folder = str(folder_of(smollm2(print)))
    features = sampled(folder)
    advantages = [1.0 if i % 2 else -1.0 for i in range(len(features))]

    def step_of(how):
        model = TransformersModel(folder, device="cpu", **how)

        def step():
            model.forward_backward(features, advantages=advantages)
            model.model.zero_grad()

        return step

    def plain():
        plain_step(model, features, advantages)
        model.zero_grad()

    model = TransformersModel(folder, device="cpu", dtype="float32").model
    contenders = {name: step_of(how) for name, how in CONTENDERS.items()} | {"plain transformers": plain}
    print(table("forward and backward", interleave(contenders, options.rounds, warmup=1)))
    print(note or "")


if __name__ == "__main__":
    main()
