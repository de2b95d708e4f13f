python grpo.py --model-id hf://Qwen/Qwen3-1.7B --use-lora --lora-r 16 --lora-alpha 16 --lora-dropout 0 \
    --lora-target-modules q_proj k_proj v_proj --learning-rate 2e-5 --scheduler-cls LinearLR --loss-cls DRGRPOLoss \
    --epsilon 0.1 --entropy-coef 0.001 --batch-size 32 --max-tokens 1024 --temperature 0.6 --top-k -1 --max-steps 100 \
    --num-generations 12 --advantage-scale batch --sampler-type TorchSampler
