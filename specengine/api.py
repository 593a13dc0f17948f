"""`generate()`: one call; the next call with the same settings reuses its engine."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specengine.engine.engine import Engine
from specengine.models.lora.adapters import check_folders
from specengine.rules import Rule, parse_rule
from specengine.tensor_parallel.loading import LoadedModel, check_model, load_model
from specengine.types import Outputs, Prompt, SamplingParams

# Beyond these the least recently used ones are dropped. An engine that shares a model costs its own cache.
MAX_MODELS = 2
MAX_ENGINES = 8

_models: OrderedDict[tuple[str, str, str], LoadedModel] = OrderedDict()
_engines: OrderedDict[tuple[str, str, str, str, Rule, tuple[tuple[str, str], ...]], Engine] = OrderedDict()
_lock = threading.Lock()


def generate(
    prompts: Prompt | Sequence[Prompt],
    *,
    model: str | Path = "smollm2-135m",
    drafter: str = "auto",
    rule: str | Rule = "match",
    device: str = "auto",
    dtype: str = "auto",
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    stop_token_ids: Sequence[int] = (),
    min_tokens: int = 0,
    skip_special_tokens: bool = True,
    logprobs: int = 0,
    n: int = 1,
    trace: bool = False,
    json_schema: Mapping[str, Any] | str | None = None,
    regex: str | None = None,
    grammar: str | None = None,
    choices: Sequence[str] | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    adapter: str | None = None,
) -> Outputs:
    """Continues one prompt or a list of prompts (strings, lists of token ids, lists of chat messages).

    model, drafter, rule, device, dtype and adapters are arguments of Engine, the others fields of SamplingParams.
    Repeated calls reuse the loaded engine. One prompt gives one output, a list gives a list; n > 1 gives n outputs in
    place of each.
    Raises ValueError naming the argument.
    """
    params = SamplingParams.among(locals())
    return _engine(model, drafter, rule, device, dtype, adapters).generate(prompts, params)


def _engine(
    model: str | Path,
    drafter: str,
    rule: str | Rule,
    device: str,
    dtype: str,
    adapters: Mapping[str, str | Path] | None = None,
) -> Engine:
    """Returns the engine of these settings; engines of one model share its weights."""
    for name, value in (("drafter", drafter), ("device", device), ("dtype", dtype)):
        if not isinstance(value, str):
            raise ValueError(f"{name}: expected a string, got {value!r}")
    if adapters is not None:
        check_folders(adapters)
    check_model(model)
    parsed = parse_rule(rule)
    with _lock:
        key = (str(model), device, dtype)
        if key not in _models:
            _models[key] = load_model(model, device=device, dtype=dtype)
        _models.move_to_end(key)
        while len(_models) > MAX_MODELS:
            gone, _ = _models.popitem(last=False)
            for old in [k for k in _engines if k[:3] == gone]:
                del _engines[old]
        folders = tuple((name, str(folder)) for name, folder in (adapters or {}).items())
        engine_key = (*key, drafter, parsed, folders)
        if engine_key not in _engines:
            _engines[engine_key] = Engine(_models[key], drafter=drafter, rule=parsed, adapters=adapters)
        _engines.move_to_end(engine_key)
        if len(_engines) > MAX_ENGINES:
            _engines.popitem(last=False)
        return _engines[engine_key]
