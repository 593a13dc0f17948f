"""The native pass of all layers: against its reference, against its own ops one by one, and the bits of a row."""

import dataclasses

import pytest
import torch

from specengine import _C
from specengine._C import KVCacheView
from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.models.config import ModelConfig
from specengine.ops import native, reference
from specengine.ops.decoder import Decoder, Layer
from specengine.ops.layer import rms_norm, rope_cache, silu_mul
from specengine.ops.layerwise.decoder import LayerwiseDecoder
from specengine.ops.linear import Projection, linear
from specengine.ops.tree_attention import tree_attention
from specengine.ops.weight import FLOAT_FORMATS, Weight, gather_rows
from specengine.utils.multipliers import PLAIN, Multipliers
from tests.ops.cases import CACHE_DTYPES, chain, comb, later_rows, make_cache, path_to, randn, random_tree
from tests.ops.packing import CPU, FORMATS, QUANTISED, packed, values_of

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=50,
    hidden_size=40,
    intermediate_size=72,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=12,
    rms_norm_eps=1e-5,
    max_position=300,
)
OPTIONS = {
    "plain": {},
    "biases": {"biases": True},
    "norms": {"norms": True},
    "windows": {"windows": (0, 16, 70)},
    "heads of their own": {"config": {"num_kv_heads": 6}},
    "one head for all": {"config": {"num_kv_heads": 1}, "biases": True, "norms": True},
    "two of a head": {"config": {"num_heads": 4, "head_dim": 20}, "windows": (5, 0, 5)},
}
TREES, LENGTHS = [random_tree(20), comb(40), chain(7), [-1]], [70, 0, 62, 130]


class Model:
    """A decoder of random weights in one format, or in several by projection."""

    def __init__(self, form="float32", *, biases=False, norms=False, windows=(0, 0, 0), config=None, mixed=None):
        c = self.config = dataclasses.replace(CONFIG, **(config or {}))
        self.form, self.mixed, self.seed = form, mixed or {}, 0
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.embedding = packed(self._random(c.vocab_size, c.hidden_size), form)
        self.layers = [
            Layer(
                attention_norm=1 + self._random(c.hidden_size),
                qkv=self._linear("qkv", (q, kv, kv), c.hidden_size, biases),
                q_norm=1 + self._random(c.head_dim) if norms else None,
                k_norm=1 + self._random(c.head_dim) if norms else None,
                attention_out=self._linear("attention_out", (c.hidden_size,), q, biases),
                mlp_norm=1 + self._random(c.hidden_size),
                gate_up=self._linear("gate_up", (c.intermediate_size,) * 2, c.hidden_size, biases),
                down=self._linear("down", (c.hidden_size,), c.intermediate_size, biases),
                window=window,
            )
            for window in windows
        ]
        self.final_norm = 1 + self._random(c.hidden_size)
        angle = torch.arange(c.max_position)[:, None] / 100.0 ** (torch.arange(c.head_dim // 2) / (c.head_dim // 2))
        self.rope = angle.cos().contiguous(), angle.sin().contiguous()
        self.native = Decoder(c, self.embedding, self.layers, self.final_norm)

    def _random(self, *shape: int) -> torch.Tensor:
        self.seed += 1
        return 0.2 * randn(*shape, seed=self.seed)

    def _linear(self, name: str, rows: tuple[int, ...], columns: int, bias: bool) -> Projection:
        forms = self.mixed.get(name, (self.form,) * len(rows))
        weights = tuple(packed(self._random(n, columns), form) for n, form in zip(rows, forms, strict=True))
        return Projection(weights, self._random(sum(rows)) if bias else None)

    def reference(self, hidden_state_layers: tuple[int, ...] = ()) -> LayerwiseDecoder:
        """The same weights as float32."""

        def plain(weight: Weight, columns: int) -> Weight:
            return Weight(values_of(weight, columns), weight.rows, "float32")

        def plain_linear(layer: Projection, columns: int) -> Projection:
            return Projection(tuple(plain(weight, columns) for weight in layer.weights), layer.bias)

        c = self.config
        columns = {
            "qkv": c.hidden_size,
            "attention_out": c.num_heads * c.head_dim,
            "gate_up": c.hidden_size,
            "down": c.intermediate_size,
        }
        layers = [
            dataclasses.replace(layer, **{n: plain_linear(getattr(layer, n), size) for n, size in columns.items()})
            for layer in self.layers
        ]
        return reference.decoder(c, plain(self.embedding, c.hidden_size), layers, self.final_norm, hidden_state_layers)

    def caches(self, trees, lengths, dtype=torch.float32) -> list[torch.Tensor]:
        """k_cache and v_cache [layers, pages, K, 64, D] with random prefixes, block_table, lengths."""
        c = self.config
        made = [make_cache(trees, lengths, c.num_kv_heads, c.head_dim, dtype, seed=7) for _ in self.layers]
        for i, cache in enumerate(made):
            cache.k.mul_(1 + i)  # every layer has a prefix of its own
        k, v = torch.stack([cache.k for cache in made]), torch.stack([cache.v for cache in made])
        return [k, v, made[0].block_table, made[0].lengths]


def tree_batch(trees, seed: int = 3) -> TreeBatch:
    count = sum(map(len, trees))
    tokens = torch.randint(0, CONFIG.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    starts = [sum(map(len, trees[:b])) for b in range(len(trees))]
    return TreeBatch.of([DraftTree(tokens[s : s + len(t)], t) for s, t in zip(starts, trees, strict=True)], CPU)


def step_by_step(
    model: Model, tree: TreeBatch, k_cache, v_cache, block_table, lengths, states: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """The pass as its native ops, called one after the other; states: gets the residual stream before every layer and
    behind the last."""
    states = [] if states is None else states
    c, rows = model.config, len(tree.tokens)
    residual = torch.empty(rows, c.hidden_size)
    gather_rows(model.embedding, tree.tokens, residual)
    normed, delta = torch.empty_like(residual), None
    q, attended = torch.empty(rows, c.num_heads, c.head_dim), torch.empty(rows, c.num_heads, c.head_dim)
    gated = torch.empty(rows, c.intermediate_size)
    for layer, keys, values in zip(model.layers, k_cache, v_cache, strict=True):
        rms_norm(residual, delta, layer.attention_norm, normed, c.rms_norm_eps)
        states.append(residual.clone())
        norms = (layer.q_norm, layer.k_norm)
        qkv = linear(normed, layer.qkv)
        cache = KVCacheView(keys, values, block_table, lengths, tree.row_start, 0)
        rope_cache(qkv, *model.rope, *norms, tree.depths, cache, q, c.rms_norm_eps)
        tree_attention(q, cache, tree.ancestors, attended, c.head_dim**-0.5, layer.window)
        delta = linear(attended.view(rows, -1), layer.attention_out)
        rms_norm(residual, delta, layer.mlp_norm, normed, c.rms_norm_eps)
        silu_mul(linear(normed, layer.gate_up), gated)
        delta = linear(gated, layer.down)
    rms_norm(residual, delta, model.final_norm, normed, c.rms_norm_eps)
    states.append(residual)
    return normed


MIXED = {"qkv": ("q4_min", "q4_min", "q8"), "gate_up": ("q8", "q4"), "down": ("float16",)}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("batch", ["trees", "chains", "roots"])
def test_a_pass_is_that_of_its_reference(options, batch):
    model = Model(**OPTIONS[options])
    trees = {"trees": TREES, "chains": [chain(70), chain(3)], "roots": [[-1]] * 3}[batch]
    lengths = [70, 0, 62, 130][: len(trees)]
    tree = tree_batch(trees)
    assert (tree.ancestors is None) == (batch != "trees")
    cache, expected_cache = model.caches(trees, lengths), model.caches(trees, lengths)
    hidden_states = model.native(tree, *cache, *model.rope)
    expected = model.reference()(tree, *expected_cache, *model.rope)
    torch.testing.assert_close(hidden_states, expected, rtol=1e-4, atol=1e-4)
    for got, wanted in zip(cache, expected_cache, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("form", FLOAT_FORMATS)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
def test_a_pass_of_any_float_weights_and_cache_is_that_of_its_reference(form, cache_dtype):
    model, tree = Model(form, biases=True), tree_batch(TREES)
    cache, expected_cache = (model.caches(TREES, LENGTHS, cache_dtype) for _ in range(2))
    hidden_states = model.native(tree, *cache, *model.rope)
    expected = model.reference()(tree, *expected_cache, *model.rope)
    # A key may fall on the other side of a rounding boundary of the cache.
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}[cache_dtype]
    torch.testing.assert_close(hidden_states, expected, rtol=tolerance, atol=tolerance)
    for got, wanted in zip(cache, expected_cache, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("form, most", [("q8", 0.03), ("q4", 0.03), ("q4_min", 0.03)])
def test_a_pass_of_quantised_weights_is_near_that_of_the_values_they_hold(form, most):
    model, tree = Model(form), tree_batch(TREES)
    hidden_states = model.native(tree, *model.caches(TREES, LENGTHS), *model.rope)
    expected = model.reference()(tree, *model.caches(TREES, LENGTHS), *model.rope)
    assert (hidden_states - expected).std() < most * expected.std()


@pytest.mark.usefixtures("wide_instruction_set")
@pytest.mark.parametrize("form", [*FORMATS, "mixed"])
@pytest.mark.parametrize("options", ["plain", "one head for all"])
def test_a_pass_is_its_ops_one_by_one_to_the_bit(form, options):
    mixed = MIXED if form == "mixed" else None
    model = Model("q8" if mixed else form, mixed=mixed, **OPTIONS[options])
    for trees, lengths in ((TREES, LENGTHS), ([chain(9)], [64])):
        tree, cache, expected_cache = tree_batch(trees), model.caches(trees, lengths), model.caches(trees, lengths)
        hidden_states = model.native(tree, *cache, *model.rope)
        assert torch.equal(hidden_states, step_by_step(model, tree, *expected_cache))
        for got, wanted in zip(cache, expected_cache, strict=True):
            assert torch.equal(got.nan_to_num(9), wanted.nan_to_num(9))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("hidden_state_layers", [(0,), (3,), (1, 2), (0, 1, 2, 3)])
def test_at_layers_is_the_residual_stream_before_the_layers_asked_for(form, hidden_state_layers):
    model, tree, states = Model(form), tree_batch(TREES), []
    expected = step_by_step(model, tree, *model.caches(TREES, LENGTHS), states)
    decoder = Decoder(model.config, model.embedding, model.layers, model.final_norm, hidden_state_layers)
    at_layers, other = (
        torch.full((len(tree.tokens), len(hidden_state_layers), CONFIG.hidden_size), torch.nan) for _ in range(2)
    )
    assert torch.equal(decoder(tree, *model.caches(TREES, LENGTHS), *model.rope, at_layers), expected)
    assert torch.equal(at_layers, torch.stack([states[layer] for layer in hidden_state_layers], 1))
    if form == "float32":
        model.reference(hidden_state_layers)(tree, *model.caches(TREES, LENGTHS), *model.rope, other)
        torch.testing.assert_close(at_layers, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMATS)
def test_inputs_take_the_place_of_the_tokens_embeddings(form):
    model, tree = Model(form), tree_batch(TREES)
    inputs = torch.empty(len(tree.tokens), CONFIG.hidden_size)
    gather_rows(model.embedding, tree.tokens, inputs)
    expected = model.native(tree, *model.caches(TREES, LENGTHS), *model.rope)
    fed = Decoder(model.config, None, model.layers, model.final_norm)
    assert torch.equal(fed(tree, *model.caches(TREES, LENGTHS), *model.rope, inputs=inputs), expected)
    if form == "float32":
        found = model.reference()(tree, *model.caches(TREES, LENGTHS), *model.rope, inputs=inputs)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMATS)
def test_a_first_layer_without_a_norm_reads_its_inputs_as_they_are(form):
    """As rows do that a norm of ones leaves as they are: their mean square is one."""
    model, tree = Model(form), tree_batch(TREES)
    inputs = randn(len(tree.tokens), CONFIG.hidden_size, seed=9)
    inputs = inputs / inputs.square().mean(-1, keepdim=True).sqrt()
    hidden_states = []
    for norm in (torch.ones(CONFIG.hidden_size), None):
        layers = [dataclasses.replace(model.layers[0], attention_norm=norm), *model.layers[1:]]
        decoder = Decoder(model.config, None, layers, model.final_norm)
        hidden_states.append(decoder(tree, *model.caches(TREES, LENGTHS), *model.rope, inputs=inputs))
    difference, scale = (hidden_states[0] - hidden_states[1]).abs().max(), hidden_states[0].abs().max()
    assert difference < (1e-4 if form in FLOAT_FORMATS else 0.05) * scale
    twice = decoder(tree, *model.caches(TREES, LENGTHS), *model.rope, inputs=2 * inputs)
    assert (twice - hidden_states[1]).abs().max() > 0.1 * scale  # which a norm would not tell apart


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("columns", [40, 80])
def test_the_first_layer_may_read_rows_of_its_own(form, columns):
    """Its q, k and v are those rows' alone, the residual stream is that of the rows that enter."""
    model, tree = Model(form), tree_batch(TREES)
    c, rows = model.config, len(tree.tokens)
    qkv = model._linear("qkv", (c.num_heads * c.head_dim, *(c.num_kv_heads * c.head_dim,) * 2), columns, False)
    layers = [dataclasses.replace(model.layers[0], attention_norm=None, qkv=qkv), *model.layers[1:]]
    inputs, first = randn(rows, c.hidden_size, seed=9), randn(rows, columns, seed=8)
    arguments = {"inputs": inputs, "first_inputs": first, "at_layers": torch.empty(rows, 1, c.hidden_size)}
    decoders = [make(c, None, layers, model.final_norm, (0,), columns) for make in (Decoder, by_native_ops)]
    cache, expected_cache = (model.caches(TREES, LENGTHS) for _ in range(2))
    hidden_states = decoders[0](tree, *cache, *model.rope, **arguments)
    assert torch.equal(arguments["at_layers"][:, 0], inputs)
    expected = decoders[1](tree, *expected_cache, *model.rope, **arguments)
    # rows are quantised here and there
    tolerance = 1e-5 if form in FLOAT_FORMATS else 1e-4
    torch.testing.assert_close(hidden_states, expected, rtol=tolerance, atol=tolerance)
    other = decoders[0](tree, *cache, *model.rope, **{**arguments, "first_inputs": 2 * first})
    assert (other - hidden_states).abs().max() > 0.01


def by_native_ops(*arguments, **named):
    return LayerwiseDecoder(native.layer, *arguments, **named)


@pytest.mark.parametrize("make", [Decoder, by_native_ops])
def test_multipliers_are_those_of_weights_that_contain_them(make):
    """An epsilon that counts: the residual stream is kept divided. What a pass writes of it has its true size."""
    model, scaled = (Model(config={"rms_norm_eps": 0.05}) for _ in range(2))
    scaled.embedding.data.mul_(3.0)
    for layer in scaled.layers:
        layer.qkv.weights[0].data.mul_(0.11 * CONFIG.head_dim**0.5)  # of q alone
        layer.attention_out.weights[0].data.mul_(0.22)
        layer.down.weights[0].data.mul_(0.22)
    tree, results = tree_batch(TREES), []
    factors = Multipliers(embedding=3.0, attention=0.11, residual=0.22)
    for each, used in ((model, factors), (scaled, PLAIN), (model, PLAIN)):
        decoder = make(each.config, each.embedding, each.layers, each.final_norm, (0, 1, 2, 3), multipliers=used)
        at_layers = torch.empty(len(tree.tokens), 4, CONFIG.hidden_size)
        results.append((decoder(tree, *each.caches(TREES, LENGTHS), *each.rope, at_layers), at_layers))
    for found, expected, without in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert (found - without).abs().max() > 0.1


@pytest.mark.parametrize("first_node", [1, 7])
@pytest.mark.parametrize("make", [Decoder, by_native_ops])
def test_levels_one_after_the_other_are_the_whole_tree(make, first_node):
    """Nodes before `first_node` in a pass of their own, then the others behind them."""
    trees, lengths = [random_tree(20), comb(40), chain(7)], [70, 0, 62]
    model, tree = Model("q8", windows=(0, 16, 70)), tree_batch(trees)
    decoder = make(model.config, model.embedding, model.layers, model.final_norm)
    cache, expected_cache = (model.caches(trees, lengths) for _ in range(2))
    expected = decoder(tree, *expected_cache, *model.rope)
    later, later_start = later_rows(tree.row_start, first_node)
    first = torch.tensor([row for row in range(len(tree.tokens)) if row not in later.tolist()])
    first_start = torch.arange(len(trees) + 1, dtype=torch.int32) * first_node
    for rows, start, before in ((first, first_start, 0), (later, later_start, first_node)):
        part = TreeBatch(*(x[rows] for x in (tree.tokens, tree.parents, tree.depths)), start, tree.ancestors[rows], 0)
        assert torch.equal(decoder(part, *cache, *model.rope, first_node=before), expected[rows])
    for got, wanted in zip(cache, expected_cache, strict=True):
        assert torch.equal(got.nan_to_num(9), wanted.nan_to_num(9))


@pytest.mark.parametrize("make", [Decoder, by_native_ops])
def test_a_pass_may_leave_it_at_keys_and_values(make):
    model, tree = Model("q8"), tree_batch(TREES)
    decoder = make(model.config, model.embedding, model.layers, model.final_norm, (3,))
    cache, expected_cache = (model.caches(TREES, LENGTHS) for _ in range(2))
    decoder(tree, *expected_cache, *model.rope, torch.empty(len(tree.tokens), 1, CONFIG.hidden_size))
    assert decoder(tree, *cache, *model.rope, only_cache=True) is None
    for got, wanted in zip(cache, expected_cache, strict=True):
        assert torch.equal(got.nan_to_num(9), wanted.nan_to_num(9))


@pytest.mark.usefixtures("wide_instruction_set")
@pytest.mark.parametrize("form", [*FORMATS, "mixed"])
def test_a_node_has_the_bits_of_its_token_in_plain_decoding(form):
    """The rows of a batch of trees, on any number of threads, against one row per pass along the path of each node."""
    mixed = MIXED if form == "mixed" else None
    model = Model("q8" if mixed else form, mixed=mixed, biases=True, windows=(0, 16, 0))
    trees, lengths = [random_tree(9, 4), comb(12)], [62, 5]
    tree = tree_batch(trees)
    _C.set_num_threads(1)
    hidden_states = model.native(tree, *model.caches(trees, lengths), *model.rope)
    for threads in (2, 3):
        _C.set_num_threads(threads)
        assert torch.equal(model.native(tree, *model.caches(trees, lengths), *model.rope), hidden_states)
    _C.set_num_threads(1)
    for b, parents in enumerate(trees):
        first = int(tree.row_start[b])
        for node in (1, len(parents) // 2, len(parents) - 1):
            k, v, table, _ = model.caches(trees, lengths)
            path = path_to(parents, node)
            for depth, step in enumerate(path):
                root = TreeBatch.chains([[int(tree.tokens[first + step])]], CPU)
                length = torch.tensor([lengths[b] + depth], dtype=torch.int32)
                plain = model.native(root, k, v, table[b : b + 1].contiguous(), length, *model.rope)
                assert torch.equal(plain[0], hidden_states[first + step]), f"node {step} of request {b}"


@pytest.mark.parametrize("form", ["float32", "q8", "q4_min"])
def test_a_request_has_its_bits_alone_and_in_a_batch(form):
    model, tree = Model(form), tree_batch(TREES)
    hidden_states = model.native(tree, *model.caches(TREES, LENGTHS), *model.rope)
    for b, parents in enumerate(TREES):
        first = int(tree.row_start[b])
        k, v, table, lengths = model.caches(TREES, LENGTHS)
        own = slice(first, first + len(parents))
        alone = TreeBatch.of([DraftTree(tree.tokens[own].tolist(), parents)], CPU)
        got = model.native(alone, k, v, table[b : b + 1].contiguous(), lengths[b : b + 1], *model.rope)
        assert torch.equal(got, hidden_states[own])


@pytest.mark.parametrize("form", FORMATS)
def test_instruction_sets_agree_as_far_as_their_arithmetic_does(form):
    model, tree, before = Model(form), tree_batch(TREES), _C.instruction_set()
    results = {}
    for name in _C.instruction_sets:
        _C.set_instruction_set(name)
        results[name] = model.native(tree, *model.caches(TREES, LENGTHS), *model.rope)
    _C.set_instruction_set(before)
    portable = results["portable"]
    for name, result in results.items():
        assert (result - portable).std() < (0.02 if form in QUANTISED else 1e-5) * portable.std(), name
    for wide, narrow in (("avxvnni", "avx2"), ("avx512vnni", "avx512")):  # they differ in integer products only
        if wide in results:
            assert torch.equal(results[wide], results[narrow])


def test_an_empty_batch_has_no_hidden_states():
    model = Model("q8")
    k, v, *_ = model.caches([[-1]], [0])
    table, lengths = torch.empty(0, 1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    hidden_states = model.native(TreeBatch.of([], CPU), k, v, table, lengths, *model.rope)
    assert hidden_states.shape == (0, CONFIG.hidden_size)


def test_the_workspace_grows_with_the_rows_and_is_what_the_pass_asks_for():
    c = native.decoder(CONFIG, Model().embedding, Model("q8").layers, Model().final_norm).native
    sizes = [c.workspace_bytes(rows) for rows in (0, 1, 2, 64, 1000)]
    assert sizes[0] == 0 and sizes == sorted(set(sizes))


def test_hidden_states_that_are_not_finite_stay_with_their_request():
    model, trees = Model("q8"), [chain(4), chain(4)]
    tree, caches = tree_batch(trees), model.caches(trees, [10, 10])
    clean = model.native(tree, *model.caches(trees, [10, 10]), *model.rope)
    page = int(caches[2][0, 0])
    caches[1][0, page, :, 3] = torch.nan  # a value of the first request's prefix, in the first layer
    hidden_states = model.native(tree, *caches, *model.rope)
    assert hidden_states[:4].isnan().all() and torch.equal(hidden_states[4:], clean[4:])
