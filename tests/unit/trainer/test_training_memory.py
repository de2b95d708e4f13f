"""The estimate of memory, against the peak that torch's tracker finds in a step of FSDP2, and by hand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from gruppo.model.lora import LoraSpec, add_lora
from gruppo.model.sharding import shard
from gruppo.parallel.ranks import Ranks
from gruppo.trainer import TrainConfig, build
from gruppo.trainer.estimate import estimate_run, training_memory
from gruppo.trainer.inputs import resolve_inputs
from gruppo.types import Prompt
from gruppo.weights.source import resolve

HIDDEN, INNER, LAYERS, VOCABULARY = 256, 1024, 6, 64
BLOCK = 4 * HIDDEN**2 + 3 * HIDDEN * INNER + 2 * HIDDEN
OUTSIDE = 2 * VOCABULARY * HIDDEN + HIDDEN


def llama(**changes: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**sizes | heads | changes))


@pytest.fixture
def group_of() -> Iterator[Any]:
    """Groups of ranks that are not there: collectives move nothing, and memory is that of one rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def make(world: int) -> Any:
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        return dist.group.WORLD

    yield make
    dist.destroy_process_group()


def peak_of_step(model: torch.nn.Module, tokens: int) -> int:
    """Bytes at the peak of the second step: the first makes the optimizer's state."""
    from torch.distributed._tools.mem_tracker import MemTracker

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    ids = torch.arange(tokens)[None] % VOCABULARY

    def step() -> None:
        model(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's, about a group that is not there
@pytest.mark.parametrize(
    ("world", "dtype", "exact"),
    [
        (2, "float32", False),
        (8, "float32", False),
        (8, "bfloat16", False),
        (64, "bfloat16", False),
        (8, "float32", True),
    ],
)
def test_the_estimate_on_ranks_is_near_the_peak_of_a_step(world: int, dtype: str, exact: bool, group_of: Any) -> None:
    model, compute = llama(), getattr(torch, dtype)
    config = TrainConfig(ranks_exact=exact)
    estimate = training_memory(config, model, tokens=16, dtype=compute, ranks=world)
    shard(model, model, Ranks(group_of(world)), torch.device("cpu"), compute=compute, exact=exact)
    assert estimate.total == pytest.approx(peak_of_step(model, 16), rel=0.12)
    # A model that is sharded already, as that of a run, has the same shapes.
    assert training_memory(config, model, tokens=16, dtype=compute, ranks=world) == estimate


def test_all_weights_on_ranks_by_hand() -> None:
    found = training_memory(TrainConfig(beta=0.1), llama(), tokens=100, dtype=torch.bfloat16, ranks=4)
    parameters = LAYERS * BLOCK + OUTSIDE
    assert (found.weights, found.gradients, found.optimizer) == (parameters, parameters, 2 * parameters)
    assert found.reference == parameters
    # Two blocks in bfloat16, the gradient of one in bfloat16 and in float32; the rest and its gradient in bfloat16.
    assert found.gathered == BLOCK * (2 + 2 + 2 + 4) + OUTSIDE * (2 + 2)
    assert found.activations == 100 * HIDDEN * 16 * LAYERS * 2 + 100 * VOCABULARY * 4 * 3


def test_an_adapter_of_a_model_that_has_no_weights_yet() -> None:
    with torch.device("meta"):
        model = add_lora(llama(), LoraSpec(rank=4))
    config = TrainConfig(lora=True, gradient_checkpointing=True, ranks_exact=True)
    found = training_memory(config, model, tokens=100, dtype=torch.bfloat16, ranks=2)
    of_block = 4 * (4 * 2 * HIDDEN + 3 * (HIDDEN + INNER))  # rank 4 on four square layers and three of the MLP
    whole = LAYERS * (BLOCK + of_block) + OUTSIDE
    assert (found.weights, found.optimizer) == (2 * whole, 4 * LAYERS * of_block)
    assert found.gradients == 4 * LAYERS * of_block  # and the sums so far
    assert found.gathered == (BLOCK + of_block) * 4 + of_block * 6 + OUTSIDE * 2
    assert found.activations == 100 * HIDDEN * (LAYERS + 16) * 2 + 100 * VOCABULARY * 4 * 3


WHOLE = LAYERS * BLOCK + OUTSIDE
ADAPTER = LAYERS * 4 * (4 * 2 * HIDDEN + 3 * (HIDDEN + INNER))
LORA: dict[str, Any] = {"lora": True, "lora_rank": 4}


@pytest.mark.filterwarnings("ignore")  # torch's, about a group that is not there
@pytest.mark.parametrize(
    ("options", "copied"),
    [
        ({"dtype": "float32", "shard": "full"}, 4 * WHOLE),
        ({"dtype": "bfloat16", "shard": "full"}, 2 * WHOLE),
        ({"dtype": "bfloat16", "shard": "full", **LORA}, 2 * (WHOLE + ADAPTER)),
        # The head is there twice, and the files are not read by rows.
        (
            {"dtype": "bfloat16", "shard": "full", **LORA, "lora_modules_to_save": ("lm_head",)},
            4 * (WHOLE + ADAPTER + VOCABULARY * HIDDEN),
        ),
        ({"dtype": "bfloat16", "shard": "none"}, 2 * WHOLE),
        ({"dtype": "bfloat16", "shard": "none", **LORA}, 2 * ADAPTER),  # the base is shared with the model
        ({"dtype": "bfloat16", "shard": "full", "sampler": "vllm:start"}, 0),
    ],
    ids=["float32", "bfloat16", "lora", "loaded whole", "replicated", "replicated lora", "vllm"],
)
def test_the_copy_that_samples_by_hand(
    options: dict[str, Any],
    copied: int,
    group_of: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llama().save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(resolve("builtin")).save_pretrained(tmp_path)
    config, objects = resolve_inputs(TrainConfig(model=str(tmp_path), rewards=("exact_match",), **options))
    model = build.build_ranked(config, objects, build.build_loss(config), None, Ranks(group_of(2)), lambda seen: seen)
    assert estimate_run(config, model, [Prompt(token_ids=(1, 2))]).copy == copied
