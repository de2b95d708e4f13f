# RLOO with CISPO on a test split, sampled in the process.
python grpo.py --model-id Qwen/Qwen3-0.6B --dataset-id hf://openai/gsm8k/main --split test --learning-rate 3e-6 \
    --scheduler-cls CosineWarmupScheduler --num-warmup-steps 10 --loss-cls CISPOLoss --epsilon 3.0 --epsilon-high 5.0 \
    --sampler-type TorchSampler --batch-size 16 --max-tokens 512 --temperature 0.9 --stop "</answer>" --max-steps 300 \
    --num-generations 6 --advantage-type RLOOAdvantage --advantage-scale none --max-grad-norm 0.5
