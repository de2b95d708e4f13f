# Minibatches, no thinking, top-p, an evaluation.
python short_math_grpo.py --model-id ms://Qwen/Qwen3.5-4B --dataset-id hf://openai/gsm8k --subset-name main \
    --enable-thinking False --default-system "Put your final answer within \\boxed{}." --max-steps 1000 --batch-size 4 \
    --gradient-accumulation-steps 2 --mini-batch-size 16 --save-steps 1000 --epsilon-high 0.28 --beta 0.01 --top-p 0.95 \
    --max-tokens 4096 --temperature 1.0 --eval-samples 64 --eval-interval 25 --scheduler-cls ConstantLR --tp-size 2
