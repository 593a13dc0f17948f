"""The longest chain of global loads of every kernel, read from its PTX: each address follows from the load before."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENTRY = re.compile(r"\.entry (\w+)\(.*?^\{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
REGISTER = re.compile(r"%[a-z]+\d+")
ADDRESS = re.compile(r"\[(.*?)\]")
LOADS = ("ld.global", "cp.async.cg", "atom.global")
NO_RESULT = ("st.", "bra", "bar.", "red.", "cp.", "ret", "griddepcontrol", "fence", "membar")


def chains() -> dict[str, int]:
    """Compiles csrc/cuda; returns the chain of each kernel by its short name. Raises RuntimeError without nvcc."""
    if shutil.which("nvcc") is None:
        raise RuntimeError("chains of loads: expected nvcc on PATH")
    found: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for source in sorted(ROOT.glob("csrc/cuda/**/*.cu")):
            to = f"{folder}/{source.stem}.ptx"
            options = ["-std=c++20", f"-I{ROOT / 'csrc'}", "-DSPECENGINE_HAVE_CUDA", "-arch=sm_90a", "-ptx"]
            subprocess.run(["nvcc", *options, str(source), "-o", to], check=True, capture_output=True)
            found |= chains_in(Path(to).read_text(encoding="utf-8"))
    names = subprocess.run(["c++filt"], input="\n".join(found), capture_output=True, text=True, check=True).stdout
    return {short(name): chain for name, chain in zip(names.splitlines(), found.values(), strict=True)}


def chains_in(ptx: str) -> dict[str, int]:
    """Returns the chain of each entry function of a PTX file by its mangled name."""
    return {name: chain_of(body) for name, body in ENTRY.findall(ptx)}


def chain_of(body: str) -> int:
    """Returns how many loads the longest chain has; a loop's body counts once, and shared memory ends a chain."""
    loads_before: dict[str, int] = {}
    longest = 0
    for line in body.splitlines():
        instruction = line.partition("//")[0].strip()
        guard = REGISTER.findall(instruction.partition(" ")[0]) if instruction.startswith("@") else []
        text = instruction.partition(" ")[2] if guard else instruction
        operation, _, operands = text.replace("\t", " ").partition(" ")
        if not operands:
            continue
        split = operands.find("[") if operation.startswith("ld.") else _end_of_first(operands)
        results = [] if operation.startswith(NO_RESULT) else REGISTER.findall(operands[:split])
        if operation.startswith(LOADS):  # what an atomic operation writes does not delay its address
            sources = guard + REGISTER.findall(" ".join(ADDRESS.findall(operands)))
        else:
            sources = guard + REGISTER.findall(operands[split:] if results else operands)
        depth = max((loads_before.get(source, 0) for source in sources), default=0)
        if operation.startswith(LOADS):
            depth += 1
            longest = max(longest, depth)
        for result in results:
            # Of a register with several writers, such as one that a loop updates, the longest chain counts.
            loads_before[result] = max(depth, loads_before.get(result, 0))
    return longest


def _end_of_first(operands: str) -> int:
    """The place of the comma behind the first operand, which may be a list in braces."""
    start = operands.find("}") if operands.lstrip().startswith("{") else 0
    comma = operands.find(",", start)
    return len(operands) if comma < 0 else comma


def short(name: str) -> str:
    """A demangled name without namespaces, return type and arguments, as bench/results/ptxas.json has it."""
    name = re.sub(r"^void |specengine::|\(anonymous namespace\)::", "", name)
    depth = 0
    for position, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:position]
    return name
