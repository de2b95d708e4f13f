python grpo.py --model-id ms://Qwen/Qwen3.5-4B --loss-cls SAPOLoss --beta 0.01 --tau-pos 1.2 --num-generations 4 \
    --sampler-type TorchSampler --advantage-scale batch --seed 7
