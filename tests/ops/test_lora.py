"""add_lora beside its reference, on the CPU and by the CUDA kernels, and what the bits of a row depend on."""

import pytest
import torch

from specengine import _C
from specengine.ops.lora.add_lora import add_lora, add_lora_reference
from specengine.ops.lora.matrices import LoraProjection, stack_lora
from tests.backends import CUDA_BACKENDS, Backend, cuda_backend_of
from tests.ops.cases import randn

ROWS = (17, 5, 30, 2)  # of the matrices of a projection, as many as one may have
COLUMNS = 300  # more than one chunk
RANKS = ((3, 20, None, 2), (16, None, 1, None), (None, 33, 16, 17))  # by adapter and matrix
STARTS = (0, 1, 8, 8, 15, 16, 30)
CHOSEN = (1, 0, 2, -1, 2, 1)


@pytest.fixture(params=["cpu", *CUDA_BACKENDS])
def backend(request, monkeypatch) -> Backend:
    if request.param == "cpu":
        return Backend("cpu", torch.device("cpu"))
    return cuda_backend_of(request, monkeypatch)


def projection(device, format="float32", adapters=(0, 1, 2)) -> LoraProjection:
    modules, first = [], 0
    for matrix, rows in enumerate(ROWS):
        own = [RANKS[adapter][matrix] for adapter in adapters]
        seeds = [10 * matrix + adapter for adapter in adapters]
        matrices = [
            rank and (randn(rank, COLUMNS, seed=seed), randn(rows, rank, seed=100 + seed), 0.5 + seed)
            for rank, seed in zip(own, seeds, strict=True)
        ]
        modules.append(stack_lora(matrices, format, first, device))
        first += rows
    return LoraProjection(tuple(modules))


def added(backend, x, starts, chosen, format="float32") -> torch.Tensor:
    out = randn(30, sum(ROWS), seed=3)[: len(x)].clone()
    out[0, 0] = -0.0
    given = [backend.put(torch.tensor(each, dtype=torch.int32)) for each in (starts, chosen)]
    out = backend.put(out)
    add_lora(backend.put(x), projection(backend.device, format), *given, out)
    return out.cpu()


@pytest.mark.parametrize("format", ["float32", "bfloat16", "float16"])
def test_it_adds_what_the_reference_adds(backend, format):
    x = randn(30, COLUMNS)
    expected = randn(30, sum(ROWS), seed=3)
    starts, chosen = (torch.tensor(each, dtype=torch.int32) for each in (STARTS, CHOSEN))
    add_lora_reference(x, projection(torch.device("cpu"), format), starts, chosen, expected)
    got = added(backend, x, STARTS, CHOSEN, format)
    got[0, 0] = expected[0, 0]
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-3)
    untouched = randn(30, sum(ROWS), seed=3)
    assert not torch.allclose(got[0], untouched[0])  # the reference adds something to compare


def test_a_row_has_the_bits_that_it_has_alone(backend):
    x, whole = randn(30, COLUMNS), None
    for starts, chosen in ((STARTS, CHOSEN), ((0, 30), (2,)), ((0, 30), (1,)), ((0, 30), (0,))):
        whole = added(backend, x, starts, chosen)
        for row in (0, 3, 14, 20, 29):
            request = next(b for b in range(len(chosen)) if starts[b] <= row < starts[b + 1])
            out = backend.put(randn(30, sum(ROWS), seed=3)[row : row + 1].clone())
            if row == 0:
                out[0, 0] = -0.0
            alone = [backend.put(torch.tensor(each, dtype=torch.int32)) for each in ((0, 1), (chosen[request],))]
            add_lora(backend.put(x[row : row + 1]), projection(backend.device), *alone, out)
            assert torch.equal(out.cpu()[0], whole[row])


def test_rows_without_an_adapter_and_padding_stay_as_they_are(backend):
    x, before = randn(30, COLUMNS), randn(30, sum(ROWS), seed=3)
    before[0, 0] = -0.0
    out = added(backend, x, STARTS, (-1, -1, -1, 0, -1, -1))
    kept = [*range(8), *range(15, 30)]
    assert torch.equal(out[kept].view(torch.int32), before[kept].view(torch.int32))
    assert not torch.equal(out[8:15], before[8:15])
    if backend.name != "cpu":  # rows behind the last request, and adapters that are none
        out = added(backend, x, (0, 4, 8, 8, 9, 9, 20), (-1, 7, 0, 3, 0, -1))
        assert torch.equal(out, before)


def test_an_adapter_has_the_bits_that_it_has_without_the_others(backend):
    x = randn(7, COLUMNS)
    for adapter in range(3):
        outs = []
        for adapters, number in (((0, 1, 2), adapter), ((adapter, adapter), 1), ((adapter,), 0)):
            if adapter == 2 and len(adapters) < 3:
                continue  # it leaves one matrix alone, which no other adapter here has
            modules = projection(torch.device("cpu"), adapters=adapters) if len(adapters) == 3 else None
            modules = modules or LoraProjection(
                tuple(
                    stack_lora([each] * len(adapters), "float32", first, backend.device)
                    for each, first in _matrices(adapter)
                )
            )
            out = backend.put(torch.zeros(7, sum(ROWS)))
            given = [backend.put(torch.tensor(each, dtype=torch.int32)) for each in ((0, 7), (number,))]
            add_lora(backend.put(x), _on(modules, backend), *given, out)
            outs.append(out.cpu())
        assert all(torch.equal(each, outs[0]) for each in outs)


def _matrices(adapter):
    first = 0
    for matrix, rows in enumerate(ROWS):
        rank, seed = RANKS[adapter][matrix], 10 * matrix + adapter
        if rank:
            yield (randn(rank, COLUMNS, seed=seed), randn(rows, rank, seed=100 + seed), 0.5 + seed), first
        first += rows


def _on(modules, backend):
    if backend.device.type == "cpu":
        return modules
    put = backend.put
    return LoraProjection(
        tuple(type(m)(put(m.a), put(m.b), put(m.ranks), put(m.scales), m.first, m.rows) for m in modules.modules)
    )


def test_every_instruction_set_with_fused_multiply_adds_gives_the_same_bits():
    used, found = _C.instruction_set(), {}
    backend = Backend("cpu", torch.device("cpu"))
    try:
        for name in ("avx2", "avxvnni", "avx512", "avx512vnni"):
            try:
                _C.set_instruction_set(name)
            except ValueError:
                continue  # not on this machine
            found[name] = added(backend, randn(30, COLUMNS), STARTS, CHOSEN)
    finally:
        _C.set_instruction_set(used)
    outs = list(found.values())
    assert all(torch.equal(each, outs[0]) for each in outs)


def test_faulty_arguments_are_refused():
    x, out = randn(4, COLUMNS), torch.zeros(4, sum(ROWS))
    ours = projection(torch.device("cpu"))

    def call(starts=(0, 4), chosen=(0,), x=x, out=out):
        add_lora(x, ours, *(torch.tensor(each, dtype=torch.int32) for each in (starts, chosen)), out)

    call()
    for message, faults in {
        "adapters: entry 0 is 3, expected -1 to 2": {"chosen": (3,)},
        "adapters: entry 0 is -2": {"chosen": (-2,)},
        "row_start: expected to run from 0 to 4, got 0 to 3": {"starts": (0, 3)},
        "row_start: decreases": {"starts": (0, 5, 4), "chosen": (0, 0)},
        "x: 299 columns, the adapters read 300": {"x": randn(4, 299)},
        "out: adapters write past 51 rows": {"out": torch.zeros(4, 51)},
    }.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            call(**faults)


def test_values_too_large_for_the_format_are_refused():
    with pytest.raises(ValueError, match="too large for float16"):
        stack_lora([(torch.full((4, 32), 1e6), torch.zeros(8, 4), 1.0)], "float16", 0, torch.device("cpu"))
