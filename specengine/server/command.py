"""Loads a model and serves it until a signal ends the server: the body of `specengine serve`."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from specengine.server.app import make_app
from specengine.server.connection import Connection
from specengine.server.engine_pool import EnginePool
from specengine.server.limits import HEAD_BYTES
from specengine.server.settings import Settings, is_loopback
from specengine.tensor_parallel.loading import LoadedModel, load_model
from specengine.types import RankFailed
from specengine.utils.console import note

GRACE = 10  # seconds in which the requests of cut connections end


def serve(model: str, device: str, dtype: str, tensor_parallel: int, settings: Settings) -> None:
    """Serves a model until SIGTERM or Ctrl-C, and finishes the running texts first.

    Raises ValueError if the address is not free, ChildProcessError if a process of tensor_parallel fails at the start,
    and the errors of load_model and Engine.
    """
    # The socket comes first: an address error must not wait for minutes of loading.
    with _log_to_stderr(), open_listener(settings.host, settings.port) as listener:
        try:
            loaded = load_model(model, device=device, dtype=dtype, tensor_parallel=tensor_parallel)
        except RankFailed as error:
            raise ChildProcessError(str(error)) from error
        server = make_server(loaded, settings, listener)
        if not is_loopback(settings.host) and not settings.api_key:
            note("no API key is set: every machine that reaches this address can use the model")
        # uvicorn raises its signal again after a graceful shutdown, which would make the exit status a failure.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        asyncio.run(server.serve(sockets=[listener]))


def make_server(model: LoadedModel, settings: Settings, listener: socket.socket) -> uvicorn.Server:
    """Makes the server of a loaded model; the caller runs it.

    Raises ValueError for a model without a tokenizer, and the errors of Engine.
    """
    config = uvicorn.Config(
        make_app(EnginePool(model, settings), settings),
        http=Connection,
        h11_max_incomplete_event_size=HEAD_BYTES,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=math.ceil(settings.drain) + GRACE,
    )
    return _Server(config, f"{settings.name} at http://{_format_address(listener)}", settings.drain)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, about: str, drain: float) -> None:
        super().__init__(config)
        self._about = about
        self._drain = drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        note(f"serving {self._about}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        note("shutting down: running texts are finished, new connections are refused")
        cutting = asyncio.get_running_loop().call_later(self._drain, self._cut_connections)
        await super().shutdown(sockets)
        cutting.cancel()

    def _cut_connections(self) -> None:
        connections = [each for each in self.server_state.connections if isinstance(each, Connection)]
        note(f"{len(connections)} requests are cut off, {self._drain:g} s after the signal")
        for connection in connections:
            connection.cut()


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Writes the log of the engines to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("specengine")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def open_listener(host: str, port: int) -> Iterator[socket.socket]:
    """Yields a socket that is bound to an address. Raises ValueError if the address is unknown or not free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"host: {host!r} is not an address of this machine ({error})") from error
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise ValueError(f"port: cannot listen on {host} port {port} ({error.strerror})") from error
        yield listener


def _format_address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
