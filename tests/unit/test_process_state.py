"""What foreign code changes of the process is put back, and said: when it is imported, built and called."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffrl.methods.learning import LearningRewards
from diffrl.process_state import unchanged
from diffrl.prompts import Prompt
from diffrl.rewards.protocol import RewardError
from diffrl.rewards.registry import load_reward
from diffrl.rewards.scoring import Scorer

# what to run: (the words that say it, how the state is asked for)
CHANGES = {
    "torch.autocast('cpu', dtype=torch.bfloat16).__enter__()": "torch's autocast on cpu",
    "torch.set_default_dtype(torch.float64)": "torch's default dtype",
    "torch.set_default_device('meta')": "torch's default device",
    "torch.set_grad_enabled(not torch.is_grad_enabled())": "torch's grad mode",
    "KEPT.append(torch.inference_mode()); KEPT[-1].__enter__()": "torch's inference mode",
    "torch.set_num_threads(torch.get_num_threads() + 1)": "torch's number of threads",
    "torch.use_deterministic_algorithms(True, warn_only=True)": "torch's deterministic mode",
    "torch.set_float32_matmul_precision('medium')": "torch's float32 precision",
    "torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark": "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.enabled = False": "torch.backends.cudnn.enabled",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'": "torch's float32 precision",
    "torch.backends.cuda.matmul.allow_tf32 = True": "torch's float32 precision",
    "torch.backends.cudnn.allow_tf32 = False": "torch's float32 precision",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False": "bf16_reduced_precision_reduction",
    "torch.autograd.set_detect_anomaly(True)": "torch's anomaly detection",
    "import numpy; numpy.seterr(all='raise')": "numpy's errors",
    "os.chdir('/')": "the working folder",
    "socket.setdefaulttimeout(3.0)": "the sockets' default timeout",
    "warnings.simplefilter('error')": "errors of warnings",
    "import torch.utils._device as d; KEPT.append(d.DeviceContext('meta')); KEPT[-1].__enter__()": "default device",
    "torch.nn.modules.module.register_module_forward_hook(lambda *_: None)": "torch's hooks on all modules",
    "import torch.nn.modules.module as m; m._global_forward_hooks = type(m._global_forward_hooks)({1: print})": (
        "torch's hooks on all modules"
    ),
    "KEPT.append(torch.autograd.graph.saved_tensors_hooks(lambda t: 0 * t, lambda t: t)); KEPT[-1].__enter__()": (
        "torch's hooks on saved tensors"
    ),
    "torch.autograd.set_multithreading_enabled(False)": "threads of backward",
    "torch.set_autocast_cache_enabled(False)": "cache of autocast",
    "torch.backends.mha.set_fastpath_enabled(False)": "fast path of attention",
    "torch.backends.cuda.matmul.allow_fp16_accumulation = True": "allow_fp16_accumulation",
}
MAIN_ONLY = {
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)": "what SIGTERM does",
    "torch.backends.cuda.enable_flash_sdp(False)": "torch's flash attention",
    "import sys; sys.excepthook = lambda *_: None": "sys.excepthook",
    "import threading; threading.excepthook = lambda *_: None": "threading.excepthook",
    "import logging; logging.disable(logging.CRITICAL)": "logging.disable",
    "import logging; logging.getLogger('diffrl').setLevel(60)": "diffrl's logger",
    "import locale; locale.setlocale(locale.LC_ALL, 'C')": "the locale",
    "import multiprocessing as m; m.set_start_method('spawn', force=True)": "multiprocessing's start method",
    "import gc; gc.disable()": "the garbage collector",
    "os.environ['CUDA_VISIBLE_DEVICES'] = '7'": "the environment",
    "os.environ['RANK'] = '3'": "the environment",
    "os.umask(0o177)": "the umask",
    "torch.nn.functional.scaled_dot_product_attention = lambda q, k, v, **_: v": "torch's own functions",
    "torch.Tensor.to = lambda self, *_, **more: self": "torch's own functions",
    "from accelerate import init_empty_weights as e; KEPT.append(e()); KEPT[-1].__enter__()": "torch's own functions",
    "import sys; sys.argv[:] = ['its own']": "sys.argv",
    "import io, sys; sys.stdout = io.StringIO()": "sys.stdout",
    "import sys; sys.setrecursionlimit(200)": "the recursion limit",
    "import sys; sys.path[:] = ['/its/own']; sys.path.remove('/its/own')": "folders out of sys.path",
    "signal.alarm(1000)": "the timer of SIGALRM",
    "signal.signal(signal.SIGPIPE, signal.SIG_DFL)": "what SIGPIPE does",
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])": "which signals wait",
    "import resource as r; r.setrlimit(7, (500, r.getrlimit(7)[1]))": "the process's limits",
    "import tempfile; tempfile.tempdir = '/nowhere'": "the folder of temporary files",
    "os.environ['HOME'] = '/nowhere'": "the environment",
}
HEAD = "import os, signal, socket, warnings\nimport torch\nKEPT = []\n"
PLAIN = """class R:
    name = "r"
    def __call__(self, images, prompts, metadata):
        return images.mean(dim=(1, 2, 3))
"""


def state() -> tuple[Any, ...]:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return (
        torch.is_autocast_enabled("cpu"), depth, torch.get_default_dtype(), str(torch.get_default_device()),
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled, os.getcwd(), socket.getdefaulttimeout(),
        list(warnings.filters), signal.getsignal(signal.SIGTERM), list(sys.path),
    )  # fmt: skip


@pytest.mark.parametrize(("code", "what"), (CHANGES | MAIN_ONLY).items())
def test_a_change_is_put_back_and_said(code: str, what: str) -> None:
    said: list[str] = []
    before, kept = state(), dict[str, Any]()
    with unchanged(said.append):
        exec(HEAD + code, kept)
    assert state() == before
    assert [what in line for line in said] == [True]


def test_an_error_inside_leaves_the_state_as_well() -> None:
    before = state()
    with pytest.raises(ValueError, match="its own"), unchanged(lambda _: None):
        torch.set_default_dtype(torch.float64)
        raise ValueError("its own")
    assert state() == before


def test_an_exit_past_python_is_an_exception_with_its_code() -> None:
    """`os._exit(0)` in a reward ended a run with code 0 and without a word."""
    with pytest.raises(SystemExit, match=r"os\._exit\(0\)"), unchanged(lambda _: None):
        os._exit(0)
    with pytest.raises(RewardError, match=r'reward "r" .* failed with SystemExit: os\._exit\(0\); try'):
        Scorer({"r": lambda *_: os._exit(0)}).score(torch.rand(1, 3, 8, 8), [Prompt("a")])


@pytest.mark.parametrize("when", ["import", "build", "call"])
def test_a_reward_leaves_the_process_as_it_was(when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each kind of change, at each moment; and the scores are the same."""
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    before = state()
    for i, (code, what) in enumerate(CHANGES.items()):
        lines = PLAIN.splitlines(keepends=True)
        if when == "build":
            lines[2:2] = ["    def __init__(self):\n", f"        {code}\n"]
        elif when == "call":
            lines.insert(3, f"        {code}\n")
        file = tmp_path / f"r{when}{i}.py"
        file.write_text(HEAD + "".join(lines) + (f"{code}\n" if when == "import" else ""))
        caplog.clear()
        reward = load_reward(f"{file}:R")
        scorer = Scorer({"r": reward})
        try:
            scores = scorer.score(images, [Prompt("a"), Prompt("b")], torch.zeros(2, dtype=torch.int64))
        finally:
            scorer.close()
        assert state() == before, code
        torch.testing.assert_close(scores[:, 0], images.mean(dim=(1, 2, 3)))
        assert any(what in line for line in caplog.messages), (code, caplog.messages)


@pytest.mark.parametrize("how", ["score", "submit"])
def test_what_threads_share_is_as_before_when_a_phase_of_calls_ends(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Rewards are called in threads, which cannot tell who else has changed it meanwhile; a phase's end can."""

    def red(images: torch.Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> torch.Tensor:
        os.umask(0o177)
        gc.disable()
        torch.nn.functional.linear = torch.nn.functional.layer_norm
        return images.mean(dim=(1, 2, 3))

    images, prompts, linear = torch.rand(2, 3, 4, 4), [Prompt("a"), Prompt("b")], torch.nn.functional.linear
    scorer, mask = Scorer({"red": red}), os.umask(0o022)  # type: ignore[dict-item]
    try:
        if how == "score":
            scorer.score(images, prompts)
        else:
            scores = [scorer.submit(images, prompts).result() for _ in range(2)]
            scorer.finish(torch.cat(scores), [images] * 2, prompts * 2, torch.arange(4))
        assert (os.umask(mask), gc.isenabled(), torch.nn.functional.linear is linear) == (0o022, True, True)
        assert sum("it was put back" in line for line in caplog.messages) == 3
    finally:
        gc.enable()
        torch.nn.functional.linear = linear


def test_a_file_that_imports_torch_first_is_compared_with_torch_as_it_starts(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(HEAD + "torch.set_grad_enabled(False)\n" + PLAIN)
    code = "from diffrl.plugins import load; import sys; assert 'torch' not in sys.modules\n"
    code += f"load('reward', {str(tmp_path / 'r.py')!r} + ':R'); import torch; print(torch.is_grad_enabled())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


class Changing:
    """A reward of which one method changes the process's state."""

    name, learns, first, width = "changing", True, None, 1

    def __init__(self, when: str) -> None:
        self.when, self.seen = when, dict[int, torch.Tensor]()

    def _change(self, at: str) -> None:
        if at == self.when:
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(not torch.is_grad_enabled())

    def __call__(self, images, prompts, metadata):
        return images.mean(dim=(1, 2, 3))

    def applies(self, prompt, metadata):
        self._change("applies")
        return prompt != "b"

    def observe(self, images, prompts, metadata, keys):
        self._change("observe")
        self.seen |= dict(zip(keys, images, strict=True))
        images.zero_()

    def describe(self, images, prompts, metadata):
        return self(images, prompts, metadata)[:, None]

    def gains(self, rows, wanted):
        self._change("gains")
        return rows[wanted, 0], 0.5


@pytest.mark.parametrize("when", ["observe", "applies", "gains"])
def test_whatever_is_asked_of_a_reward_leaves_the_process_and_the_images(when: str, caplog) -> None:
    reward, before = Changing(when), state()
    reward.batchwise = when == "gains"
    images = torch.rand(3, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    given, prompts = images.clone(), [Prompt("a"), Prompt("b"), Prompt("c")]
    scorer = Scorer({"changing": reward})
    scores = scorer.submit(given, prompts, keys=[10, 11, 12]).result()
    assert sorted(reward.seen) == ([10, 12] if when != "gains" else [])  # of those that it judges
    scores = scorer.finish(scores, [given], prompts, torch.arange(3))
    expected = images.mean(dim=(1, 2, 3))
    expected[1] = torch.nan
    torch.testing.assert_close(scores[:, 0], expected, equal_nan=True)
    assert state() == before and torch.equal(given, images)
    assert sum("torch's default dtype; it was put back" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("when", ["learn", "state_dict", "load_state_dict"])
def test_a_reward_that_learns_leaves_the_process_as_it_was(when: str, caplog: pytest.LogCaptureFixture) -> None:
    def changing(*_: object) -> dict[str, object]:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        return {}

    methods = dict.fromkeys(("learn", "state_dict", "load_state_dict"), changing)
    reward = SimpleNamespace(first={}, learns=True, **methods)
    processes = SimpleNamespace(sum=None, clock=SimpleNamespace(add=lambda *_: None))
    scorer = SimpleNamespace(rewards={f"never {when}": reward})
    hook = LearningRewards(SimpleNamespace(scorer=scorer, processes=processes))  # type: ignore[arg-type]
    before = state()
    {"learn": hook._learn, "state_dict": hook.state_dict, "load_state_dict": lambda: hook.load_state_dict({})}[when]()
    assert state() == before and any("put back" in line for line in caplog.messages)
