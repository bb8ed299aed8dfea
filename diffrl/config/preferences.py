"""The config's sections of objectives on the forward process that rank or weigh images, and of two on the steps."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import FiniteFloat

from diffrl.config.base import STOCHASTIC, Method, Problem, Sampling, Section, Share, Whole, key, section
from diffrl.config.methods import ADV_CLIP, ADVANTAGE_STD, AdvantageStd, Decay, ForwardProcess, check_timesteps

COPY = Decay(slope=0.0)  # "old" is theta again after every epoch
KL = "weight of mean (v_theta - v_ref)^2, v_ref the pretrained model's; 0 runs no reference forward for it"
TimestepSampling = Literal["schedule", "uniform", "logit_normal", "logit_normal_3"]
SAMPLING = (
    "the sampling schedule's own timesteps without repeats, or draws from (0, 1); logit_normal_3: moved towards noise "
    "by SD3's shift of 3, median 0.75 (Flow-GRPO's code of DPO, SFT, RWR)"
)


class Ranked(ForwardProcess):
    """What the objectives on the forward process share that rank or weigh a group by themselves."""

    beta: FiniteFloat = key(0.0, KL, ge=0)
    timestep_sampling: TimestepSampling = key("schedule", SAMPLING)

    def check(self, config: Whole) -> None:
        check_timesteps(config.method.name, self, config.rollout)


class DPO(Ranked):
    method = Method(
        "dpo",
        "DPO",
        {"Diffusion-DPO": "2311.12908", "Flow-DPO": "2501.13918"},
        options={("flip", True): {"SePPO": "2410.05255"}},
        about="pairs of a group's best and worst",
        trainer="diffrl.methods.dpo.objective:DPO",
        advantages="own",
    )
    whole_groups: ClassVar[bool] = True
    b: FiniteFloat = key(
        100.0, "how sharply a pair's difference of errors is judged; constant over the timesteps", gt=0
    )
    follow: int | None = key(
        None,
        "the reference becomes the trained weights after so many optimiser steps (online DPO: 40); null: the "
        "pretrained model for good",
        "optimiser steps",
        ge=1,
    )
    ring: int | None = key(
        None,
        "the reference is one of so many earlier states of the trained weights, drawn for each epoch, and draws the "
        "epoch's images (SePPO: 7); null: as follow says",
        "LoRAs",
        ge=1,
    )
    every: int = key(30, "a new state is kept after so many (SePPO: 30)", "optimiser steps", ge=1)
    flip: bool = key(
        False, "where the reference fits the better image better than theta does, the worse one counts as good (SePPO)"
    )

    def arguments(self, config: Any) -> dict[str, Any]:
        """Whether pairs are a set's pictures with rivals, and the seed that chooses the reference."""
        rival = config.image_set is not None and config.image_set.rival
        return super().arguments(config) | {"rival": rival, "seed": config.seed}

    def check(self, config: Whole) -> None:
        super().check(config)
        if self.ring is not None and self.follow is not None:
            raise Problem("dpo.follow", "the reference is a state of dpo.ring already; leave one out")


class RWR(Ranked):
    method = Method(
        "rwr",
        "RWR",
        {"Flow-RWR": "2501.13918", "ORW-CFM-W2": "2502.06061"},
        about="reward-weighted regression",
        options={("weights", "linear"): {"SRUM": "2510.12784"}},
        trainer="diffrl.methods.rwr.objective:Regression",
        advantages="own",
        spatial=True,
    )
    weights: Literal["softmax", "exp", "linear"] = key(
        "softmax",
        "softmax(r / tau) over the group times its size, exp(A / tau) of the group's advantage, or r + constraint "
        "(SRUM)",
    )
    constraint: FiniteFloat = key(
        0.5, "linear: added to the weighted sum of rewards; what stays below 0 is unlearned", ge=0
    )
    tau: FiniteFloat = key(1.0, "temperature, in units of the weighted sum of rewards (exp: of advantages)", gt=0)


class ACFlow(Ranked):
    method = Method(
        "acflow",
        "AC-Flow",
        {"AC-Flow": "2510.18072"},
        about="reward-weighted regression against a critic of the noised image",
        trainer="diffrl.methods.acflow.objective:ActorCritic",
        advantages="own",
    )
    tau: FiniteFloat = key(
        0.2,
        "temperature of the weights exp(A / tau), in standard deviations of the reward; a step's weights have mean 1",
        gt=0,
    )
    adv_clip: FiniteFloat = key(2.0, ADV_CLIP, gt=0)
    critic_rate: FiniteFloat = key(1e-3, "learning rate of the critic's Adam", gt=0)
    critic_steps: int = key(8, "its steps for each of the policy's, each on the images noised anew", "steps", ge=1)
    warmup: int = key(
        1, "the critic first learns from so many epochs of the untrained model's images", "epochs of images", ge=0
    )

    def arguments(self, config: Any) -> dict[str, Any]:
        """With the seed of the critic's first weights."""
        return super().arguments(config) | {"seed": config.seed}


class SFT(Ranked):
    method = Method(
        "sft",
        "SFT",
        about="fine-tuning on the best image of each group",
        trainer="diffrl.methods.rwr.objective:Regression",
        advantages="own",
    )

    def arguments(self, config: Whole) -> dict[str, Any]:
        """Regression without weights."""
        return super().arguments(config) | {"weights": None}


class GDRO(Ranked):
    method = Method(
        "gdro",
        "GDRO",
        {"GDRO": "2601.02036"},
        about="group-level direct reward optimisation",
        trainer="diffrl.methods.gdro.objective:GDRO",
        advantages="own",
    )
    whole_groups: ClassVar[bool] = True
    b: FiniteFloat = key(
        12.0, "scale of the implicit reward; calibrate gdro/implicit_std to about gdro/reward_std", gt=0
    )
    tau: FiniteFloat = key(0.05, "temperature of the soft targets, in units of the weighted sum of rewards", gt=0)
    best: FiniteFloat = key(0.5, "g: weight of the best image's own error, which keeps its likelihood", ge=0)
    top: bool = key(False, "only who is best counts, not the order of the others")


class Slow(Decay):
    cap: Share = key(0.3, "largest decay")


class AWM(Ranked):
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
    clip: FiniteFloat = key(1.0, "the ratio is clipped to 1 plus or minus this; acts on policy never", gt=0)
    adv_clip: FiniteFloat = key(5.0, ADV_CLIP + ", then divided by it", gt=0)
    advantage_std: AdvantageStd = key("batch", ADVANTAGE_STD)
    beta: FiniteFloat = key(1e-3, KL, ge=0)
    beta_average: FiniteFloat = key(
        1.0, "weight of mean (v_theta - v_average)^2, the brake with many updates an epoch; 0: no average is kept", ge=0
    )
    average: Slow = section(Slow, "how the average follows: average <- d average + (1 - d) theta each epoch")


class DGPO(Ranked):
    method = Method(
        "dgpo",
        "DGPO",
        {"DGPO": "2510.08425"},
        about="direct group preference optimisation",
        trainer="diffrl.methods.dgpo.objective:DGPO",
    )
    whole_groups: ClassVar[bool] = True
    b: FiniteFloat = key(100.0, "scale of the group's preference: how soon its sigmoid saturates", gt=0)
    clip: FiniteFloat | None = key(
        1e-3,
        "an image whose error moved by more than this to where its advantage pushes it is stopped; null: none",
        gt=0,
    )
    reference: Literal["pretrained", "old"] = key(
        "pretrained", "what errors are compared with: frozen, or the slowly following snapshot (b 2000 to 5000)"
    )
    advantage_std: AdvantageStd = key("group", ADVANTAGE_STD)
    beta: FiniteFloat = key(1e-3, KL, ge=0)
    anchor_guidance: FiniteFloat | None = key(
        None, "guidance of that v_ref; 1 is none; null: that of the trained rows", ge=1
    )
    old: Slow = section(Slow, "how the old snapshot follows: old <- d old + (1 - d) theta each epoch")
    sample_old: int | None = key(
        None, "the old snapshot draws the images from here on; null: the trained weights do", "optimiser steps", ge=0
    )


class PRDP(Section):
    method = Method(
        "prdp",
        "PRDP",
        {"PRDP": "2402.08714"},
        about="proximal reward difference prediction",
        trainer="diffrl.methods.prdp.objective:PRDP",
        on_steps=True,
        needs={"rollout": {"sampler": "flow_sde"}},
    )
    whole_groups: ClassVar[bool] = True
    advantage_std: AdvantageStd = key("group", ADVANTAGE_STD)
    b: FiniteFloat = key(1.0, "a difference of advantages over this is what the log-ratios are to differ by", gt=0)
    clip: FiniteFloat = key(1e-4, "a step's log-ratio is held within this of the sampling model's", gt=0)
    beta: FiniteFloat = key(0.0, "weight of the step's KL divergence to the reference", ge=0)

    def trained_steps(self, rollout: Sampling) -> int:
        return rollout.stochastic_steps

    def check(self, config: Any) -> None:
        needs = 'but objective "prdp" needs log-probabilities'
        rollout = config.rollout
        if not rollout.facts.stochastic:
            choices = ", ".join(STOCHASTIC)
            raise Problem("rollout.sampler", f'"{rollout.sampler}" is deterministic, {needs}: use one of {choices}')
        if rollout.stochastic_steps == 0:
            raise Problem("rollout.noise_level", f"no step of {rollout.sampler} is stochastic, {needs}")


class FDFO(Section):
    method = Method(
        "fdfo",
        "FDFO",
        {"FDFO": "2603.12893"},
        about="finite-difference flow optimisation",
        trainer="diffrl.methods.fdfo.objective:FDFO",
        needs={"rollout": {"sampler": "cps", "noise_level": 0.045, "same_noise": True}},
    )
    whole_groups: ClassVar[bool] = True
    epsilon: FiniteFloat = key(
        0.03, "the ratio is drawn to 1 plus or minus this: velocities move by half of it of what images differ", gt=0
    )
    advantage_std: AdvantageStd = key("none", ADVANTAGE_STD)
    beta: FiniteFloat = key(0.0, KL, ge=0)

    def trained_steps(self, rollout: Sampling) -> int:
        return rollout.steps

    def check(self, config: Any) -> None:
        rollout = config.rollout
        if not rollout.facts.stochastic:
            text = f'"{rollout.sampler}" is deterministic, but objective "fdfo" needs images that differ a little'
            raise Problem("rollout.sampler", f"{text}: use one of {', '.join(STOCHASTIC)} at a low rollout.noise_level")
        if not rollout.same_noise:
            text = 'false, but objective "fdfo" compares images that a little noise on the way sets apart: true'
            raise Problem("rollout.same_noise", text)
        if rollout.tail is not None:
            raise Problem("rollout.tail", 'objective "fdfo" trains all steps of a path; leave it out')
        if rollout.cache.kind != "off":
            raise Problem("rollout.cache", 'objective "fdfo" trains on the states of the rollout\'s path; leave it out')
