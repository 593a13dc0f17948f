"""A strict reader of Prometheus' text format: whatever the format does not allow is an error."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


@dataclass
class Family:
    """samples: (what follows the family's name, labels) -> value."""

    help: str
    kind: str
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)


def parsed(text: str) -> dict[str, Family]:
    assert text.endswith("\n") and not text.startswith("\n") and "\n\n" not in text
    families: dict[str, Family] = {}
    lines = iter(text[:-1].split("\n"))
    name = ""
    for line in lines:
        if line.startswith("#"):
            head, typed = re.fullmatch(rf"# HELP ({NAME}) (.+)", line), next(lines)
            name = head[1]
            kind = re.fullmatch(rf"# TYPE {name} (counter|gauge|histogram)", typed)[1]
            assert name not in families
            assert (kind == "counter") == name.endswith("_total"), name
            assert re.fullmatch(r"(?:[^\\]|\\[\\n])*", head[2])
            families[name] = Family(head[2], kind)
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        family = families[name]
        suffix = match[1].removeprefix(name)
        assert match[1].startswith(name) and suffix in SUFFIXES[family.kind], line
        labels = tuple((key, _plain(value)) for key, value in re.findall(LABEL, match[2] or ""))
        assert len(dict(labels)) == len(labels) and (suffix, labels) not in family.samples, line
        family.samples[suffix, labels] = float(match[match.re.groups])
    for name, family in families.items():
        if family.kind == "histogram":
            _check_histogram(name, family)
    return families


def _plain(value: str) -> str:
    return re.sub(r"\\(.)", lambda match: {"n": "\n"}.get(match[1], match[1]), value)


def _check_histogram(name: str, family: Family) -> None:
    for labels in {tuple(each for each in labels if each[0] != "le") for _, labels in family.samples}:
        buckets = [
            (dict(own)["le"], value)
            for (suffix, own), value in family.samples.items()
            if suffix == "_bucket" and tuple(each for each in own if each[0] != "le") == labels
        ]
        bounds, counts = [float(bound) for bound, _ in buckets], [count for _, count in buckets]
        assert bounds == sorted(set(bounds)) and buckets[-1][0] == "+Inf", name
        assert counts == sorted(counts) and counts[-1] == family.samples["_count", labels], name
        assert ("_sum", labels) in family.samples, name
