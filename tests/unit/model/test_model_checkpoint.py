"""Folders that are complete or do not exist: the commit protocol, and what a manifest protects against."""

import errno
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import actor, random_features, weights

from gruppo.errors import CheckpointError, NumericError
from gruppo.model import LoraSpec, TransformersModel
from gruppo.model.checkpoint import load_training_state, save_training_state
from gruppo.model.shards import load_shards
from gruppo.weights.files import commit_folder, read_manifest

FEATURES = random_features(num=4, seed=41)


def trained(steps: int = 2, **options: Any) -> TransformersModel:
    model = actor(**options)
    model.set_optimizer("AdamW", lr=0.01)
    for _ in range(steps):
        take_step(model)
    return model


def take_step(model: TransformersModel) -> None:
    model.forward_backward(FEATURES, advantages=[1.0, -1.0, 0.5, -0.5])
    model.clip_grad_and_step()


def write_two_files(folder: Path) -> None:
    (folder / "a.txt").write_text("alpha")
    (folder / "sub").mkdir()
    (folder / "sub" / "b.txt").write_text("beta")


# --- commit -------------------------------------------------------------------------------------------------------


def test_a_committed_folder_lists_every_file_with_size_and_hash(tmp_path: Path) -> None:
    commit_folder(tmp_path / "one", write_two_files, {"step": 3})
    manifest = read_manifest(tmp_path / "one")
    assert manifest["step"] == 3
    assert manifest["files"]["a.txt"] == {
        "size": 5,
        "sha256": "8ed3f6ad685b959ead7022518e1af76cd816f8e8ec7ccdda1ed4018e8f2223f8",  # of the word alpha
    }
    assert set(manifest["files"]) == {"a.txt", "sub/b.txt"}
    assert [p.name for p in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_the_files_of_a_folder_have_the_modes_that_the_umask_gives(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        commit_folder(tmp_path / "one", lambda folder: save_file({"a": torch.zeros(2)}, folder / "a.safetensors"), {})
    finally:
        os.umask(before)
    assert {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "one").iterdir()} == {
        "a.safetensors": mode,
        "manifest.json": mode,
    }


def test_an_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    commit_folder(tmp_path / "one", write_two_files, {})
    with pytest.raises(CheckpointError, match="exists already; nothing was written"):
        commit_folder(tmp_path / "one", write_two_files, {})


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "I/O error")])
@pytest.mark.parametrize("where", ["write", "fsync", "rename", "write_text", "mkdir"])
def test_an_error_of_the_disk_leaves_nothing_behind(
    where: str, error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_folder(tmp_path / "step-1", write_two_files, {})

    def fail(*_: Any, **__: Any) -> None:
        raise error

    def write(folder: Path) -> None:
        if where == "write_text":  # write_two_files uses it as well
            (folder / "a.bin").write_bytes(b"x")
            return
        write_two_files(folder)
        if where == "write":
            fail()

    owner: Any = {"fsync": os, "rename": os, "write_text": Path, "mkdir": Path}.get(where)
    if owner is not None:
        monkeypatch.setattr(owner, where, fail)
    with pytest.raises(
        CheckpointError, match=rf"could not write .*step-2: .*{error.strerror}.*what was saved before is untouched"
    ):
        commit_folder(tmp_path / "step-2", write, {})
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    assert set(read_manifest(tmp_path / "step-1")["files"]) == {"a.txt", "sub/b.txt"}


def test_a_full_disk_under_safetensors_is_the_same_error(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the full disk; safetensors has an exception of its own for it."""
    commit_folder(tmp_path / "step-1", write_two_files, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match=r"could not write .*step-2.*MiB free"):
            commit_folder(
                tmp_path / "step-2", lambda folder: save_file({"x": torch.zeros(10_000)}, folder / "w.safetensors"), {}
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    read_manifest(tmp_path / "step-1")


def test_an_error_of_our_own_leaves_nothing_behind_either(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        write_two_files(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        commit_folder(tmp_path / "one", write, {})
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_is_written_last_and_the_folder_renamed_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, list[str]]] = []
    rename, fsync = os.rename, os.fsync

    def spy_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        seen.append(("fsync", [path.name]))
        fsync(descriptor)

    def spy_rename(source: Path, target: Path) -> None:
        seen.append(("rename", sorted(p.name for p in Path(source).iterdir())))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "rename", spy_rename)
    commit_folder(tmp_path / "one", write_two_files, {})
    assert seen == [
        ("fsync", ["a.txt"]),
        ("fsync", ["b.txt"]),
        ("fsync", ["manifest.json"]),
        ("rename", ["a.txt", "manifest.json", "sub"]),
        ("fsync", [tmp_path.name]),
    ]


# --- manifests ----------------------------------------------------------------------------------------------------


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "3", "{}", '{"files": []}', '{"files": {"a.txt": 5}}', '{"files": {"a.txt": {"size": 5}}}',
     '{"files": {"a.txt": {"size": "x", "sha256": 1}}}', "\ud800".encode("utf-8", "surrogatepass"), "[" * 100_000],
    ids=range(12),
)  # fmt: skip
@pytest.mark.row("R-45", "manifests that are none")
def test_a_manifest_that_is_none_is_refused(content: str | bytes, tmp_path: Path) -> None:
    commit_folder(tmp_path / "one", write_two_files, {})
    (tmp_path / "one" / "manifest.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        read_manifest(tmp_path / "one")


@pytest.mark.parametrize("name", ["../secret.txt", "sub/../../secret.txt", "/etc/hostname"])
@pytest.mark.row("R-45", "../ in a manifest")
def test_a_manifest_that_points_outside_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    commit_folder(tmp_path / "one", write_two_files, {})
    manifest = manifest_of(tmp_path / "one")
    manifest["files"][name] = {"size": 6, "sha256": "0" * 64}
    (tmp_path / "one" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="lies outside the folder"):
        read_manifest(tmp_path / "one")


@pytest.mark.row("R-45", "a symlinked shard")
def test_a_file_replaced_by_a_link_is_refused(tmp_path: Path) -> None:
    commit_folder(tmp_path / "one", write_two_files, {})
    (tmp_path / "elsewhere.txt").write_text("alpha")
    (tmp_path / "one" / "a.txt").unlink()
    (tmp_path / "one" / "a.txt").symlink_to(tmp_path / "elsewhere.txt")
    with pytest.raises(CheckpointError, match="lies outside the folder"):
        read_manifest(tmp_path / "one")


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "grow", "remove"])
@pytest.mark.row("R-05", "any byte changed")
def test_any_damage_to_a_file_is_seen(damage: str, tmp_path: Path) -> None:
    commit_folder(tmp_path / "one", write_two_files, {})
    path = tmp_path / "one" / "sub" / "b.txt"
    change = {"flip": "bexa", "truncate": "bet", "empty": "", "grow": "beta!"}.get(damage)
    if change is None:
        path.unlink()
    else:
        path.write_text(change)
    with pytest.raises(CheckpointError, match=r"lacks sub/b\.txt" if damage == "remove" else r"b\.txt is damaged"):
        read_manifest(tmp_path / "one")


# --- training state -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["full", "lora"])
def test_a_restored_model_continues_to_the_bit(lora: LoraSpec | None, tmp_path: Path) -> None:
    model = trained(lora=lora)
    save_training_state(model.weights, model.optimizer, tmp_path)
    for _ in range(2):
        take_step(model)
    other = actor(lora=lora)
    other.set_optimizer("AdamW", lr=0.01)
    load_training_state(other.weights, other.optimizer, tmp_path)
    for _ in range(2):
        take_step(other)
    mine, theirs = weights(model.model), weights(other.model)
    assert all(torch.equal(mine[n], theirs[n]) for n in mine)


@pytest.mark.parametrize("load", [load_training_state, load_shards], ids=["one process", "ranks"])
def test_the_options_of_the_optimizer_are_those_that_it_was_made_with(load: Any, tmp_path: Path) -> None:
    model, other = trained(), actor()
    save_training_state(model.weights, model.optimizer, tmp_path)
    other.set_optimizer("AdamW", lr=0.01, weight_decay=0.5)
    load(other.weights, other.optimizer, tmp_path)
    before = weights(model.model)
    for each in (model, other):
        take_step(each)
    # The same step, and of each weight 0.01 * 0.5 less
    mine, theirs = weights(model.model), weights(other.model)
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor - theirs[name], 0.005 * before[name], atol=2e-7, rtol=0)


def test_only_what_trains_is_saved(tmp_path: Path) -> None:
    model = trained(lora=LoraSpec(rank=2))
    save_training_state(model.weights, model.optimizer, tmp_path)
    assert all("lora_" in name for name in load_file(tmp_path / "weights.safetensors"))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "optimizer.json",
        "optimizer.safetensors",
        "weights.safetensors",
    ]


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "RMSprop", "Adagrad"])
def test_any_optimizer_of_torch_is_restored(optimizer: str, tmp_path: Path) -> None:
    models = [actor() for _ in range(2)]
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    for model in models:
        model.set_optimizer(optimizer, lr=0.01, **options)
    for _ in range(2):
        take_step(models[0])
    save_training_state(models[0].weights, models[0].optimizer, tmp_path)
    load_training_state(models[1].weights, models[1].optimizer, tmp_path)
    for model in models:
        take_step(model)
    mine, theirs = (weights(m.model) for m in models)
    assert all(torch.equal(mine[n], theirs[n]) for n in mine)


@pytest.mark.row("R-30", "a checkpoint of NaN")
def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    model = trained()
    with torch.no_grad():
        model.model.get_parameter("model.norm.weight")[3] = float("inf")
    with pytest.raises(NumericError, match=r"model\.norm\.weight holds non-finite numbers .* Lower lr"):
        save_training_state(model.weights, model.optimizer, tmp_path)


def crafted(tmp_path: Path, what: str) -> None:
    model = trained()
    save_training_state(model.weights, model.optimizer, tmp_path)
    tensors = load_file(tmp_path / "weights.safetensors")
    state = load_file(tmp_path / "optimizer.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    if what == "shape":
        tensors[name] = tensors[name].T.contiguous()
    elif what == "missing key":
        del tensors[name]
    elif what == "extra key":
        tensors["evil"] = torch.zeros(2)
    elif what == "nan":
        tensors[name][0, 0] = float("nan")
    elif what == "optimizer shape":
        state["0.exp_avg"] = state["0.exp_avg"][:-1].contiguous()
    elif what == "negative square":
        state["0.exp_avg_sq"][0] = -1e-3
    elif what == "optimizer index":
        state["999.exp_avg"] = torch.zeros(2, 2)
    elif what == "optimizer key":
        state["nonsense"] = torch.zeros(2)
    save_file(tensors, tmp_path / "weights.safetensors")
    save_file(state, tmp_path / "optimizer.safetensors")
    if what == "optimizer json":
        (tmp_path / "optimizer.json").write_text("[]")
    elif what == "huge header":
        (tmp_path / "weights.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"{}")
    elif what == "overlap":
        header = json.dumps({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}).encode()
        data = len(header).to_bytes(8, "little") + header + b"\0" * 4
        (tmp_path / "weights.safetensors").write_bytes(data)
    elif what == "absent":
        (tmp_path / "weights.safetensors").unlink()


@pytest.mark.parametrize(
    "what",
    ["shape", "missing key", "extra key", "nan", "optimizer shape", "negative square", "optimizer index",
     "optimizer key", "optimizer json", "huge header", "overlap", "absent"],
)  # fmt: skip
@pytest.mark.row("R-45", "crafted state with a fitting hash")
def test_a_crafted_state_is_refused_and_changes_nothing(what: str, tmp_path: Path) -> None:
    crafted(tmp_path, what)
    model = trained(steps=1, seed=5)
    before = weights(model.model)
    moments = {k: v["exp_avg"].clone() for k, v in model.optimizer.state.items()}
    with pytest.raises(CheckpointError):
        load_training_state(model.weights, model.optimizer, tmp_path)
    assert all(torch.equal(p, before[n]) for n, p in weights(model.model).items())
    assert all(torch.equal(model.optimizer.state[k]["exp_avg"], v) for k, v in moments.items())
