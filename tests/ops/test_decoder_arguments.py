"""What a decoder is made of: it refuses layers and sizes that do not fit, and keeps what it borrows."""

import gc

import pytest
import torch

from specengine import _C
from specengine.ops.weight import BLOCK_BYTES
from tests.ops.arguments import OPS, blocks, call, decoder, decoder_layer, lora_layers, projection, randn

NORMS = ({}, {"attention_norm": None})
FLOAT_WEIGHT, Q8_WEIGHT = randn(4, 6, 16), blocks(1, BLOCK_BYTES["q8"])
PLAIN = {"embedding": 1.0, "attention": 0.3, "residual": 1.0}
BAD_LAYERS = [  # what replaces arguments of a layer, and the message
    *[
        ({name: randn(7)}, rf"{name}: expected shape \[C\] with C=6 \(from hidden\)")
        for name in ("attention_norm", "mlp_norm")
    ],
    ({"mlp_norm": None}, "mlp_norm: expected a tensor, got None"),
    *[
        ({name: 3}, f"{name}: expected a tensor, got int")
        for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm")
    ],
    *[({name: randn(6)}, f"{name}: expected shape .8., got .6.") for name in ("q_norm", "k_norm")],
    *[({name: randn(8).double()}, f"{name}: expected dtype float32") for name in ("q_norm", "k_norm")],
    ({"qkv": projection(63, 6, 1)}, "qkv: expected 64 rows, got 63"),
    ({"qkv": projection(64, 7, 1)}, "qkv: expected shape .*C=6 "),
    ({"qkv": _C.Projection((FLOAT_WEIGHT,), (48,), None, None, False)}, "qkv: 48 rows do not match 4 panels of 16"),
    (
        {"qkv": _C.Projection((FLOAT_WEIGHT,), (2**63 - 1,), None, None, False)},
        "qkv: 9223372036854775807 rows do not match 4 panels",
    ),
    ({"qkv": _C.Projection((FLOAT_WEIGHT,), (-1,), None, None, False)}, "qkv: -1 rows do not match 4 panels"),
    ({"qkv": _C.Projection((), (), None, None, False)}, "qkv: expected one row count per weight"),
    ({"qkv": _C.Projection((FLOAT_WEIGHT,), (32, 32), None, None, False)}, "qkv: expected one row count per weight"),
    ({"qkv": _C.Projection((FLOAT_WEIGHT,), (64,), randn(63), None, False)}, "qkv bias: expected shape .64., got .63."),
    ({"qkv": _C.Projection((FLOAT_WEIGHT,), (64,), 3, None, False)}, "qkv bias: expected a tensor, got int"),
    ({"qkv": _C.Projection((FLOAT_WEIGHT.double(),), (64,), None, None, False)}, "qkv: expected dtype float32"),
    ({"qkv": _C.Projection((None,), (64,), None, None, False)}, "qkv: expected a tensor, got None"),
    ({"qkv": _C.Projection((blocks(2, BLOCK_BYTES["q8"]),), (32,), None, None, False)}, "qkv: expected shape .*C/32=1"),
    (
        {"qkv": _C.Projection((blocks(1, 300),), (32,), None, None, False)},
        "qkv: blocks of 300 bytes are of no known format",
    ),
    (
        {"qkv": _C.Projection((FLOAT_WEIGHT[:2], Q8_WEIGHT), (32, 32), None, None, False)},
        "qkv: weights of int8 rows and of floats are mixed",
    ),
    (
        {"qkv": _C.Projection((Q8_WEIGHT, FLOAT_WEIGHT[:2]), (32, 32), None, None, False)},
        "qkv: weights of int8 rows and of floats are mixed",
    ),
    ({"attention_out": projection(6, 24, 2)}, "attention_out: expected shape .*C=32 "),
    ({"gate_up": projection(18, 6, 3)}, "gate_up: expected 20 rows, got 18"),
    ({"down": projection(6, 20, 4)}, "down: expected shape .*C=10 "),
    ({"down": projection(7, 10, 4)}, "down: expected 6 rows, got 7"),
    ({"window": -1}, "window: expected 0 "),
]


@pytest.mark.parametrize("changes, message", BAD_LAYERS)
def test_a_decoder_refuses_a_layer_that_does_not_fit(changes, message):
    good, bad = _C.DecoderLayer(**decoder_layer()), _C.DecoderLayer(**{**decoder_layer(), **changes})
    for layers in ([bad, good], [good, bad]):
        with pytest.raises(ValueError, match=f"^layers: layer {layers.index(bad)}: {message}"):
            _C.Decoder(**{**decoder(), "layers": layers})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layers": []}, "layers: expected at least one"),
        ({"embedding": "text"}, "embedding: expected a tensor, got str"),
        ({"embedding": randn(2, 7, 16)}, r"embedding: expected shape \[P, C, 16\] with C=6 \(from hidden\)"),
        ({"embedding": randn(2, 6, 16).double()}, "embedding: expected dtype float32 or float16 or bfloat16 or uint8"),
        ({"embedding": blocks(2, BLOCK_BYTES["q8"])}, "embedding: expected shape"),
        ({"final_norm": randn(7)}, "final_norm: expected shape"),
        ({"final_norm": None}, "final_norm: expected a tensor, got None"),
        *[
            ({name: value}, f"{name}: expected 1 to 16777216, got {value}")
            for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate")
            for value in (0, -1, 2**24 + 1, 2**63 - 1)
        ],
        ({"heads": 3}, "heads: 3 heads are no multiple of kv_heads=2"),
        ({"heads": 514}, "heads: at most 256 query heads"),
        ({"head_dim": 7}, "head_dim: expected an even number, got 7"),
        ({"intermediate": 11}, "layers: layer 0: gate_up: expected 22 rows, got 20"),
        ({"kv_heads": 4}, "layers: layer 0: qkv: expected 96 rows, got 64"),
        *[
            ({"multipliers": _C.Multipliers(**{**PLAIN, name: value})}, f"{name} multiplier: expected a positive")
            for name in PLAIN
            for value in (0.0, -1.0, float("nan"), float("inf"))
        ],
        *[
            ({"hidden_state_layers": hidden_state_layers}, "hidden_state_layers: expected rising numbers from 0 to 2")
            for hidden_state_layers in ((3,), (-1,), (1, 1), (2, 0))
        ],
    ],
)
def test_a_decoder_refuses_sizes_and_tensors_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        _C.Decoder(**{**decoder(), **changes})


def test_a_pass_takes_tokens_or_inputs():
    arguments, fed = OPS["decoder_pass"](), OPS["decoder_pass fed"]()
    with pytest.raises(ValueError, match="inputs: expected None beside tokens"):
        call("decoder_pass", {**arguments, "inputs": fed["inputs"]})
    with pytest.raises(ValueError, match="tokens: this decoder has no embedding"):
        call("decoder_pass", {**fed, "tokens": arguments["tokens"], "inputs": None})


def test_only_the_first_layer_may_do_without_a_norm():
    layers = [_C.DecoderLayer(**{**decoder_layer(), "attention_norm": None}) for _ in range(2)]
    with pytest.raises(ValueError, match="layers: layer 1: attention_norm: only the first layer may do without"):
        _C.Decoder(**{**decoder(), "layers": layers})


def test_a_residual_stream_that_is_kept_divided_has_a_norm_in_front_of_every_layer():
    first, second = (_C.DecoderLayer(**{**decoder_layer(), **more}) for more in ({"attention_norm": None}, {}))
    divided = {**decoder(), "multipliers": _C.Multipliers(**{**PLAIN, "residual": 0.5})}
    _C.Decoder(**{**divided, "layers": [second, second]})
    with pytest.raises(ValueError, match="layer 0: attention_norm: expected a tensor where the residual stream"):
        _C.Decoder(**{**divided, "layers": [first, second]})


def test_a_decoder_without_hidden_state_layers_writes_none():
    arguments = OPS["decoder_pass"]()
    arguments["adapters"] = None
    plain = _C.Decoder(**{**decoder(), "hidden_state_layers": ()})
    call("decoder_pass", {**arguments, "decoder": plain, "at_layers": None})
    with pytest.raises(ValueError, match="at_layers: this decoder has no hidden_state_layers"):
        call("decoder_pass", {**arguments, "decoder": plain})


def test_a_decoder_keeps_its_weights_alive():
    arguments = OPS["decoder_pass"]()
    gc.collect()  # nothing but the decoder refers to its weights here
    filler = [torch.full((4, 6, 16), torch.nan) for _ in range(200)]
    expected = OPS["decoder_pass"]()
    for case in (arguments, expected):
        call("decoder_pass", case)
    assert torch.equal(arguments["hidden_states"], expected["hidden_states"]) and len(filler) == 200


def test_a_first_layer_that_is_given_its_rows_has_no_norm_and_needs_them():
    layers = [_C.DecoderLayer(**{**decoder_layer(), "qkv": projection(64, 9, 1), **more}) for more in NORMS]
    second = _C.DecoderLayer(**decoder_layer())
    wide = {**decoder(), "first_columns": 9}
    with pytest.raises(ValueError, match="layer 0: attention_norm: expected None where the first layer is given"):
        _C.Decoder(**{**wide, "layers": [layers[0], second]})
    with pytest.raises(ValueError, match=r"layer 0: qkv: expected shape .*C=8 "):
        _C.Decoder(**{**wide, "first_columns": 8, "layers": [layers[1], second]})
    with pytest.raises(ValueError, match="first_columns: expected 1 to 16777216, got -1"):
        _C.Decoder(**{**wide, "first_columns": -1, "layers": [layers[1], second]})
    given, arguments = _C.Decoder(**{**wide, "layers": [layers[1], second]}), OPS["decoder_pass"]()
    workspace = torch.zeros(given.workspace_bytes(8), dtype=torch.uint8)
    for rows, message in ((None, "expected a tensor, got None"), (randn(8, 6), "expected shape")):
        with pytest.raises(ValueError, match=f"^first_inputs: {message}"):
            call("decoder_pass", {**arguments, "decoder": given, "workspace": workspace, "first_inputs": rows})
    with pytest.raises(ValueError, match=r"^first_inputs: this decoder's first layer reads its rows"):
        call("decoder_pass", {**arguments, "first_inputs": randn(8, 6)})


@pytest.mark.parametrize("first_node", [-1, 256, 2**63 - 1])
def test_nodes_before_a_pass_are_counted_from_0(first_node):
    with pytest.raises(ValueError, match=f"^first_node: expected 0 to 255 nodes, got {first_node}"):
        call("decoder_pass", {**OPS["decoder_pass"](), "first_node": first_node})


def test_adapters_are_those_of_the_decoder():
    arguments = OPS["decoder_pass"]()
    bare = _C.Decoder(**decoder())
    with pytest.raises(ValueError, match="adapters: this decoder has none"):
        call("decoder_pass", {**arguments, "decoder": bare})
    for adapters, message in (((2, 0), "entry 0 is 2, expected -1 to 1"), ((0, -2), "entry 1 is -2")):
        with pytest.raises(ValueError, match=f"adapters: {message}"):
            call("decoder_pass", {**arguments, "adapters": torch.tensor(adapters, dtype=torch.int32)})
    for changes, message in (
        ({"lora": lora_layers()[:1]}, "lora: expected 2 layers, got 1"),
        ({"lora": lora_layers(), "hidden": 6, "heads": 2, "kv_heads": 1}, "layers: layer 0: qkv"),
    ):
        with pytest.raises(ValueError, match=message):
            _C.Decoder(**{**decoder(), **changes})


def test_a_pass_without_adapters_has_the_bits_of_a_decoder_without_any():
    bare = OPS["decoder_pass"]() | {"decoder": _C.Decoder(**decoder()), "adapters": None}
    able = [OPS["decoder_pass"]() | {"adapters": given} for given in (None, torch.tensor([-1, -1], dtype=torch.int32))]
    for case in (bare, *able):
        call("decoder_pass", case)
    assert all(torch.equal(case[name], bare[name]) for case in able for name in ("hidden_states", "at_layers"))
