"""A run on the hub: sent while it trains (`checkpoint.push`), fetched to go on elsewhere (`--resume hub:OWNER/NAME`).

Sent are the newest checkpoint, the LoRA and what the run recorded, never a plugin's code. A push works in a thread on
copies, or links to files that are never rewritten, so that the training neither waits for it nor changes what it reads.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from huggingface_hub import HfApi, get_token, snapshot_download

from diffrl.errors import UserError, in_one_line
from diffrl.files import is_address
from diffrl.hub import not_name
from diffrl.hub_access import hub_failure
from diffrl.pushing.runs import current, send
from diffrl.pushing.runs import fetch as fetch_stored
from diffrl.records import checkpoint

PREFIX = "hub:"
FIXED = ("lora", "healthy", "samples")  # folders whose files are replaced, never written into
FILES = ("config.yaml", "metrics.jsonl", "held_out.jsonl", "history.jsonl", "environment.json", "report.html")
STAGE = ".push"


class Pusher:
    """Sends a run's folder to the hub's model OWNER/NAME, made private if it is not there. It asks nothing.

    A push that fails, or that meets one that is still under way, is a line for `note` and no more.
    """

    def __init__(self, folder: Path, repository: str, note: Callable[[str], None]) -> None:
        self.folder, self.repository, self.note = folder, repository, note
        self._api, self._epoch = HfApi(), 0
        self._sending: Future[None] | None = None
        self.sent: int | None = None  # the newest epoch that has arrived
        if not is_address(repository) and get_token() is None:
            note("checkpoint.push: no token of the hub is here; set HF_TOKEN or run `hf auth login`, or pushes fail")

    def push(self, epoch: int) -> None:
        """Begin to send what the folder has now."""
        if self._sending is not None and not self._sending.done():
            self.note(f"checkpoint.push: the push before is still under way; that of epoch {epoch} is left out")
            return
        self.wait()
        try:
            stage(self.folder)
        except OSError as error:
            self.note(f"checkpoint.push: epoch {epoch} was not sent: {in_one_line(error, most=200)}")
            return
        self._sending, self._epoch = Future(), epoch
        # A thread that the interpreter's end does not wait for: `wait` has said how long.
        threading.Thread(target=self._work, args=(self._sending, epoch), daemon=True).start()

    def _work(self, sending: Future[None], epoch: int) -> None:
        try:
            if is_address(self.repository):
                send(self.repository, self.folder / STAGE, epoch)
            else:
                self._send(epoch)
        except BaseException as error:
            sending.set_exception(error)
        else:
            self.sent = epoch
            sending.set_result(None)

    def wait(self, seconds: float | None = None) -> None:
        """Until nothing is under way, or for so many seconds; says how a push failed."""
        if self._sending is None:
            return
        try:
            self._sending.result(seconds)
        except TimeoutError:
            self.note(f"checkpoint.push: epoch {self._epoch} was not sent to {self.repository} within {seconds:.0f} s")
            if not self._sending.done():
                return
        except Exception as error:  # whatever it is, the training goes on
            why = in_one_line(error, most=200)
            self.note(f"checkpoint.push: epoch {self._epoch} was not sent to {self.repository} ({why})")
        self._sending = None
        shutil.rmtree(self.folder / STAGE, ignore_errors=True)

    def _send(self, epoch: int) -> None:
        self._api.create_repo(self.repository, private=True, exist_ok=True)
        self._api.upload_folder(
            repo_id=self.repository,
            folder_path=self.folder / STAGE,
            commit_message=f"Epoch {epoch}, by diffrl",
            delete_patterns=["checkpoints/*"],  # older ones
        )


def stage(folder: Path) -> Path:
    """`folder/.push` with what is sent of a run. OSError if it cannot be made."""
    target = folder / STAGE
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for name in FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    newest, _ = checkpoint.survey(folder)
    for source in [*(folder / name for name in FIXED), *([] if newest is None else [newest])]:
        if source.is_dir():
            shutil.copytree(source, target / source.relative_to(folder), copy_function=_link)
    return target


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


def fetch(resume: str, run_dir: str | None = None) -> Path:
    """The run `hub:OWNER/NAME` that `checkpoint.push` sent, in the new folder `run_dir` (None: runs/NAME), which is
    whole or not there.

    Of several processes the first fetches; machines that do not see its disk get copies (`diffrl.prepare.hand_on`).

    Raises:
        UserError: the name has another form, the hub does not give it, it is no run, or the folder is not empty.
    """
    repository, stored = resume.removeprefix(PREFIX), is_address(resume) and not resume.startswith(PREFIX)
    if not stored and (wrong := not_name(repository, f"{PREFIX}OWNER/NAME")):
        raise UserError(f'--resume: "{resume}": {wrong}')
    folder = Path(run_dir or f"runs/{repository.rpartition('/')[2]}")
    if os.environ.get("RANK", "0") != "0":
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        where = f"go on there with --resume {folder}, or " if (folder / "config.yaml").is_file() else ""
        raise UserError(f"--resume: {folder} is not empty; {where}name another folder with run_dir=")
    if stored:
        fetch_stored(repository, folder)
        return folder
    failure, temporary = hub_failure(), folder.with_name(f".{folder.name}.{os.getpid()}")
    wanted = [*FILES, *(f"{name}/*" for name in (*FIXED, "checkpoints"))]
    try:
        temporary.mkdir(parents=True)
        snapshot_download(repository, local_dir=temporary, allow_patterns=wanted)
        shutil.rmtree(temporary / ".cache", ignore_errors=True)  # the hub's own notes
        if not (temporary / "config.yaml").is_file():
            raise UserError(f"--resume: {PREFIX}{repository} is not a run of diffrl: it has no config.yaml")
        os.replace(temporary, folder)
    except UserError:
        raise
    except Exception as error:  # what the hub's client raises depends on where it fails
        reason = failure or in_one_line(error, most=200)
        raise UserError(f"--resume: {PREFIX}{repository} cannot be fetched ({reason})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def from_store(address: str | None, run_dir: Path, resumed: Path | None) -> None:
    """Before a run that is sent to `address` begins or goes on: what is there already, fetched where nothing is here.

    Raises:
        UserError: a new run, and there is one; the run here is behind the one there.
    """
    if address is None or os.environ.get("RANK", "0") != "0" or (table := current(address)) is None:
        return
    if resumed is None:
        raise UserError(
            f"checkpoint.push: {address} already holds a run; continue it with --resume auto, or choose another"
        )
    newest, _ = checkpoint.survey(resumed) if resumed.is_dir() else (None, [])
    epoch = 0 if newest is None else checkpoint.epoch_of(newest)
    if not (resumed / "config.yaml").is_file():
        fetch_stored(address, run_dir)
    elif epoch < table["epoch"]:
        text = f"--resume: {resumed} has epoch {epoch}, and {address} epoch {table['epoch']}"
        raise UserError(f"{text}: move {resumed} away, and it is fetched from there")
