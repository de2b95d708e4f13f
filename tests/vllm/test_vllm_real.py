"""vLLM on real weights: its log-probs are the trainer's, and the proof of a hand-over holds in bfloat16 too."""

import pytest
import torch

from gruppo.model import TransformersModel
from gruppo.sampler import SamplingParams, vLLMSampler
from gruppo.task.carries import sums_rows
from gruppo.types import InputFeature
from gruppo.weights.canary import BOUNDS

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=12, seed=4)


@pytest.mark.parametrize("dtype, mean, most", [("float32", 2e-5, 5e-4), ("bfloat16", 0.05, 1.0)])
def test_log_probs_and_proofs_of_real_weights(dtype: str, mean: float, most: float, smollm2_folder: str) -> None:
    model = TransformersModel(smollm2_folder, device="cpu", dtype=dtype)  # type: ignore[arg-type]  # one of the two
    sampler = vLLMSampler(smollm2_folder, dtype=dtype, max_model_len=128)
    prompts = [
        sampler.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        for row in sums_rows("heldout")[:8]
    ]
    try:
        for update in range(2):  # a hand-over raises where the canary is beyond its bound
            proof = sampler.sync(model)
            responses = sampler.sample(prompts, 4, PARAMS)
            drawn = [sequence for response in responses for sequence in response.sequences]
            features = [InputFeature(prompt_ids=s.prompt_ids, completion_ids=s.tokens) for s in drawn]
            reported = torch.tensor([logp for s in drawn for logp in s.logps])
            gap = (torch.cat(model.forward_only(features)["logps"]) - reported).abs()
            moved = proof.get("sync/canary_moved", 0.0)
            print(
                f"{dtype}, update {update}: gap {gap.mean():.2g} on average, {gap.max():.2g} at most; "
                f"canary {proof['sync/canary_gap']:.2g}, moved {moved:.2g}"
            )
            assert float(gap.mean()) < mean and float(gap.max()) < most
            assert proof["sync/canary_gap"] < BOUNDS[dtype] / 2
            assert moved > 0 or update == 0
            model.set_optimizer("AdamW", lr=2e-5)
            model.forward_backward(features, advantages=[1.0 - 2 * (i % 2) for i in range(len(features))])
            model.clip_grad_and_step()
    finally:
        sampler.close()
