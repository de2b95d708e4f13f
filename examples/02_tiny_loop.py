"""The whole algorithm in one file, with the public parts and no trainer. Runs on any CPU in half a minute.

    python examples/02_tiny_loop.py

A tiny language model has learned to add from somebody who forgets the carry. Group-relative policy optimization asks
it for eight answers to each sum, finds out which are right, and makes those more likely than the others.
"""

import torch

from gruppo.advantage import GRPOAdvantage
from gruppo.loss import GRPOLoss
from gruppo.metric import metric_for
from gruppo.model import TransformersModel
from gruppo.reward import RewardScorer
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.task import load_prompts, prompt_indices, resolve_source

STEPS, PROMPTS, GROUP = 60, 32, 8
torch.set_num_threads(1)  # the tensors are too small to share

# 1. The parts. `builtin` is the embedded model; a folder or a hub id works the same way.
model = TransformersModel("builtin")
model.set_loss(GRPOLoss(clip_range=0.2))
model.set_optimizer("AdamW", lr=1e-4)
model.set_lr_scheduler("constant", warmup_steps=10)
model.add_metric(metric_for(model.loss))
sampler = TorchSampler(model)  # samples from the weights that are being trained
advantage = GRPOAdvantage(normalization="standard")
rewards = RewardScorer(["exact_match"])  # compares the completion with the row's `answer`

train = load_prompts(resolve_source("builtin:carries"), model.tokenizer)
held_out = load_prompts(resolve_source("builtin:carries?split=heldout"), model.tokenizer)


def score(prompts, sequences):
    """1.0 for a right answer, 0.0 for a wrong one."""
    answers = {"answer": [p.columns["answer"] for p in prompts]}
    return rewards.score([p.source for p in prompts], [s.text for s in sequences], columns=answers).totals


def accuracy():
    """Share of right answers when the model says what it thinks most likely."""
    responses = sampler.sample(held_out.prompts, 1, SamplingParams(temperature=0, max_new_tokens=4))
    right = score(held_out.prompts, [r.sequences[0] for r in responses])
    return sum(right) / len(right)


print(f"held-out accuracy before: {accuracy():.3f}")

for step in range(STEPS):
    # 2. Rollouts: a group of completions for each prompt of this step.
    prompts = [train[i] for i in prompt_indices(len(train), step, PROMPTS, seed=0)]
    responses = sampler.sample(prompts, GROUP, SamplingParams(max_new_tokens=4, seed=0, step=step))
    sequences = [s for response in responses for s in response.sequences]

    # 3. Rewards, and from them advantages: how much better than the rest of its group?
    reward = score([p for p in prompts for _ in range(GROUP)], sequences)
    advantages = advantage(reward, num_generations=GROUP)

    # 4. One gradient step. The loss normalises by the whole step, however it is split into micro-batches.
    model.forward_backward([s.new_input_feature for s in sequences], advantages=advantages)
    report = model.clip_grad_and_step(max_grad_norm=1.0)

    if (step + 1) % 10 == 0:
        metrics = model.calculate_metric()
        print(
            f"step {step + 1:>3}  reward {sum(reward) / len(reward):.3f}  grad {report.grad_norm:.2f}  "
            f"entropy {metrics['train/entropy']:.3f}  kl {metrics['train/approx_kl']:.1e}"
        )

print(f"held-out accuracy after:  {accuracy():.3f}")
