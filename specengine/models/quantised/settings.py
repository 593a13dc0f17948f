"""What a checkpoint's configuration says of its quantised weights: the method, and the scheme of each module.

Lists of modules that are left out are not read. The tensors of a module say whether it is quantised.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specengine.utils.json_fields import Fields
from specengine.utils.json_file import read_json_object

_METHODS = {
    **{name: name for name in ("awq", "gptq", "fp8", "fbgemm_fp8", "mxfp4", "bitsandbytes", "auto-round")},
    **dict.fromkeys(("compressed-tensors", "compressed_tensors"), "compressed-tensors"),
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"), "modelopt"),
    **dict.fromkeys(("auto_round", "autoround", "intel/auto-round"), "auto-round"),
}
_OTHER_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
# what the name of AutoRound's packing contains, in the order in which AutoRound asks
_AUTOROUND_WORDS = {"awq": "awq-gemm", "gptqmodel": "gptq_v2", "gptq": "gptq", "auto_round": "gptq_v2"}
FLOAT8 = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
# of compressed-tensors, less what it gave up: marlin-24, sparse-bitmask and sparse-24-bitmask
_FORMATS = (
    *("dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized"),
)
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
# how the names of ModelOpt's algorithms begin; W4A16_AWQ and W4A8_AWQ have a layout of their own
_ALGORITHMS = (
    *("FP8", "NVFP4", "MXFP4", "MXFP8", "INT8", "W8A8", "W8A16", "MIXED_PRECISION"),
    *("W4A16_NVFP4", "W4A16_MXFP4", "W4A8_NVFP4", "W4A8_MXFP4"),
)


@dataclass(frozen=True)
class Scheme:
    """How a weight is said to be coded; None where the configuration is silent. group: -1 stands for whole rows.

    fits: whether it is of a target that fits the module.
    """

    bits: int | None = None
    group: int | None = None
    block: tuple[int, int] | None = None
    symmetric: bool = True
    fits: bool = True

    def divides(self, rows: int, columns: int) -> bool:
        """Says whether a weight [rows, columns] must have more scales than one, or one a row."""
        by_group = self.group is not None and 0 < self.group < columns
        by_block = self.block is not None and (self.block[0] < rows or self.block[1] < columns)
        return self.fits and (by_group or by_block)


class Settings:
    """A quantization_config. method: one of the values of _METHODS.  words: how `qweight` is packed, see `_words`.

    float8: the type that FP8 weights are said to have, one of the values of FLOAT8; None where nothing is said.
    """

    def __init__(self, data: Any, where: str, method: str | None = None) -> None:
        self.fields = _unwrapped(Fields(data, where))
        self.method = method or self._method()
        self.words = self._words()
        self.float8 = self._float8()
        self._rules = [*self._all_rules()]

    def schemes(self, module: str) -> Iterator[Scheme]:
        """Lists the schemes that a module may have, the likeliest first."""
        for fit in range(3):
            for patterns, scheme in self._rules:
                if any(_fit(pattern, module) == fit for pattern in patterns):
                    yield scheme
        for patterns, scheme in self._rules:
            if all(_fit(pattern, module) is None for pattern in patterns):
                yield replace(scheme, fits=False)

    def scheme(self, module: str) -> Scheme:
        """Returns the likeliest scheme of a module."""
        return next(self.schemes(module), Scheme())

    def scheme_of_bytes(self, module: str) -> Scheme:
        """Returns the likeliest scheme of a module whose codes have 8 bits."""
        return next((each for each in self.schemes(module) if each.bits in (None, 8)), self.scheme(module))

    def _method(self) -> str:
        fields = self.fields
        if fields.data.get("quant_method") is None:
            if fields.data.get("load_in_4bit") or fields.data.get("load_in_8bit"):
                return "bitsandbytes"
            raise fields.error("quant_method", f"is missing, as in files of MLX and EXL2; {_HINT}")
        name = fields.get("quant_method", str).lower()
        if name not in _METHODS:
            raise fields.error("quant_method", f"is {name!r}, which is not supported; {_HINT}")
        return _METHODS[name]

    def _words(self) -> str | None:
        """Names the packing of `qweight`: awq-gemm, awq-gemv, gptq (zeros less one) or gptq_v2. None: other methods."""
        fields = self.fields
        if self.method == "auto-round":
            return self._words_of_autoround()
        if self.method not in ("awq", "gptq"):
            return None
        if fields.get("is_marlin_format", bool, False):
            raise fields.error("is_marlin_format", "is true, which is not supported")
        # GPTQ files may have a version too, an integer that says nothing of the packing
        is_awq = self.method == "awq"
        keys = ("checkpoint_format", "version", "format") if is_awq else ("checkpoint_format", "format")
        name, packing = next(
            ((key, fields.get(key, str)) for key in keys if fields.data.get(key)),
            ("format", "gemm" if is_awq else "gptq"),
        )
        packing = packing.lower()
        if packing in ("exllama", "ipex"):  # how AutoAWQ runs a file, which has gemm's layout
            packing = "gemm"
        words = f"awq-{packing}" if packing in ("gemm", "gemv") else packing
        if words not in ("awq-gemm", "awq-gemv", "gptq", "gptq_v2"):
            raise fields.error(name, f"is {packing!r}, expected gptq, gptq_v2, gemm or gemv")
        return words

    def _words_of_autoround(self) -> str:
        """Reads the packing by what its name contains, as AutoRound does; kernels may follow in the name."""
        name = "backend" if self.fields.data.get("packing_format") is None else "packing_format"  # older files: backend
        packing = self.fields.get(name, str, "auto").lower()
        if packing == "auto":
            return "gptq"
        for part, words in _AUTOROUND_WORDS.items():
            if part in packing:
                return words
        raise self.fields.error(name, f"is {packing!r}, expected a name with {', '.join(_AUTOROUND_WORDS)}")

    def _float8(self) -> str | None:
        return FLOAT8.get(_one_of(self.fields, "fmt", FLOAT8)) if self.method == "fp8" else None

    def _all_rules(self) -> Iterator[tuple[list[str], Scheme]]:
        fields = self.fields
        if self.method == "compressed-tensors":
            yield from self._groups()
            return
        said = self._flat(fields, Scheme(symmetric=self.method != "awq"))
        if self.method == "modelopt" and _algorithm(fields).startswith("MIXED"):
            said = replace(said, group=None)  # it is that of some layers
        for key in ("dynamic", "extra_config"):  # GPTQModel, AutoRound
            for pattern, changes in fields.get(key, dict, {}).items():
                if pattern.startswith("-:") or not isinstance(changes, dict):
                    continue
                changed = self._flat(Fields(changes, f"{fields.where}: {key}: {pattern[:80]}"), said)
                name = pattern.removeprefix("+:")
                yield [name, _checked(fields, f"re:{name}")], changed
        yield ["Linear"], said

    def _flat(self, fields: Fields, base: Scheme) -> Scheme:
        """Reads fields as AWQ, GPTQ and FP8 files have them at the top; those that are absent keep their value."""
        bits = fields.get("bits", int, None) or fields.get("w_bit", int, base.bits)
        group = fields.get("group_size", int, None) or fields.get("q_group_size", int, base.group)
        block = fields.get("weight_block_size", list, None)
        symmetric = not fields.get("zero_point", bool, not fields.get("sym", bool, base.symmetric))
        return Scheme(bits, group, base.block if block is None else _pair(fields, "weight_block_size"), symmetric)

    def _groups(self) -> Iterator[tuple[list[str], Scheme]]:
        """Reads the config_groups of compressed-tensors."""
        fields = self.fields
        if fields.get("transform_config", dict, {}).get("config_groups"):
            raise fields.error("transform_config", "has transforms, which are not supported")
        _one_of(fields, "format", _FORMATS)
        for name, group in fields.get("config_groups", dict, {}).items():
            where = f"{fields.where}: config_groups: {name[:80]}"
            if isinstance(group, list):  # the targets of a preset such as "W4A16"
                digits = re.match(r"[A-Z]*W(\d)", name)
                yield _names(fields, group), Scheme(int(digits[1]) if digits else None, None)
                continue
            each = Fields(group, where)
            _one_of(each, "format", _FORMATS)
            if (weights := each.get("weights", dict, None)) is None:
                continue
            args = Fields(weights, f"{where}: weights")
            _one_of(args, "type", ("int", "float"))
            _one_of(args, "strategy", _STRATEGIES)
            block = None if args.data.get("block_structure") is None else _pair(args, "block_structure")
            symmetric = args.get("symmetric", bool, True)
            scheme = Scheme(args.get("num_bits", int, 8), args.get("group_size", int, None), block, symmetric)
            yield _names(fields, each.get("targets", list, ["Linear"])), scheme


_HINT = "supported are FP8, AWQ, GPTQ, compressed-tensors, ModelOpt, MXFP4, bitsandbytes and GGUF files"


def read_settings(folder: Path) -> Settings | None:
    """Reads what a folder says of its quantised weights; None where it says nothing.

    Raises ValueError for a method that is not supported, and for fields that cannot be read.
    """
    path = folder / "config.json"
    config = read_json_object(path) if path.is_file() else {}
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            return Settings(config[key], f"{path}: {key}")
    if config.get("quantization"):
        raise ValueError(f"{path}: field 'quantization' is of MLX, whose files are not supported; {_HINT}")
    for name, method in _OTHER_FILES.items():
        if (folder / name).is_file():
            data = read_json_object(folder / name)
            return Settings(data.get("quantization", {}) if method == "modelopt" else data, str(folder / name), method)
    return None


def _unwrapped(fields: Fields) -> Fields:
    """Returns the configuration itself where compressed-tensors nests it beside one of sparsity.

    Raises ValueError for weights that are stored sparse.
    """
    inner = fields.get("quantization_config", dict, None)
    found = fields
    if inner is not None:
        method = inner.get("quant_method") or fields.data.get("quant_method")
        found = Fields({**inner, "quant_method": method}, f"{fields.where}: quantization_config")
    for each in (fields, found):
        sparsity = Fields(each.get("sparsity_config", dict, {}), f"{each.where}: sparsity_config")
        _one_of(sparsity, "format", ("dense",))
    return found


def _algorithm(fields: Fields) -> str:
    """Returns ModelOpt's algorithm in capitals, "" where nothing is said. Raises ValueError for an unknown one."""
    layers = fields.get("quantized_layers", dict, {}).items()
    each = [Fields(layer, f"{fields.where}: quantized_layers: {name[:80]}") for name, layer in layers]
    for part in (fields, *each):
        name = part.get("quant_algo", str, "")
        if name and not name.upper().startswith(_ALGORITHMS):
            raise part.error("quant_algo", f"is {name!r}, expected a name that begins with {', '.join(_ALGORITHMS)}")
    return fields.get("quant_algo", str, "").upper()


def _one_of(fields: Fields, name: str, known: Iterable[str]) -> str:
    """Returns a field in small letters, "" where it is absent. Raises ValueError for a value outside `known`."""
    if fields.data.get(name) is None:
        return ""
    value = fields.get(name, str)
    if value.lower() not in known:
        raise fields.error(name, f"is {value[:80]!r}, expected {' or '.join(known)}")
    return value.lower()


def _names(fields: Fields, values: list[Any]) -> list[str]:
    if not all(isinstance(value, str) for value in values):
        raise fields.error("config_groups", f"has targets {str(values)[:80]}, expected texts")
    return [_checked(fields, value) for value in values]


def _checked(fields: Fields, pattern: str) -> str:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{fields.where}: regex {pattern[3:80]!r} cannot be read: {error}") from None
    return pattern


def _pair(fields: Fields, name: str) -> tuple[int, int]:
    value = fields.data[name]
    if isinstance(value, str):
        value = [int(part) if part.isascii() and part.isdigit() else 0 for part in value[:40].split("x")]
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise fields.error(name, f"must be [rows, columns], got {str(value)[:80]}")
    return value[0], value[1]


def _fit(pattern: str, module: str) -> int | None:
    """How closely a target fits a module, 0 most closely: by its name, by a regex, by the class; None: it does not."""
    if pattern == module:
        return 0
    if pattern.startswith("re:"):
        return 1 if re.match(pattern[3:], module) else None
    classes = {"Embedding"} if module.endswith("embed_tokens") else {"Linear"}
    return 2 if pattern in classes else None
