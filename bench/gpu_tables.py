"""Tables of a run on a GPU: its goals, and the kernels with the largest shares of each cycle."""

from __future__ import annotations

import re
from typing import Any

SHOWN = 3  # kernels of a cycle
NAME = 23  # letters of a kernel's name


def gpu_lines(data: dict[str, Any], name: str) -> list[str]:
    """Returns the lines of both tables."""
    lines = [
        f"Measured on one {data['gpu']}, Llama-3.1-8B of random weights, bfloat16, 2,048 tokens (`bench/{name}`):",
        "",
        "| measured | value | goal | met |",
        "|---|---|---|---|",
    ]
    for step in data["gpu_steps"].values():
        for each in step["measured"]:
            if each["goal"] is not None and each["value"] is not None:
                goal = f"at {'least' if each['at_least'] else 'most'} {each['goal']:g}"
                met = "yes" if each["met"] else "no"
                lines.append(f"| {each['name']} | {each['value']:.4g} {each['unit']} | {goal} | {met} |")
    lines += ["", "| cycle | ms | launches | us of the kernels with the largest shares |", "|---|---|---|---|"]
    for case, cycle in data["cycles"].items():
        if "kernels" in cycle:
            shares = ", ".join(f"{_short(k['kernel'])} {k['share_us']:.0f}" for k in cycle["kernels"][:SHOWN])
            label = f"{re.split('[:,@]', case)[0]}, batch {case.rpartition('@')[2]}"
            lines.append(f"| {label} | {cycle['median_us'] / 1000:.2f} | {cycle['launches']} | {shares} |")
    return lines


def _short(kernel: str) -> str:
    return kernel.rpartition("::")[2].partition("<")[0][:NAME]
