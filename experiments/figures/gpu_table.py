"""The page's tables of what `scripts/gpu_proof.py` found on a GPU, for `tables.py`."""

from __future__ import annotations

from typing import Any

COLUMNS = {
    "images_per_gpu_second": "images/GPU/s",
    "images_per_second_rollout": "sampling, images/s",
    "rows_per_second_optimise": "optimise, rows/s",
}
PAIRS = {  # two figures in one cell
    "utilisation of both": ("mfu_rollout", "mfu_optimise"),
    "peak GiB, counted": ("peak_gib", "counted_gib"),
}
REFERENCES = ("peft", "peft_compiled", "roofline")
SHORT = {"images_per_gpu_second": "images", "images_per_second_rollout": "sampling"}
SHORT |= {"rows_per_second_optimise": "rows", "peak_gib": "peak memory"}


def _measured(found: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """The parts that have figures; none of a file of the tiny size."""
    if found is None or found["tiny"]:
        return {}
    return {name: part for name, part in found["parts"].items() if part["status"] in ("done", "part")}


def table(found: dict[str, Any] | None) -> str:
    """Speed, utilisation, memory, and an epoch's time in the references over diffrl's."""
    parts = _measured(found)
    if found is None or not parts:
        return "**Not measured**: nobody has run `scripts/gpu_proof.py` on a GPU and committed its figures yet."
    head = ["part", *COLUMNS.values(), *PAIRS, "peft, compiled, roofline"]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for name, part in parts.items():
        cells = [f"{part[key]:.3g}" if key in part else "" for key in COLUMNS]
        against = part.get("of_the_epoch", {})
        if any(cells):
            cells += [", ".join(f"{part[key]:.3g}" if key in part else "–" for key in pair) for pair in PAIRS.values()]
            cells.append(", ".join(f"{against[key]:.2f}" if key in against else "–" for key in REFERENCES))
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_sentences(parts), _device(found, parts)])


def _sentences(parts: dict[str, dict[str, Any]]) -> list[str]:
    """What the parts without a speed have found."""
    said = []
    if (learned := parts.get("learn/playground")) and learned.get("cpu"):
        score = "eval/playground"
        cpu = ", ".join(f"{value:.3f}" for value in learned["cpu"]["after"][score])
        before, after = learned["before"][score], learned["after"][score]
        said.append(
            f"Learning: {learned['recipe']}, {learned['epochs']} epochs, seed 0: {before:.3f} to {after:.3f} held out; "
            f"CPU, seeds 0 to 2: {cpu}."
        )
    if resumed := parts.get("resume"):
        said.append(f"A resumed run equals an undisturbed one in all {resumed['numbers']:,} numbers, to the bit.")
    return said


def _device(found: dict[str, Any], parts: dict[str, dict[str, Any]]) -> str:
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in ("torch", "diffusers", "peft"))
    rates = parts.get("environment", {})
    rate = f", product {rates['product_bf16_tflops']:.0f} TFLOP/s in bf16" if "product_bf16_tflops" in rates else ""
    return f"{found['machine']['gpu']}{rate}; {versions}; diffrl at {found.get('commit')}. `{found['command']}`"


def options(*files: dict[str, Any] | None) -> str:
    """What options give beside the plain run of the same call; the last file counts that has one."""
    lines = ["| option | images/GPU/s | beside the plain run |", "| --- | --- | --- |"]
    parts = {name: part for found in files for name, part in _measured(found).items() if "relative" in part}
    for name, part in sorted(parts.items()):
        gains = ", ".join(f"{SHORT[key]} x {value:.2f}" for key, value in part["relative"].items())
        lines.append(f"| {name} | {part['images_per_gpu_second']:.3g} | {gains} |")
    return "\n".join(lines)


def trials(found: dict[str, Any] | None) -> str:
    """The decoder's arithmetic, and the network's with and without autocast."""
    parts = _measured(found)
    lines = ["| decoding 512 pixels | ms an image | largest and mean distance of a pixel |", "| --- | --- | --- |"]
    for name, trial in parts.get("trial/decode/sd35", {}).items():
        if isinstance(trial, dict):
            lines.append(f"| {name} | {trial['ms']:.1f} | {trial['largest']:.1g}, {trial['mean']:.1g} |")
    lines += ["", "| arithmetic of the network | forward, ms | with backward, ms | prediction, gradient from fp32's |"]
    lines += ["| --- " * 4 + "|"]
    for model in ("sd35", "qwen"):
        for name, trial in parts.get(f"trial/arithmetic/{model}", {}).items():
            if isinstance(trial, dict):
                away = [trial[key] for key in ("prediction_off", "gradient_off") if key in trial]
                off = ", ".join(f"{value:.4f}" for value in away) or "not measured"
                lines.append(f"| {model}, {name} | {trial['forward_ms']:.0f} | {trial['train_ms']:.0f} | {off} |")
    return "\n".join(lines)
