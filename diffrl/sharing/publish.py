"""`diffrl publish`: from a run's folder to a folder that can go to the hub as it is."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from diffrl.config import Config, dump, load_config
from diffrl.drawing import Drawing
from diffrl.errors import UserError, in_one_line
from diffrl.hub import not_name
from diffrl.lora_files import lora_file
from diffrl.policy import Policy, find_model
from diffrl.prepare.handed_over import register
from diffrl.prompts import Prompt, load_prompts
from diffrl.records.disk import check_writable, replacing, write_json, write_text
from diffrl.records.tracking import read_metrics
from diffrl.report import read_run, warnings_of
from diffrl.resources import file_of_run, owner_of
from diffrl.rewards import local
from diffrl.rewards.protocol import Card
from diffrl.rewards.registry import found
from diffrl.sharing.card import COMFY, GALLERY, LORA, Facts, drawn_steps, render
from diffrl.sharing.keys import for_comfyui
from diffrl.sharing.measure import Row, gallery, measure

log = logging.getLogger("diffrl")
EARLIER = "evaluation.json"  # of a run's earlier LoRA: its epoch
SHOWN = 4  # prompts of the gallery


def publish(
    run: str | Path, out: str | Path | None = None, *, lora: str | Path | None = None, prompts: int | None = None
) -> Path:
    """Write the folder of a run's LoRA for the hub; nothing is sent anywhere (see `push`).

    Args:
        run: the folder of a run.
        out: where to write; default: RUN/publish. Its files of an earlier time are replaced.
        lora: another LoRA than the run's newest, for example RUN/healthy.
        prompts: how many held-out prompts are measured; default: the config's `evaluate.prompts`; 0: none, and the
            table has the run's own evaluations without intervals.

    Returns:
        The folder: LoRA in diffusers' keys, and in ComfyUI's where it knows the family; README.md, gallery.png,
        config.yaml, results.json.

    Raises:
        UserError: this is no run's folder, or it has no LoRA.
    """
    run = Path(run)
    file = file_of_run(run, "config.yaml", "publish")
    with _stand_ins(file) as absent:
        if absent:
            log.warning("%s: Python objects that are not here; nothing is measured anew", ", ".join(absent))
        return _publish(run, load_config(file), out, lora, 0 if absent else prompts)


def _publish(run: Path, config: Config, out: str | Path | None, lora: str | Path | None, prompts: int | None) -> Path:
    source = Path(lora) if lora is not None else run / "lora"
    metrics = read_metrics(run)
    if not metrics:
        raise UserError(f'publish: "{run}" has no epochs in metrics.jsonl yet')
    data = read_run(run)
    # Another LoRA's values are not the run's, but those of RUN/healthy are the run's earlier ones.
    evaluated = metrics if lora is None else []
    if (earlier := source / EARLIER).is_file():
        epoch = json.loads(earlier.read_text())["epoch"]
        evaluated = metrics = [row for row in metrics if row["epoch"] <= epoch]
    out = run / "publish" if out is None else Path(out)
    _check_out(run, source, out)
    family = str(find_model(config.model)[1].get("_class_name"))
    size = config.evaluate.resolution or config.rollout.resolution
    kind: dict[str, Any] = {"resolution": size, "family": config.family, "text_length": config.text_length}
    policy = Drawing(config.model, lora=str(source), **kind).policy()
    held_out = load_prompts(config.prompts.test)
    wanted = config.evaluate.prompts if prompts is None else prompts
    rows = _rows(data.lower, config, policy, held_out[:wanted], evaluated)

    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / LORA) as unfinished:
        shutil.copyfile(lora_file(source), unfinished)
    (out / COMFY).unlink(missing_ok=True)
    try:
        tensors = for_comfyui(family, policy.state(), policy.lora.spec)
        with replacing(out / COMFY) as unfinished:
            save_file(tensors, unfinished, metadata={"format": "pt"})
    except UserError as error:
        log.warning("%s", error)
    shown = held_out[:SHOWN]
    drawing = Drawing(config.model, lora=str(source), steps=drawn_steps(config))
    sheet = gallery(policy, shown, drawing.spec(policy), seed=config.seed, batch_size=config.rollout.batch_size)
    with replacing(out / GALLERY) as unfinished:
        sheet.save(unfinished, format="PNG")
    dump(config.model_copy(update={"run_dir": f"runs/{run.resolve().name}"}), out / "config.yaml")
    pipe = policy.backbone.pipe
    optional = pipe._optional_components
    hub = data.starts[-1].get("hub") if data.starts else None  # the commits that its last start has recorded
    facts = Facts(
        name=run.resolve().name,
        config=config,
        plain_call=policy.backbone.plain_call,
        rows=rows,
        prompts=min(wanted, len(held_out)),
        warnings=warnings_of(data),
        cards=_cards(config),
        epoch=metrics[-1]["epoch"],
        images=int(metrics[-1].get("samples") or 0),
        comfyui=(out / COMFY).is_file(),
        resolution=(policy.latent_shape[-1] * policy.backbone.scale, policy.latent_shape[-2] * policy.backbone.scale),
        absent=[name for name, part in pipe.components.items() if part is None and name not in optional],
        hub=hub if isinstance(hub, dict) else {},
    )
    write_text(out / "README.md", render(facts, [prompt.text for prompt in shown]))
    results = {"rows": [asdict(row) for row in rows], "prompts": facts.prompts, "warnings": list(facts.warnings)}
    write_json(out / "results.json", results)
    return out


def _check_out(run: Path, source: Path, out: Path) -> None:
    """UserError where nothing can be written, or where files of a run or the LoRA itself would be written over."""
    check_writable(out, "--out")
    of_lora = out.resolve() == lora_file(source).resolve().parent or (out / EARLIER).exists()
    if owner := owner_of(out) or "a LoRA" * of_lora:
        raise UserError(f'--out: "{out}" is {owner}\'s own folder; name another, such as {run / "publish"}')


@contextmanager
def _stand_ins(file: Path) -> Iterator[list[str]]:
    """Inside, the config can be read although rewards that were Python objects are not here; yields their names."""
    text = file.read_text(encoding="utf-8")
    plugins = dict.fromkeys(re.findall(rf"plugin: ['\"]?({local.PREFIX}[\w-]+)", text))
    absent = [plugin for plugin in plugins if not local.knows(plugin)]
    for plugin in absent:
        register(plugin.removeprefix(local.PREFIX), _Absent)
    try:
        yield absent
    finally:
        for plugin in absent:
            local.forget(plugin)


class _Absent:
    """A reward that is never called."""

    name = "absent"

    def __call__(self, images: Any, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Any:
        raise AssertionError("a stand-in is never called")


def push(folder: str | Path, repository: str, message: str = "A LoRA trained with diffrl") -> str:
    """Send a folder to the hub as the model OWNER/NAME, made if it is not there; returns its address.

    Raises:
        UserError: the name has another form.
        ConnectionError: the hub could not be reached, or refused; the folder is complete all the same.
    """
    from huggingface_hub import HfApi

    if wrong := not_name(repository):
        raise UserError(f'--push: "{repository}": {wrong}')
    try:
        api = HfApi()
        address = api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except Exception as error:  # the hub's, the network's, the disk's: each library has its own
        reason = in_one_line(error, most=200)
        raise ConnectionError(f"--push: {repository} could not be sent: {reason}; {folder} is complete") from error
    return str(address)


def _rows(
    lower: frozenset[str],
    config: Config,
    policy: Policy,
    prompts: Sequence[Prompt],
    metrics: Sequence[Mapping[str, Any]],
) -> list[Row]:
    """Measured now if prompts are wanted and every reward can be built; else the run's first and last evaluation."""
    if prompts:
        try:
            return measure(config, policy, prompts, lower)
        except UserError as error:  # a reward's weights or package are not on this machine
            log.warning("%s; the table has the run's own evaluations, without intervals", error)
    judged = [row for row in metrics if "eval/diversity" in row]
    rows = []
    for name in [*config.rewards, *config.watch, "diversity"]:
        first, last = (row.get(f"eval/{name}") for row in (judged[0], judged[-1])) if judged[1:] else (None, None)
        if first is not None and last is not None:
            role = "trained" if name in config.rewards else "held out"
            rows.append(Row(name, role, float(first), float(last), lower_is_better=name in lower))
    return rows


def _cards(config: Config) -> dict[str, Card | None]:
    """What each reward says of itself, without building it."""
    cards: dict[str, Card | None] = {}
    for name, entry in {**config.rewards, **config.watch}.items():
        plugin = entry.plugin or name
        card = getattr(found(plugin), "card", None)
        cards[name] = card if isinstance(card, Card) else None
    return cards
