"""Model ids: the folder or hub repository behind one, its model, tokenizer and config.

A model id is a local folder, a run directory, a GGUF file, `hf://org/name`, `ms://org/name`, a bare hub id `org/name`,
`builtin` or `builtin-chat`; `@revision` after a hub id is a commit, tag or branch of it. Code from a model repository
is never run and pickled weights are never read: both can do anything to the machine. docs/security.md lists what is
refused.
"""

import logging
import os
import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import safe_open

from gruppo.errors import GruppoError, InputError, require
from gruppo.process.streams import printable, shell_word
from gruppo.weights import gguf
from gruppo.weights.files import MANIFEST, digest_tensors
from gruppo.weights.folder import ADAPTER, check_floating, check_folder, check_whole, cut, read_object, refusing

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Files that hold a tokenizer, of all families."""

_HUB_ID = re.compile(r"(?P<hub>hf://|ms://|)(?P<name>\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(?P<revision>.*))?", re.ASCII | re.S)
_REVISION = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SMALL = ("*.json", "*.jinja", "*.txt", *_TOKENIZERS)
_WEIGHTS = ("*.safetensors",)
_BESIDE = ("*/*", "consolidated*")
"""Files that no loader reads: folders of other formats, and weights a second time."""


def resolve(model_id: str, *, weights: bool = False) -> str:
    """The checked local folder behind a model id. A hub's files are fetched into its cache first.

    Args:
        weights: fetch the weights of a hub's model too.
    """
    if (embedded := _embedded(model_id)) is not None:
        return str(embedded)
    if gguf.is_gguf(model_id):
        return str(gguf.folder_of(Path(model_id).expanduser()))
    folder = _local_folder(model_id)
    if folder is None:
        hub, name, revision = _hub_parts(model_id)
        try:
            fetched = Path((_from_modelscope if hub == "ms://" else _from_hub)(name, revision, weights))
        except InputError as error:
            if hub:
                raise
            raise InputError(f"there is no folder {name!r}; taken as a hub name: {error}") from error
        check_folder(fetched, name=model_id, needs_weights=weights)
        return str(fetched)
    if (folder / "config.yaml").is_file() and not (folder / "config.json").is_file():  # a run directory
        if not (folder / "model").is_dir():
            raise InputError(
                f"run {folder} has no model yet, which its end saves; `gruppo resume {shell_word(folder)}` goes on"
            )
        folder /= "model"
    check_folder(folder)
    return str(folder)


def _embedded(model_id: str) -> Path | None:
    """The folder of a model that gruppo ships; None for another name."""
    if not model_id.startswith("builtin"):
        return None
    from gruppo.task.builtin import EMBEDDED

    return EMBEDDED.get(model_id)


def _local_folder(model_id: str) -> Path | None:
    """The folder of that name; None for a name of a hub."""
    path = os.path.expanduser(model_id)
    return Path(path) if os.path.isdir(path) and not path.startswith(("hf://", "ms://")) else None


def _hub_parts(model_id: str) -> tuple[str, str, str | None]:
    """Hub, name and revision of the id of a hub's model."""
    match = _HUB_ID.fullmatch(model_id)
    if match is None or (not match["hub"] and "/" not in match["name"]) or ".." in match["name"]:
        raise InputError(
            f"model {cut(model_id)!r} is neither a folder nor a hub id; give a folder with config.json and "
            "*.safetensors, a hub id like org/name, 'builtin' or 'builtin-chat'"
        )
    revision = match["revision"]
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise InputError(f"revision={cut(revision)!r} of model {match['name']!r} must be a commit, tag or branch")
    return match["hub"], match["name"], revision


def pin(model_id: str, revision: str | None) -> tuple[str, str | None]:
    """A model id without its revision, and the revision to load: of the Hugging Face hub the commit that it is now."""
    local = _embedded(model_id) or gguf.is_gguf(model_id) or _local_folder(model_id)
    if local:
        if revision is not None:
            raise InputError(
                f"revision={revision!r} is for a model from a hub, and {model_id!r} is local: its files are what they "
                "are. Leave revision out, or name the model hf://org/name"
            )
        return model_id, None
    hub, _, own = _hub_parts(model_id)
    if own is not None and revision is not None:
        raise InputError(f"revision={revision!r} and model={model_id!r} both name a revision; give one of the two")
    chosen = own if revision is None else revision
    plain = model_id if own is None else model_id.removesuffix(f"@{own}")
    folder = Path(resolve(plain if chosen is None else f"{plain}@{chosen}"))
    return plain, folder.name if hub != "ms://" and _COMMIT.fullmatch(folder.name) else chosen


@lru_cache(maxsize=64)
def _from_hub(name: str, revision: str | None, weights: bool) -> str:
    """The folder of a snapshot in the cache of the Hugging Face hub. It is called after its commit."""
    from huggingface_hub import snapshot_download

    patterns = [*_SMALL, *(_WEIGHTS if weights else ())]
    given = "" if revision is None else f"@{revision}"
    with refusing(f"model 'hf://{name}{given}' cannot be fetched from the hub", "check name and network"):
        return snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=list(_BESIDE))


def check_repository(repo_id: str) -> None:
    """Refuse an invalid name of a repository on the Hugging Face hub."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise InputError(f'repo_id={cut(repo_id)!r} names no repository: {error} Give "you/name"') from None


def upload(
    folder: Path, repo_id: str, *, private: bool | None, token: str | None, revision: str | None, message: str
) -> str:
    """Upload a model's folder to a repository of the Hugging Face hub, which is made if need be; its address."""
    from huggingface_hub import HfApi

    try:
        api = HfApi(token=token)
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision, commit_message=message)
        return str(address)
    except Exception as error:  # of the client, of its HTTP library, or of the connection
        raise GruppoError(
            f"{repo_id} cannot be uploaded: {type(error).__name__}: {cut(str(error).strip(), 1000)}\n"
            f"The model is safe in {folder}; to try again: hf upload {shell_word(repo_id)} {shell_word(folder)}"
        ) from error


@lru_cache(maxsize=64)
def _from_modelscope(name: str, revision: str | None, weights: bool) -> str:
    try:
        from modelscope import snapshot_download  # pyright: ignore[reportMissingImports]  # optional
    except ImportError:
        raise require("modelscope", "modelscope", f"model 'ms://{name}'") from None
    patterns = [*_SMALL, *(_WEIGHTS if weights else ())]
    with refusing(f"model 'ms://{name}' cannot be fetched from the hub", "check name and network"):
        return snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=list(_BESIDE))


def holds_adapter(model_id: str) -> bool:
    """True for a folder with an adapter rather than a whole model."""
    return (Path(resolve(model_id)) / ADAPTER).is_file()


def base_of(model_id: str) -> str:
    """The model that an adapter's folder was trained on, at the revision it notes; any other model id itself."""
    if not holds_adapter(model_id):
        return model_id
    config = Path(resolve(model_id)) / ADAPTER
    values = read_object(config)
    base, revision = values.get("base_model_name_or_path"), values.get("revision")
    if not base or not isinstance(base, str):
        raise InputError(f"{config} does not name its base model (base_model_name_or_path)")
    if revision and _embedded(base) is None and _local_folder(base) is None and "@" not in base:
        base = f"{base}@{revision}"
    if holds_adapter(base):
        raise InputError(
            f"{config} names {base!r} as its base model (base_model_name_or_path), which is an adapter itself; fold "
            f"that one into its own base first: gruppo export {shell_word(base)} FOLDER --merge"
        )
    return base


def quantization_of(model_id: str) -> dict[str, str]:
    """Quantisation of an adapter's base in training, and the dtype it was made from; {} if there was none."""
    file = Path(resolve(model_id)) / MANIFEST
    noted = read_object(file) if holds_adapter(model_id) and file.is_file() else {}
    return {name: noted[name] for name in ("quantize", "dtype")} if "quantize" in noted else {}


def weights_digest(model_id: str) -> str | None:
    """Digest of the weights behind a model id, fetched if they are on a hub, and for an adapter's folder also of its
    base; None if they cannot be read."""
    path = resolve(model_id, weights=True)
    base = weights_digest(base_of(path)) if holds_adapter(path) else None
    try:
        own = digest_tensors(Path(path))
    except (OSError, ValueError, LookupError, TypeError):  # whoever opens it gives the reason
        return None
    return own if base is None else f"{own} on {base}"


def _check_base(folder: str) -> None:
    """Refuse an adapter whose manifest names other weights than its base holds."""
    file = Path(folder) / MANIFEST
    trained_on = read_object(file).get("base") if file.is_file() else None
    base = base_of(folder)
    found = weights_digest(base)
    if None not in (trained_on, found) and trained_on != found:
        raise InputError(
            f"adapter folder {folder} was trained on other weights than those of {base!r} (digest {trained_on}, found "
            f"{found}), and on these it is another policy. Put the weights back, or name the folder that has them in "
            f"{ADAPTER} (base_model_name_or_path)"
        )


def load_model(
    model_id: str,
    *,
    dtype: Any,
    attn_implementation: str | None = None,
    revision: str | None = None,
    quantize: str | None = None,
    device: Any = "cpu",
    head: Literal["CausalLM", "SequenceClassification"] = "CausalLM",
) -> "PreTrainedModel":
    """The language model of `model_id`, on the CPU; for an adapter's folder its base with the adapter on it.

    Args:
        quantize: "nf4" for linear layers in 4 bits. None: as they are; for an adapter as they were while it trained.
        device: of 4-bit weights, which are made there.
    """
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar per load would run across gruppo's own
    model_id, revision = pin(model_id, revision)
    pinned = model_id if revision is None else f"{model_id}@{revision}"
    path = resolve(pinned, weights=True)
    check_whole(Path(path))
    options: dict[str, Any] = {"dtype": dtype}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if holds_adapter(path):
        # Other weights come out of 4 bits if they were rounded otherwise before.
        options |= {"quantize": quantize, "device": device} | quantization_of(path)
        return _with_adapter(load_model(base_of(path), head=head, **options), path)
    if quantize is not None:
        options |= _quantization(pinned, quantize, dtype) | {"device_map": {"": device}}
    with refusing(f"model {model_id!r} cannot be opened"):
        auto = getattr(transformers, f"AutoModelFor{head}")
        loaded: Any = auto.from_pretrained(
            path,
            output_loading_info=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # refused below: transformers would name them in its report alone
            **options,
        )
    model, report = loaded
    if report["mismatched_keys"]:
        name, found, own = min(report["mismatched_keys"])
        raise InputError(
            f"the weights of {model_id!r} do not fit its config.json: {len(report['mismatched_keys'])} tensors have "
            f"another shape, the first {name}: {list(found)} in its files, {list(own)} by the config; copy the folder "
            "again"
        )
    if report["missing_keys"]:  # transformers would fill them with random numbers
        missing = sorted(report["missing_keys"])
        raise InputError(
            f"the weights of {model_id!r} lack {len(missing)} tensors: {', '.join(missing[:3])}; copy the folder again"
        )
    if report["unexpected_keys"]:
        unused = sorted(report["unexpected_keys"])
        names = printable(cut(", ".join(name[:100] for name in unused[:3])))
        logger.warning("%d of the tensors in the files of %r are not used: %s", len(unused), model_id, names)
    if getattr(model.config, "quantization_config", None) is None:
        check_floating(Path(path), {name for name, _ in model.named_parameters()})
    name_source(model, model_id, revision)
    return model


def name_source(model: Any, model_id: str, revision: str | None) -> None:
    """Note a file's name, or a hub's name and commit, in the model, not the folder of the cache: an adapter notes its
    base by these."""
    if gguf.is_gguf(model_id):
        model.name_or_path = model.config._name_or_path = model_id
    if revision is not None:
        model.name_or_path = model_id.removeprefix("hf://")
        model.config._name_or_path, model.config._commit_hash = model.name_or_path, revision


def load_dequantized(folder: str, *, dtype: Any) -> "PreTrainedModel":
    """The adapter of a folder on its base, whose weights are what its 4-bit numbers stand for, if it has such."""
    options: dict[str, Any] = {"dtype": dtype} | quantization_of(folder)
    base = load_model(base_of(folder), **options)
    if getattr(base, "is_quantized", False):
        with refusing(f"model {base_of(folder)!r} cannot be opened"):
            base = base.dequantize()
    return _with_adapter(base.to(dtype), folder)


def _quantization(model_id: str, quantize: str, dtype: Any) -> dict[str, Any]:
    """Options of transformers for a model in 4 bits, as in QLoRA (arXiv:2305.14314), which computes in `dtype`."""
    if find_spec("bitsandbytes") is None:
        raise require("qlora", "bitsandbytes", f"quantize={quantize!r}")
    if getattr(load_config(model_id), "quantization_config", None) is not None:
        raise InputError(f"quantize={quantize!r}: the weights of {model_id!r} are quantised already; leave it out")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantize,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config}


def _with_adapter(base: "PreTrainedModel", folder: str) -> Any:
    """A base with the adapter of a folder on it."""
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict

    _check_base(folder)
    with refusing(f"model {folder!r} cannot be opened"):
        # PEFT would import the module that `auto_mapping` names; what kind of model the base is shows in it.
        config = PeftConfig.from_pretrained(folder)
        config.auto_mapping = None
        model = PeftModel.from_pretrained(base, folder, is_trainable=True, config=config)
    own = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
    with safe_open(Path(folder) / "adapter_model.safetensors", framework="pt") as file:
        names = set(file.keys())
    missing, unknown = sorted(own - names), sorted(name for name in names - own if ".lora_" in name)
    if missing:  # PEFT leaves them at zero with a warning: the adapter that was trained would be gone
        raise InputError(
            f"adapter folder {folder} lacks {len(missing)} of its tensors: {', '.join(missing[:3])}; copy it again"
        )
    if unknown:  # PEFT leaves them out: part of the adapter would be gone
        raise InputError(
            f"adapter folder {folder} is for another base than {base_of(folder)!r}, which has no place for "
            f"{len(unknown)} of its tensors: {', '.join(unknown[:3])}. Name its own in {ADAPTER} "
            "(base_model_name_or_path)"
        )
    return model


def load_tokenizer(model_id: str, revision: str | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer of `model_id`, or of a folder that holds nothing else; of an adapter's folder without one that of
    its base."""
    from transformers import AutoTokenizer

    model_id = model_id if revision is None else f"{model_id}@{revision}"
    folder = _local_folder(model_id)
    alone = folder is not None and (folder / "tokenizer.json").is_file() and not (folder / "config.json").exists()
    path = str(folder) if alone else resolve(model_id)
    if not alone and not (Path(path) / "tokenizer_config.json").is_file():
        path = resolve(base_of(model_id))
    # transformers makes an empty tokenizer of a folder without one, and every prompt would have no tokens.
    if not any(next(Path(path).glob(name), None) for name in _TOKENIZERS):
        if gguf.is_gguf(model_id):
            raise InputError(f"{model_id} holds no tokenizer; name the folder or hub id of one: --tokenizer FOLDER")
        raise InputError(
            f"model folder {path} has no tokenizer (tokenizer.json and tokenizer_config.json); copy the files from the "
            "model that it was made from"
        )
    with refusing(f"model {model_id!r} has no usable tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        tokenizer("1", verbose=False)  # some files can be read and not used
        return tokenizer


def load_config(model_id: str) -> Any:
    """The config of `model_id`; of an adapter's folder that of its base."""
    from transformers import AutoConfig

    if holds_adapter(model_id):
        return load_config(base_of(model_id))
    with refusing(f"model {model_id!r} cannot be opened"):
        return AutoConfig.from_pretrained(resolve(model_id), trust_remote_code=False)


def context_length(model: Any) -> int | None:
    """Longest context of a model, by its id or the object, in tokens; None if its config does not give it."""
    config = load_config(model) if isinstance(model, str) else model.config
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def longest_prompt(model: Any, max_new_tokens: int, max_prompt_tokens: int | None = None) -> int | None:
    """Most tokens that a prompt may have: what its completion leaves of the context, and no more than the limit.

    None if there is no limit and the config of the model does not give its context.
    """
    context = context_length(model)
    if context is None:
        return max_prompt_tokens
    room = context - max_new_tokens
    if room < 1:
        raise InputError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt in the model's context of {context} tokens; "
            "lower it"
        )
    return room if max_prompt_tokens is None else min(max_prompt_tokens, room)


def vocabulary_size(model: Any) -> int | None:
    """Tokens that a model has an embedding for, by its id or the object; None if its config does not tell."""
    if not isinstance(model, str):
        return len(model.get_input_embeddings().weight)
    return getattr(load_config(model).get_text_config(), "vocab_size", None)


def end_tokens(model_id: str, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a completion, by the generation config, the config or the tokenizer."""
    from transformers import GenerationConfig

    folder = Path(resolve(model_id))
    generation = None
    if (folder / "generation_config.json").is_file():
        with refusing(f"model {model_id!r} cannot be opened"):
            generation = GenerationConfig.from_pretrained(folder)
    return end_tokens_of(generation, load_config(model_id), tokenizer)


def end_tokens_of(*sources: Any) -> frozenset[int]:
    """The end tokens that any of these names."""
    named = [getattr(source, "eos_token_id", None) for source in sources]
    return frozenset(i for ids in named for i in (ids if isinstance(ids, list) else [ids]) if i is not None)


def outline(model_id: str) -> "PreTrainedModel":
    """The language model of `model_id` without numbers, for its modules and shapes; of an adapter's folder the base."""
    import torch
    from transformers import AutoModelForCausalLM

    with refusing(f"model {model_id!r} cannot be opened"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(load_config(model_id), trust_remote_code=False)


def linear_layers(model: Any) -> tuple[str, ...]:
    """Last names of all linear layers except the head, by a model's id or the object: the targets of "all-linear"."""
    import torch
    from transformers.pytorch_utils import Conv1D

    if isinstance(model, str):
        model = outline(model)
    head = model.get_output_embeddings()
    return tuple(sorted({
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
    }))  # fmt: skip
