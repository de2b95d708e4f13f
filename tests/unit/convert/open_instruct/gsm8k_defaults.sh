python open_instruct/grpo_fast.py \
    --dataset_mixer_list ai2-adapt-dev/rlvr_gsm8k_zs 1.0 \
    --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
    --learning_rate 3e-7 \
    --total_episodes 200000 \
    --output_dir runs/gsm8k
