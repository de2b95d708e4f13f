"""Twinkle: the calls of a training script. The script is parsed, never run."""

from collections.abc import Sequence
from typing import Any

from gruppo.convert.conversion import Conversion
from gruppo.convert.read import read_text
from gruppo.convert.script import Script
from gruppo.errors import InputError
from gruppo.trainer.elsewhere import DROPOUT, Reason

LOSSES = {"GRPOLoss": "grpo", "GSPOLoss": "gspo", "SAPOLoss": "sapo", "CISPOLoss": "cispo", "BNPOLoss": "bnpo",
          "DRGRPOLoss": "drgrpo"}  # fmt: skip
ADVANTAGES = {"GRPOAdvantage": "grpo", "RLOOAdvantage": "rloo"}
REWARDS = {"GSM8KAccuracyReward": "number_match", "MathAccuracyReward": "math_match"}


def from_twinkle(words: Sequence[str]) -> Conversion:
    """A run for a training script in Python."""
    if len(words) != 1 or not words[0].endswith(".py"):
        raise InputError("convert twinkle needs one Python file: gruppo convert twinkle train.py")
    script = Script(read_text(words[0]))
    made = Conversion("Twinkle", {}, {})
    _model(made, script)
    _data(made, script)
    _loss(made, script)
    _sampling(made, script)
    _steps(made, script)
    return made.finish()


def _model(made: Conversion, script: Script) -> None:
    model = script.keywords("TransformersModel", "MegatronModel").get("model_id")
    if model:
        made.same(f"model_id={model}", model=model)
    if script.find("MegatronModel"):
        why = Reason("a model is transformers', on ranks with FSDP2 (docs/distributed.md)", "megatron tensor_parallel")
        made.none("MegatronModel", why)
    if script.find("LoraConfig"):
        lora = script.keywords("LoraConfig")
        own: dict[str, Any] = {"lora": True, "lora_rank": lora.get("r", 8), "lora_alpha": lora.get("lora_alpha", 8)}
        targets = lora.get("target_modules")
        if targets not in (None, "all-linear"):
            own["lora_targets"] = [targets] if isinstance(targets, str) else targets
        made.same("LoraConfig", **own)
        if lora.get("lora_dropout"):
            made.none(f"lora_dropout={lora['lora_dropout']}", DROPOUT)


def _data(made: Conversion, script: Script) -> None:
    if (found := script.find("DatasetMeta")) is not None:
        name = str(found[1][0] if found[1] else found[2].get("dataset_id"))
        split = found[2].get("split", "train")
        if script.find("GSM8KProcessor"):
            source = "gsm8k:hf://openai/gsm8k/main" + ("" if split == "train" else f":{split}")
            made.near(
                f"DatasetMeta({name}), GSM8KProcessor", "the same rows with an instruction of its own", data=source
            )
        elif name.startswith("hf://"):
            made.same(f"DatasetMeta({name})", data=name + ("" if split == "train" else f":{split}"))
        else:
            made.ask("data", f"{name} is of ModelScope; save its rows as JSONL with `prompt` and `answer`")
    if system := script.constants.get("SYSTEM_PROMPT"):
        made.same("SYSTEM_PROMPT", system=system)
    template = script.keywords("set_template")
    if "max_length" in template:
        made.same(f"max_length={template['max_length']}", max_prompt_tokens=template["max_length"])
    if "enable_thinking" in template:
        thinks = bool(template["enable_thinking"])
        made.same(f"enable_thinking={thinks}", chat_template_kwargs={"enable_thinking": thinks})
    rewards = []
    for name in dict.fromkeys(name for name, _, _ in script.calls if name.endswith(("Reward", "Penalty"))):
        if name in REWARDS:
            rewards.append(REWARDS[name])
            made.near(name, "the same question, answered by the built-in verifier", rewards=list(rewards))
        else:
            made.ask(
                "rewards", f"{name}: make it a function f(prompts, completions, **columns) and name it module:function"
            )


def _loss(made: Conversion, script: Script) -> None:
    found = script.find("set_loss")
    named, options = "", {}
    if found is not None and found[1] and isinstance(found[1][0], str):
        named, options = found[1][0], found[2]
    elif (made_of := script.find(*LOSSES)) is not None:
        named, _, options = made_of
    if named:
        _named_loss(made, named, dict(options))
    advantage = script.find(*ADVANTAGES)
    if advantage is not None and ADVANTAGES[advantage[0]] != "grpo":
        made.same(advantage[0], advantage=ADVANTAGES[advantage[0]])
    calls = [named for _, _, named in script.calls if "num_generations" in named]
    scale = calls[-1].get("scale", "group") if calls else "group"
    if scale == "none":
        made.same("scale=none", normalization="centered")
    elif scale == "batch":
        made.same("scale=batch", scale="batch")
    elif advantage is not None:
        made.same(
            "scale=group: its code divides by the standard deviation, its documentation does not",
            normalization="standard",
        )


def _named_loss(made: Conversion, named: str, options: dict[str, Any]) -> None:
    if named not in LOSSES:
        made.unknown(named, "no loss of that name; `gruppo losses` lists them")
        return
    loss = LOSSES[named]
    made.same(named, loss=loss)
    if loss == "bnpo":
        made.near(named, "a token mean over the whole update here, over each micro-batch there")
    low, high = options.pop("epsilon", None), options.pop("epsilon_high", None)
    documented, tau = options.pop("clip_range", None), options.pop("tau", None)
    if documented is not None:
        why = "as documented; its code drops the keyword and clips at 0.2"
        made.near(f"clip_range={documented}", why, clip_range=documented)
    elif low is not None or high is not None:
        low = 0.2 if low is None else low
        if loss == "cispo":
            made.same(f"epsilon={low}: the cap is 1 + epsilon", clip_range=low)
            if high is not None:
                made.near(f"epsilon_high={high}", "its code ignores it in CISPO; here the upper side is the cap")
        else:
            made.same(f"epsilon={low}, epsilon_high={high}", clip_range=low if high in (None, low) else [low, high])
    positive, negative = options.pop("tau_pos", None), options.pop("tau_neg", None)
    if tau is not None:
        made.near(f"tau={tau}", "as documented; its code drops the keyword and takes tau_pos and tau_neg", tau=tau)
    elif positive is not None or negative is not None:
        pair = [1.0 if positive is None else positive, 1.05 if negative is None else negative]
        made.same(f"tau_pos={pair[0]}, tau_neg={pair[1]}", tau=pair)
    for name in ("beta", "entropy_coef"):
        if name in options:
            made.same(f"{name}={options[name]}", **{name: options.pop(name)})
    if made.values.get("beta"):
        made.same("the penalty is k3", kl_estimator=2)
    for name, value in options.items():
        if name != "max_completion_length":
            made.unknown(f"{named}({name}={value})")


def _sampling(made: Conversion, script: Script) -> None:
    params = script.keywords("SamplingParams")
    if "max_tokens" in params:
        made.same(f"max_tokens={params['max_tokens']}", max_new_tokens=params["max_tokens"])
    if "temperature" in params:
        made.same(f"temperature={params['temperature']}", temperature=params["temperature"])
    if params.get("stop"):
        stop = params["stop"]
        made.same(f"stop={stop}", stop=[stop] if isinstance(stop, str) else stop)
    made.given |= {name: params[name] for name in ("top_p", "top_k", "min_p") if name in params}
    made.filters({"top_p": (1,), "top_k": (0, -1), "min_p": (0,)})
    if script.find("vLLMSampler"):
        made.same("vLLMSampler", sampler="vllm")
        engine = script.keywords("vLLMSampler").get("engine_args", {})
        if "gpu_memory_utilization" in engine:
            why = "vLLM has GPUs of its own there; here it shares one with the trainer, unless sampler is vllm:start"
            made.near(f"gpu_memory_utilization={engine['gpu_memory_utilization']}", why)
        why = "the ratio is policy over sampler there; here it is policy over trainer, and the sampler's is capped at 2"
        made.near("old_logps of the sampler", why, correction="truncate")


def _steps(made: Conversion, script: Script) -> None:
    constants = script.constants
    group = script.keywords("sample").get("num_samples") or 1
    group = max([group, *(named["num_generations"] for _, _, named in script.calls if "num_generations" in named)])
    if group > 1:
        made.same(f"num_generations={group}", group_size=group)
    prompts = script.keywords("DataLoader").get("batch_size")
    if prompts:
        made.same(f"DataLoader(batch_size={prompts})", prompts_per_step=prompts)
    minibatches = 1
    part = constants.get("MINI_BATCH_SIZE")
    if prompts and part and group > 1:
        minibatches = made.whole("MINI_BATCH_SIZE", prompts * group / part)
        if prompts % minibatches:
            why = "minibatches are whole groups here and must divide the prompts of a step"
            made.near(f"MINI_BATCH_SIZE={part}", why, minibatches=prompts)
            minibatches = prompts
        elif minibatches > 1:
            made.same(f"{prompts * group} completions / MINI_BATCH_SIZE={part}", minibatches=minibatches)
    if "MAX_STEPS" in constants:
        steps = made.whole("MAX_STEPS", constants["MAX_STEPS"] / minibatches)
        made.same(f"MAX_STEPS={constants['MAX_STEPS']} optimizer steps", steps=steps)
    if "SAVE_STEPS" in constants:
        made.every(f"SAVE_STEPS={constants['SAVE_STEPS']}", constants["SAVE_STEPS"] / minibatches, "save_every")
    rate = script.keywords("set_optimizer").get("lr")
    if rate is not None:
        made.same(f"lr={rate}", lr=rate)
    schedules = [args[0] for name, args, _ in script.calls if name == "set_lr_scheduler" and args]
    schedule = str(schedules[-1]) if schedules else ""
    if "Cosine" in schedule:
        made.same(schedule, lr_schedule="cosine")
    elif "Linear" in schedule:
        made.same(schedule, lr_schedule="linear")
    elif schedule:
        made.near(f"set_lr_scheduler({schedule})", "a schedule of Megatron; the rate stays", lr_schedule="constant")
    warmup = script.keywords("set_lr_scheduler").get("num_warmup_steps")
    if warmup:
        made.same(f"num_warmup_steps={warmup}", warmup_steps=warmup)
    norm = [args[0] for name, args, _ in script.calls if name in ("clip_grad_norm", "clip_grad_and_step") and args]
    if norm and isinstance(norm[-1], int | float):
        made.same(f"max_grad_norm={norm[-1]}", max_grad_norm=float(norm[-1]))
