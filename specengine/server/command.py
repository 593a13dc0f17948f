"""`specengine serve`: loads a model and serves it until it is told to end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from specengine.server.app import make_app
from specengine.server.engine_pool import Engines
from specengine.server.settings import Settings, is_loopback
from specengine.tensor_parallel.loading import LoadedModel, load_model
from specengine.types import RankFailed
from specengine.utils.console import note


def serve(model: str, device: str, dtype: str, tensor_parallel: int, settings: Settings) -> None:
    """Serves a model until SIGTERM or Ctrl-C; texts under way are finished first.

    Raises ValueError where the port cannot be had, ChildProcessError where a process of tensor_parallel fails before
    that, and what load_model and Engine raise.
    """
    with (
        _logged(),
        listening(settings.host, settings.port) as listener,
    ):  # first: loading for minutes and then failing is no use
        try:
            loaded = load_model(model, device=device, dtype=dtype, tensor_parallel=tensor_parallel)
        except RankFailed as error:
            raise ChildProcessError(str(error)) from error
        server = server_of(loaded, settings, listener)
        if not is_loopback(settings.host) and not settings.api_key:
            note("whoever reaches this address can use the model: no API key is set")
        # The server raises the signal that ended it once more: ended as it was told to, it has not failed.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        asyncio.run(server.serve(sockets=[listener]))


def server_of(model: LoadedModel, settings: Settings, listener: socket.socket) -> uvicorn.Server:
    """The server of a loaded model, not yet running. Raises ValueError for a model without a tokenizer, and what Engine
    raises."""
    config = uvicorn.Config(
        make_app(Engines(model, settings), settings),
        http="h11",  # the others set no limit to a request's head
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=max(1, round(settings.drain)),
    )
    return _Server(config, f"{settings.name} at http://{_shown(listener)}")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, about: str) -> None:
        super().__init__(config)
        self._about = about

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        note(f"serving {self._about}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        note("ending: texts under way are finished, new connections are refused")
        await super().shutdown(sockets)


@contextmanager
def _logged() -> Iterator[None]:
    """What the engines log goes to standard error."""
    log, logger = logging.StreamHandler(), logging.getLogger("specengine")
    log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(log)
    try:
        yield
    finally:
        logger.removeHandler(log)


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket bound to an address. Raises ValueError where that cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"host: {host!r} is no address of this machine ({error})") from error
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise ValueError(f"port: cannot listen on {host} port {port} ({error.strerror})") from error
        yield listener


def _shown(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
