"""Attention in fp32 where bf16 is slow: the values asked for, better gradients, nothing else touched; kept pages."""

from __future__ import annotations

import platform
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffrl.policy import cpu_workarounds as host
from diffrl.policy.cpu_workarounds import Fp32Attention, keep_pages


def gradients(q: Tensor, k: Tensor, v: Tensor, wide: bool) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        if wide:
            with Fp32Attention():
                out = F.scaled_dot_product_attention(*leaves)
        else:
            out = F.scaled_dot_product_attention(*leaves)
    assert out.dtype == torch.bfloat16
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


def test_attention_is_differentiated_in_fp32_and_given_in_bf16() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 3, 20, 8, generator=generator).bfloat16() for _ in range(3)]
    exact = [x.float().requires_grad_() for x in inputs]
    out = F.scaled_dot_product_attention(*exact)
    expected = [out, *torch.autograd.grad(out.square().sum(), exact)]
    errors = {}
    for wide in (False, True):
        found = gradients(*inputs, wide=wide)
        errors[wide] = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    assert all(new <= 1.05 * old for new, old in zip(errors[True], errors[False], strict=True)), errors
    assert max(errors[True]) < 0.01


def test_other_types_and_functions_are_left_alone_and_a_rollout_has_the_same_arithmetic() -> None:
    x = torch.randn(1, 2, 4, 8).bfloat16().requires_grad_()
    wide = F.scaled_dot_product_attention(x.float(), x.float(), x.float()).bfloat16()
    with Fp32Attention():
        trained = F.scaled_dot_product_attention(x, x, x)
        with torch.no_grad():
            drawn = F.scaled_dot_product_attention(x, x, x)
        assert torch.equal(F.scaled_dot_product_attention(x.float(), x.float(), x.float()).bfloat16(), wide)
        assert torch.equal(F.relu(x), x.relu())
    assert torch.equal(trained, wide) and torch.equal(drawn, wide)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's thresholds")
def test_pages_are_kept_where_glibc_is() -> None:
    if platform.libc_ver()[0] == "glibc":
        assert keep_pages()
    with pytest.MonkeyPatch.context() as patch:

        def no_libc(name: str) -> None:
            raise OSError(name)

        patch.setattr(host.ctypes, "CDLL", no_libc)
        assert keep_pages() is False
