"""R-44 to R-46 and R-50: files of strangers run no code and take no more than there is; a server of ours is private."""

import http.client
import json
import logging
import os
import pickle
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
import yaml
from fuzz_cases import GOOD_ROWS, copy_model, parquet_of, spoil
from safetensors.torch import load_file, save_file
from warm_process import run_python

from gruppo.cli.main import main
from gruppo.errors import InputError, MissingExtraError
from gruppo.model import TransformersModel
from gruppo.run.reader import read_yaml
from gruppo.sampler.vllm.http import HttpEngine
from gruppo.sampler.vllm.server import ServerProcess
from gruppo.task.builtin import builtin_model_path
from gruppo.task.dataset import read_rows
from gruppo.task.template import render_chat
from gruppo.trainer.config import TrainConfig
from gruppo.weights.source import load_model, load_tokenizer, pin, resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "f" * 40


@pytest.fixture
def model(tmp_path: Path) -> Path:
    copy_model(tmp_path / "m")
    return tmp_path / "m"


# --- model folders ------------------------------------------------------------------------------------------------


def test_an_index_that_names_a_pickle_is_refused_though_the_pickle_holds_the_weights(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    torch.save(weights, model / "weights.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "weights.bin")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model.safetensors").rename(model / "other.safetensors")
    with pytest.raises(
        InputError, match=r"index\.json names 'weights\.bin' for tensor .*; gruppo reads \*\.safetensors"
    ):
        load_model(str(model), dtype=torch.float32)


@pytest.mark.parametrize("shard", ["../other/x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "x.pt", 5])
def test_an_index_names_safetensors_of_its_own_folder_alone(shard: Any, model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(InputError, match="in the folder only"):
        resolve(str(model))


def test_shards_of_its_own_folder_are_read(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = load_model(str(model), dtype=torch.float32)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in weights.items())


NAME = "\x1b[2J\x1b]0;owned\x07{}"


@pytest.mark.parametrize("num", [1, 20_000])
@pytest.mark.row("R-48", "names of tensors in a model folder")
def test_tensors_that_the_model_does_not_use_are_counted_and_their_names_escaped(num: int, model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    extra = {NAME.format(i) + f".{'ab'[i % 2]}{i:05d}": torch.zeros(1) for i in range(num)}
    save_file(weights | extra, model / "model.safetensors", metadata={"format": "pt"})
    code = (
        f"import torch; from gruppo.weights.source import load_model; load_model({str(model)!r}, dtype=torch.float32)"
    )
    said = run_python(["-c", code], capture_output=True, text=True, timeout=120).stderr
    assert (
        f"{num} of the tensors in the files of {str(model)!r} are not used: \\x1b[2J\\x1b]0;owned\\x070.a00000" in said
    )
    assert "\x1b" not in said and "\x07" not in said and len(said) < 1000


def test_tensors_of_another_shape_are_an_error_that_names_them(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = torch.zeros(3)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"1 tensors have another shape, the first model.norm.weight: \[3\] in its"):
        load_model(str(model), dtype=torch.float32)
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_what_transformers_says_of_a_file_is_escaped_and_cut(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("transformers.modeling_utils")
    before = transformers.AutoModelForCausalLM.from_pretrained

    def speaks(*arguments: Any, **options: Any) -> Any:
        logger.warning("%s", "\x1b[2J" + "x" * 5000)
        return before(*arguments, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", speaks)
    seen: list[str] = []
    keeper = logging.Handler()
    keeper.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [keeper])
    load_model(str(model), dtype=torch.float32)
    assert seen == ["\\x1b[2J" + "x" * 996 + "... (5,004 characters)"]


@pytest.mark.parametrize(
    "values",
    [
        {"_attn_implementation": "evil/kernel"},
        {"attn_implementation": "kernels-community/flash-attn@main:x"},
        {"_attn_implementation_internal": "evil/kernel"},
        {"_experts_implementation": {"": "evil/kernel"}},
        {"text_config": {"vision": [{"_attn_implementation": "evil/kernel"}]}},
    ],
)
def test_a_kernel_that_a_config_names_is_refused(values: dict[str, Any], model: Path) -> None:
    spoil(model, {"file": "config.json", "set": values})
    with pytest.raises(InputError, match="a kernel that transformers would fetch from a hub and run"):
        resolve(str(model))


def test_an_adapter_whose_base_is_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="which is an adapter itself"):
        load_model(str(tmp_path), dtype=torch.float32)


# --- data --------------------------------------------------------------------------------------------------------


def test_a_parquet_file_of_many_equal_rows_is_read(tmp_path: Path) -> None:
    file = tmp_path / "equal.parquet"
    file.write_bytes(parquet_of(["1+1="] * 3000, answer=["2", None, "\u20ac"] * 1000))
    rows = read_rows(file)
    assert [rows[0], rows[1], rows[2999]] == [
        {"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1=", "answer": None}, {"prompt": "1+1=", "answer": "\u20ac"}
    ]  # fmt: skip


def test_aliases_that_stand_for_a_billion_values_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    file.write_text("\n".join(["a0: &a0 [lol]", *levels]))
    with pytest.raises(InputError, match="stands for more than 10,000 values by its aliases; write them out"):
        read_yaml(file)
    file.write_text("a: &a [1, 2]\nb: *a\nc: {<<: {d: 1}}\n")
    assert read_yaml(file) == {"a": [1, 2], "b": [1, 2], "c": {"d": 1}}


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            "{{ messages.__class__.__mro__ }}",
            "refuses the conversation: access to attribute '__class__' of 'list' object",
        ),
        ("{{ messages.append(1) }}", "refuses the conversation: access to attribute 'append'"),
        ("{{ 1 / 0 }}", "fails on the conversation: ZeroDivisionError"),
        ("{{ raise_exception('only one turn') }}", "refuses the conversation: only one turn"),
    ],
)
def test_a_chat_template_reaches_nothing_and_its_error_is_named(template: str, says: str) -> None:
    tokenizer = load_tokenizer("builtin")
    tokenizer.chat_template = template
    with pytest.raises(InputError) as refused:
        render_chat([{"role": "user", "content": "1+1="}], tokenizer)
    assert says in str(refused.value)


def test_a_chat_template_gives_the_tokens_that_transformers_gives() -> None:
    tokenizer = load_tokenizer("builtin")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "12+34="}, {"role": "user", "content": "56+78="}]
    theirs: Any = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True)
    ids, text = render_chat(messages, tokenizer)
    assert (list(ids), text) == (theirs["input_ids"], "<s>12+34=56+78=".replace("<s>", str(tokenizer.bos_token)))


# --- run directories ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("words", [["sample", "1+1=", "--run", "RUN"], ["eval", "RUN", "--rewards", "exact_match"]])
def test_tools_of_another_users_run_are_not_imported_unless_told(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "evil_tools.py").write_text("import pathlib\npathlib.Path('canary').touch()\ntool = 1\n")
    sys.modules.pop("evil_tools", None)
    copy_model(run / "model")
    (run / "config.yaml").write_text(yaml.safe_dump({"tools": ["evil_tools:tool"], "output": str(run)}))
    (run / "heldout.jsonl").write_text(GOOD_ROWS)
    monkeypatch.chdir(tmp_path)
    os.chown(run, 12345, 12345)
    words = [str(run) if word == "RUN" else word for word in words]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert f"{run} belongs to another user (uid 12345)" in capsys.readouterr().err
    assert not (tmp_path / "canary").exists()
    with pytest.raises(SystemExit):
        main([*words, "--trust"])
    assert (tmp_path / "canary").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("words", [["resume"], ["eval"]])
def test_a_run_of_another_user_is_not_resumed_unless_told(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    code = "import pathlib\npathlib.Path('canary').touch()\ndef reward(completions): return [0.0]\n"
    (tmp_path / "evil_module.py").write_text(code)
    sys.modules.pop("evil_module", None)
    copy_model(run / "model")
    (run / "config.yaml").write_text(yaml.safe_dump({"rewards": ["evil_module:reward"], "output": str(run)}))
    (run / "heldout.jsonl").write_text(GOOD_ROWS)
    monkeypatch.chdir(tmp_path)
    os.chown(run, 12345, 12345)
    os.chown(run / "config.yaml", 12345, 12345)
    with pytest.raises(SystemExit) as ended:
        main([*words, str(run)])
    assert ended.value.code == 2
    assert f"{run} belongs to another user (uid 12345)" in capsys.readouterr().err
    assert not (tmp_path / "canary").exists()
    with pytest.raises(SystemExit):
        main([*words, str(run), "--trust"])  # further on it fails, after the module was imported
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("words", [["resume"], ["eval"]])
@pytest.mark.parametrize("opened", ["config.yaml", "."])
def test_a_run_that_every_user_can_write_is_not_resumed_unless_told(
    opened: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "evil_module.py").write_text("import pathlib\npathlib.Path('canary').touch()\n")
    sys.modules.pop("evil_module", None)
    copy_model(run / "model")
    (run / "config.yaml").write_text(yaml.safe_dump({"rewards": ["evil_module:reward"], "output": str(run)}))
    (run / "heldout.jsonl").write_text(GOOD_ROWS)
    monkeypatch.chdir(tmp_path)
    (run / opened).chmod(0o777 if opened == "." else 0o666)
    with pytest.raises(SystemExit) as ended:
        main([*words, str(run)])
    assert ended.value.code == 2
    mode = "777" if opened == "." else "666"
    said = capsys.readouterr().err
    assert f"{run / opened} can be written by every user (mode {mode}; chmod o-w)" in said and "--trust" in said
    assert not (tmp_path / "canary").exists()
    with pytest.raises(SystemExit):
        main([*words, str(run), "--trust"])
    assert (tmp_path / "canary").exists()


# --- revisions ----------------------------------------------------------------------------------------------------


class Hub:
    """A Hugging Face hub on this machine with one model at two commits."""

    def __init__(self, folders: dict[str, Path]) -> None:
        hub = self
        self.folders, self.asked = folders, []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None: ...

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                hub.asked.append(path)
                parts = path.strip("/").split("/")
                if path.startswith("/api/models/org/name/revision/"):
                    commit = {"main": COMMIT, "v1": OLDER}.get(parts[-1], parts[-1])
                    self.send(json.dumps({"id": "org/name", "sha": commit, "siblings": []}).encode(), commit)
                elif path.startswith("/api/models/org/name/tree/"):
                    files = sorted(hub.folders[parts[5]].iterdir())
                    tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f.name} for f in files]
                    self.send(json.dumps(tree).encode(), parts[5])
                elif parts[2:3] == ["resolve"] and (hub.folders[parts[3]] / parts[4]).is_file():
                    self.send((hub.folders[parts[3]] / parts[4]).read_bytes(), parts[3], etag=parts[4] + parts[3])
                else:
                    self.send(b"{}", "", status=404)

            def send(self, body: bytes, commit: str, etag: str = "x", status: int = 200) -> None:
                self.send_response(status)
                for name, value in {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Content-Length": len(body)}.items():
                    self.send_header(name, str(value))
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    copy_model(tmp_path / "new")
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    (tmp_path / "new" / "pytorch_model.bin").write_bytes(pickle.dumps("never fetched"))
    made = Hub({COMMIT: tmp_path / "new", OLDER: tmp_path / "old"})
    yield made
    made.server.shutdown()
    made.server.server_close()


def gruppo_with(hub: Hub, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "cache"), "NO_PROXY": "*"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "no_proxy": "*"}
    command = [sys.executable, "-m", "gruppo", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=200)


@pytest.mark.long
@pytest.mark.slow
def test_a_run_records_the_commit_of_its_model_and_goes_on_from_it(hub: Hub, tmp_path: Path) -> None:
    small = ["--steps", "1", "--prompts-per-step", "2", "--group-size", "2", "--eval-prompts", "0"]
    small += ["--no-tensorboard", "--lora", "--lora-rank", "2"]
    done = gruppo_with(hub, tmp_path, "train", "--model", "org/name", *small, "--output", "newest")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load((tmp_path / "newest/config.yaml").read_text())["revision"] == COMMIT
    assert not any("pytorch_model.bin" in path for path in hub.asked)
    adapter = json.loads((tmp_path / "newest/model/adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("org/name", COMMIT)

    hub.asked.clear()
    done = gruppo_with(hub, tmp_path, "resume", "newest", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert not any("/revision/main" in path for path in hub.asked)

    spoil(tmp_path / "old", {"file": "config.json", "set": {"_attn_implementation": "evil/kernel"}})
    done = gruppo_with(hub, tmp_path, "train", "--model", "hf://org/name", "--revision", "v1", *small)
    assert done.returncode == 2 and "evil/kernel" in done.stderr
    assert any(f"/resolve/{OLDER}/config.json" in path for path in hub.asked)


@pytest.mark.parametrize("name", ["builtin", "folder"])
def test_a_revision_of_a_local_model_is_refused_with_the_reason(name: str, model: Path) -> None:
    with pytest.raises(InputError, match=r"revision='main' is for a model from a hub, and .* is local"):
        pin(name if name == "builtin" else str(model), "main")


@pytest.mark.parametrize("revision", ["../../up", "", "a b", "/x", "a//b", "a/../b"])
def test_a_revision_is_the_name_of_one(revision: str) -> None:
    with pytest.raises(InputError, match="must be a commit, tag or branch"):
        pin("hf://org/name", revision)


def test_two_revisions_are_refused() -> None:
    with pytest.raises(InputError, match="both name a revision"):
        pin("org/name@v1", "v2")


def test_a_revision_with_modelscope_is_handed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    package = tmp_path / "modelscope.py"
    package.write_text(
        "def snapshot_download(name, revision=None, **patterns):\n"
        f"    assert (name, revision) == ('org/name', 'v1'), (name, revision)\n    return {str(model)!r}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert pin("ms://org/name", "v1") == ("ms://org/name", "v1")


def test_a_revision_of_a_model_object_is_refused() -> None:
    from gruppo.trainer.inputs import resolve_inputs

    actor = TransformersModel("builtin")
    with pytest.raises(InputError, match="revision='main' is for a model that is loaded by its name"):
        resolve_inputs(TrainConfig(revision="main"), model=actor.model, tokenizer=actor.tokenizer)


# --- the vLLM server ----------------------------------------------------------------------------------------------

SERVER = """
import json, os, socket, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import UnixStreamServer

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def address_string(self): return "socket"
    def do_GET(self):
        wants_key = self.path.startswith("/v1")
        has_key = self.headers.get("Authorization") == f"Bearer {os.environ['VLLM_API_KEY']}"
        self.send_response(200 if has_key or not wants_key else 401)
        insecure = os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION")
        body = json.dumps({"data": [{"id": f"m {insecure}"}]}).encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

path = sys.argv[sys.argv.index("--uds") + 1]
assert "--host" not in sys.argv and "--port" not in sys.argv
UnixStreamServer(path, Handler).serve_forever()
"""


@pytest.fixture
def stand_in_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `vllm` whose server listens where vLLM's option --uds says, and wants its key as vLLM does."""
    folder = tmp_path / "packages" / "vllm" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    for parent in (folder, folder.parent, folder.parent.parent):
        (parent / "__init__.py").write_text("")
    (folder / "api_server.py").write_text(SERVER)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'packages'}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


@pytest.mark.row("R-50", "the vLLM server of a run: a socket of its user alone, with a key")
def test_the_server_of_a_run_is_reached_by_its_user_alone(stand_in_vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    process = ServerProcess({"model": "m"})
    engine = HttpEngine(process.address, process=process)
    engine.deadline_s = 60.0
    try:
        engine.wait_until_ready()
        assert engine.model == "m None"  # and the key was right
        assert stat.S_IMODE(process.folder.stat().st_mode) == 0o700
        assert process.process is not None
        family = [psutil.Process(process.process.pid), *psutil.Process(process.process.pid).children(recursive=True)]
        assert [c for p in family for c in p.net_connections("inet")] == []
        assert all(process.key not in " ".join(p.cmdline()) for p in family)
        stranger = http.client.HTTPConnection("localhost")
        stranger.sock = socket.socket(socket.AF_UNIX)
        stranger.sock.connect(str(process.folder / "server.sock"))
        stranger.request("GET", "/v1/models")
        assert stranger.getresponse().status == 401
        stranger.close()
    finally:
        engine.close()
    assert not process.folder.exists()


def test_without_vllm_nothing_is_left_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(MissingExtraError):
        ServerProcess({"model": "m"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["trust_remote_code", "host", "port", "api_key", "uds"])
def test_options_of_the_server_that_would_open_it_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"vllm_options has {name}="):
        TrainConfig.read({"sampler": "vllm:start", "vllm_options": {name: "x"}})


def test_the_builtin_model_is_a_checked_folder_too() -> None:
    assert resolve("builtin") == str(builtin_model_path())
