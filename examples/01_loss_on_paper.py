"""A GRPO loss that you can check with a pocket calculator.

Two completions of one prompt, three sampled tokens in all. The first completion was good (advantage +1), the second
bad (-1). Each token is given by three probabilities: under the policy now, under the policy that sampled it, and under
the reference. Everything below is worked out in plain Python floats, then GRPOLoss is asked for the same number.

    python examples/01_loss_on_paper.py
"""

from math import exp, log

import torch

from gruppo.loss import DRGRPOLoss, GRPOLoss, GSPOLoss

CLIP, BETA = 0.2, 0.1

#          sequence  now   sampled  reference
TOKENS = [
    (0, 0.60, 0.40, 0.60),  # became 1.5 times as likely: beyond the band [0.8, 1.2]
    (0, 0.45, 0.50, 0.90),  # 0.9 times: inside it; but half as likely as under the reference
    (1, 0.25, 0.50, 0.125),  # 0.5 times: beyond it; and twice as likely as under the reference
]
ADVANTAGES = [+1.0, -1.0]
LENGTHS = [2, 1]  # scored tokens of each sequence


def clip(ratio: float) -> float:
    return min(max(ratio, 1 - CLIP), 1 + CLIP)


def surrogate(ratio: float, advantage: float) -> float:
    """What PPO minimises: minus the smaller of the plain and the clipped gain."""
    return -min(ratio * advantage, clip(ratio) * advantage)


def k3(now: float, reference: float) -> float:
    """The KL penalty of one token; 0 where policy and reference agree, positive elsewhere."""
    delta = log(now) - log(reference)
    return exp(-delta) - 1 + delta


# --- GRPO: every token has its own ratio; mean over the tokens of a sequence, then over the sequences ----------------

print(f"GRPO on paper, clip_range = {CLIP}, beta = {BETA}\n")
print("token  seq   A   ratio  clipped  surrogate      k3  weight  contribution")
grpo_by_hand = 0.0
for number, (i, now, sampled, reference) in enumerate(TOKENS):
    ratio = now / sampled
    loss, penalty = surrogate(ratio, ADVANTAGES[i]), k3(now, reference)
    weight = 1 / len(LENGTHS) / LENGTHS[i]
    contribution = weight * (loss + BETA * penalty)
    grpo_by_hand += contribution
    print(
        f"{number:5d} {i:4d} {ADVANTAGES[i]:+3.0f} {ratio:7.2f} {clip(ratio):8.2f} {loss:+10.2f} {penalty:7.4f} "
        f"{weight:7.2f} {contribution:+13.6f}"
    )
print(f"{'sum of weight * (surrogate + beta * k3) = loss':>58} {grpo_by_hand:+13.6f}\n")


# --- GSPO: one ratio per sequence, the geometric mean of its tokens' ratios ------------------------------------------

gspo_by_hand = 0.0
for i, length in enumerate(LENGTHS):
    mine = [t for t in TOKENS if t[0] == i]
    ratio = exp(sum(log(now / sampled) for _, now, sampled, _ in mine) / length)
    penalty = sum(k3(now, reference) for _, now, _, reference in mine) / length
    gspo_by_hand += (surrogate(ratio, ADVANTAGES[i]) + BETA * penalty) / len(LENGTHS)

# --- Dr. GRPO: GRPO's tokens, but a constant length (here 2) in place of each sequence's own ------------------------

drgrpo_by_hand = sum(
    (surrogate(now / sampled, ADVANTAGES[i]) + BETA * k3(now, reference)) / (len(LENGTHS) * 2)
    for i, now, sampled, reference in TOKENS
)

# --- The same from the library ---------------------------------------------------------------------------------------
# One row per sequence. labels[t] is the token scored at slot t; -100 says that nothing is scored there.

labels = torch.tensor([[11, 12], [13, -100]])
now_logps = torch.tensor([[0.60, 0.45], [0.25, 1.0]], dtype=torch.float64).log().requires_grad_()
batch = {
    "inputs": {"labels": labels},
    "outputs": {"logps": now_logps},
    "advantages": ADVANTAGES,
    "old_logps": [[log(0.40), log(0.50)], [log(0.50)]],  # lists: exactly one value per scored token
    "ref_logps": [[log(0.60), log(0.90)], [log(0.125)]],
}
results = {
    "GRPO": (grpo_by_hand, GRPOLoss(clip_range=CLIP, beta=BETA)),
    "GSPO": (gspo_by_hand, GSPOLoss(clip_range=CLIP, beta=BETA)),
    "Dr. GRPO": (drgrpo_by_hand, DRGRPOLoss(clip_range=CLIP, beta=BETA, max_completion_length=2)),
}
print(f"{'':10} {'by hand':>10} {'gruppo':>10}")
for name, (by_hand, loss_fn) in results.items():
    value = loss_fn(**batch).loss.item()
    print(f"{name:10} {by_hand:+10.6f} {value:+10.6f}")
    assert abs(by_hand - value) < 1e-12, name

# What each token feels: d loss / d logp. Token 0 is clipped (above 1.2 with A > 0) and agrees with the reference: 0.
# Token 1 is inside the band, weight * (-ratio * A + beta * (1 - e^-delta)) = 0.25 * (-0.9 + 0.1 * (1 - 2)) = -0.25.
# Token 2 is clipped (below 0.8 with A < 0); only the KL pulls it back, 0.5 * 0.1 * (1 - 0.5) = +0.025.
(gradient,) = torch.autograd.grad(GRPOLoss(clip_range=CLIP, beta=BETA)(**batch).loss, now_logps)
print("\nd loss / d logp of the three tokens:", " ".join(f"{g:+.3f}" for g in gradient.flatten()[:3].tolist()))
