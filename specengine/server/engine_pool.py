"""The engines of a server: one for each pair of a drafter and a rule that requests ask for; all share the model."""

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
from specengine.server.errors import ApiError, of_request, refused
from specengine.server.schema import Speculation
from specengine.server.settings import Settings
from specengine.tensor_parallel.loading import LoadedModel
from specengine.utils.fair_lock import FairLock
from specengine.utils.spec_string import Spec

logger = logging.getLogger("specengine")


@dataclass(frozen=True)
class Choice:
    """A drafter and a rule, as Engine takes them."""

    drafter: str
    rule: str


@dataclass(eq=False)
class _Kept:
    serving: AsyncEngine
    users: int = 0


class Engines:
    """Made when first asked for; beyond `max_engines` one that nobody uses makes room, the least recently used first.

    They take turns, cycle by cycle, as they share the machine. The default one is made at once and stays.
    Raises ValueError for a model without a tokenizer, and what Engine raises.
    """

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        if model.tokenizer is None:
            raise ValueError(f"model: {model.name} has no tokenizer; a server takes and gives text")
        self.model, self.tokenizer, self._settings = model, model.tokenizer, settings
        self._making = asyncio.Lock()
        self._turns = FairLock()
        self._closed = False
        self._default = Choice(settings.drafters[0], settings.rules[0])
        self._kept = OrderedDict({self._default: self._serving(self._default)})

    @property
    def metrics(self) -> list[tuple[Labels, Metrics]]:
        """Of each engine, with what tells it apart."""
        return [
            ({"drafter": choice.drafter, "rule": choice.rule}, kept.serving.metrics)
            for choice, kept in self._kept.items()
        ]

    @property
    def failure(self) -> str | None:
        """Why none of them serves requests any more, for good; None: they do."""
        return self.model.target.failure

    def choice(self, wanted: Speculation) -> Choice:
        """What a request gets. Raises ApiError for what it may not ask for."""
        drafter = self._allowed("drafter", wanted.drafter, self._settings.drafters)
        rule = self._allowed("rule", wanted.rule, self._settings.rules)
        if wanted.off:
            drafter = "none"
        elif wanted.max_nodes is not None:
            drafter = self._with_nodes(drafter, wanted.max_nodes)
        return Choice(drafter, rule)

    def _allowed(self, name: str, wanted: str | None, allowed: tuple[str, ...]) -> str:
        if wanted is None or wanted in allowed:
            return wanted or allowed[0]
        field = f"speculation.{name}"
        raise ApiError(400, f"{field}: expected one of {', '.join(allowed)}, got {wanted[:100]!r}", param=field)

    def _with_nodes(self, drafter: str, most: int) -> str:
        spec = Spec.parse(drafter, "drafter")
        name = best_drafter(self.model.target).name if spec.name == "auto" else spec.name
        config = spec.build(drafter_kind(name).config_type, "drafter")
        if all(option.name != "nodes" for option in fields(config)):
            field = "speculation.max_nodes"
            raise ApiError(400, f"{field}: drafter {name} has no such limit (no option `nodes`)", param=field)
        if most >= config.nodes:
            return drafter
        fewer = 1 << (most.bit_length() - 1)  # else every number would be an engine of its own
        return str(replace(spec, options={**spec.options, "nodes": str(fewer)}))

    @asynccontextmanager
    async def leased(self, choice: Choice) -> AsyncIterator[AsyncEngine]:
        """The engine of a choice, which stays as long as it is used. Raises ApiError where there can be none."""
        while (kept := self._kept.get(choice)) is None:
            # Who asked may leave meanwhile: the thread that makes it goes on, and the next one must wait for its end.
            await asyncio.shield(self._make(choice))
        kept.users += 1  # nothing was awaited since it was found
        self._kept.move_to_end(choice)
        try:
            yield kept.serving
        finally:
            kept.users -= 1

    async def _make(self, choice: Choice) -> None:
        async with self._making:
            if choice in self._kept:
                return
            if self._closed:
                raise refused(503, "this server is about to end", "closing")
            if len(self._kept) >= self._settings.max_engines:
                await self._drop_one()
            try:
                self._kept[choice] = await asyncio.to_thread(self._serving, choice)
            except ValueError as error:
                raise of_request(error, "prompt") from error
            except (OSError, MemoryError) as error:
                logger.exception("the engine of %s cannot be made", choice)
                raise ApiError(
                    500, f"speculation.drafter: {choice.drafter} cannot be loaded", code="drafter"
                ) from error

    async def _drop_one(self) -> None:
        idle = (choice for choice, kept in self._kept.items() if not kept.users and choice != self._default)
        if (choice := next(idle, None)) is None:
            raise refused(503, "all engines are in use by requests with other drafters or rules", "engines_in_use")
        kept = self._kept.pop(choice)
        await kept.serving.close()

    def _serving(self, choice: Choice) -> _Kept:
        settings = self._settings
        engine = Engine(
            self.model,
            drafter=choice.drafter,
            rule=choice.rule,
            max_batch_size=settings.max_batch_size,
            prefix_cache_mib=settings.prefix_cache_mib,
        )
        engine.share_lock(self._turns)  # else two engines would run at once, each on fewer threads than it has measured
        return _Kept(AsyncEngine(engine, max_waiting=settings.max_waiting))

    async def close(self) -> None:
        """Drops what there is: by now a graceful end has let it finish."""
        async with self._making:
            self._closed = True
            for kept in list(self._kept.values()):  # a request may take one meanwhile
                await kept.serving.close(drain=False)
