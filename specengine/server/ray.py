"""Replicas on Ray Serve (extra `ray`): `serve run specengine.server.ray:app model=smollm2-135m max_replicas=4`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pydantic import BaseModel, Field, TypeAdapter
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from starlette.types import ASGIApp

from specengine.server.app import make_app
from specengine.server.engine_pool import EnginePool
from specengine.server.settings import Settings, derive_settings
from specengine.tensor_parallel.loading import load_model

# Requests with the same session header go to the same replica, whose cache holds the prefix of their prompts.
_ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"


class Arguments(BaseModel):
    """The application's arguments beside the fields of Settings.

    model, drafter, rule, device, dtype, tensor_parallel: as load_model and Engine take them.
    allow_drafters, allow_rules: further specs that requests may choose.
    min_replicas, max_replicas: bounds of the number of replicas, which follows the load.
    target_streams: mean number of running requests per replica, above which Ray starts another replica.
    cpus, gpus: resources of a replica; the CPU backend uses one thread for each CPU.
    """

    model: str = "smollm2-135m"
    drafter: str = "auto"
    rule: str = "match"
    device: str = "auto"
    dtype: str = "auto"
    tensor_parallel: int = Field(1, ge=1)
    allow_drafters: tuple[str, ...] = ()
    allow_rules: tuple[str, ...] = ()
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    target_streams: float = Field(8.0, gt=0)
    cpus: float = Field(1.0, ge=0)
    gpus: float = Field(0.0, ge=0)


def app(arguments: dict[str, Any]) -> Application:
    """Makes the application of a model; `serve run` and configuration files name this function.

    arguments: values of the fields of Arguments and Settings. Raises ValueError naming the argument.
    """
    given = Arguments.model_validate(arguments)
    settings = _make_settings(
        given, {key: value for key, value in arguments.items() if key not in Arguments.model_fields}
    )

    class Replica:
        """A server behind Ray's proxy. Ray replaces it when its health check fails."""

        def __init__(self) -> None:
            model = load_model(
                given.model, device=given.device, dtype=given.dtype, tensor_parallel=given.tensor_parallel
            )
            self._pool = EnginePool(model, settings)

        def __serve_build_asgi_app__(self) -> ASGIApp:
            return make_app(self._pool, settings)

        def check_health(self) -> None:
            if failure := self._pool.failure:
                raise RuntimeError(failure)

    deployment = serve.deployment(
        name="specengine",
        ray_actor_options={"num_cpus": given.cpus, "num_gpus": given.gpus},
        autoscaling_config=AutoscalingConfig(
            min_replicas=given.min_replicas,
            max_replicas=given.max_replicas,
            target_ongoing_requests=given.target_streams,
        ),
        max_ongoing_requests=settings.max_streams,
        max_queued_requests=settings.max_waiting,
        health_check_period_s=2,
        graceful_shutdown_timeout_s=settings.drain,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
    )
    return deployment(serve.ingress()(Replica)).bind()


def _make_settings(given: Arguments, more: dict[str, Any]) -> Settings:
    if unknown := sorted(more.keys() - {field.name for field in fields(Settings)}):
        raise ValueError(f"arguments: unknown {unknown[0]!r}; expected fields of Arguments or Settings")
    choices = derive_settings(given.model, given.drafter, given.rule, given.allow_drafters, given.allow_rules)
    return TypeAdapter(Settings).validate_python(choices | more)
