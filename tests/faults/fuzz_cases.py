"""Malformed input of every kind: the cases of the corpus (`corpus/*.yaml`), and seeded ones made from what is valid.

A case is a command line and the files that it finds. The same seed gives the same cases.
"""

import hashlib
import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from safetensors.torch import load, save

from gruppo.task.builtin import builtin_model_path
from gruppo.trainer.config import OPTIONS, TrainConfig

CORPUS = Path(__file__).parent / "corpus"
SAMPLE = ("sample", "1+1=", "--max-new-tokens", "2")
TRAIN = ("train", "--data", "data.jsonl", "--output", "out", "--steps", "2", "--prompts-per-step", "2")
TRAIN += ("--group-size", "2", "--eval-prompts", "0", "--no-tensorboard", "--threads", "1", "--reward-workers", "1")


def training(*words: str) -> tuple[str, ...]:
    """TRAIN with these words; a flag among them stands in the place of its own, since flags are given once."""
    given = {word.partition("=")[0] for word in words}
    kept: list[str] = []
    for word in TRAIN:
        if word.startswith("--") or not kept:
            is_kept = word not in given
        if is_kept:
            kept.append(word)
    return (*kept, *words)


SUMS = [(47, 85), (58, 67), (12, 9), (99, 1), (35, 48), (76, 27), (64, 39), (5, 5)]
GOOD_ROWS = "".join(json.dumps({"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"}) + "\n" for a, b in SUMS)
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One command in a folder of its own."""

    name: str
    words: tuple[str, ...]
    says: tuple[str, ...] = ()
    """Texts that the message of a refusal holds: the field or file, and the value."""
    codes: tuple[int, ...] = (2,)
    """Exit codes of the matrix that are right for it."""
    prepare: Callable[[Path], None] = lambda folder: None
    """Writes its files."""


def corpus(group: str) -> list[dict[str, Any]]:
    return yaml.safe_load((CORPUS / f"{group}.yaml").read_text(encoding="utf-8"))


def all_cases(originals: Path, seed: int = 0) -> list[Case]:
    """Every case; `originals` holds an adapter's folder `a` and a run directory `run` to spoil."""
    makers = (flags, verbs, configs, data, rewards, models, adapters, runs, checkpoints)
    cases = [case for make in makers for case in make(originals)]
    random_source = random.Random(seed)
    cases += [*wrong_values(random_source), *damaged_bytes(originals, random_source)]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]
    return cases


# --- from the corpus ----------------------------------------------------------------------------------------------


def _written(entry: dict[str, Any]) -> list[str]:
    if "repeat" in entry:
        flag, text, times = entry["repeat"]
        return [flag, text * times]
    return [word.replace("BUILTIN", str(builtin_model_path())) for word in entry["words"]]


def flags(_: Path) -> Iterator[Case]:
    for number, entry in enumerate(corpus("flags")):
        words = _written(entry)
        name = f"flags-{number}-{' '.join(words)[:40]}"
        codes = tuple(entry.get("codes", (2,)))
        yield Case(name=name, words=training(*words), says=tuple(entry["says"]), codes=codes, prepare=write_rows)


def verbs(_: Path) -> Iterator[Case]:
    for number, entry in enumerate(corpus("verbs")):
        words, codes = tuple(_written(entry)), tuple(entry.get("codes", (2,)))
        name = f"verbs-{number}-{' '.join(words)[:40]}"
        yield Case(name=name, words=words, says=tuple(entry["says"]), codes=codes, prepare=write_rows)


def configs(_: Path) -> Iterator[Case]:
    for number, entry in enumerate(corpus("configs")):

        def prepare(folder: Path, entry: dict[str, Any] = entry) -> None:
            write_rows(folder)
            content = MAKERS[entry["make"]](b"") if "make" in entry else entry["text"].encode()
            (folder / "run.yaml").write_bytes(content)
            if b"CHAT" in content:
                copy_model(folder / "CHAT", chat_template=CHAT)

        words = (*TRAIN, "--config", "run.yaml")
        name = f"configs-{number}-{entry.get('make') or entry['text'].strip()[:30]}"
        codes = tuple(entry.get("codes", (2,)))
        yield Case(name=name, words=words, says=tuple(entry["says"]), codes=codes, prepare=prepare)


def data(_: Path) -> Iterator[Case]:
    for number, entry in enumerate(corpus("data")):
        row = MAKERS[entry["make"]](b"") if "make" in entry else entry["row"].encode()
        name = f"data-{number}-{entry.get('make') or entry['row'][:30]}"
        yield Case(
            name=name, words=TRAIN, says=("data.jsonl:9",), prepare=_file("data.jsonl", GOOD_ROWS.encode() + row)
        )
    whole: dict[str, bytes | Callable[[], bytes]] = {
        "empty.jsonl": b"",
        "lines.jsonl": b"\n\n\n",
        "utf16.jsonl": GOOD_ROWS.encode("utf-16"),
        "nul.jsonl": b"\0" * 1000,
        "pickle.jsonl": pickle.dumps([{"prompt": "x"}]),
        "rows.json": GOOD_ROWS.encode(),
        "rows.txt": GOOD_ROWS.encode(),
        "rows": GOOD_ROWS.encode(),
        "archive.jsonl.gz": GOOD_ROWS.encode(),
        "empty.csv": b"",
        "header.csv": b"prompt,answer\n",
        "twice.csv": b"prompt,prompt\na,b\n",
        "self.csv": b"prompt,answer,self\n1+1=,2,x\n1+2=,3,x\n1+3=,4,x\n",
        "ragged.csv": b"prompt,answer\na\n",
        "open.csv": b'prompt,answer\n"a,b\n',
        "noprompt.csv": b"a,b\n1,2\n",
        "latin.csv": "prompt,answer\n\xe4,1\n".encode("latin-1"),
        "nul.csv": b"prompt,answer\n\0,1\n",
        "empty.parquet": b"",
        "junk.parquet": b"PAR1junkPAR1",
        "text.parquet": GOOD_ROWS.encode(),
        "cut.parquet": lambda: parquet_of(["01+01="])[:-20],
        "zero.parquet": lambda: parquet_of([]),
        "numbers.parquet": lambda: parquet_of([1, 2]),  # type: ignore[list-item]
    }
    for name, content in whole.items():
        words = training("--data", name)
        yield Case(name=f"data-{name}", words=words, says=(name,), prepare=_file(name, content))
    yield Case(name="data-fifo", words=training("--data", "pipe.jsonl"), says=("pipe.jsonl",), prepare=_fifo)


def rewards(_: Path) -> Iterator[Case]:
    for number, entry in enumerate(corpus("rewards")):

        def prepare(folder: Path, code: str = entry["code"]) -> None:
            write_rows(folder)
            (folder / "bad.py").write_text(code)

        says, codes = tuple(entry.get("says", ("reward",))), tuple(entry.get("codes", (2,)))
        words = training("--rewards", "bad:reward", "--reward-deadline", "2")
        name = f"rewards-{number}-{entry['code'].strip()[:30]!r}"
        yield Case(name=name, words=words, says=says, codes=codes, prepare=prepare)


def models(_: Path) -> Iterator[Case]:
    for number, entry in enumerate(corpus("models")):

        def prepare(folder: Path, entry: dict[str, Any] = entry) -> None:
            copy_model(folder / "m")
            spoil(folder / "m", entry)

        words = (*SAMPLE, "--model", "m", *(["--chat"] if entry.get("chat") else []))
        yield Case(name=_named("models", number, entry), words=words, prepare=prepare, **_expected(entry, "m"))
    for name, content in {"bin": None, "auto": {"auto_map": {"AutoConfig": "evil.Evil"}}}.items():

        def local(folder: Path, content: dict[str, Any] | None = content) -> None:
            copy_model(folder / "m")
            if content is not None:
                spoil(folder / "m", {"file": "config.json", "set": content})

        for scheme in ("hf", "ms"):
            words = (*SAMPLE, "--model", f"{scheme}://m")
            yield Case(name=f"models-{scheme}-{name}", words=words, says=(f"{scheme}://m",), prepare=local)


def adapters(originals: Path) -> Iterator[Case]:
    for number, entry in enumerate(corpus("adapters")):

        def prepare(folder: Path, entry: dict[str, Any] = entry) -> None:
            copy_model(folder / "m")
            shutil.copytree(originals / "a", folder / "a")
            spoil(folder / "a", entry)

        words = (*SAMPLE, "--model", "a")
        yield Case(name=_named("adapters", number, entry), words=words, prepare=prepare, **_expected(entry, "a"))


def runs(originals: Path) -> Iterator[Case]:
    for number, entry in enumerate(corpus("runs")):

        def prepare(folder: Path, entry: dict[str, Any] = entry) -> None:
            write_rows(folder)
            shutil.copytree(originals / "run", folder / "run")
            spoil(folder / "run", entry)

        words = tuple(entry.get("words", ("resume", "run", "--steps", "6")))
        name = f"{_named('runs', number, entry)}-{words[0]}"
        yield Case(name=name, words=words, prepare=prepare, **_expected(entry, "run"))


def checkpoints(originals: Path) -> Iterator[Case]:
    for number, entry in enumerate(corpus("checkpoints")):

        def prepare(folder: Path, entry: dict[str, Any] = entry) -> None:
            write_rows(folder)
            shutil.copytree(originals / "run", folder / "run")
            for step in ("step-000002", "step-000004"):
                if step.endswith("4") or entry.get("all"):
                    spoil(folder / "run" / "checkpoints" / step, entry)

        expected = {"codes": (6,)} | entry
        words = ("resume", "run", "--steps", "6")
        yield Case(
            name=_named("checkpoints", number, entry), words=words, prepare=prepare, **_expected(expected, "run")
        )


def _named(group: str, number: int, entry: dict[str, Any]) -> str:
    what = entry.get("make") or entry.get("set") or entry.get("yaml") or entry.get("text", "gone")
    return f"{group}-{number}-{entry['file']}-{str(what)[:40]}"


def _expected(entry: dict[str, Any], default: str) -> dict[str, Any]:
    return {"says": tuple(entry.get("says", (default,))), "codes": tuple(entry.get("codes", (2,)))}


# --- made from what is valid --------------------------------------------------------------------------------------


def wrong_values(source: random.Random) -> Iterator[Case]:
    """A value of a wrong kind for every option, in a config file and, where words can give one, as a flag."""
    for name, option in OPTIONS.items():
        kinds = str(option.annotation)
        wrong: list[Any] = [{"a": {"b": 1}}, [[[1]]], float("nan"), -(10**30), "\ud83e\udd2f" * 3]
        if "str" in kinds and "Literal" not in kinds:
            wrong = [{"a": {"b": 1}}, [[[1]]], 10**400 if "dict" not in kinds else [1], float("inf")]
        wrong = [value for value in wrong if not _may_be(name, value)]
        for value in source.sample(wrong, min(2, len(wrong))):
            text = yaml.safe_dump({name: value})
            yield Case(
                name=f"values-{name}-{text.strip()[len(name) + 2 :][:30]}",
                words=(*[w for w in TRAIN if w], "--config", "run.yaml"),
                says=(name,),
                prepare=_with_config(text),
            )
        if get_args(option.annotation) or option.annotation in (int, float):
            word = source.choice(["-1e30", "nan", "x" * 9, "0x1p-3", "1_0,0", "[]"])
            if "str" not in kinds and not (option.annotation is float or "float" in kinds):
                flag = f"--{name.replace('_', '-')}"
                yield Case(name=f"values-{name}-{word}", words=training(f"{flag}={word}"), prepare=write_rows)


def _may_be(name: str, value: Any) -> bool:
    """Whether a value is a valid one of its option after all."""
    try:
        TrainConfig(**{name: value})
    except Exception:
        return False
    return True


def damaged_bytes(originals: Path, source: random.Random) -> Iterator[Case]:
    """Files of a model, a run and a data set with a few bytes changed, put in or cut out. Some can still be read."""
    targets = [
        *(("m", name) for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors") * 3),
        *(("a", name) for name in ("adapter_config.json", "adapter_model.safetensors") * 3),
        *(("run", name) for name in ("config.yaml", "metrics.jsonl", "status.json", "env.json") * 2),
        *(
            ("run", f"checkpoints/step-000004/{name}")
            for name in ("trainer.json", "optimizer.json", "manifest.json") * 2
        ),
        *((".", "data.jsonl") for _ in range(8)),
    ]
    for number, (folder, name) in enumerate(targets):
        seed = source.randrange(2**32)

        def prepare(case: Path, folder: str = folder, name: str = name, seed: int = seed) -> None:
            write_rows(case)
            if folder in ("m", "a"):
                copy_model(case / "m")
            if folder in ("a", "run"):
                shutil.copytree(originals / folder, case / folder)
            path = case / folder / name
            path.write_bytes(_damaged(path.read_bytes(), random.Random(seed)))

        words = {"run": ("resume", "run", "--steps", "6"), ".": TRAIN}.get(folder, (*SAMPLE, "--model", folder))
        yield Case(name=f"bytes-{number}-{folder}/{name}", words=words, codes=(0, 2, 3, 4, 6), prepare=prepare)


def _damaged(content: bytes, source: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(source.choice([1, 1, 2, 5])):
        at = source.randrange(len(changed))
        match source.randrange(4):
            case 0:
                changed[at] = source.randrange(256)
            case 1:
                changed[at:at] = source.choice([b"{", b"]", b'"', b"\0", b"\xff", b"-1", b"null", b"9" * 40])
            case 2:
                del changed[at : at + source.randrange(1, 9)]
            case 3:
                changed[at:at] = changed[at : at + 40]
    return bytes(changed)


# --- files --------------------------------------------------------------------------------------------------------


def write_rows(folder: Path) -> None:
    (folder / "data.jsonl").write_text(GOOD_ROWS)


def copy_model(folder: Path, **tokenizer: Any) -> None:
    shutil.copytree(builtin_model_path(), folder)
    if tokenizer:
        spoil(folder, {"file": "tokenizer_config.json", "set": tokenizer})


def spoil(folder: Path, entry: dict[str, Any]) -> None:
    """Change a file of a folder as an entry of the corpus describes."""
    path = folder / entry["file"]
    if entry.get("gone"):
        path.unlink()
    elif entry.get("make") == "fifo":
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    elif entry.get("make") == "device":
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/zero")
    elif entry.get("make") == "folder":
        path.unlink(missing_ok=True)
        path.mkdir()
    elif entry.get("make") == "file":
        shutil.rmtree(path)
        path.write_text("x")
    elif "set" in entry:
        path.write_text(json.dumps(json.loads(path.read_text()) | entry["set"]))
    elif "yaml" in entry:
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | entry["yaml"]))
    else:
        before = path.read_bytes() if path.is_file() else b""
        path.write_bytes(MAKERS[entry["make"]](before) if "make" in entry else entry["text"].encode())
    if entry["file"].endswith("index.json"):  # transformers reads it where there is no model.safetensors
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "weights.bin").write_bytes(pickled(b""))
    if entry.get("rehash"):
        manifest = json.loads((folder / "manifest.json").read_text())
        files = {p.name: p for p in folder.iterdir() if p.name != "manifest.json"}
        manifest["files"] = {
            name: {"size": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()}
            for name, p in files.items()
        }
        (folder / "manifest.json").write_text(json.dumps(manifest))


def _file(name: str, content: bytes | Callable[[], bytes]) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        write_rows(folder)
        (folder / name).write_bytes(content() if callable(content) else content)

    return prepare


def _with_config(text: str) -> Callable[[Path], None]:
    return _file("run.yaml", text.encode("utf-8", "surrogatepass"))


def _fifo(folder: Path) -> None:
    os.mkfifo(folder / "pipe.jsonl")


def parquet_of(prompts: list[str], **columns: list[Any]) -> bytes:
    """A Parquet file of a few kilobytes, however much it holds: equal values are stored once."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    index = pa.array([0] * len(prompts), pa.int32()) if len(set(prompts)) == 1 else None
    column = pa.DictionaryArray.from_arrays(index, pa.array(prompts[:1])) if index is not None else pa.array(prompts)
    pq.write_table(pa.table({"prompt": column, **columns}), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _laughs(line: str) -> bytes:
    """YAML of a few hundred bytes whose aliases stand for a billion values."""
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    return "\n".join([f"x: {{a0: &a0 [lol], {', '.join(levels)}}}", line, ""]).encode()


def pickled(_: bytes) -> bytes:
    """A pickle that writes a file where it is run."""

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (open, ("canary", "w"))

    return pickle.dumps(Payload())


def _tensors(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[bytes], bytes]:
    return lambda before: save(change(load(before)))


def _column(name: str, change: Callable[[list[Any]], list[Any]]) -> Callable[[bytes], bytes]:
    """Other values in a column of a file of completions; they keep its type where they fit it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def spoiled(before: bytes) -> bytes:
        table = pq.read_table(pa.BufferReader(before))
        values, at = change(table[name].to_pylist()), table.schema.get_field_index(name)
        try:
            column = pa.array(values, table.schema.field(at).type)
        except pa.ArrowException:
            column = pa.array(values)
        sink = pa.BufferOutputStream()
        pq.write_table(table.set_column(at, name, column), sink)
        return sink.getvalue().to_pybytes()

    return spoiled


def _header(header: bytes, size: int | None = None, rest: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header + rest


def _index(name: str) -> Callable[[bytes], bytes]:
    tensors = load((builtin_model_path() / "model.safetensors").read_bytes())
    return lambda _: json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}).encode()


def _slow_pattern(before: bytes) -> bytes:
    values = json.loads(before)
    values["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": r"(\d+\+?)+x"},
        "behavior": "Isolated",
        "invert": False,
    }
    return json.dumps(values).encode()


_TENSOR = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}

MAKERS: dict[str, Callable[[bytes], bytes]] = {
    "laughs_rewards": lambda _: _laughs("rewards: *a9").replace(b"x: {a0", b"chat_template_kwargs: {a0"),
    "laughs_options": lambda _: _laughs("steps: 1").replace(b"x: {a0", b"loss_options: {a0"),
    "laughs_unknown": lambda _: _laughs("steps: 1"),
    "laughs_merge": lambda _: "\n".join(
        ["a0: &a0 {k: 1}", *(f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 30)}]" for i in range(1, 12)), ""]
    ).encode(),
    "equal_rewards": lambda _: b"rewards:\n" + b"- exact_match\n" * 9000,
    "many_digits": lambda _: b"seed: " + b"9" * 5000 + b"\n",
    "nested": lambda _: b"stop: " + b"[" * 3000 + b"]" * 3000 + b"\n",
    "nested_braces": lambda _: b"loss_options: " + b"{a: " * 3000 + b"1" + b"}" * 3000 + b"\n",
    "long_text": lambda _: b"loss: " + b"x" * (10 << 20) + b"\n",
    "long_key": lambda _: b"? " + b"k" * (1 << 20) + b"\n: 1\n",
    "long_model": lambda _: b"model: " + b"m/" * (1 << 19) + b"\n",
    "big_file": lambda _: b"steps: 2 # " + b"x" * (64 << 20) + b"\n",
    "many_keys": lambda _: b"".join(b"k%d: 1\n" % i for i in range(90_000)),
    "other_columns": lambda _: parquet_of(["1+1="]),
    "null_tokens": _column("tokens", lambda values: [None] * len(values)),
    "holes_in_tokens": _column("tokens", lambda values: [[None, *tokens] for tokens in values]),
    "null_advantage": _column("advantage", lambda values: [None] * len(values)),
    "text_rewards": _column("reward", lambda values: ["x"] * len(values)),
    "no_json_columns": _column("columns", lambda values: ["{"] * len(values)),
    "list_columns": _column("columns", lambda values: ["[]"] * len(values)),
    "late_samples": _column("sample", lambda values: [5] * len(values)),
    "not_utf8": lambda _: b"\xff\xfe\xfa\n",
    "utf16": lambda _: "steps: 2\n".encode("utf-16"),
    "nul": lambda _: b"steps: 2\0\n",
    "controls": lambda _: b"\x1b[2Jsteps: 2\n",
    "deep_row": lambda _: b'{"prompt": "01+01=", "answer": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "digits_row": lambda _: b'{"prompt": "01+01=", "answer": ' + b"9" * 5000 + b"}\n",
    "wide_row": lambda _: (
        b'{"prompt": "01+01=", ' + b"".join(b'"k%d": 1, ' % i for i in range(300_000)) + b'"k299999": 2}\n'
    ),
    "bytes_row": lambda _: b'{"prompt": "01+01=", "answer": "\xff"}\n',
    "deep_json": lambda _: b'{"a": ' * 50_000 + b"1" + b"}" * 50_000,
    "slow_pattern": _slow_pattern,
    "pickled": pickled,
    "cut_weights": lambda before: before[:-100],
    "huge_header": lambda _: _header(b"{}", 2**62),
    "json_header": lambda _: _header(b"[]      "),
    "overlapping": lambda _: _header(json.dumps({"a": _TENSOR, "b": _TENSOR}).encode(), rest=b"\0" * 16),
    "huge_shape": lambda _: _header(
        json.dumps({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]}}).encode(), rest=b"\0" * 16
    ),
    "int8_weights": _tensors(lambda tensors: {name: tensor.char() for name, tensor in tensors.items()}),
    "nan_weights": _tensors(lambda tensors: {name: tensor * float("nan") for name, tensor in tensors.items()}),
    "negative_weights": _tensors(lambda tensors: {name: -tensor.abs() for name, tensor in tensors.items()}),
    "no_weights": _tensors(lambda tensors: {}),
    "few_weights": _tensors(lambda tensors: dict(list(tensors.items())[:1])),
    "other_shapes": _tensors(lambda tensors: {n: t.flatten()[:1].repeat(3) for n, t in tensors.items()}),
    "index_bin": _index("weights.bin"),
    "index_up": _index("../m/model-00001-of-00001.safetensors"),
}
