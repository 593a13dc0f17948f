"""The engines of a server: one for each pair of drafter and rule that requests ask for. All share the model."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace

from specengine.drafters import best_drafter, drafter_kind
from specengine.engine.async_engine import AsyncEngine
from specengine.engine.engine import Engine
from specengine.engine.metrics import Metrics
from specengine.engine.prometheus import Labels
from specengine.models.lora.adapters import load_adapters
from specengine.server.errors import ApiError, make_field_error, make_retryable_error
from specengine.server.schema import Speculation
from specengine.server.settings import Settings
from specengine.tensor_parallel.loading import LoadedModel
from specengine.utils.fair_lock import FairLock
from specengine.utils.spec_string import Spec

SHUTTING_DOWN = "this server is shutting down"

logger = logging.getLogger("specengine")


@dataclass(frozen=True)
class EngineKey:
    """A drafter and a rule, as Engine takes them."""

    drafter: str
    rule: str


@dataclass(eq=False)
class _PooledEngine:
    engine: AsyncEngine
    users: int = 0


class EnginePool:
    """Makes an engine at the first request for it, and keeps at most `max_engines`.

    A new engine replaces the least recently used engine that has no requests. The default engine is made at once and
    stays, unless there is room for one engine only. The engines share the machine, so they take turns cycle by cycle.
    Raises ValueError for a model without a tokenizer, and the errors of Engine.
    """

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        if model.tokenizer is None:
            raise ValueError(f"model: {model.name} has no tokenizer, which a server needs")
        self.model = model
        self.tokenizer = model.tokenizer
        self._settings = settings
        self._adapters = load_adapters(settings.adapters, model.target) if settings.adapters else None
        self._making = asyncio.Lock()
        self._cycle_lock = FairLock()
        self._closed = False
        self._default = EngineKey(settings.drafters[0], settings.rules[0])
        self._engines = OrderedDict({self._default: self._make_engine(self._default)})

    @property
    def metrics(self) -> list[tuple[Labels, Metrics]]:
        """The metrics of each engine, with its labels."""
        return [
            ({"drafter": key.drafter, "rule": key.rule}, pooled.engine.metrics) for key, pooled in self._engines.items()
        ]

    @property
    def failure(self) -> str | None:
        """Why no engine can serve requests any more, or None."""
        return self.model.target.failure

    def select(self, speculation: Speculation) -> EngineKey:
        """Returns the engine that a request asks for. Raises ApiError if the settings do not allow it."""
        drafter = _check_allowed("drafter", speculation.drafter, self._settings.drafters)
        rule = _check_allowed("rule", speculation.rule, self._settings.rules)
        if speculation.off:
            drafter = "none"
        elif speculation.max_nodes is not None:
            drafter = self._limit_nodes(drafter, speculation.max_nodes)
        return EngineKey(drafter, rule)

    def _limit_nodes(self, drafter: str, max_nodes: int) -> str:
        spec = Spec.parse(drafter, "drafter")
        name = best_drafter(self.model.target).name if spec.name == "auto" else spec.name
        config = spec.build(drafter_kind(name).config_type, "drafter")
        if all(option.name != "nodes" for option in fields(config)):
            field = "speculation.max_nodes"
            raise ApiError(400, f"{field}: drafter {name} has no such limit (no option `nodes`)", param=field)
        if max_nodes >= config.nodes:
            return drafter
        # Rounding down to a power of two bounds the number of different engines.
        nodes = 1 << (max_nodes.bit_length() - 1)
        return str(replace(spec, options={**spec.options, "nodes": str(nodes)}))

    @asynccontextmanager
    async def lease(self, key: EngineKey) -> AsyncIterator[AsyncEngine]:
        """Yields an engine, which stays in the pool until the context ends. Raises ApiError if it cannot be made."""
        while (pooled := self._engines.get(key)) is None:
            # The request may be cancelled here, but the thread that makes the engine cannot be stopped. The shield
            # keeps `_making` locked until that thread ends.
            await asyncio.shield(self._add(key))
        pooled.users += 1  # no await lies between the lookup and this line
        self._engines.move_to_end(key)
        try:
            yield pooled.engine
        finally:
            pooled.users -= 1

    async def _add(self, key: EngineKey) -> None:
        async with self._making:
            if key in self._engines:
                return
            if self._closed:
                raise make_retryable_error(503, SHUTTING_DOWN, "closing")
            if len(self._engines) >= self._settings.max_engines:
                await self._drop_one()
            try:
                self._engines[key] = await asyncio.to_thread(self._make_engine, key)
            except ValueError as error:
                raise make_field_error(error, "prompt") from error
            except (OSError, MemoryError) as error:
                logger.exception("cannot make the engine of %s", key)
                raise ApiError(500, f"speculation.drafter: {key.drafter} cannot be loaded", code="drafter") from error

    async def _drop_one(self) -> None:
        kept = self._default if self._settings.max_engines > 1 else None
        idle = (key for key, pooled in self._engines.items() if not pooled.users and key != kept)
        if (key := next(idle, None)) is None:
            message = "all engines are in use by requests with other drafters or rules"
            raise make_retryable_error(503, message, "engines_in_use")
        pooled = self._engines.pop(key)
        await pooled.engine.close()

    def _make_engine(self, key: EngineKey) -> _PooledEngine:
        settings = self._settings
        engine = Engine(
            self.model,
            drafter=key.drafter,
            rule=key.rule,
            max_batch_size=settings.max_batch_size,
            prefix_cache_mib=settings.prefix_cache_mib,
            adapters=self._adapters,
        )
        # Without turns two engines would run at once, each with fewer threads than its cost model has measured.
        engine.share_lock(self._cycle_lock)
        return _PooledEngine(AsyncEngine(engine, max_waiting=settings.max_waiting))

    async def close(self) -> None:
        """Closes all engines and drops their requests. A graceful shutdown has let them finish by then."""
        async with self._making:
            self._closed = True
            for pooled in list(self._engines.values()):  # a copy, because a request may change the order meanwhile
                await pooled.engine.close(drain=False)


def _check_allowed(name: str, requested: str | None, allowed: tuple[str, ...]) -> str:
    """Returns the requested drafter or rule, or the default."""
    if requested is None or requested in allowed:
        return requested or allowed[0]
    field = f"speculation.{name}"
    raise ApiError(400, f"{field}: expected one of {', '.join(allowed)}, got {requested[:100]!r}", param=field)
