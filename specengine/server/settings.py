"""What a server may be told."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specengine.drafters import drafter_kind
from specengine.rules import parse_rule
from specengine.utils.spec_string import Spec, check_range

DRAFTERS = ("none", "prompt_lookup")  # what requests may ask for besides: they read no files
RULES = ("match", "rejection", "traversal")  # and those that keep the target's distribution, with any drafter
_MOST = 1 << 30


@dataclass(frozen=True)
class Settings:
    """Limits, names and what requests may choose; `specengine serve` has an option for each.

    drafters, rules: what requests may ask for, the first being what they get; as AsyncEngine's engines take them.
    name: of the model, in the API.  api_key: that requests under /v1 and for /metrics must carry; "" asks for none.
    hosts: names under which the server may be addressed besides addresses of this machine; empty: any, unless it
    listens on a loopback address.
    max_body_bytes, max_prompt_tokens, max_new_tokens: of a request; 0: as many as the model's context has.
    max_streams: requests that are answered at a time.  max_waiting: texts in the queue of an engine.
    max_engines: pairs of a drafter and a rule that are kept ready.
    deadline, drain: seconds a text may take, and that texts under way get when the server is told to end.
    Raises ValueError naming the setting.
    """

    name: str
    drafters: tuple[str, ...]
    rules: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = field(default="", repr=False)
    hosts: tuple[str, ...] = ()
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
        for rule in self.rules:
            parse_rule(rule)
        for drafter in self.drafters:
            spec = Spec.parse(drafter, "drafter")
            if spec.name != "auto":  # which has the options of what it stands for
                spec.build(drafter_kind(spec.name).config_type, "drafter")
        if not self.name:
            raise ValueError("name: expected the model's name in the API, got an empty one")
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable() and " " not in self.api_key):
            raise ValueError("api_key: expected printable ASCII characters without spaces, which a header can carry")

    def knows_host(self, host: str) -> bool:
        """Whether a request may have named the server so.

        Else a page elsewhere whose name is made to mean this machine could use a server that listens for this machine
        alone (DNS rebinding).
        """
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        name = name.strip("[]").lower()
        if name in {each.lower() for each in (*self.hosts, self.host)}:
            return True
        if is_loopback(self.host):
            return is_loopback(name)
        return not self.hosts or _is_address(name)


def offered(
    model: str, drafter: str, rule: str, allow_drafters: Iterable[str] = (), allow_rules: Iterable[str] = ()
) -> dict[str, Any]:
    """Settings of a server that is started with a drafter and a rule and allows others besides; its name is the last
    part of the model's."""
    return {
        "name": Path(model).name,
        "drafters": tuple(dict.fromkeys((drafter, *allow_drafters, *DRAFTERS))),
        "rules": tuple(dict.fromkeys((rule, *allow_rules, *RULES))),
    }


def is_loopback(host: str) -> bool:
    """Whether only this machine can mean this machine by it."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
