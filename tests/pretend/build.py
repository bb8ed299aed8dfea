"""Build the pretend CUDA device into build/pretend: g++ and the headers in torch's wheel, about 15 seconds, once.

    python tests/pretend/build.py [PYTEST ARGUMENTS]     # builds it, and runs the tests on it

Where it cannot be built, one line says why and the exit code is 0: these tests are for machines without a GPU that have
a compiler and the registry's torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def torch_folder() -> Path:
    """Where torch lies, without importing it: the device must be there before."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise LookupError("torch is not installed")
    return Path(found.origin).parent


def missing() -> str | None:
    """What this machine lacks, in words; None if the device can be built."""
    try:
        folder = torch_folder()
    except LookupError as error:
        return str(error)
    if not (folder / "lib" / "libtorch_cuda.so").exists():
        version = importlib.metadata.version("torch")
        return f"torch {version} is not built for CUDA (the registry's default wheel for Linux is)"
    if shutil.which("g++") is None:
        return "g++ is not installed"
    if shutil.which("nvidia-smi"):
        return "this machine has a true GPU; see tests/gpu and scripts/gpu_proof.py"
    return None


def build() -> Path:
    """The shared library for this source and this torch, made if it is not there."""
    folder = torch_folder()
    version = importlib.metadata.version("torch")
    source = HERE / "device.cpp"
    facts = source.read_bytes() + (HERE / "memory.h").read_bytes() + version.encode() + sys.version.encode()
    digest = hashlib.sha256(facts).hexdigest()[:12]
    library = ROOT / "build" / "pretend" / f"device-{digest}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        include = folder / "include"
        command = ["g++", "-O0", "-std=c++20", "-fPIC", "-shared", f"-I{include}"]
        command += [f"-I{include}/torch/csrc/api/include", str(source), "-o", str(unfinished)]
        command += [f"-L{folder}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{folder}/lib"]
        subprocess.run(command, check=True)
        unfinished.replace(library)
    return library


def environment(library: Path) -> dict[str, str]:
    """With it every Python process, and its children, has the device (`site/sitecustomize.py`)."""
    path = os.pathsep.join([str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PRETEND_CUDA": str(library), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def main() -> int:
    reason = missing()
    if reason is not None:
        print(f"test-pretend: skipped: {reason}")
        return 0
    arguments = sys.argv[1:] or ["-n", "2", "--dist", "worksteal", "tests/pretend"]
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(build())).returncode


if __name__ == "__main__":
    raise SystemExit(main())
