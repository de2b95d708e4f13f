"""Runs on several ranks, as real processes over gloo: the bits of one process, resuming elsewhere, and faults."""

import copy
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from processes import children_in, is_running, steps_in, wait_until
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from gruppo.weights.source import resolve

HERE = Path(__file__).parent


def cases() -> list[str]:
    sys.path.insert(0, str(HERE))
    try:
        from ranked_run import CASES
    finally:
        sys.path.remove(str(HERE))
    return list(CASES)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(
    command: list[str], world: int, faults: dict[int, list[dict[str, Any]]] | None = None
) -> list[subprocess.Popen]:
    """The same command on every rank, as a launcher would start it."""
    usual = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    usual |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    made = []
    for rank in range(world):
        planned = (faults or {}).get(rank)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | ({"GRUPPO_FAULTS": json.dumps(planned)} if planned else {})
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        made.append(subprocess.Popen(command, env=os.environ | usual | own, **pipe))  # type: ignore[call-overload]
    return made


def finish(processes: list[subprocess.Popen], timeout: float = 240) -> list[tuple[int, str]]:
    """Exit code and output of each rank."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def ends(processes: list[subprocess.Popen], number: int) -> list[str]:
    """Outputs of the first ranks when they have ended. The others are killed then."""
    try:
        return [process.communicate(timeout=240)[0] for process in processes[:number]]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def train_command(folder: Path, **options: Any) -> list[str]:
    usual = {"model": "builtin", "data": "builtin:carries", "steps": 6, "prompts_per_step": 8, "group_size": 4}
    usual |= {"max_new_tokens": 4, "eval_prompts": 8, "tokens_per_microbatch": 96, "lr": 1e-3, "threads": 1}
    usual |= {"save_every": 1, "eval_every": 1, "output": folder, "keep_checkpoints": 9, "shard": "full"}
    words = [str(x) for name, value in (usual | options).items() for x in (f"--{name.replace('_', '-')}", value)]
    return [sys.executable, "-m", "gruppo", "train", "--ranks-exact", "--no-tensorboard", *words]


def all_cases(world: int, folder: Path, chosen: list[str]) -> None:
    port = str(free_port())
    command = [sys.executable, str(HERE / "ranked_run.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen([*command, str(rank), str(world), port, str(folder), *chosen], env=environment)
        for rank in range(world)
    ]
    try:
        assert [rank.wait(timeout=600) for rank in ranks] == [0] * world
    finally:
        for rank in ranks:
            rank.kill()


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock decides."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("time")} for line in lines]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return {n: x for file in (run / "model").glob("*.safetensors") for n, x in load_file(file).items()}


def assert_same_run(one: Path, other: Path) -> None:
    assert metrics(one) == metrics(other)
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert not [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-process")
    all_cases(1, folder, cases())
    return folder


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_number_of_ranks_gives_the_bits_of_one_process(world: int, one_process: Path, tmp_path: Path) -> None:
    all_cases(world, tmp_path, cases())
    differ = []
    for run in sorted(one_process.iterdir()):
        if run.name in ("not-exact", "bnpo"):
            continue
        try:
            assert_same_run(run, tmp_path / run.name)
        except AssertionError:
            differ.append(run.name)
    assert not differ
    # BNPO divides by the tokens of a call, which is the whole step on any number of ranks.
    assert_same_run(one_process / "bnpo", tmp_path / "bnpo")
    rows, expected = metrics(tmp_path / "not-exact"), metrics(one_process / "not-exact")
    # The first step; a last bit of its weights may change what later ones sample.
    assert rows[1]["optim/grad_norm"] == pytest.approx(expected[1]["optim/grad_norm"], rel=1e-6)
    assert rows[1]["reward/mean"] == expected[1]["reward/mean"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    for world in (1, 2):
        all_cases(world, tmp_path / str(world), ["gspo with kl, shared prompts"])
    name = "gspo-with-kl-shared-prompts"
    assert len(metrics(tmp_path / "1" / name)) == 7
    assert_same_run(tmp_path / "1" / name, tmp_path / "2" / name)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.row("R-41", "SIGSTOP of a rank in an update, then `gruppo resume`")
def test_a_rank_that_is_stopped_is_named_at_the_deadline_and_the_run_goes_on(tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    stop = [{"site": "follow", "step": 3, "action": "stop"}]
    processes = start(train_command(run, rank_deadline=10), 2, {1: stop})
    (first,) = ends(processes, 1)
    assert processes[0].returncode == 7, first[-600:]
    assert "lost each other in `run` after version 3: rank 1 does not answer. Go on from the last checkpoint" in first
    assert "Traceback" not in first and "is saved" not in first and "could not be saved" not in first
    assert processes[1].returncode == -signal.SIGKILL  # it was there to the end
    assert finish(start(train_command(whole), 1))[0][0] == 0
    found = finish(start([sys.executable, "-m", "gruppo", "resume", str(run)], 2))
    assert [code for code, _ in found] == [0, 0], found
    assert "resuming after step 3" in found[0][1]
    assert_same_run(whole, run)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start two ranks with torchrun, and end what is left of them with the test."""
    started: list[subprocess.Popen] = []

    def begin(command: list[str]) -> subprocess.Popen:
        with (tmp_path / "log").open("w") as log:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
            both = {"stdout": log, "stderr": log, "env": environment, "start_new_session": True}
            started.append(subprocess.Popen([*TORCHRUN, *command[1:]], **both))  # type: ignore[call-overload]
        return started[-1]

    yield begin
    for each in started:
        with suppress(ProcessLookupError):
            os.killpg(each.pid, signal.SIGKILL)
        each.wait()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.row("R-39", "SIGKILL of torchrun while two ranks train")
def test_ranks_whose_torchrun_is_killed_save_and_end(launched: Callable[..., subprocess.Popen], tmp_path: Path) -> None:
    run = tmp_path / "run"
    torchrun = launched(train_command(run, steps=100_000, eval_every=0, save_every=100_000))
    wait_until(lambda: steps_in(run) > 3, 120)
    ranks = children_in("gruppo", torchrun.pid)
    assert len(ranks) == 2
    torchrun.kill()
    wait_until(lambda: not any(map(is_running, ranks)), 60)
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["step"]) == ("stopped", steps_in(run) - 1)
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{status['step']:06d}"]
    assert not (run / "lock").exists()


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.row("R-39", "SIGKILL of torchrun while two ranks load")
def test_ranks_whose_torchrun_is_killed_while_they_load_end(
    launched: Callable[..., subprocess.Popen], tmp_path: Path
) -> None:
    mark = tmp_path / "loading"
    (tmp_path / "my_loss.py").write_text(LOSS.replace("ACT", f"open({str(mark)!r}, 'w').close(); time.sleep(600)"))
    torchrun = launched(train_command(tmp_path / "run", loss="my_loss:made"))
    wait_until(mark.exists, 120)
    ranks = children_in("gruppo", torchrun.pid)
    assert len(ranks) == 2
    torchrun.kill()
    wait_until(lambda: not any(map(is_running, ranks)), 60)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_run_without_a_launcher_outlives_the_shell_that_started_it(tmp_path: Path) -> None:
    command = train_command(tmp_path / "run", steps=2)
    subprocess.run(["sh", "-c", '"$@" > log 2>&1 &', "sh", *command], cwd=tmp_path, check=True)
    status = tmp_path / "run" / "status.json"
    wait_until(lambda: status.exists() and json.loads(status.read_text())["status"] == "done", 150)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.row("R-41", "SIGSTOP of a rank that torchrun started")
def test_torchrun_ends_when_a_rank_is_stopped(launched: Callable[..., subprocess.Popen], tmp_path: Path) -> None:
    """The other rank ends with 7, and torchrun then ends the one that is stopped."""
    run = tmp_path / "run"
    torchrun = launched(train_command(run, steps=100_000, eval_every=0, rank_deadline=10))
    wait_until(lambda: steps_in(run) > 3, 120)
    ranks = children_in("gruppo", torchrun.pid)
    second = next(rank for rank in ranks if b"RANK=1" in Path(f"/proc/{rank}/environ").read_bytes().split(b"\0"))
    os.kill(second, signal.SIGSTOP)
    assert torchrun.wait(timeout=200) == 1
    log = (tmp_path / "log").read_text()
    assert "rank 1 does not answer" in log and "exitcode  : 7 " in log, log[-1500:]
    assert not any(map(is_running, ranks))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_ranks_save_a_model_with_generation_options_of_no_effect(tmp_path: Path) -> None:
    base, run, given = tmp_path / "base", tmp_path / "run", {"do_sample": False, "temperature": 0.6, "eos_token_id": 2}
    shutil.copytree(resolve("builtin"), base)
    (base / "generation_config.json").write_text(json.dumps(given))
    found = finish(start(train_command(run, steps=2, model=base), 2))
    assert [code for code, _ in found] == [0, 0], found
    saved = json.loads((run / "model" / "generation_config.json").read_text())
    assert {name: saved.get(name) for name in given} == given


REPLICATED = ["grpo", "lora with kl", "gspo with kl, shared prompts", "drgrpo, minibatches", "ahead", "not exact"]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_ranks_with_all_weights_give_the_bits_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    all_cases(1, one, REPLICATED)
    monkeypatch.setenv("SHARD", "none")
    all_cases(2, two, REPLICATED)
    for run in sorted(one.iterdir()):
        assert (two / run.name / "checkpoints" / "step-000006" / "weights.safetensors").is_file()
        if run.name != "not-exact":
            assert_same_run(run, two / run.name)
    norms = [metrics(folder / "not-exact")[1]["optim/grad_norm"] for folder in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_run_goes_on_with_its_weights_sharded_or_not(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert finish(start(train_command(whole), 1))[0][0] == 0
    assert [code for code, _ in finish(start(train_command(run, steps=2, shard="none"), 2))] == [0, 0]
    for before, after, world, steps in (("none", "full", 3, 4), ("full", "auto", 2, 6)):
        config = (run / "config.yaml").read_text()
        assert f"shard: {before}\n" in config
        (run / "config.yaml").write_text(config.replace(f"shard: {before}\n", f"shard: {after}\n"))
        command = [sys.executable, "-m", "gruppo", "resume", str(run), "--steps", str(steps), "--accept-changes"]
        found = finish(start(command, world))
        assert [code for code, _ in found] == [0] * world, found
    assert [path.name for path in sorted((run / "checkpoints" / "step-000004").iterdir())][-2] == "shards"
    assert (run / "checkpoints" / "step-000006" / "weights.safetensors").is_file()  # a small model: auto is none
    assert_same_run(whole, run)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_no_rank_holds_the_whole_model_while_it_loads(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 16, "vocab_size": 1000}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8))
    # In half precision, as most are: weights of the same precision would stay in the file until they are sharded.
    copy.deepcopy(model).bfloat16().save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(resolve("builtin")).save_pretrained(tmp_path / "model")
    size = sum(p.nbytes for p in model.parameters())
    block = sum(p.nbytes for p in model.model.layers[0].parameters())
    assert size > 200e6
    port = str(free_port())
    words = [sys.executable, str(HERE / "loading.py")]
    # The allocator would keep what is freed: each block of the first forward.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MALLOC_MMAP_THRESHOLD_": "65536"}
    tail = ["2", port, str(tmp_path / "model"), str(tmp_path)]
    ranks = [subprocess.Popen([*words, str(rank), *tail], env=environment) for rank in range(2)]
    assert [code for code, _ in finish(ranks)] == [0, 0]
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert sum(facts["held"] for facts in found) == size
    for facts in found:
        assert abs(facts["held"] - size / 2) < 0.01 * size
        # Half of the model, and a block as it is gathered for a trial forward, in pieces and as a whole, with the next.
        assert size / 2 < facts["peak"] < size / 2 + 5 * block, (facts, size, block)
        assert facts["peak"] < 0.85 * size


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_each_rank_hashes_its_own_file_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASHED", str(tmp_path))
    all_cases(2, tmp_path / "run", ["grpo"])
    hashed = [set((tmp_path / str(rank)).read_text().split()) for rank in range(2)]
    first, second = (f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2))
    assert hashed[1] == {second}
    assert first in hashed[0] and second not in hashed[0]
    for folder in (tmp_path / "run" / "grpo" / "checkpoints").iterdir():
        noted = json.loads((folder / "manifest.json").read_text())["files"]
        found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        found.pop("manifest.json")
        assert noted == {n: {"size": len(x), "sha256": hashlib.sha256(x).hexdigest()} for n, x in found.items()}
        assert len(noted) == 4  # both shards, optimizer.json, trainer.json


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_a_run_of_four_ranks_goes_on_on_two_three_and_one(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert finish(start(train_command(whole), 1))[0][0] == 0
    found = finish(start(train_command(stopped, steps=3), 4))
    assert [code for code, _ in found] == [0] * 4, found
    for world in (2, 3, 1):
        run = tmp_path / f"on-{world}"
        shutil.copytree(stopped, run)
        config = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(config.replace(str(stopped), str(run)))
        command = [sys.executable, "-m", "gruppo", "resume", str(run), "--steps", "6", "--accept-changes"]
        found = finish(start(command, world))
        assert [code for code, _ in found] == [0] * world, found
        assert_same_run(whole, run)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_the_reference_of_an_adapter_that_goes_on_is_the_adapter_of_the_start(tmp_path: Path) -> None:
    """And not the policy itself: the KL of one process, which is above 0 from the second step on."""
    assert finish(start([*train_command(tmp_path / "first", steps=2), "--lora"], 1))[0][0] == 0
    onward = {"model": tmp_path / "first" / "model", "beta": 0.05, "steps": 3}
    for world in (1, 2):
        found = finish(start(train_command(tmp_path / f"on-{world}", **onward), world))
        assert [code for code, _ in found] == [0] * world, found
    assert metrics(tmp_path / "on-1")[-1]["policy/kl"] > 0
    for key in ("policy/kl", "optim/grad_norm"):
        one, two = ([line.get(key) for line in metrics(tmp_path / f"on-{world}")] for world in (1, 2))
        assert one == two
    one, two = (load_file(tmp_path / f"on-{world}" / "model" / "adapter_model.safetensors") for world in (1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one | two)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_checkpoint_before_the_first_update_goes_on_on_any_number_of_ranks(tmp_path: Path) -> None:
    assert finish(start(train_command(tmp_path / "whole", steps=2), 1))[0][0] == 0
    stop = [{"site": "eval", "step": 0, "action": "term"}]
    for saved_by, taken_by in ((2, 2), (2, 1), (1, 2)):
        run = tmp_path / f"run-{saved_by}-{taken_by}"
        found = finish(start(train_command(run, steps=2), saved_by, {0: stop}))
        assert [code for code, _ in found] == [75] * saved_by, found
        found = finish(start([sys.executable, "-m", "gruppo", "resume", str(run)], taken_by))
        assert [code for code, _ in found] == [0] * taken_by, found
        assert_same_run(tmp_path / "whole", run)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_ranks_write_the_names_that_the_files_of_a_family_have(tmp_path: Path) -> None:
    """GPT-NeoX calls its head `embed_out` in files, and transformers `lm_head` in memory."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(resolve("builtin"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 64}
    GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, **tokens)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    base = load_file(tmp_path / "base" / "model.safetensors")
    assert "embed_out.weight" in base
    for world in (1, 2):
        found = finish(start(train_command(tmp_path / f"on-{world}", model=tmp_path / "base", steps=2), world))
        assert [code for code, _ in found] == [0] * world, found
    one, two = (load_file(tmp_path / f"on-{world}" / "model" / "model.safetensors") for world in (1, 2))
    assert one.keys() == two.keys() == base.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    config, other = (json.loads((tmp_path / f"on-{world}" / "model" / "config.json").read_text()) for world in (1, 2))
    assert config == other


LOSS = """
import os, signal, time
from gruppo.loss import GRPOLoss

def made(beta=0.0, kl_estimator=2, entropy_coef=0.0, **options):
    if os.environ.get("RANK") == "1":
        ACT
    return GRPOLoss(beta=beta, kl_estimator=kl_estimator, entropy_coef=entropy_coef, **options)
"""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(600)
class TestFaults:
    @pytest.mark.parametrize(
        ("act", "codes", "text"),
        [
            ("os.kill(os.getpid(), signal.SIGKILL)", [7, -9], "in the start: rank 1 does not answer. Start them again"),
            ("raise ValueError('not here')", [2, 2], "in the start: rank 1: InputError: loss='my_loss:made' cannot be"),
            ("time.sleep(600)", [7, 1], "in the start: rank 1 does not answer. Start them again"),
            ("os.kill(os.getpid(), signal.SIGSTOP)", [7, -9], "in the start: rank 1 does not answer. Start them again"),
        ],
    )
    def test_a_rank_that_is_lost_while_the_model_is_made_is_named(
        self, act: str, codes: list[int], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "my_loss.py").write_text(LOSS.replace("ACT", act))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
        processes = start(train_command(tmp_path / "run", loss="my_loss:made", rank_deadline=15), 2)
        (first,) = ends(processes, 1) if "SIGSTOP" in act else (finish(processes)[0][1],)
        assert [process.returncode for process in processes] == codes, first
        assert text in first and "Traceback" not in first, first[-600:]
        assert not (tmp_path / "run").exists()

    def test_a_rank_that_never_comes_ends_the_others(self, tmp_path: Path) -> None:
        """It is stopped before it is Python."""
        stopped = 'test "$RANK" = 1 && kill -STOP $$; exec "$@"'
        command = train_command(tmp_path / "run", rank_deadline=15)
        processes = start(["bash", "-c", stopped, "-", *command], 2)
        (first,) = ends(processes, 1)
        assert processes[0].returncode == 7, first
        assert "the ranks have not found each other: not all of them have come to 127.0.0.1:" in first
        assert "Traceback" not in first and not (tmp_path / "run").exists()

    def test_torchrun_says_which_rank_never_comes(
        self, launched: Callable[..., subprocess.Popen], tmp_path: Path
    ) -> None:
        (tmp_path / "sitecustomize.py").write_text(
            "import os, signal\nif os.environ.get('RANK') == '1': os.kill(os.getpid(), signal.SIGSTOP)\n"
        )
        torchrun = launched(train_command(tmp_path / "run", rank_deadline=15))
        assert torchrun.wait(timeout=200) == 1
        log = (tmp_path / "log").read_text()
        assert "the ranks have not found each other: rank 1 has not come. Start them again" in log, log[-1500:]
        assert "exitcode  : 7 " in log and not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("fault", "codes", "text"),
        [
            ({"action": "kill"}, [7, 7, -9], "`run` after version 1: rank 2 does not answer"),
            ({"action": "raise"}, [1, 1, 1], "`run` after version 1: rank 2: RuntimeError: fault planned"),
            ({"action": "sleep", "seconds": 600}, [7, 7, 1], "`run` after version 1: rank 2 does not answer"),
        ],
    )
    def test_of_three_ranks_the_two_others_name_the_third(
        self, fault: dict[str, Any], codes: list[int], text: str, tmp_path: Path
    ) -> None:
        planned = {2: [{"site": "follow", "step": 1} | fault]}
        found = finish(start(train_command(tmp_path / "run", rank_deadline=15), 3, planned))
        assert [code for code, _ in found] == codes, found
        assert all(text in output for _, output in found[:2]), found[:2]

    @pytest.mark.row("R-41", "SIGSTOP of one of three ranks")
    def test_of_three_ranks_the_two_others_name_the_one_that_is_stopped(self, tmp_path: Path) -> None:
        planned = {2: [{"site": "follow", "step": 1, "action": "stop"}]}
        processes = start(train_command(tmp_path / "run", rank_deadline=15), 3, planned)
        outputs = ends(processes, 2)
        assert [process.returncode for process in processes] == [7, 7, -signal.SIGKILL], outputs
        assert all("`run` after version 1: rank 2 does not answer" in output for output in outputs), outputs

    def test_a_checkpoint_that_cannot_be_written_ends_all_ranks_with_one_line(self, tmp_path: Path) -> None:
        command = train_command(tmp_path / "run", steps=2)
        found = finish(start(["bash", "-c", 'ulimit -f 300; exec "$@"', "-", *command], 2))
        assert [code for code, _ in found] == [6, 6], found
        assert "step-000001: rank" in found[0][1] and "File too large" in found[0][1]
        assert "CheckpointException" not in found[0][1] + found[1][1]

    def test_a_checkpoint_that_one_rank_refuses_is_passed_over_by_all(self, tmp_path: Path) -> None:
        """The optimizer of the newest has other options than the run's; its hashes are right."""
        run = tmp_path / "run"
        assert [code for code, _ in finish(start(train_command(run, steps=3), 2))] == [0, 0]
        folder = run / "checkpoints" / "step-000003"
        scalars = json.loads((folder / "optimizer.json").read_text())
        scalars["param_groups"][0]["more"] = 1
        (folder / "optimizer.json").write_text(json.dumps(scalars))
        manifest = json.loads((folder / "manifest.json").read_text())
        content = (folder / "optimizer.json").read_bytes()
        manifest["files"]["optimizer.json"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        found = finish(start([sys.executable, "-m", "gruppo", "resume", str(run), "--steps", "4"], 2))
        assert [code for code, _ in found] == [0, 0], found
        assert "resuming after step 2" in found[0][1]

    def test_a_shard_that_is_missing_is_an_error_and_the_checkpoint_before_is_taken(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        assert [code for code, _ in finish(start(train_command(run, steps=3), 2))] == [0, 0]
        next((run / "checkpoints" / "step-000003" / "shards").iterdir()).unlink()
        found = finish(start([sys.executable, "-m", "gruppo", "resume", str(run), "--steps", "4"], 2))
        assert [code for code, _ in found] == [0, 0], found
        assert "skipping a checkpoint" in found[0][1] and "lacks shards/" in found[0][1]
        assert "resuming after step 2" in found[0][1]

    @pytest.mark.row("R-42", "a rank raises in an update")
    def test_a_rank_that_raises_ends_the_run_with_its_text(self, tmp_path: Path) -> None:
        fault = {"site": "follow", "step": 2, "action": "raise"}
        found = finish(start(train_command(tmp_path / "run"), 2, {1: [fault]}))
        assert found[1][0] == 1 and "fault planned at follow of step 2" in found[1][1]
        # The first rank ends with the text and the code of the one that failed.
        assert found[0][0] == 1 and "rank 1: RuntimeError: fault planned at follow of step 2" in found[0][1]

    @pytest.mark.row("R-40", "SIGKILL of a rank in an update, then `gruppo resume`")
    def test_a_rank_that_is_killed_is_noticed_at_once_and_the_run_goes_on(self, tmp_path: Path) -> None:
        fault = {"site": "follow", "step": 3, "action": "kill"}
        found = finish(start(train_command(tmp_path / "run"), 2, {1: [fault]}))
        assert found[1][0] == -signal.SIGKILL and found[0][0] == 7, found[0][1][-600:]
        assert "rank 1 does not answer" in found[0][1]
        whole = tmp_path / "whole"
        assert finish(start(train_command(whole), 1))[0][0] == 0
        found = finish(start([sys.executable, "-m", "gruppo", "resume", str(tmp_path / "run")], 2))
        assert [code for code, _ in found] == [0, 0], found
        assert "on each of 2 ranks (estimate)" in " ".join(found[0][1].split())
        assert_same_run(whole, tmp_path / "run")

    @pytest.mark.row("R-41", "a rank sleeps in an update")
    def test_a_rank_that_hangs_is_given_up_at_the_deadline(self, tmp_path: Path) -> None:
        fault = {"site": "follow", "step": 2, "action": "sleep", "seconds": 600}
        processes = start(train_command(tmp_path / "run", rank_deadline=20), 2, {1: [fault]})
        first = processes[0].communicate(timeout=120)[0]
        assert processes[0].returncode == 7
        assert "lost each other in `run`" in first and "rank 1 does not answer" in first, first[-600:]
        output = processes[1].communicate(timeout=90)[0]
        assert "Timeout" in output and "strike" in output, output[-600:]  # the stack of the sleep

    @pytest.mark.row("R-12", "SIGTERM to the second of two ranks")
    def test_a_signal_to_any_rank_saves_on_all(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        fault = {"site": "follow", "step": 2, "action": "term"}
        found = finish(start(train_command(run, save_every=50), 2, {1: [fault]}))
        assert [code for code, _ in found] == [75, 75], found
        assert (run / "checkpoints" / "step-000003").is_dir()
        assert json.loads((run / "status.json").read_text())["status"] == "stopped"

    def test_torchrun_starts_a_killed_rank_again_and_the_run_goes_on(self, tmp_path: Path) -> None:
        run, whole = tmp_path / "run", tmp_path / "whole"
        fault = [{"site": "follow", "step": 3, "action": "kill"}]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launcher, "--max-restarts", "2", *train_command(run)[1:]]
        # Only the first start of the second rank has the fault: a file says that it struck.
        script = tmp_path / "sitecustomize.py"
        script.write_text(
            "import os, pathlib\n"
            f"mark = pathlib.Path({str(tmp_path / 'struck')!r})\n"
            "if os.environ.get('RANK') == '1' and not mark.exists():\n"
            "    mark.touch()\n"
            f"    os.environ['GRUPPO_FAULTS'] = {json.dumps(fault)!r}\n"
        )
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-1500:]
        assert "resuming after step" in done.stdout
        assert finish(start(train_command(whole), 1))[0][0] == 0
        assert_same_run(whole, run)

    def test_torchrun_starts_again_without_touching_a_run_that_was_there_before(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        assert finish(start(train_command(run, steps=2), 1))[0][0] == 0
        before = (run / "metrics.jsonl").read_bytes()
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "1"]
        quiet = {"capture_output": True, "text": True, "timeout": 200}
        done = subprocess.run([*launcher, *train_command(run, steps=4)[1:]], **quiet)
        assert done.returncode == 1 and done.stderr.count("exists already; nothing was touched") == 2, done.stderr
        assert (run / "metrics.jsonl").read_bytes() == before
        # The first start ends before the run begins; the second one overwrites, as it was told.
        script = tmp_path / "sitecustomize.py"
        script.write_text("import os\nif os.environ.get('TORCHELASTIC_RESTART_COUNT') == '0': os._exit(9)\n")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        command = [*launcher, *train_command(run, steps=3, seed=5)[1:], "--overwrite"]
        done = subprocess.run(command, env=environment, **quiet)
        assert done.returncode == 0 and "resuming" not in done.stdout, done.stderr
        assert yaml.safe_load((run / "config.yaml").read_text())["seed"] == 5
        assert [line["step"] for line in metrics(run)] == [0, 1, 2, 3]

    def test_a_nan_on_one_rank_is_one_decision_and_names_the_parameter(self, tmp_path: Path) -> None:
        port = str(free_port())
        command = [sys.executable, str(HERE / "ranked_run.py"), "RANK", "2", port, str(tmp_path), "grpo"]
        ranks = []
        for rank in ("0", "1"):
            words = [rank if word == "RANK" else word for word in command]
            own = {"POISON": "1"} if rank == "1" else {}
            environment = os.environ | {"OMP_NUM_THREADS": "1"} | own
            pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            ranks.append(subprocess.Popen(words, env=environment, **pipe))  # type: ignore[call-overload]
        found = finish(ranks)
        assert [code for code, _ in found] == [0, 0], found
        lines = metrics(tmp_path / "grpo")
        assert [line.get("optim/skipped") for line in lines[1:4]] == [0.0, 1.0, 0.0]
        for _, output in found:  # both ranks name the same parameter
            assert "the gradient of model.layers.1.mlp.down_proj.weight is not finite" in output
