"""`expediter serve`: an OpenAI-compatible server over replicas of our own, over other servers, or over both."""

from __future__ import annotations

import argparse
import importlib.util
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from expediter.cli.sizes import gibibytes

if TYPE_CHECKING:
    from expediter.assembly.file_config import FileConfig
    from expediter.assembly.observing import ObservingConfig
    from expediter.assembly.presets import Preset
    from expediter.gateway.backends.config import BackendConfig

logger = logging.getLogger(__name__)

_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its flags; names are vLLM's where there is the same one."""
    parser = commands.add_parser("serve", help="serve a model over OpenAI's API", description=__doc__)
    parser.set_defaults(run=run)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="Hugging Face folder (default: SmolLM2-135M-Instruct)"
    )
    _add_network_flags(parser.add_argument_group("network"))
    _add_seeing_flags(parser.add_argument_group("what is written of requests, see docs/observe.md"))
    _add_backend_flags(parser.add_argument_group("backends: servers that speak OpenAI's API, see docs/backends.md"))
    admin = parser.add_argument_group("admin listener: backends come and go, see docs/backends.md")
    admin.add_argument("--admin-host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    admin.add_argument("--admin-port", type=int, metavar="PORT", help="0 lets the system choose (default: none)")
    _add_replica_flags(parser.add_argument_group("replicas"))
    _add_limit_flags(parser.add_argument_group("limits and policy of each replica (default: the preset's)"))


def _add_network_flags(network: argparse._ArgumentGroup) -> None:
    network.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    network.add_argument("--port", type=int, default=8000, help="0 lets the system choose (default: %(default)s)")
    network.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="a key of the tenant `default`; may be repeated"
    )
    network.add_argument("--config", metavar="FILE", help="TOML file with SLO classes and tenants")
    network.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names that clients use")
    network.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="for requests in flight at SIGTERM (default: %(default)s)",
    )


def _add_seeing_flags(seeing: argparse._ArgumentGroup) -> None:
    seeing.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="lines on standard error; json: objects, and one per request among them (default: %(default)s)",
    )
    seeing.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send OpenTelemetry spans there over HTTP, such as http://127.0.0.1:4318/v1/traces",
    )


def _add_backend_flags(backends: argparse._ArgumentGroup) -> None:
    backends.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="URL",
        help="stand in front of this server; may be repeated. Without MODEL, no replicas of our own are started",
    )
    backends.add_argument(
        "--gateway-processes",
        type=int,
        default=1,
        metavar="N",
        help="processes that share the port; without replicas of our own only (default: %(default)s)",
    )


def _add_replica_flags(replicas: argparse._ArgumentGroup) -> None:
    replicas.add_argument("--replicas", type=int, default=1, metavar="N", help="default: %(default)s")
    replicas.add_argument("--preset", default="sarathi", metavar="NAME", help="default: %(default)s")
    replicas.add_argument("--routing", metavar="NAME", help="who gets a request (default: the preset's)")
    replicas.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: %(default)s)")
    replicas.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")


def _add_limit_flags(limits: argparse._ArgumentGroup) -> None:
    limits.add_argument("--max-num-seqs", type=int, metavar="N", help="most running sequences")
    limits.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="token budget of a step")
    limits.add_argument("--max-model-len", type=int, metavar="TOKENS", help="default: what model and KV cache hold")
    limits.add_argument("--block-size", type=int, metavar="TOKENS", help="tokens per KV block")
    limits.add_argument("--num-gpu-blocks-override", type=int, metavar="N", help="KV blocks, on any device")
    limits.add_argument(
        "--swap-space",
        type=gibibytes,
        default=0,
        metavar="GIB",
        help="host memory for the KV of preempted requests (default: 0)",
    )
    limits.add_argument("--kv-cache-memory-bytes", type=int, metavar="BYTES", help="memory of the KV cache")
    limits.add_argument("--scheduling-policy", metavar="NAME", help="order of the waiting queue")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; return 0 after a clean shutdown.

    Raises:
        ConfigurationError, ReplicaError: the server cannot start with these flags.
    """
    # Imported here, so that `expediter --help` and other commands do not load a server, nor a door the engine.
    from expediter.assembly.file_config import load_file_config
    from expediter.assembly.observing import PROCESS
    from expediter.gateway.backends.config import BackendConfig
    from expediter.telemetry.logging_setup import setup_logging

    setup_logging(PROCESS, log_format=args.log_format)
    file = load_file_config(args.config)
    backends = tuple(BackendConfig(url=url) for url in args.backend)
    if args.host not in _LOOPBACK and not args.api_key and not file.tenants:
        logger.warning("%s may be reached by others, and no keys are asked for", args.host)
    if args.model is None and (backends or file.backends):
        _serve_backends(args, file, backends)
    else:
        _serve_replicas(args, file, backends)
    return 0


def _serve_backends(args: argparse.Namespace, file: FileConfig, backends: tuple[BackendConfig, ...]) -> None:
    """Stand in front of other servers."""
    from expediter.assembly.door import serve_backends
    from expediter.assembly.door_config import DoorConfig
    from expediter.assembly.door_processes import serve_in_processes

    config = DoorConfig(
        host=args.host,
        port=args.port,
        backends=backends,
        num_processes=args.gateway_processes,
        routing=args.routing,
        api_keys=tuple(args.api_key),
        file=file,
        shutdown_timeout_s=args.shutdown_timeout,
        admin_host=args.admin_host,
        admin_port=args.admin_port,
        observing=_observing(args),
    )
    if config.num_processes > 1:
        serve_in_processes(config, _say)
    else:
        serve_backends(config, _say)


def _serve_replicas(args: argparse.Namespace, file: FileConfig, backends: tuple[BackendConfig, ...]) -> None:
    """Serve replicas of our own, and stand in front of other servers if there are any."""
    from expediter.core.errors import ConfigurationError

    if importlib.util.find_spec("torch") is None:
        raise ConfigurationError(
            "replicas of our own need pip install 'expediter[engine]'; in front of others, name them: --backend URL"
        )
    from expediter.assembly.serving import ServeConfig, serve
    from expediter.engine.default_model import DEFAULT_MODEL, resolve_model

    if args.gateway_processes != 1:
        raise ConfigurationError("--gateway-processes above 1 is for backends alone, without replicas of our own")
    preset = _preset(args)
    folder = resolve_model(args.model)
    name = DEFAULT_MODEL if args.model is None else folder.resolve().name
    config = ServeConfig(
        model=folder,
        model_names=tuple(args.served_model_name or (name,)),
        preset=preset,
        host=args.host,
        port=args.port,
        num_replicas=args.replicas,
        max_model_len=args.max_model_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_blocks=args.num_gpu_blocks_override,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        swap_space_bytes=args.swap_space,
        dtype=args.dtype,
        device=args.device,
        backends=backends,
        api_keys=tuple(args.api_key),
        file=file,
        shutdown_timeout_s=args.shutdown_timeout,
        admin_host=args.admin_host,
        admin_port=args.admin_port,
        observing=_observing(args),
    )
    logger.info("starting %d replica(s) of %s", args.replicas, config.model_names[0])
    serve(config, _say)


def _say(line: str) -> None:
    print(line, flush=True)


def _observing(args: argparse.Namespace) -> ObservingConfig:
    from expediter.assembly.observing import ObservingConfig

    return ObservingConfig(log_format=args.log_format, otlp_traces_endpoint=args.otlp_traces_endpoint)


def _preset(args: argparse.Namespace) -> Preset:
    """Return the preset with the flags' overrides in it, but for the token budget, which may depend on the model."""
    from expediter.assembly.presets import load_preset

    preset = load_preset(args.preset)
    max_num_seqs = args.max_num_seqs
    if max_num_seqs is None:
        max_num_seqs = preset.scheduler.max_num_seqs
        if args.max_num_batched_tokens is not None and args.max_num_batched_tokens > 0:
            # A small budget alone means fewer sequences, too: each of them decodes one token per step.
            max_num_seqs = min(max_num_seqs, args.max_num_batched_tokens)
    routing = preset.cluster.routing
    return replace(
        preset,
        cluster=replace(preset.cluster, routing=replace(routing, name=args.routing or routing.name)),
        scheduler=replace(preset.scheduler, max_num_seqs=max_num_seqs),
        policy=replace(preset.policy, ordering=args.scheduling_policy or preset.policy.ordering),
        block_size=args.block_size if args.block_size is not None else preset.block_size,
    )
