"""`deployments.app:build_app`, the import_path of every Serve config of ours."""

from __future__ import annotations

from typing import Any

from ray import serve

from deployments.server import OpenAIServer
from deployments.settings import load_settings


def build_app(args: dict[str, Any]) -> serve.Application:
    """The application of a Serve config's `args`. Raises ConfigError naming every wrong key."""
    settings = load_settings(args)
    server = settings.server
    deployment = serve.deployment(
        serve.ingress()(OpenAIServer),
        name=OpenAIServer.__name__,
        num_replicas=settings.num_replicas,
        max_replicas_per_node=settings.max_replicas_per_node,
        max_ongoing_requests=server.max_ongoing_requests,
        # A constructor that fails has found the configuration wrong: it would fail again.
        max_constructor_retry_count=1,
        health_check_period_s=settings.health.check_period_s,
        health_check_timeout_s=settings.health.check_timeout_s,
        graceful_shutdown_timeout_s=server.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": server.num_cpus, "resources": server.resources},
    )
    return deployment.bind(settings)
