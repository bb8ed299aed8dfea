"""A diffusers pipeline with LoRA, brought to one form for every family of models.

Symbols (shapes): x_t, x0, v, latents (B, C, h, w); t (B,) float in [0, 1], 0 is clean; images (B, 3, H, W);
conditioning of B rows: see `diffrl.policy.conditioning`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from torch import Tensor, nn

from diffrl.forward import Prediction
from diffrl.policy.conditioning import Conditioning
from diffrl.policy.cpu_workarounds import Fp32Attention
from diffrl.policy.lora import PARTS, TRAINED, Adapters, LoraSpec
from diffrl.policy.text_cache import Texts
from diffrl.records.disk import replacing

if TYPE_CHECKING:
    from diffrl.policy.backbone import Backbone
    from diffrl.policy.sharding import FullyShardedDataParallelPlugin, Lockstep
    from diffrl.worlds import World

# One decoding chunk: 2 images of 1024 x 1024, 8 of 512 x 512, at most 16 (more leave a CPU's caches: 1.7 times slower).
CHUNK_PIXELS, CHUNK_IMAGES = 1 << 21, 16


def decoded_at_once(height: int, width: int, scale: int) -> int:
    """Images of a decoding chunk, for latents of this height and width, `scale` pixels to a side each."""
    pixels = height * width * scale**2
    return min(max(CHUNK_PIXELS // pixels, 1), CHUNK_IMAGES)


class Policy:
    """A text-to-image model to be trained: frozen base, named LoRAs, text encoders and autoencoder.

    The LoRA is always fp32. If the network's own type is narrower, forwards run under autocast to it, else under none.

    Args:
        backbone: the family's part.
        lora: rank, alpha and targets.
        device: where network and autoencoder live. Text encoders visit it only while they have something to encode.
        seed: of the LoRA's gaussian start.
        convert: makes the network's frozen weights something else, on a device, once the LoRA is in: (network, device).
        whole: False: the network stays in main memory until `shard` brings this process's share to the device.
        without: takes merged LoRAs off the pretrained model of `adapter(None)`, see `Adapters`.

    `network` is what `predict` calls; a wrapper (torch.compile, DistributedDataParallel) may be put in its place.
    `world`: whose language of prompts the model draws, if it is a world's.
    """

    world: World | None = None

    def __init__(
        self,
        backbone: Backbone,
        *,
        lora: LoraSpec | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
        convert: Callable[..., None] | None = None,
        whole: bool = True,
        without: Callable[[Adapters, bool], None] | None = None,
    ) -> None:
        self.backbone, self.device = backbone, torch.device(device)
        self.process, self.latent_shape = backbone.process, backbone.latent_shape
        for module in (backbone.network, backbone.vae, *backbone.text_encoders):
            module.requires_grad_(False).eval()
        self.network: nn.Module = backbone.network
        dtype = next(self.network.parameters()).dtype  # before weights become bytes
        if convert is None and whole:  # else it waits: converted layers go to the device one by one
            self.network.to(self.device)
        self.vae = backbone.vae.to(self.device)
        self._autocast_to = None if dtype == torch.float32 else dtype
        self.lora = Adapters(
            self.network,
            lora or LoraSpec(),
            backbone.targets,
            dead=backbone.dead_targets,
            seed=seed,
            cast_input=self._autocast_to is None,
            convert=convert and partial(convert, device=self.device),
            without=without,
        )
        if whole:
            self.network.to(self.device)
        self.wide_attention = False  # attention in fp32 although the rest is narrower
        self.decoded: int | None = None  # images decoded at a time; None: by their size
        self.texts = Texts(backbone, self.device)
        self.plain_texts: Texts | None = None  # of the pretrained model, where a LoRA changes the text encoders, too
        self.add_texts: Callable[[Path, Any], None] | None = None  # writes the text encoders' LoRAs into a LoRA's file
        self._negative: Conditioning | None = None  # of the family's empty prompt, on the device
        self._lockstep: Lockstep | None = None  # of a sharded network

    # ---- text

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Conditioning of the prompts (one row each, in their order), on the device.

        Every distinct prompt is encoded once and kept on the CPU; where all are known no text encoder moves or runs.
        Prompts are encoded one at a time, so that an embedding does not depend, in its last bits, on the company in
        which the prompt came first: a resumed run or one on more processes meets them in other company.
        """
        distinct = list(dict.fromkeys(prompts))
        cond = Conditioning.cat(self._texts(distinct)).to(self.device)
        if len(distinct) == len(prompts):
            return cond
        row = {prompt: i for i, prompt in enumerate(distinct)}
        return cond.select(torch.tensor([row[prompt] for prompt in prompts]))

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """The network waits in main memory inside the context, for which it is copied there and back."""
        self.lora.fused.forget()  # merged copies of its weights
        self.backbone.network.to("cpu")
        try:
            yield
        finally:
            self.backbone.network.to(self.device)

    # ---- the denoiser

    @property
    def distilled_guidance(self) -> bool:
        """Is guidance an input of the network (FLUX.1-dev), so that it costs nothing and training needs it, too?"""
        return not self.backbone.classifier_free

    def predict(
        self, x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float = 1.0, *, hold_empty: bool = False
    ) -> Prediction:
        """The active LoRA's prediction for x_t (B, C, h, w) at t (B,) in [0, 1], fp32, with gradient where enabled.

        `guidance` 1 runs the conditional row only. Otherwise the family's guidance, in most of them classifier-free,
        `out(empty) + guidance * (out(cond) - out(empty))`, with both rows in one forward; `hold_empty`: out(empty) is
        a constant to the gradient.
        """
        if self._lockstep is not None:
            self._lockstep.announce()
        x_t, t = x_t.float(), t.float()
        if guidance == 1.0 or not self.backbone.classifier_free:
            with self._autocast():
                output = self.backbone.forward(self.network, x_t, t, cond, guidance).float()
            return self.backbone.prediction(x_t, t, output)
        both = Conditioning.cat([self._empty().expand(len(x_t)), cond])
        with self._autocast():
            output = self.backbone.forward(self.network, torch.cat([x_t, x_t]), torch.cat([t, t]), both, guidance)
        negative, positive = output.float().chunk(2)
        if hold_empty:
            negative = negative.detach()
        return self.backbone.prediction(x_t, t, self.backbone.guide(positive, negative, guidance, t))

    def _empty(self) -> Conditioning:
        """The one row that guidance contrasts with, on the device."""
        if self.plain_texts is not None:
            return self._texts.empty().to(self.device)
        if self._negative is None:
            self._negative = self.texts.empty().to(self.device)
        return self._negative

    @property
    def _texts(self) -> Texts:
        return self.texts if self.plain_texts is None or self.lora.active else self.plain_texts

    @property
    def precision(self) -> torch.dtype:
        """Of the frozen weights, the texts and the arithmetic."""
        return self._autocast_to or torch.float32

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._autocast_to is None:
            return nullcontext()
        narrow = torch.autocast(self.device.type, dtype=self._autocast_to)
        if not self.wide_attention:
            return narrow
        (stack := ExitStack()).enter_context(narrow)
        stack.enter_context(Fp32Attention())
        return stack

    def timesteps(self, steps: int) -> Tensor:
        """Noise levels (steps + 1,), noisiest first, last 0: the pipeline's own; UserError without such."""
        from diffrl.policy.meaning import falling

        return falling(type(self.backbone.pipe.scheduler).__name__, self.backbone.timesteps, steps)

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward pass: less memory, one forward more. Run it with "default" active."""
        self.backbone.network.enable_gradient_checkpointing()  # type: ignore[operator]
        if self.vae._supports_gradient_checkpointing:
            self.vae.enable_gradient_checkpointing()

    # ---- many processes

    def shard(self, plugin: FullyShardedDataParallelPlugin, accelerator: Accelerator) -> None:
        """Keep only this process's share of the frozen network, see `sharding`; after the last `add_snapshot`."""
        from diffrl.policy import sharding

        loras = [part.to(self.device) for name, part in self.network.named_modules() if name.endswith(PARTS)]
        sharding.shard(self.network, loras, plugin, accelerator)
        self.lora.fused.merging = False  # a process has its share of a weight only
        self._lockstep = sharding.Lockstep(self._idle, self.device)

    @property
    def sharded(self) -> bool:
        """Does this process hold a share of the network only?"""
        return self._lockstep is not None

    def uneven_forwards(self) -> AbstractContextManager[None]:
        """Predictions inside may be unevenly many on the processes of a sharded network; no other exchange is there.

        Every process enters and leaves it.
        """
        return nullcontext() if self._lockstep is None else self._lockstep.uneven()

    @torch.no_grad()
    def _idle(self) -> None:
        """One row's forward, for its part in gathering the others' weights."""
        row = torch.zeros(1, *self.latent_shape, device=self.device)
        self.predict(row, torch.ones(1, device=self.device), self.encode([""]))

    # ---- the autoencoder

    def decode(self, latents: Tensor, chunk: int | None = None, grad: bool = False) -> Tensor:
        """Images (B, 3, H, W) of latents (B, C, h, w): fp32 in [0, 1], on the device.

        `chunk` images at a time (default: `decoded`, else 2 megapixels and at most 16 images). `grad` keeps the graph,
        for rewards that are back-propagated.
        """
        chunk = chunk or self.decoded
        if chunk is None:
            height, width = latents.shape[-2:]
            chunk = decoded_at_once(height, width, self.backbone.scale)
        images = []
        with torch.set_grad_enabled(grad):
            for part in latents.split(chunk):
                z = self.backbone.to_vae(part.to(self.device, torch.float32)).to(self.vae.dtype)
                images.append(self.backbone.from_vae(self.vae.decode(z, return_dict=False)[0]).float())
            return (torch.cat(images) / 2 + 0.5).clamp(0, 1)

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """Latents (B, C, h, w), fp32, of images (B, 3, H, W) in [0, 1]: the posterior's mode, one image at a time.

        So they do not depend, in their last bits, on the company in which they were encoded.
        """
        latents = []
        for image in images.split(1):
            x = self.backbone.to_encoder(image.to(self.device, torch.float32) * 2 - 1).to(self.vae.dtype)
            encoded = self.vae.encode(x, return_dict=False)[0]  # a tensor of autoencoders without a posterior
            encoded = encoded if isinstance(encoded, Tensor) else encoded.mode()
            latents.append(self.backbone.from_encoder(encoded.float()))
        return torch.cat(latents)

    # ---- LoRA snapshots: see Adapters

    @property
    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Name and parameter of everything that is trained: "default"'s matrices, fp32."""
        return self.lora.trainable

    @property
    def adapters(self) -> list[str]:
        """Names of the trained LoRA ("default") and of its snapshots."""
        return self.lora.names

    def adapter(self, name: str | None) -> AbstractContextManager[None]:
        """Predict with the snapshot `name` inside the context; None is the pretrained model. Costs nothing."""
        return self.lora.adapter(name)

    def add_snapshot(self, name: str) -> None:
        """A new snapshot, equal to the trained LoRA as it is now."""
        self.lora.add(name)

    def copy(self, source: str, destination: str) -> None:
        """destination <- source."""
        self.lora.copy(source, destination)

    def ema_update(self, name: str, decay: float | Tensor) -> None:
        """name <- decay * name + (1 - decay) * default; decay may be a tensor () on the device."""
        self.lora.ema_update(name, decay)

    def state(self, name: str = TRAINED) -> dict[str, Tensor]:
        """The LoRA `name` as fp32 CPU tensors, keyed by layer."""
        return self.lora.state(name)

    def load_state(self, name: str, state: dict[str, Tensor]) -> None:
        """Set the LoRA `name` to what `state` returned; UserError if it does not fit."""
        self.lora.load_state(name, state)

    def save_lora(self, directory: str | Path, name: str = TRAINED) -> Path:
        """Write a LoRA so that diffusers' `pipe.load_lora_weights(directory)` loads it; returns the file.

        Written beside and renamed, so that the file is whole at every moment.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / LORA_WEIGHT_NAME_SAFE
        with replacing(path) as unfinished:
            self.backbone.save_lora(directory, unfinished.name, self.lora.state(name), self.lora.metadata())
            if self.add_texts is not None:
                self.add_texts(unfinished, self.backbone)
        return path

    def load_lora(self, source: str | Path, name: str = TRAINED) -> None:
        """Set the LoRA `name` to a file's, see `diffrl.lora_files`; what the file has not gets no effect.

        Raises:
            UserError: it cannot be read, or its rank is larger or its layers are others (`lora.rank`, `lora.targets`).
        """
        from diffrl.lora_files import reader_of

        reader_of(source).load(str(source), self, name)
