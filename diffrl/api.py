"""The Python interface: `import diffrl`, then `diffrl.train`, `load`, `evaluate`, `Config`, `Run`.

    run = diffrl.train("playground/demo", rewards={"redness": redness}, epochs=5)
    model = diffrl.load("playground", lora=run.lora)
    images = model.draw(["a red heart"], seed=0)
    scores = diffrl.evaluate(model, rewards=["clip", redness], prompts=["a red heart", "two blue stars"])

The command line calls the same functions, so checks and errors are the same: `UserError` for bad input, in one line.
"""

from __future__ import annotations

import html
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffrl.config import Config, check_model, check_plugin, dump, load_config
from diffrl.errors import UserError, nearest
from diffrl.lora_files import find_lora
from diffrl.prepare import Base, prepare
from diffrl.prepare.handed_over import Rewards, entries
from diffrl.ranks import joined
from diffrl.resources import file_of_run
from diffrl.switches import as_torch_starts
from diffrl.tools.given_prompts import PromptLike
from diffrl.tools.outputs import out_file

if TYPE_CHECKING:
    from diffrl.model import Model, load

__all__ = ["Config", "Model", "Run", "evaluate", "load", "load_config", "prepare", "save_config", "train"]

save_config = dump


def __getattr__(name: str) -> Any:
    """What draws; a training from the shell does without."""
    if name in ("Model", "load"):
        from diffrl import model

        return getattr(model, name)
    raise AttributeError(f"module 'diffrl.api' has no attribute {name!r}")


@as_torch_starts()
def train(
    config: Base | None = None,
    *overrides: str,
    rewards: Rewards | None = None,
    watch: Rewards | None = None,
    resume: str | Path | None = None,
    override: Sequence[str] = (),
    dry_run: bool = False,
    **values: Any,
) -> Run:
    """Train a LoRA; what `diffrl train` does, with rewards that may also be Python objects.

    Under `accelerate launch script.py` every process calls it, and only the first one writes.

    Args:
        config: a YAML file, a shipped recipe ("playground/demo"), a `Config`, or a table of sections and keys, whose
            rewards may be callables and whose prompts lists, as below.
        overrides: texts "section.key=value", as on the command line.
        rewards: what is optimised instead of the config's rewards: names and callables, in a list or as {name: ...}.
            A value is a callable, a plugin's name, or a table such as {"plugin": redness, "weight": 2.0}. A callable
            takes (images), (images, prompts) or (images, prompts, metadata), with images (B, 3, H, W), float in [0, 1],
            and gives B scores, higher is better; or it is a class or an object with the reward protocol. What was
            watched before and is optimised now is no longer watched.
        watch: what is scored and never optimised, in the same forms, instead of the config's.
        resume: the folder of a run to continue, or "auto": the config's own `run_dir` if there is a run in it.
        override: keys or sections in which a resumed run may differ from what its checkpoint was trained with.
        dry_run: check everything, load model and rewards, and write nothing.
        values: sections and keys that replace the config's, for example `epochs=5, rollout={"groups": 8}`;
            `prompts={"train": [...], "test": [...]}` may hold lists of texts, which are kept in the run's folder.

    Returns:
        The run, with its metrics, LoRA and report.

    Raises:
        UserError: for bad input, in one line, before the training starts.
        RewardError, TrainingError: when the run cannot go on; a checkpoint is left behind.
        Interrupted: by Ctrl-C, a notebook's stop button, or SIGTERM; continue with `resume`.
    """
    with (peers := joined()).starting():
        checked, folder = prepare(config, overrides, rewards=rewards, watch=watch, resume=resume, values=values)
        from diffrl.ranks.meeting import parted_at_exit
        from diffrl.run.train import train as run_training

        if dry_run:
            from diffrl.prepare.dry_run import try_out

    with parted_at_exit():
        instead = try_out if dry_run else None
        run_training(checked, resume=folder, override=override, peers=peers, instead=instead)
    return Run(checked.run_dir)


class Run:
    """The folder of a run: what `train` returns, and `diffrl.Run("runs/demo")` for one that is there already.

    Raises:
        UserError: by its properties, where the folder has not (yet) what they ask for.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def config(self) -> Config:
        """What was run: every value."""
        return load_config(file_of_run(self.folder, "config.yaml", "run"))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row for each epoch, row 0 is the model before training; the keys are those of `metrics.jsonl`."""
        from diffrl.records.tracking import read_metrics

        return read_metrics(self.folder)

    @property
    def lora(self) -> Path:
        """The folder of the newest LoRA; `pipe.load_lora_weights(run.lora)` of diffusers reads it, too."""
        return file_of_run(self.folder / "lora", "pytorch_lora_weights.safetensors", "lora").parent

    @property
    def report(self) -> Path:
        """The page of the run, one file that fetches nothing."""
        return file_of_run(self.folder, "report.html", "report")

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before trusting the run: alarms and signs of reward hacking, one sentence each."""
        from diffrl.report import read_run, warnings_of

        return warnings_of(read_run(self.folder))

    def gains(self) -> dict[str, tuple[float, float]]:
        """(before, after) of everything that was evaluated on held-out prompts, by name; nothing of one evaluation."""
        judged = [row for row in self.metrics if "eval/diversity" in row]
        first, last = (judged[0], judged[-1]) if len(judged) > 1 else ({}, {})
        names = [key for key in last if key.startswith("eval/") and not key.endswith("/std")]
        ends = {key[5:]: (first.get(key), last[key]) for key in names}
        return {name: (a, b) for name, (a, b) in ends.items() if isinstance(a, float) and isinstance(b, float)}

    def show(self, height: int = 700) -> Any:
        """In a notebook: the report, inline. Elsewhere: prints where it is, and returns None."""
        page = self.report
        try:
            from IPython import get_ipython
            from IPython.display import HTML
        except ImportError:
            get_ipython = None
        if get_ipython is None or get_ipython() is None:
            print(f"report: {page.resolve()}")
            return None
        # As a document of its own: its styles do not meet the notebook's, and it works where files are not served.
        inner = html.escape(page.read_text(encoding="utf-8"), quote=True)
        return HTML(f'<iframe srcdoc="{inner}" style="width: 100%; height: {height}px; border: 0"></iframe>')

    def __repr__(self) -> str:
        return f'Run("{self.folder}")'


@as_torch_starts()
def evaluate(
    model: str | Path | Model | Run,
    rewards: Rewards,
    prompts: str | Sequence[PromptLike],
    *,
    per_prompt: int = 4,
    out: str | Path | None = None,
    **drawing: Any,
) -> dict[str, Any]:
    """Score a model's images of prompts; what `diffrl evaluate` does, with rewards that may also be Python objects.

    Args:
        model: a loaded model, the name of one, or a run: its model with its LoRA.
        rewards: as in `train`; an entry's table holds the parameters of its constructor.
        prompts: a text or several, or a set or file as in a config.
        per_prompt: images for each prompt; diversity needs two.
        out: a JSON file to write the result to.
        drawing: `seed`, `steps`, `limit`, `sampler`, `guidance_scale`, `batch_size`; with a name also `lora`,
            `merge`, `resolution`; `like`: a run that says what is left open; `base=True`: also without the LoRA.

    Returns:
        "mean" and "standard_error" (over prompts) of each reward, "diversity", "parts" of rewards with a breakdown, and
        every image's "scores". Printed, it is a small table.
    """
    from diffrl.drawing import Drawing
    from diffrl.drawing import evaluate as score
    from diffrl.model import Model, load, name_of, prompts_of
    from diffrl.rewards.building import Entry

    known = {*inspect.signature(Drawing).parameters, *inspect.signature(score).parameters} - {"drawing"}
    if unknown := [name for name in drawing if name not in known]:
        raise UserError(f'evaluate: unknown argument "{unknown[0]}"{nearest(unknown[0], known)}')
    target = None if out is None else out_file(Path(out), "out", "scores")
    wanted = entries(rewards, "rewards")
    plugins = {name: entry.pop("plugin", name) for name, entry in wanted.items()}
    for name, plugin in plugins.items():
        try:
            check_plugin(plugin)
        except UserError as error:
            raise UserError(f"rewards.{name}: {error}") from error
    if isinstance(model, Run):
        model = load(model)
    if isinstance(model, Model):
        if fixed := [name for name in ("lora", "merge", "resolution", "family") if name in drawing]:
            raise UserError(f"{fixed[0]}: the model is loaded already; give it to diffrl.load")
        named = {name: getattr(model, name) for name in ("lora", "resolution", "merge", "policy")}
        named["model"] = model.name
    else:
        model = name_of(model)
        check_model(model)
        if drawing.get("lora") is not None:
            find_lora(drawing["lora"])
            drawing["lora"] = str(drawing["lora"])
        named = {"model": model}
    judges = {name: Entry(plugin, wanted[name]) for name, plugin in plugins.items()}
    return score(rewards=judges, prompts=prompts_of(prompts), per_prompt=per_prompt, out=target, **named | drawing)
