"""A set of the hub: `hub:OWNER/NAME[@REVISION][:FILES]`, a data set in one of the layouts, as it lies there.

Its files are fetched into the hub's cache when a run begins, and found there from then on, without a network. FILES is
a pattern, such as data/train-*: a data set may be larger than a disk.
"""

from __future__ import annotations

from pathlib import Path

from diffrl.errors import UserError, in_one_line
from diffrl.hub import not_name, pinned
from diffrl.hub_access import hub_failure

FORM = "hub:OWNER/NAME[@REVISION][:FILES], such as hub:OWNER/NAME:data/train-*"


def parts(source: str) -> tuple[str, str | None]:
    """The data set, with its revision, and FILES, where a source has some; UserError for another form."""
    name, *files = source.removeprefix("hub:").split(":")
    if (wrong := not_name(name, FORM)) or len(files) > 1 or not all(files):
        raise UserError(f'"{source}": {wrong or f"write {FORM}"}')
    return name, files[0] if files else None


def fetched(source: str, fetch: bool = True) -> tuple[Path, list[Path]]:
    """The data set's folder on this machine, and those of its files that FILES asks for, if it does.

    Args:
        fetch: what is missing is fetched.

    Raises:
        UserError: another form; no such data set or file; nothing here and no network.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    name, files = parts(source)
    failure = hub_failure() if fetch else "it is not fetched yet"
    try:
        name, at = pinned(name, "dataset")
        here = {"repo_type": "dataset", "local_files_only": bool(failure), **at}
        folder = Path(snapshot_download(name, allow_patterns=files, **here))
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        reason = failure or in_one_line(error, most=120)
        raise UserError(f'"{source}" is not on this machine, and the hub does not give it ({reason})') from error
    chosen = sorted(folder.glob(files)) if files else []
    if files and not chosen:
        raise UserError(f'"{source}": the data set has no such file{f" here ({failure})" if failure else ""}')
    return folder, chosen
