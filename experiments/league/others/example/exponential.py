"""The objective `exponential`: L = (exp(A / tau) - 1) e, with e = mean (v_theta - v)^2 at a noise level."""

from __future__ import annotations

from torch import Tensor

from diffrl.config.base import Method, key
from diffrl.config.methods import ForwardProcess
from diffrl.objectives.noising import Noising
from diffrl.objectives.objective import Objective
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy


class Keys(ForwardProcess):
    """The config's section `exponential`."""

    method = Method("exponential", title="Exponential regression", papers={}, about="an example of the league")
    tau: float = key(1.0, "temperature of the advantages", gt=0)
    beta: float = key(0.0, "weight of mean (v_theta - v_ref)^2; 0 runs no reference forward", ge=0)


class Exponential(Objective):
    """Built from its section of the config."""

    section = Keys

    def __init__(self, keys: Keys) -> None:
        super().__init__(beta=keys.beta, advantage_std="group", noising=Noising.of(keys))
        self.tau = keys.tau

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        """phi (b, 1): e, differentiable."""
        rows.prediction = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)
        return (rows.prediction.v - rows.velocity(policy.process)).square().flatten(1).mean(1, keepdim=True)

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        """(1,) summed over the rows."""
        return (((rows.advantages / self.tau).exp() - 1) * phi).sum(0)
