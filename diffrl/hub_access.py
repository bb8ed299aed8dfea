"""The hub itself: whether it can be reached, and the commit of a revision there or in this machine's cache."""

from __future__ import annotations

import functools
import re
import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from diffrl.errors import in_one_line

COMMIT = re.compile(r"[0-9a-f]{40}")


@functools.cache
def hub_failure() -> str:
    """Why the hub cannot be reached, "" where it can. Then it is read offline: five retries a file take a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    url = urlsplit(constants.ENDPOINT)
    if url.scheme in urllib.request.getproxies():  # the proxy knows the way, this machine need not
        return ""
    try:
        socket.create_connection((url.hostname, url.port or (443 if url.scheme == "https" else 80)), 5).close()
    except OSError as error:
        constants.HF_HUB_OFFLINE = True
        return f"{url.hostname} cannot be reached ({in_one_line(error)})"
    return ""


@functools.cache
def commit_at(repository: str, revision: str, kind: str) -> str | None:
    """That a revision stands for: the hub's, or offline that of this machine's cache; None where neither has it."""
    if COMMIT.fullmatch(revision):
        return revision
    if not hub_failure():
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RevisionNotFoundError

        try:
            return HfApi().repo_info(repository, revision=revision, repo_type=kind, timeout=20).sha
        except RevisionNotFoundError:
            return None
        except Exception:  # a private or gated one without a token, a name of another server: the cache may have it
            pass
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type=kind)
    try:
        return (folder / "refs" / revision).read_text().strip()
    except OSError:
        short = [one.name for one in folder.glob(f"snapshots/{revision}*")] if len(revision) >= 7 else []
        return short[0] if len(short) == 1 else None
