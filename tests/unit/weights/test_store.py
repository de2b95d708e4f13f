"""What is published for samplers, what is said about a folder that is not the model's, and what is deleted when."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tiny_models import actor, perturb_adapter
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from gruppo.errors import SamplerError
from gruppo.model import LoraSpec, TransformersModel
from gruppo.weights import Published, WeightStore, store
from gruppo.weights.store import NotTaken, WrongWeights

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
Q = "model.layers.0.self_attn.q_proj.weight"


def written(model: TransformersModel, folder: Path, change: Change = lambda tensors: tensors) -> Path:
    """A folder of the model, changed."""
    store.write(model, folder)
    (file,) = folder.glob("*.safetensors")
    save_file(change(load_file(file)), file)
    return folder


def test_a_header_is_read_as_it_was_packed_by_hand(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(26))
    found = store.contents(tmp_path)
    assert found == {"a": ((2, 3), 24), "b": ((), 2)}


def test_all_files_of_a_folder_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "model-00002-of-00002.safetensors")
    assert store.contents(tmp_path) == {"a": ((2,), 8), "b": ((3,), 6)}


@pytest.mark.parametrize("content", [b"", b"\x05\0\0\0", struct.pack("<Q", 3) + b"{{{"], ids=["empty", "5", "{{{"])
def test_a_file_that_is_none_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(SamplerError, match=r"model\.safetensors is not a safetensors file"):
        store.contents(tmp_path)


def test_a_file_that_lacks_its_last_byte_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(SamplerError, match="it is cut short"):
        store.contents(tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])  # an untied head and two tied ones
def test_all_weights_are_written_once_and_found_right(family: str, tmp_path: Path) -> None:
    model = actor(family)
    folder = written(model, tmp_path / "w")
    own = {p.data_ptr(): p for p in model.model.parameters()}
    assert sum(size for _, size in store.contents(folder).values()) == 4 * sum(p.numel() for p in own.values())
    assert store.compare(model, folder) is None
    assert store.differing(model, folder) == []


def test_an_adapter_is_written_alone(tmp_path: Path) -> None:
    model = actor("llama", lora=LoraSpec(rank=2, targets=("q_proj",)))
    perturb_adapter(model.model)
    folder = written(model, tmp_path / "w")
    prefix = "base_model.model.model.layers"
    assert store.contents(folder) == {  # q_proj is [32, 32]: A is [2, 32], B is [32, 2]
        f"{prefix}.{layer}.self_attn.q_proj.lora_{half}.weight": (shape, 256)
        for layer in (0, 1)
        for half, shape in (("A", (2, 32)), ("B", (32, 2)))
    }
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 2
    assert store.compare(model, folder) is None
    assert store.differing(model, folder) == []


def test_what_lay_in_the_folder_before_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    folder.mkdir()
    save_file({"of another run": torch.zeros(2)}, folder / "model-00009.safetensors")
    assert store.compare(actor("llama"), written(actor("llama"), folder)) is None
    assert not (folder / "model-00009.safetensors").exists()


CHANGES: dict[str, tuple[Change, str]] = {
    "dropped": (lambda t: {n: x for n, x in t.items() if n != Q}, f"the file lacks ['{Q}'] and has unknown []"),
    "prefix": (
        lambda t: {n.replace(Q, f"base_model.model.{Q}"): x for n, x in t.items()} | {"more": torch.zeros(1)},
        f"the file lacks ['{Q}'] and has unknown ['base_model.model.{Q}', 'more']",
    ),
    "shape": (lambda t: t | {Q: t[Q][:8].clone()}, f"the file has other shapes for ['{Q}']"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_with_other_tensors_is_described(name: str, tmp_path: Path) -> None:
    change, said = CHANGES[name]
    model = actor("llama")
    assert store.compare(model, written(model, tmp_path / "w", change)) == said


def test_an_empty_adapter_is_described_by_its_first_names_and_their_number(tmp_path: Path) -> None:
    model = actor("llama", lora=LoraSpec(rank=2))
    said = store.compare(model, written(model, tmp_path / "w", lambda t: {}))
    assert said is not None
    assert said.startswith("the file lacks ['base_model.model.model.layers.0.mlp.down_proj.lora_A.weight', ")
    assert said.endswith("and 25 more and has unknown []")  # 2 layers x 7 layers x 2 halves, less 3


def test_an_adapter_under_a_wrong_prefix_is_described_though_its_size_is_right(tmp_path: Path) -> None:
    model = actor("llama", lora=LoraSpec(rank=2, targets=("q_proj",)))
    change: Change = lambda t: {n.replace("base_model.model.", "base_model.model.wrong."): x for n, x in t.items()}  # noqa: E731
    said = store.compare(model, written(model, tmp_path / "w", change))
    assert said is not None and "has unknown ['base_model.model.wrong.model.layers.0" in said


def test_the_tensors_that_differ_are_named(tmp_path: Path) -> None:
    model = actor("llama")

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[Q][3, 4] += 1e-6
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
        return tensors

    assert store.differing(model, written(model, tmp_path / "w", change)) == [Q, "model.norm.weight"]


def test_the_tensors_of_a_sharded_model_that_differ_are_named(tmp_path: Path) -> None:
    model = actor("llama")

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[Q][3, 4] += 1e-6
        return tensors

    folder = written(model, tmp_path / "w", change)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model.model, mesh=DeviceMesh("cpu", [0]))
        assert store.differing(model, folder) == [Q]
    finally:
        dist.destroy_process_group()


def test_few_names_the_first_three() -> None:
    assert store.few(["a", "b"]) == "['a', 'b']"
    assert store.few(["a", "b", "c", "d", "e"]) == "['a', 'b', 'c'] and 2 more"


# --- publishing ---------------------------------------------------------------------------------------------------

ROWS = ((5, 9, 4), (17, 30))


class FakeSampler:
    """Takes weights, or raises what it was told to."""

    def __init__(self, *faults: Exception) -> None:
        self.faults = list(faults)
        self.loaded: Published | None = None
        self.given: list[Published] = []

    def load(self, published: Published) -> dict[str, float]:
        self.given.append(published)
        if self.faults:
            raise self.faults.pop(0)
        self.loaded = published
        return {"sync/bytes": float(published.bytes)}


def versions(weights: WeightStore) -> list[str]:
    return sorted(p.name for p in weights.folder.iterdir())


def test_what_is_published_says_its_version_its_tensors_and_the_trainers_log_probs(tmp_path: Path) -> None:
    model = actor("llama", temperature=0.5)
    model.version = 7
    published = WeightStore(tmp_path, ROWS).publish(model)
    assert (published.version, published.folder) == (7, tmp_path / "version-7")
    assert published.contents == store.contents(published.folder)
    assert not published.is_adapter
    expected = []
    for row in ROWS:  # at temperature 1, whatever the model's own
        with torch.no_grad():
            logits = model.model(input_ids=torch.tensor([row])).logits[0].double()
        expected += [logits[j - 1].log_softmax(-1)[row[j]].item() for j in range(1, len(row))]
    assert published.canary.rows == ROWS
    assert published.canary.logps == pytest.approx(expected, abs=1e-5)


def test_a_sampler_that_has_the_version_is_given_nothing(tmp_path: Path) -> None:
    weights, model, sampler = WeightStore(tmp_path, ROWS), actor("llama"), FakeSampler()
    size = 4 * sum(p.numel() for p in model.model.parameters())
    assert weights.hand_over(model, sampler) == {"sync/bytes": size}
    assert weights.hand_over(model, sampler) == {}
    model.version = 1
    assert weights.hand_over(model, sampler) == {"sync/bytes": size}
    assert [p.version for p in sampler.given] == [0, 1]


def test_weights_that_are_not_taken_are_written_and_given_once_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights, sampler = WeightStore(tmp_path, ROWS), FakeSampler(NotTaken("read 3 of 4"))
    assert weights.hand_over(actor("llama"), sampler).keys() == {"sync/bytes"}
    assert len(sampler.given) == 2
    assert [r.getMessage() for r in caplog.records] == ["hand-over of version 0 failed: read 3 of 4"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (NotTaken("read 3 of 4"), r"version 0 did not reach the sampler, tried twice: read 3 of 4\. Nothing was"),
        (WrongWeights("gap 0.5"), "gap 0.5; the file holds the model's weights, so the engine did not take them"),
    ],
)
def test_weights_that_are_never_taken_stop_the_run_and_stay_to_be_looked_at(
    fault: Exception, said: str, tmp_path: Path
) -> None:
    weights, sampler = WeightStore(tmp_path / "sync", ROWS), FakeSampler(fault, fault)
    with pytest.raises(SamplerError, match=said):
        weights.hand_over(actor("llama"), sampler)
    assert len(sampler.given) == 2
    weights.close()
    assert versions(weights) == ["version-0"]


def test_a_sampler_that_is_lost_is_not_given_the_weights_again(tmp_path: Path) -> None:
    sampler = FakeSampler(SamplerError("was lost 4 times in a row"))
    with pytest.raises(SamplerError, match=r"^was lost 4 times in a row$"):
        WeightStore(tmp_path, ROWS).hand_over(actor("llama"), sampler)
    assert len(sampler.given) == 1


def test_versions_before_the_one_in_use_are_deleted_and_newer_ones_stay(tmp_path: Path) -> None:
    (tmp_path / "version-77").mkdir()  # of a run that was killed
    (tmp_path / "mine.txt").touch()
    weights, model = WeightStore(tmp_path, ROWS), actor("llama")
    published = []
    for version in range(4):
        model.version = version
        published.append(weights.publish(model))
    weights.release(published[2])
    assert versions(weights) == ["mine.txt", "version-2", "version-3"]
    weights.release(published[3])
    assert versions(weights) == ["mine.txt", "version-3"]
    weights.close()
    assert versions(weights) == ["mine.txt"]


def test_a_temporary_folder_is_gone_after_the_end() -> None:
    weights = WeightStore(None, ROWS)
    weights.hand_over(actor("llama"), FakeSampler())
    assert versions(weights) == ["version-0"]
    weights.close()
    assert not weights.folder.exists()
