"""AWM: advantage weighted matching."""

from __future__ import annotations

from typing import Literal

from pydantic import FiniteFloat

from diffrl.config.base import Method, key
from diffrl.config.methods import ADVANTAGE_STD, AdvantageStd
from diffrl.methods.shared.sections import KL, Ranked


class AWMSection(Ranked):
    method = Method(
        "awm",
        "AWM",
        {"AWM": "2509.25050"},
        about="advantage weighted matching",
        trainer="diffrl.methods.awm.objective:AWM",
    )
    weighting: Literal["uniform", "t", "t2", "huber", "ghuber"] = key(
        "ghuber", "how an error e at level t counts: e, t e, t^2 e, t sqrt(e), or 4 t e^(1/4)"
    )
    advantage_std: AdvantageStd = key("batch", ADVANTAGE_STD)
    beta: FiniteFloat = key(1e-3, KL, ge=0)
    beta_average: FiniteFloat = key(
        1.0,
        "weight of mean (v_theta - v_average)^2, the penalty for many updates an epoch; 0: no average is kept",
        ge=0,
    )
