"""The settings of a server."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specengine.drafters import drafter_kind
from specengine.models.lora.adapters import check_folders
from specengine.rules import parse_rule
from specengine.tool_calls.dialects import DIALECTS
from specengine.tool_calls.reasoning import REASONING
from specengine.utils.spec_string import Spec, check_range

# Requests may always choose these: the drafters read no files, and the rules keep the target's distribution.
DRAFTERS = ("none", "prompt_lookup")
RULES = ("match", "rejection", "traversal")
_MOST = 1 << 30


@dataclass(frozen=True)
class Settings:
    """Names, limits, and the drafters and rules that requests may choose. `specengine serve` has an option for each.

    drafters, rules: specs that requests may choose, as Engine takes them; the first of each is the default.
    name: the model's name in the API.  adapters: names of PEFT LoRA folders, which requests choose as `model`.
    api_key: required in requests for /v1 and /metrics; "" requires none.
    hosts: accepted host names beside the addresses of this machine. If empty, a server accepts any name, unless it
      listens on a loopback address.
    allowed_origins: origins of pages that browsers let use this server, such as https://app.example; `*`: all.
    ignore_unknown_fields: drops fields of a request that the API does not have; otherwise they are an error.
    max_body_bytes: size limit of a request's body.
    max_prompt_tokens, max_new_tokens: token limits of a prompt and of a text; 0: the model's context.
    max_streams: requests that run at a time.  max_waiting: texts that wait for a place in the
      batch of an engine.
    max_engines: pairs of a drafter and a rule that stay loaded.
    tool_dialect: a name of DIALECTS; `auto` reads it from the chat template.
    reasoning: a name of REASONING, `none`, or `auto`, which reads it from the chat template.
    deadline: time limit of a text in seconds.  drain: seconds that running texts get at a shutdown.
    Raises ValueError naming the setting.
    """

    name: str
    drafters: tuple[str, ...]
    rules: tuple[str, ...]
    adapters: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = field(default="", repr=False)
    hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    ignore_unknown_fields: bool = False
    max_batch_size: int = 16
    prefix_cache_mib: int = 256
    max_body_bytes: int = 1 << 20
    max_prompt_tokens: int = 0
    max_new_tokens: int = 0
    max_streams: int = 128
    max_waiting: int = 256
    max_engines: int = 4
    deadline: float = 300.0
    drain: float = 330.0
    tool_dialect: str = "auto"
    reasoning: str = "auto"

    def __post_init__(self) -> None:
        check_range("port", self.port, 0, 65535)
        for name in ("max_body_bytes", "max_streams", "max_waiting", "max_engines", "max_batch_size"):
            check_range(name, getattr(self, name), 1, _MOST)
        for name in ("max_prompt_tokens", "max_new_tokens"):
            check_range(name, getattr(self, name), 0, _MOST)
        for name in ("deadline", "drain"):
            seconds = getattr(self, name)
            if not 0 < seconds < 1e6:
                raise ValueError(f"{name}: expected a positive number of seconds, got {seconds!r}")
        for name, known in (("tool_dialect", ("auto", *DIALECTS)), ("reasoning", ("auto", "none", *REASONING))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")
        for origin in self.allowed_origins:
            if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+", origin, re.IGNORECASE):
                raise ValueError(f"allowed_origins: expected * or SCHEME://HOST[:PORT] without a path, got {origin!r}")
        for rule in self.rules:
            parse_rule(rule)
        for drafter in self.drafters:
            spec = Spec.parse(drafter, "drafter")
            if spec.name != "auto":  # the model decides which drafter `auto` is
                spec.build(drafter_kind(spec.name).config_type, "drafter")
        if self.adapters:
            check_folders(self.adapters)
        if self.name in self.adapters:
            raise ValueError(f"adapters: {self.name!r} is the name of the model itself")
        if not self.name:
            raise ValueError("name: expected the model's name in the API, got an empty string")
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable() and " " not in self.api_key):
            raise ValueError("api_key: expected printable ASCII characters without spaces")

    def accepts_host(self, host: str) -> bool:
        """Returns whether a request's `Host` header may have this value.

        The check prevents DNS rebinding: a web page whose host name resolves to this machine could otherwise use a
        server that listens only on a loopback address.
        """
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        name = name.strip("[]").lower()
        if name in {each.lower() for each in (*self.hosts, self.host)}:
            return True
        if is_loopback(self.host):
            return is_loopback(name)
        return not self.hosts or _is_address(name)


def derive_settings(
    model: str, drafter: str, rule: str, allow_drafters: Iterable[str] = (), allow_rules: Iterable[str] = ()
) -> dict[str, Any]:
    """Returns the settings `name`, `drafters` and `rules`.

    drafter, rule: the server's defaults. allow_drafters, allow_rules: specs that requests may choose beside them.
    The name is the last part of the model's.
    """
    return {
        "name": Path(model).name,
        "drafters": tuple(dict.fromkeys((drafter, *allow_drafters, *DRAFTERS))),
        "rules": tuple(dict.fromkeys((rule, *allow_rules, *RULES))),
    }


def is_loopback(host: str) -> bool:
    """Returns whether an address reaches only the machine that uses it."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
