"""`diffrl rewards serve --engine ray`: replicas of each reward on devices, by Ray Serve; wire format and client stay.

Each reward is an application of Ray under /rewards/NAME. Its replicas run the application of `diffrl.serving.server`
for it alone, with a queue of their own. Ray places them (on a fraction of a GPU, too), adds and removes some with the
load, starts another one for one that died or hangs, and lets one that is removed end its requests. A request whose
replica dies is sent again by the client.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from diffrl.errors import UserError, in_one_line
from diffrl.serving.limits import bind, check_address, url_of
from diffrl.serving.server import Options, Served, check_served, make_app

EACH = 4  # requests at a replica at once: one that is scored, and others that are read or wait for a common batch
START = 3  # times that a replica may fail to start


@dataclass(frozen=True)
class Wanted:
    """A reward to serve, not built here: `least` to `most` replicas, each on `cpus` and `gpus`, which may be parts."""

    plugin: str
    arguments: Mapping[str, Any]
    least: int = 1
    most: int = 1
    cpus: float = 1.0
    gpus: float = 0.0


def serve_on_ray(
    wanted: Mapping[str, Wanted], host: str, port: int, options: Options, ready: Callable[[str], object]
) -> None:
    """Begins to serve and returns; `ready` gets the URL. `stop` ends it.

    Uses the cluster of RAY_ADDRESS, or one of this machine's own. UserError for a reward that cannot be served.
    """
    import ray
    from ray import serve

    check_address(host, options.token)
    if not ray.is_initialized():
        local: dict[str, Any] = {} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
        ray.init(logging_level=logging.ERROR, log_to_driver=False, **local)
    if not port:
        with bind(host, 0) as free:
            port = free.getsockname()[1]
    http = {"host": host, "port": port, "request_timeout_s": options.time_limit + options.read_limit}
    serve.start(http_options=http, logging_config={"log_level": "ERROR"})
    for name, one in wanted.items():
        application = _application(name, one, options).bind()
        try:
            serve.run(application, name=name, route_prefix=f"/rewards/{name}", logging_config={"log_level": "ERROR"})
        except Exception as error:
            status = serve.status().applications.get(name)
            told = status.deployments[name].message if status and name in status.deployments else in_one_line(error)
            stop()
            lines = [line.strip() for line in told.splitlines() if line.strip()]
            reason = next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)), lines[-1])
            raise UserError(f'rewards serve: "{name}" does not start: {reason[:500]}') from error
    ready(url_of(host, port))


def stop() -> None:
    """Ends the replicas, which end their requests first, and Ray if it is this process's own."""
    import ray
    from ray import serve

    if ray.is_initialized():
        serve.shutdown()
        ray.shutdown()


def _application(name: str, one: Wanted, options: Options) -> Any:
    """Ray's deployment of a reward."""
    from ray import serve

    options = replace(options, at_once=EACH * one.most)

    def build() -> Any:
        """The application of a replica, in its process."""
        from diffrl.rewards.registry import load_reward

        served = Served(load_reward(one.plugin, **one.arguments), one.plugin, one.arguments)
        check_served(served)
        return _Whole(make_app({name: served}, options))

    scale: dict[str, Any] = {"num_replicas": one.least}
    if one.most > one.least:
        bounds = {"min_replicas": one.least, "max_replicas": one.most, "target_ongoing_requests": EACH / 2}
        scale = {"autoscaling_config": bounds}
    deployment = serve.deployment(
        name=name,
        ray_actor_options={"num_cpus": one.cpus, "num_gpus": one.gpus},
        max_ongoing_requests=EACH,
        health_check_period_s=2.0,
        health_check_timeout_s=options.time_limit,
        graceful_shutdown_timeout_s=options.time_limit,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=START,
        **scale,
    )
    return deployment(serve.ingress(build)(_Replica))


class _Replica:
    """What Ray asks beside requests."""

    _asgi_app: Any

    def check_health(self) -> None:
        """Raises when a call of the reward hangs; then Ray starts another replica."""
        if (health := self._asgi_app.application.state.host.health()).status_code != 200:
            raise RuntimeError(f"a call hangs: {health.body!r}")


class _Whole:
    """An ASGI application that gets whole paths, as without Ray, which takes /rewards/NAME away."""

    def __init__(self, application: Any) -> None:
        self.application = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            root, path = scope.get("root_path", ""), scope["path"]
            scope = {**scope, "root_path": "", "path": path if path.startswith(root) else root + path}
        await self.application(scope, receive, send)
