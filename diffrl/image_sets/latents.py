"""An image set's latents: encoded once, kept on the disk, a file for each group, so that no set has to fit into memory.

The folder is named by the autoencoder's weights and the size of the pictures, a file by its group's pictures: their
names, sizes and times, as `make` knows files. So what has changed is encoded anew, and nothing old is ever read.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from diffrl.errors import UserError, in_one_line
from diffrl.image_sets.layouts import Group, Picture
from diffrl.image_sets.reading import open_parquet
from diffrl.policy import Policy
from diffrl.records.disk import writing
from diffrl.tools.pictures import to_rgb

FOLDER = ".latents"  # in the set's own, unless another is named


class Latents:
    """The latents of groups under a policy's autoencoder, in a sub-folder of `folder`."""

    def __init__(self, policy: Policy, folder: Path) -> None:
        self.policy = policy
        self.folder = folder / _autoencoder(policy)
        self._pictures = Pictures()

    def missing(self, groups: Iterable[Group]) -> list[Group]:
        """Those that are still to be encoded."""
        return [group for group in groups if not group.latents and not self._file(group).is_file()]

    def encode(
        self,
        groups: Iterable[Group],
        check: Callable[[], None] = lambda: None,
        done: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Encode and keep those that are missing, in their order. `check`, which may raise, is called before each.

        Raises UserError for a picture that cannot be read, and DiskError.
        """
        for number, group in enumerate(self.missing(groups), start=1):
            check()
            images = [self._image(picture, group) for picture in group.pictures]
            self.keep(group, self.policy.encode_images(torch.stack(images)))
            done(number)

    def keep(self, group: Group, latents: Tensor) -> None:
        """Latents (m, C, h, w) of a group's pictures, from now on. DiskError."""
        file = self._file(group)
        unfinished = file.with_name(f".{file.name}.{os.getpid()}")  # another run may encode the same set
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as stream:
                np.save(stream, latents.cpu().numpy())
            os.replace(unfinished, file)

    def __call__(self, group: Group, members: Tensor) -> Tensor:
        """Latents (len(members), C, h, w), fp32 on the CPU, of some of a group's pictures; encoded if they are not."""
        if not group.latents and not self._file(group).is_file():
            self.encode([group])
        file = group.latents or str(self._file(group))
        wanted = (len(group.pictures), *self.policy.latent_shape)
        try:
            stored = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: no latents that can be read ({in_one_line(error, most=80)})") from error
        if stored.shape != wanted:
            text = f"latents of the shape {stored.shape}, but those of its pictures under this model are {wanted}"
            raise UserError(f"{group.where}: {text}; without `latents` the pictures are encoded")
        return torch.from_numpy(np.array(stored[members.numpy()], dtype=np.float32))

    def _file(self, group: Group) -> Path:
        stamps = []
        for picture in group.pictures:
            path = Path(picture.file)
            try:
                stat = path.stat()
            except OSError as error:
                raise UserError(f"{group.where}: no picture {picture} ({error.strerror})") from error
            stamps.append([path.name, stat.st_size, stat.st_mtime_ns, picture.row, picture.column])
        return self.folder / f"{hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:32]}.npy"

    def _image(self, picture: Picture, group: Group) -> Tensor:
        _, height, width = self.policy.latent_shape
        scale = self.policy.backbone.scale
        return self._pictures(picture, group.where, (width * scale, height * scale))


def fitted(pixels: np.ndarray, size: tuple[int, int]) -> Tensor:
    """(3, H, W) in [0, 1] of uint8 pixels (h, w, 3): scaled to cover `size` = (W, H), and its middle cut out."""
    picture, (width, height) = Image.fromarray(pixels), size
    if picture.size != size:
        factor = max(width / picture.width, height / picture.height)
        whole = (max(round(picture.width * factor), width), max(round(picture.height * factor), height))
        picture = picture.resize(whole, Image.Resampling.LANCZOS)
        left, top = (whole[0] - width) // 2, (whole[1] - height) // 2
        picture = picture.crop((left, top, left + width, top + height))
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255


class Pictures:
    """Reads the pictures of an image set."""

    def __init__(self) -> None:
        self._cells = _Cells()

    def __call__(self, picture: Picture, where: str, size: tuple[int, int]) -> Tensor:
        """(3, H, W) in [0, 1], `fitted` to size = (W, H); UserError, beginning with `where`, for what is none."""
        return fitted(self.pixels(picture, where), size)

    def pixels(self, picture: Picture, where: str) -> np.ndarray:
        """uint8 (h, w, 3), as it is; UserError, beginning with `where`, for what is no picture."""
        try:
            source: Any = picture.file if picture.row < 0 else io.BytesIO(self._cells(picture))
            with Image.open(source) as opened:
                return to_rgb(opened)
        except UserError:
            raise
        except Exception as error:  # PIL's own kinds, for files of anybody's
            text = f"{picture} is not a picture that can be read ({in_one_line(error, most=120)})"
            raise UserError(f"{where}: {text}") from error


class _Cells:
    """Bytes of parquet files' cells. Pictures come in the files' order, so the row groups read last are kept."""

    def __init__(self) -> None:
        self._table: tuple[str, Any] = ("", None)
        self._columns: dict[tuple[str, int, str], Any] = {}

    def __call__(self, picture: Picture) -> bytes:
        if self._table[0] != picture.file:
            self._table = (picture.file, open_parquet(picture.file))
        table, row, index = self._table[1], picture.row, 0
        while row >= (rows := table.metadata.row_group(index).num_rows):
            row, index = row - rows, index + 1
        at = (picture.file, index, picture.column)
        if at not in self._columns:
            while len(self._columns) > 1:  # both columns of a layout of pairs
                del self._columns[next(iter(self._columns))]
            self._columns[at] = table.read_row_group(index, columns=[picture.column]).column(0)
        value = self._columns[at][row].as_py()
        data = value["bytes"] if isinstance(value, dict) else value
        if not data:
            raise ValueError("the cell is empty")
        return bytes(data)


def _autoencoder(policy: Policy) -> str:
    """A name for how this policy encodes: its autoencoder's weights, settings and type, and the size of a picture."""
    hasher = hashlib.sha256()
    settings = {name: value for name, value in policy.vae.config.items() if not name.startswith("_")}
    hasher.update(json.dumps([policy.latent_shape, str(policy.vae.dtype), settings], default=str).encode())
    for name, tensor in policy.vae.state_dict().items():
        hasher.update(name.encode())
        hasher.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]
