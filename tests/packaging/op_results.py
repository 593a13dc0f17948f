"""Results of every CPU op on arguments that are the same on every machine, as digests, to be compared between machines.

python -m tests.packaging.op_results save FILE      writes the digests of the portable kernels
python -m tests.packaging.op_results compare FILE   exits with 1 where the digests of this machine's core differ
"""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from specengine import _C

DRAWS = itertools.count()


def portable_randn(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Stands in for torch.randn, whose last bits differ between machines: floats in [-4, 4), of 24 bits each."""
    rng = np.random.default_rng([generator.initial_seed(), next(DRAWS)])
    return torch.from_numpy((rng.integers(-(2**23), 2**23, shape) / 2**21).astype(np.float32))


def cases() -> Iterator[tuple[str, Callable[[], dict]]]:
    """Names of cases, each with what runs it and returns its arguments, the written ones among them."""
    from tests.ops.arguments import OPS, call
    from tests.ops.cases import CACHE_DTYPES, ancestor_bits, make_cache, randn, random_tree
    from tests.ops.packing import FORMATS, packed

    def run(op: str, arguments: dict) -> dict:
        call(op, arguments)
        return arguments

    for op, make in OPS.items():
        yield op, lambda op=op, make=make: run(op, make())
    for form, rows in itertools.product(FORMATS, (1, 7, 33)):

        def linear(form: str = form, rows: int = rows) -> dict:
            weight = packed(randn(70, 256, seed=3), form)
            x = randn(rows, 256, seed=4)
            if form.startswith("q"):
                blocks = torch.zeros(rows, 256 // _C.BLOCK, _C.ROW_BLOCK_BYTES, dtype=torch.uint8)
                _C.quantise_rows(x, blocks, None)
                x = blocks
            out = torch.zeros(rows, 70)
            _C.linear(x=x, weight=weight.data, bias=randn(70, seed=5), out=out, first=0, rows=70, variant=0, masks=None)
            return {"weight": weight.data, "x": x, "out": out}

        yield f"linear of {form} and {rows} rows", linear
    for dtype, strict in itertools.product(CACHE_DTYPES, (False, True)):

        def attention(dtype: torch.dtype = dtype, strict: bool = strict) -> dict:
            trees, lengths = [random_tree(40), random_tree(9)], [300, 63]
            names = ("k_cache", "v_cache", "block_table", "lengths", "row_start")
            cache = dict(zip(names, make_cache(trees, lengths, 2, 64, dtype).place(), strict=True))
            out = {"q": randn(49, 8, 64), "out": torch.zeros(49, 8, 64), "workspace": torch.zeros(4)}
            rest = {"ancestors": ancestor_bits(trees), "scale": 0.125, "window": 0, "strict": strict}
            return run("tree_attention", {**cache, **out, **rest})

        yield f"tree_attention over {dtype}{' strict' * strict}", attention


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.zeros(0, dtype=torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def results() -> dict[str, dict[str, str]]:
    torch.randn = portable_randn
    found = {}
    for name, run in cases():
        arguments = run()
        found[name] = {key: digest(each) for key, each in arguments.items() if isinstance(each, torch.Tensor)}
    return found


def main(command: str, file: str, instruction_set: str = "portable") -> int:
    _C.set_instruction_set(instruction_set)
    found = results()
    count = sum(map(len, found.values()))
    if command == "save":
        Path(file).write_text(json.dumps(found), encoding="utf-8")
        print(f"{platform.machine()}: wrote {count} tensors of {len(found)} cases")
        return 0
    expected = json.loads(Path(file).read_text(encoding="utf-8"))
    assert expected.keys() == found.keys()
    differing = [
        f"{case}: {key}" for case, tensors in found.items() for key in tensors if tensors[key] != expected[case][key]
    ]
    print(*differing, sep="\n", end="\n" if differing else "")
    print(f"{platform.machine()}: {count - len(differing)} of {count} tensors of {len(found)} cases are the same bits")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
