"""The kernels of a pass of the target, of verification and of drafters, in the shapes of Llama-3.1-8B."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from specengine._C import MOST_FUSED_ROWS
from specengine.bench.gpu_model.constants import Gpu
from specengine.bench.gpu_model.counts import CHAIN, EAGLE_VOCABULARY, VARIANTS, launches
from specengine.bench.gpu_model.roofline import LAST_BLOCK_ROUNDS, KernelTime, kernel_time, library_time
from specengine.bench.kernels.shapes import LLAMA_8B

SHAPES = LLAMA_8B
PREFIX = 2048
MOST_ROWS = 64  # of a product by the engine's own kernel
EAGLE_INPUTS = 2 * SHAPES.hidden
EAGLE_FUSED = 3 * SHAPES.hidden
ONE_PASS_LAYERS = 5  # of the target's shape: 1.1 billion parameters
ONE_PASS_ROWS = 16
# The engine's kernels around a draft: pair_rows, gather_rows and keep_pairs; of DFlash also expand_levels and
# select_nodes. The simulator has not counted them; they take as long as a small kernel of PyTorch's.
EAGLE_SMALL, ONE_PASS_SMALL = 3, 5
PREFETCHED_SHARE = 8  # csrc/cuda/attention/prefetch.cuh: an eighth of L2, and lines of a thread
PREFETCHED_LINES, LINE = 8, 128


@dataclass(frozen=True)
class Step:
    """Holds kernels that run one after the other `count` times.  kernels: empty for PyTorch's, which take `us`."""

    label: str
    count: int
    kernels: tuple[KernelTime, ...] = ()
    torch_us: float = 0.0

    @property
    def us(self) -> float:
        """Microseconds of all `count` times."""
        return self.count * (self.torch_us + sum(kernel.us for kernel in self.kernels))

    @property
    def launches(self) -> int:
        """Kernels that start."""
        return self.count * max(1, len(self.kernels))


def linear(gpu: Gpu, rows: int, n: int, c: int, library: bool = True, in_l2: float = 0.0) -> KernelTime:
    """Models x[rows, c] @ weight[n, c]^T by the fastest variant of the kernel or by cuBLAS, as the engine chooses.

    library: whether cuBLAS is a choice; above MOST_ROWS it is the only one.
    in_l2: bytes of the weight that a kernel before has brought to L2.
    """
    times = [library_time(rows, n, c, gpu, -in_l2)] if library or rows > MOST_ROWS else []
    if rows <= MOST_ROWS:
        sizes = [{"rows": rows, "n": n, "c": c, "variant": variant} for variant in VARIANTS]
        times += [kernel_time(launch, gpu, -in_l2) for size in sizes for launch in launches("linear", size)]
    return min(times, key=lambda time: time.us)


def op(gpu: Gpu, name: str, **size: int) -> tuple[KernelTime, ...]:
    """Models the launches of an op."""
    return tuple(kernel_time(launch, gpu) for launch in launches(name, size))


def attention(gpu: Gpu, upcoming: int, **size: int) -> tuple[tuple[KernelTime, ...], float]:
    """Models the launches of attention, which prefetch a weight of `upcoming` bytes; and how many bytes of it."""
    first, *others = launches("tree_attention", size)
    by_threads = first.blocks * first.threads * PREFETCHED_LINES * LINE
    prefetched = float(min(upcoming, gpu.l2_bytes // PREFETCHED_SHARE, by_threads))
    return (kernel_time(first, gpu, prefetched), *(kernel_time(launch, gpu) for launch in others)), prefetched


def fused(gpu: Gpu, product: KernelTime, behind: tuple[KernelTime, ...], rows: int, columns: int) -> KernelTime | None:
    """Models a product by our kernel that does what the ops `behind` it do; None where it does not.

    columns: of float32 that its last blocks read of a row, after three latencies; 0: they wait for nobody.
    """
    if rows > MOST_FUSED_ROWS or product.launch is None:
        return None
    alone = LAST_BLOCK_ROUNDS * gpu.l2_latency + 4 * rows * columns / gpu.multiprocessor_l2 if columns else 0.0
    name = "+".join([product.kernel, *(kernel.kernel for kernel in behind)])
    return replace(
        product,
        kernel=name,
        us=product.us + alone,
        dram_bytes=product.dram_bytes + sum(kernel.dram_bytes for kernel in behind),
        l2_bytes=product.l2_bytes + sum(kernel.l2_bytes for kernel in behind),
        last_block_us=product.last_block_us + alone,
    )


def layers(
    gpu: Gpu,
    nodes: int,
    batch: int,
    count: int,
    inputs: int = SHAPES.hidden,
    library: bool = True,
    prefetch: bool = True,
) -> list[Step]:
    """Models decoder layers.  nodes: rows of a request.  inputs: columns that qkv reads.  library: see `linear`.

    prefetch: whether attention brings a part of `o` to L2.
    """
    rows = nodes * batch
    n = {name: size for name, size in SHAPES.linears.items() if name != "head"}
    weight = 2 * n["o"][0] * n["o"][1]
    attends, in_l2 = attention(gpu, weight if prefetch else 0, nodes=nodes, batch=batch, prefix=PREFIX)

    def product(name: str, behind: str, columns: int, in_l2: float = 0.0, **size: int) -> Step:
        """A product and the op behind it, in the faster of one launch and two."""
        shape = (n[name][0], inputs if name == "qkv" else n[name][1])
        separate = (linear(gpu, rows, *shape, library, in_l2), *op(gpu, behind, **size))
        one = (
            fused(gpu, linear(gpu, rows, *shape, False, in_l2), separate[1:], rows, columns)
            if rows <= MOST_ROWS
            else None
        )
        pays = one is not None and one.us < sum(kernel.us for kernel in separate)
        return Step(name, count, (one,) if one is not None and pays else separate)

    return [
        product("qkv", "rope_cache", SHAPES.head_dim, nodes=nodes, batch=batch),
        Step("tree_attention", count, attends),
        product("o", "rms_norm", SHAPES.hidden, in_l2, rows=rows),
        product("gate_up", "silu_mul", 0, rows=rows),
        product("down", "rms_norm", SHAPES.hidden, rows=rows),
    ]


def target_pass(gpu: Gpu, nodes: int, batch: int = 1, library: bool = True) -> list[Step]:
    """Models a pass of the target with its head: logits of every row.  Arguments: see `layers`."""
    rows = nodes * batch
    return [
        Step("gather_norm", 1, op(gpu, "rms_norm", rows=rows)),  # not counted itself
        *layers(gpu, nodes, batch, SHAPES.layers, library=library),
        Step("head", 1, (linear(gpu, rows, *SHAPES.linears["head"], library),)),
    ]


def verification(gpu: Gpu, nodes: int, batch: int, chains: bool = False) -> list[Step]:
    """Models greedy verification, compaction and the commit. PyTorch copies the record.  chains: paths lie in place."""
    return [
        Step("verify_tree", 1, op(gpu, "verify_tree", nodes=nodes, batch=batch, vocabulary=SHAPES.vocab)),
        *([Step("compact_kv", 1, op(gpu, "compact_kv", nodes=nodes, batch=batch))] if nodes > 1 and not chains else []),
        Step("commit_tokens", 1, op(gpu, "commit_tokens", nodes=nodes, batch=batch)),
        _small(gpu, 1, "PyTorch"),
    ]


def lookup(gpu: Gpu, batch: int) -> list[Step]:
    """Models what makes trees of one node for plain decoding."""
    return [Step("draft_lookup", 1, op(gpu, "draft_lookup", nodes=1, batch=batch))]


def eagle_chain(gpu: Gpu) -> list[Step]:
    """Models EAGLE-3's drafter at batch 1: its first level has the rows of the last cycle, each later one has one."""
    first = CHAIN + 1
    steps = [Step("EAGLE fc", 1, (linear(gpu, first, SHAPES.hidden, EAGLE_FUSED),))]
    for rows, count in ((first, 1), (1, CHAIN - 1)):
        steps += [
            Step("EAGLE join_rows", count, op(gpu, "rms_norm", rows=rows)),  # not counted itself: two norms at once
            *_named("EAGLE", layers(gpu, rows, 1, count, EAGLE_INPUTS)),
            Step("EAGLE head", count, (linear(gpu, 1, EAGLE_VOCABULARY, SHAPES.hidden),)),
            Step("EAGLE expand_level", count, op(gpu, "expand_level", vocabulary=EAGLE_VOCABULARY)),
        ]
    around = _small(gpu, EAGLE_SMALL, "EAGLE small kernels")
    return [*steps, Step("EAGLE select_nodes", 1, op(gpu, "select_nodes", nodes=first)), around]


def one_pass_drafter(gpu: Gpu) -> list[Step]:
    """Models a drafter of one pass that shares the target's head, at batch 1."""
    head = SHAPES.linears["head"]
    return [
        Step("drafter gather_rows", 1, op(gpu, "gather_rows", rows=ONE_PASS_ROWS)),
        *_named("drafter", layers(gpu, ONE_PASS_ROWS, 1, ONE_PASS_LAYERS)),
        Step("drafter rms_norm", 1, op(gpu, "rms_norm", rows=ONE_PASS_ROWS)),
        Step("drafter head", 1, (linear(gpu, ONE_PASS_ROWS, *head),)),
        _small(gpu, ONE_PASS_SMALL, "drafter small kernels"),
    ]


def total(steps: Iterable[Step]) -> float:
    """Returns the microseconds of all steps."""
    return sum(step.us for step in steps)


def _named(prefix: str, steps: Iterable[Step]) -> list[Step]:
    return [Step(f"{prefix} {step.label}", step.count, step.kernels, step.torch_us) for step in steps]


def _small(gpu: Gpu, count: int, label: str) -> Step:
    return Step(label, count, torch_us=gpu.torch_kernel)
