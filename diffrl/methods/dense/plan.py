"""What DenseGRPO's rollout draws: the plain chain, and an image from each of its states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from diffrl.continuations import chain_forwards
from diffrl.denoising import Chain, SampledBatch, SampleJob, Trajectory, chain
from diffrl.forward import Prediction
from diffrl.sampling import SamplerSpec

if TYPE_CHECKING:
    from diffrl.policy import Conditioning


@dataclass(frozen=True)
class PerStepViews:
    """A view from every kept state of the trajectory, by the ODE, and the final image (DenseGRPO).

    common: the first state is the same for the whole group (same_noise): its view would cancel in every advantage, and
    is left out.
    """

    common: bool

    apart: ClassVar[bool] = False

    def views(self, spec: SamplerSpec) -> int:
        return spec.stochastic_steps + (not self.common)

    def forwards(self, spec: SamplerSpec, start: int, members: Sequence[tuple[int, int]], group: int) -> int:
        """A state's own prediction is there already, so its continuation takes one less than its steps."""
        steps = range(start + self.common, start + spec.stochastic_steps)
        views = sum(spec.steps - step - 1 for step in steps)
        return len(members) * (chain_forwards(spec, start) + views)

    def final(self, spec: SamplerSpec) -> int:
        return self.views(spec) - 1

    def allocate(self, job: SampleJob, latents: Tensor) -> Trajectory:
        return Chain().allocate(job, latents)

    def draw(self, job: SampleJob, texts: Sequence[str], members: Sequence[int], cond: Conditioning) -> SampledBatch:
        def view(x: Tensor, i: int, prediction: Prediction) -> Tensor | None:
            """The clean end of the ODE from the state x before step i, whose prediction is there already."""
            if self.common and i == job.start:
                return None
            return job.finish(x, cond, job.sigmas[i:], first=prediction)

        noise = job.step_noise(list(zip(texts, members, strict=True)), job.spec.stochastic_steps)
        return chain(job, job.begin(texts, members, job.spec.same_noise), cond, noise, view)
