"""The config's section of how a group's scores become advantages; present = on.

`rule` says who does it, and the keys beside it are the rule's own. A rule is called as `diffrl.advantages.Estimate`:
(N, K) scores, (N,) groups, std -> (N, K) advantages. From outside it is a function with its keys behind these, or a
class whose constructor has them, each with a type and a default; or a section under `Advantages` that names either
(`made`), so that nothing heavy is imported to read a config. The shipped rule is the latter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from diffrl.config.base import PathText, Problem, Section, key
from diffrl.config.methods import advantage_std
from diffrl.errors import UserError, in_one_line
from diffrl.keys import at_key
from diffrl.plugins import load, load_value

KIND = "advantage rule"


class Advantages(Section):
    about = "what groups that agree give, and other estimates"
    rule: PathText = key(
        "groups",
        "from a group's scores to advantages: groups, an installed rule, or your own, path/to/file.py:NAME; its keys "
        "stand beside this one",
    )
    made: ClassVar[str] = ""  # `module:NAME` of the rule's function or class; "": what `rule` leads to

    @classmethod
    def made_for(cls, values: Any) -> type[Section]:
        rule = values.get("rule") if isinstance(values, Mapping) else None
        return at_key("advantages.rule", find_rule, rule) if isinstance(rule, str) else cls

    def check(self, config: Any) -> None:
        name = config.method.name
        if config.method.advantages == "none":
            raise Problem("advantages", f'shapes advantages, which objective "{name}" does not use; leave it out')
        if config.method.advantages == "own":
            raise Problem(
                "advantages", f'estimates advantages, but objective "{name}" ranks or weighs a group by itself'
            )

    def code(self) -> Any:
        """The rule's function or class, without its keys."""
        return load_value(KIND, self.rule, self.made) if self.made else load(KIND, self.rule)

    def contents(self, config: Any) -> Mapping[str, Path | str]:
        if self.rule == "groups":
            return {}  # its code is the package's
        from diffrl.run.identity import digest_of_code

        return {"advantages (code)": digest_of_code(self.code())}

    def around(self, objective: Any, config: Any, lower: Collection[str]) -> None:
        from diffrl.objectives.estimates import Checked

        objective.rule = replace(objective.rule, estimate=Checked(self.estimate(), self.rule))

    def estimate(self) -> Callable[..., Any]:
        """The rule. UserError if its constructor fails."""
        thing = self.code()
        rule: Callable[..., Any] = partial(thing, **self.model_dump(exclude={"rule"}))
        try:
            return rule() if inspect.isclass(thing) else rule
        except Exception as error:
            raise UserError(f'{KIND} "{self.rule}" could not be built: {in_one_line(error)}') from error


class GroupAdvantages(Advantages):
    made: ClassVar[str] = "diffrl.objectives.estimates:Estimator"
    agree: Literal["keep", "leave_out", "floor"] = key(
        "keep",
        "a group whose images score alike. leave_out: the mean is over the others (DAPO); floor: the std that "
        "divides is at least 1e-3",
    )

    def check(self, config: Any) -> None:
        super().check(config)
        std, owner = advantage_std(config)
        if self.agree == "floor" and std != "group":
            raise Problem("advantages.agree", f'"floor" is a least std of the group, but {owner} is "{std}"')


def find_rule(rule: str) -> type[Advantages]:
    """The section of an installed rule, or of `path/to/file.py:NAME`.

    Raises:
        UserError: there is none, with the nearest name; it cannot be imported; it is no rule, and what it lacks.
    """
    thing = load(KIND, rule)
    if inspect.isclass(thing) and issubclass(thing, Advantages):
        return thing
    from diffrl.additions.own_rules import section_of

    return section_of(thing, KIND, rule, Advantages)
