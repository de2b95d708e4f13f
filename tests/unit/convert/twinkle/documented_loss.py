# ruff: noqa
"""The documented loop: a loss made with the documented keywords, four samples per prompt."""

actor = TransformersModel(model_id="ms://Qwen/Qwen3.5-4B")
sampler = vLLMSampler(model_id="ms://Qwen/Qwen3.5-4B")
loss_fn = SAPOLoss(clip_range=0.3, beta=0.01, tau=1.0)
actor.set_loss(loss_fn)
advantage_fn = GRPOAdvantage()
for batch in dataloader:
    sample_response = sampler.sample(batch, num_samples=4)
    advantages = advantage_fn(rewards, num_generations=4)
    actor.forward_backward(inputs=input_data, advantages=advantages)
    actor.clip_grad_and_step()
