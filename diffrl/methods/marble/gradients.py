"""K gradients of the trained LoRA from m backward passes, whatever K is.

symbol       name here   meaning
phi          phi         (b, m) per-row scalars of the network that every reward's loss is a function of
W            slopes      (K, b, m) d loss_k / d phi_ij
u, y         x, y        input and output gradient of a LoRA matrix, (b, T, in) and (b, T, out)
G_k          bank[k]     gradient of loss k for all LoRA matrices together, flat

The gradient of loss k is `sum_ij W_kij grad phi_ij`. A backward pass of one column of phi meets, at every LoRA matrix,
the gradient `y_i^T u_i` of each row, and adds `G_k += sum_i W_ki y_i^T u_i` at once for all K (rows of a network do not
interact). The cost beside the pass itself is K multiplications for each row and LoRA weight, without the T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch._functorch.config as functorch_config
from torch import Tensor

from diffrl.errors import UserError
from diffrl.policy.lora import Adapters

# Numbers that are in float64 at a time: few enough to stay in a CPU's cache, enough to fill a GPU.
_GRAM_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}


class LoraGradients:
    """Takes the weight gradients of the trained LoRA ("default") out of a backward pass, into a bank.

    It is a sink of the fused LoRA path (`diffrl.policy.fused`). Outside `into` nothing changes: backward leaves the
    same gradients in `parameter.grad`. Tensor hooks would do, too, but autograd would compute every weight gradient a
    second time, and add it to `.grad`.

    Works with gradient checkpointing, with autocast (contraction and bank are float32) and with any number of backward
    passes over one graph. Under `torch.compile` each group of LoRA layers is a graph break, since a compiled backward
    pass cannot write to a bank: correct, but what surrounds them is compiled in pieces.

    Args:
        adapters: the policy's LoRAs. Those of other names (snapshots) are left alone.
        folded: how the names of layers begin whose rows are tokens, all of the first sample and then of the next.
    """

    def __init__(self, adapters: Adapters, folded: tuple[str, ...] = ()) -> None:
        self.size = 0  # numbers of all matrices together, in the order of `adapters.trainable`
        self._bank: Tensor | None = None
        self._weights: Tensor | None = None
        self._folded, self._copies = folded, 0  # rows of a sample in this pass: 2 under guidance, 0 unknown
        self._places: dict[int, tuple[int, str]] = {}  # of a parameter: where it starts in the bank, its name
        functorch_config.donated_buffer = False  # or a compiled network could not go backward twice
        fused = {name for group in adapters.fused.groups for name in group.names}
        for name, parameter in adapters.trainable:
            layer, matrix, _ = name.rsplit(".", 2)
            if layer not in fused:
                text = "is a DoRA or a convolution, whose gradients are not told apart by sample; see lora.kind"
                raise UserError(f"marble: the LoRA of {layer} {text}, lora.targets and lora.start")
            self._places[id(parameter)] = self.size, f"{layer}.{matrix}"
            self.size += parameter.numel()
        adapters.fused.install()
        adapters.fused.sink = self

    @contextmanager
    def into(self, bank: Tensor, weights: Tensor | None = None) -> Iterator[None]:
        """Backward passes inside add to the rows of `bank` (K, size) instead of to `parameter.grad`.

        Row k gets `sum_i weights[i, k] grad_i` for weights (b, K) float32; without weights, K = 1 and it gets the sum.
        """
        self._bank, self._weights, self._copies = bank, weights, 0
        try:
            yield
        finally:
            self._bank = self._weights = None

    def open(self) -> bool:
        """Is this inside of `into`?"""
        return self._bank is not None

    def take(self, parameters: Sequence[Tensor], x: Tensor, y: Tensor) -> None:
        """Add weight gradients to the bank: of matrices (out_i, in) with one input x (b, T, in); y (b, T, sum out_i).

        Raises:
            UserError: if the rows are not the micro-batch's.
        """
        assert self._bank is not None, "take() is for backward passes inside of into()"
        if self._weights is None:
            each, weights = _product(y.reshape(1, -1, y.shape[-1]), x.reshape(1, -1, x.shape[-1])), None
        else:
            x, y = self._by_sample(self._places[id(parameters[0])][1], x, y)
            copies = len(x) // len(self._weights)
            each = _product(y, x)
            # Guidance runs every row twice in one forward, all empty prompts before all prompts: see Policy.predict.
            weights = self._weights.repeat(copies, 1).T if copies > 1 else self._weights.T
        parts = each.split([len(parameter) for parameter in parameters], 1)
        for parameter, part in zip(parameters, parts, strict=True):
            start = self._places[id(parameter)][0]
            target = self._bank[:, start : start + parameter.numel()]
            if weights is None:
                target.add_(part.reshape(1, -1))
            else:
                target.addmm_(weights, part.reshape(len(part), -1))

    def _by_sample(self, layer: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x and y with a row for each sample, or two under guidance."""
        assert self._weights is not None
        rows, seen = len(self._weights), len(x)
        if layer.startswith(self._folded) and self._copies:  # a backward pass meets the blocks before the text's layers
            x, y = (part.reshape(rows * self._copies, -1, part.shape[-1]) for part in (x, y))
        elif seen in (rows, 2 * rows):
            self._copies = seen // rows
        else:
            raise UserError(
                f"marble: the layer {layer} sees {seen} rows in a micro-batch of {rows}, so its gradients cannot be "
                "told apart by sample; leave it out of lora.targets, or use marble.mode=full"
            )
        return x, y


def _product(y: Tensor, x: Tensor) -> Tensor:
    """(n, out, in) float32 of y (n, T, out) and x (n, T, in): `y_i^T x_i`, summed in float32 whatever their type."""
    if y.is_cuda and y.dtype == x.dtype and y.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(y.transpose(1, 2), x, out_dtype=torch.float32)  # type: ignore[call-overload,no-any-return]
    return torch.bmm(y.transpose(1, 2).float(), x.float())


class Passes:
    """The backward passes of one micro-batch, from phi and the slopes to a bank.

    Args:
        basis: m rows (m,) of directions in the space of phi, if the objective knows better ones than its columns: the
            slopes along the *first* are then the same for all rewards, so that one plain pass serves all of them.
        device: of phi.
    """

    def __init__(self, basis: Sequence[Sequence[float]] | None, device: torch.device) -> None:
        self.shared = basis is not None
        self._basis = None if basis is None else torch.tensor(basis, device=device)
        self._inverse = None if basis is None else torch.linalg.inv(torch.tensor(basis)).to(device)

    def run(
        self,
        capture: LoraGradients,
        phi: Tensor,
        slopes: Tensor,
        bank: Tensor,
        scale: Tensor,
        *,
        skip_shared: bool = False,
        masked: bool = False,
        direct: bool = False,
        retain: bool = False,
    ) -> None:
        """Add `scale` times the gradients of K losses to bank[:K], what all of them share to bank[K].

        Args:
            phi: (b, m) with its graph.
            slopes: (K, b, m).
            bank: (K + 1, size); row K is used where there is a basis.
            scale: scalar tensor, put into the pass itself, so that fp16 sees numbers of the usual size.
            skip_shared: the gradient of phi along the basis's first direction is known to be zero.
            masked: some losses leave out some rows, so that the slopes along the first direction are not the same.
            direct: K plain passes, one for each reward: the definition, and cheaper where K is at most their number.
            retain: keep the graph for a further backward pass.
        """
        passes: list[tuple[Tensor, Tensor, Tensor | None]] = []  # cotangent (b, m), rows of the bank, weights (b, K)
        rewards, m = len(slopes), phi.shape[1]
        columns = m - 1 if skip_shared and self.shared else m
        if direct or rewards <= columns:
            passes = [(slopes[k], bank[k : k + 1], None) for k in range(rewards)]
        else:
            along = slopes if self._inverse is None else slopes @ self._inverse
            directions = torch.eye(m, device=phi.device) if self._basis is None else self._basis
            for j in range(m):
                if self.shared and j == 0 and skip_shared:
                    continue
                if masked or not (self.shared and j == 0):
                    passes.append((directions[j].expand_as(phi), bank[:rewards], along[:, :, j].T))
                else:
                    passes.append((along[0, :, :1] * directions[0], bank[rewards:], None))
        for number, (cotangent, rows, weights) in enumerate(passes, start=1):
            with capture.into(rows, weights):
                phi.backward((cotangent * scale).to(phi.dtype), retain_graph=retain or number < len(passes))


def gram_matrix(rows: Tensor) -> Tensor:
    """(K, K) float64 of inner products of the rows (K, size), on their device, without a float64 copy of them all.

    Apple's devices have no float64: for them it is the CPU that computes, and has the result.
    """
    device = torch.device("cpu") if rows.device.type == "mps" else rows.device
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=device)
    columns = max(_GRAM_CHUNK.get(rows.device.type, 1 << 24) // max(len(rows), 1), 1)
    for part in rows.split(columns, dim=1):
        wide = part.to(device).double()
        gram.addmm_(wide, wide.T)
    return gram
