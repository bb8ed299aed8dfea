"""The facts of the benchmarks: a table. No torch is imported, so that the command line can show it at once."""

from __future__ import annotations

from . import compbench, dpg, general, geneval, geneval2, unigenbench
from .items import Bench, Judge

_SPACY = ("spacy", "en_core_web_sm")
_OWL = "the reward compbench: OWLv2 (ViT-B/16), 0.6 GB in fp32"
_QWEN = "Qwen/Qwen3-VL-8B-Instruct"
_QUESTIONS = {"mode": "questions", "model": _QWEN}
_POINTS = {"mode": "points", "max_tokens": 4096, "request_retries": 10, "request_timeout": 300.0}
_B32 = {"model": "ViT-B-32-quickgelu", "pretrained": "openai"}
_RATERS = "The paper asks human raters; preference models on its prompts are the field's habit."

# fmt: off
BENCHES = {
    "geneval": Bench(
        "GenEval", "github.com/djghosh13/geneval", "MIT", "Ghosh et al. 2023, arXiv:2310.11513",
        prompts=553, images=4, seed=42, forwards=2212, read=geneval.read, marks=geneval.marks,
        judges={"geneval": Judge(
            "mmdet's Mask2Former (Swin-S) and OpenAI's CLIP ViT-L/14", "geneval",
            "the reward geneval: Mask2Former 0.3 GB and CLIP ViT-L/14 1.7 GB, in fp32",
        )},
        overall={"Overall": "Task"}, decimals=4,
        remarks=(
            "The detector has its authors' weights, not mmdet's: images near a threshold may be judged otherwise.",
        ),
    ),
    "geneval2": Bench(
        "GenEval 2", "github.com/facebookresearch/GenEval2", "CC BY-NC 4.0", "Kamath et al. 2025, arXiv:2512.16853",
        prompts=800, forwards=6012, read=geneval2.read, marks=geneval2.marks,
        judges={"vlm": Judge(
            _QWEN, "vlm", f"{_QWEN}, 8.8 B parameters: 18 GB in bf16, or a server with it (vlm.server=URL)", _QUESTIONS,
        )},
    ),
    "dpg": Bench(
        "DPG-Bench", "github.com/TencentQQGYLab/ELLA", "Apache-2.0", "Hu et al. 2024, arXiv:2403.05135",
        prompts=1065, images=4, forwards=0, read=dpg.read, marks=dpg.marks,
        judges={"vlm": Judge(
            "mPLUG-large for VQA (ModelScope)", "vlm",
            f"{_QWEN}, 8.8 B parameters: 18 GB in bf16, or any other (vlm.model, vlm.server); the official one by "
            "--judge mplug, which needs modelscope", _QUESTIONS,
        )},
        remarks=(
            "The official judge is mPLUG; with another one the score cannot be compared with the paper's.",
            "As the official script does: the file's first question is skipped, a prompt with a question whose parent "
            "is missing is left out, and the categories are those of each prompt's last image, before the rule.",
        ),
    ),
    "compbench": Bench(
        "T2I-CompBench++", "github.com/Karine-Huang/T2I-CompBench", "MIT", "Huang et al. 2025, TPAMI, arXiv:2307.06350",
        prompts=2400, images=10, seed=42, forwards=30_000, read=compbench.read, marks=compbench.marks, decimals=4,
        judges={
            "blip_vqa": Judge(
                "BLIP for VQA (ViT-B, CapFilt-L), on spaCy's noun phrases", "blip_vqa",
                "the reward blip_vqa: 1.4 GB in fp32; and spaCy with its model en_core_web_sm, else it is left out",
                imports=_SPACY,
            ),
            "unidet_2d": Judge(
                "UniDet RS200, and rules of position", "compbench", f"{_OWL}; and spaCy, as above",
                {"mode": "spatial"}, _SPACY,
            ),
            "unidet_3d": Judge(
                "UniDet R50, DPT-Hybrid's depth, and rules of position", "compbench",
                f"{_OWL}, and DPT-Hybrid, 0.5 GB; and spaCy, as above", {"mode": "depth"}, _SPACY,
            ),
            "unidet_count": Judge("UniDet R50, and rules of counts", "compbench", _OWL, {"mode": "numeracy"}),
            "clip": Judge("OpenAI's CLIP ViT-B/32: the cosine", "clip", "CLIP ViT-B/32: 0.6 GB in fp32", _B32),
            "clip_plain": Judge(
                "CLIP ViT-B/32 on the prompt without its adjectives", "compbench", "the same CLIP; and spaCy, as above",
                {"mode": "action"}, _SPACY,
            ),
        },
        remarks=(
            "UniDet is not in transformers: OWLv2 stands for it under the official rules, so spatial, 3d_spatial, "
            "numeracy and complex cannot be compared with the paper's. OWLv2 is asked for the prompt's words, table, "
            "bag, cow, computer, mouse, phone, sofa, painting and wallet, too, which the script never finds there.",
            "As the official scripts do: 'on top of' in complex prompts is never right, and depth is read with x and y "
            "exchanged.",
        ),
    ),
    "unigenbench": Bench(
        "UniGenBench", "github.com/CodeGoat24/UniGenBench", "CC BY 4.0", "Wang et al. 2025, arXiv:2508.20751",
        prompts=600, images=4, seed=3407, forwards=2400, read=unigenbench.read, marks=unigenbench.marks,
        judges={"vlm": Judge(
            "Gemini 2.5 Pro, or CodeGoat24/UniGenBench-EvalModel-qwen3vl-32b-v1", "vlm",
            "a server (vlm.server=URL) with the published judge (32 B parameters by its name: 64 GB in bf16)", _POINTS,
        )},
        overall={"mean of the dimensions": "Dimension"},
        remarks=("The official script prints the dimensions and their parts; their mean is ours.",),
    ),
    "drawbench": Bench(
        "DrawBench", "the sheet of imagen.research.google, saved as drawbench.csv", "none is given",
        "Saharia et al. 2022, arXiv:2205.11487", prompts=200, forwards=200,
        read=general.read_drawbench, marks=general.marks, decimals=4, remarks=(_RATERS,),
    ),
    "parti": Bench(
        "PartiPrompts", "github.com/google-research/parti", "Apache-2.0", "Yu et al. 2022, arXiv:2206.10789",
        prompts=1632, forwards=1632, read=general.read_parti, marks=general.marks, decimals=4, remarks=(_RATERS,),
    ),
}
