"""The stub of the native module is the one that its generator writes."""

import runpy
from pathlib import Path

from specengine import _C

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "specengine" / "_C" / "__init__.pyi"
stub_of = runpy.run_path(str(ROOT / "csrc" / "bindings" / "write_stub.py"))["stub_of"]


def test_the_stub_is_that_of_the_built_module():
    assert STUB.read_text() == stub_of(_C), "run: python csrc/bindings/write_stub.py"


def test_a_stub_names_every_argument_with_its_type():
    stub = stub_of(_C)
    assert (
        "def compact_kv(\n    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths: Tensor, path: Tensor"
        in stub
    )
    assert "    def newest(self, token: int, most: int) -> list[list[int]]: ...\n" in stub
    assert (
        "class TokenHistory(NamedTuple):\n    tokens: Tensor\n    length: Tensor\n    prompt_length: Tensor\n" in stub
    )
    assert "arg0" not in stub and "SupportsInt" not in stub and "_C." not in stub


def test_an_op_takes_at_most_a_dozen_arguments():
    functions = [value for name, value in vars(_C).items() if callable(value) and not isinstance(value, type)]
    counts = {f.__name__: f.__doc__.splitlines()[0].partition(" -> ")[0].count(": ") for f in functions}
    assert counts["decoder_pass"] == 12 and max(counts.values()) <= 12


def test_package_says_that_it_is_typed():
    assert (ROOT / "specengine" / "py.typed").is_file()
