"""The steps of a run on a GPU, in their order: what is most likely to fail comes first, then the measurements."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import targets
from core_build import CORE
from targets import Reading, both, cycle_of, listed, without_goals

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
RESULTS = "{results}"  # in a command: the JSON file that the step writes
QUESTIONS = "{questions}"  # in a command: a file with one question of random tokens
CHECKS, TESTS, BENCHES = "checks", "tests", "benches"  # groups; each fits into a run of 570 seconds on an H200
SEVEN = "synthetic:0.81,0.80,0.79,0.78,0.77,0.76,0.75"  # FastEagle's paper, by depth
TREE = f"{SEVEN.rpartition(',')[0]},k=10,cost=fasteagle"  # 61 nodes
WIDE = f"{SEVEN},k=18,cost=fasteagle"  # 127 nodes
CHAIN = f"{SEVEN},cost=eagle3"
SWITCHES = {"prefetch": "SPECENGINE_PREFETCH", "fusion": "SPECENGINE_FUSE"}  # off in steps of their own
PROCESSES = 6  # of tests on one GPU: each has a CUDA context of its own
ON_DEVICE = re.compile(r"cuda_backend|device_engine|backend\.put|backend\.device|mark\.gpu")


@dataclass(frozen=True)
class Step:
    """Holds a step: its command, and what its results say.

    seconds: at most.  stand_in: what a dry run does instead.
    """

    name: str
    group: str
    says: str
    seconds: int
    command: tuple[str, ...]
    stand_in: str = ""
    reading: Reading = listed


@dataclass(frozen=True)
class Sizes:
    """Holds models, device and sizes.

    model: of the measured cycles.  small: of the engines that are checked.  tokens: of prompts, and before a pass.
    new: tokens per answer.  rows: of passes.  prompts: ROWS:PREFIX of passes over prompts.
    """

    model: str
    small: str
    device: str
    tokens: int
    new: int
    rows: str
    repetitions: int
    prompts: tuple[str, ...]

    @property
    def dry(self) -> bool:
        """Whether there is no GPU."""
        return self.device == "cpu"


PROMPTS = tuple(f"{rows}:{prefix}" for prefix in (0, 1024, 4096, 16384) for rows in (1024, 256, 64))
GPU = Sizes(
    "llama-3.1-8b",
    "llama-3.2-1b",
    "cuda",
    tokens=2048,
    new=256,
    rows="1,8,16,32,60,128",
    repetitions=3,
    prompts=PROMPTS,
)
CPU = Sizes("tiny-llama3", "tiny-llama3", "cpu", tokens=128, new=24, rows="1,8,60", repetitions=1, prompts=("70:9",))


def steps(dry: bool) -> list[Step]:
    """Returns all steps. dry: those that stand in for them on a machine without a GPU."""
    sizes = CPU if dry else GPU
    return [*_checks(sizes), _tests(sizes), *_benches(sizes)]


def device_tests() -> list[str]:
    """Returns the test files that run on a device; others may need packages that are not installed."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path) for path in found if ON_DEVICE.search(path.read_text(encoding="utf-8"))]


def _checks(s: Sizes) -> list[Step]:
    dry = ("--dry",) if s.dry else ()
    networks = [f"{kind}:random:{s.small}@{size}" for kind in ("eagle3", "fasteagle", "dflash") for size in (1, 2)]
    networks += [f"draft_model:self,layers=2,length=3@{size}" for size in (1, 2)]

    def check(name: str, says: str, seconds: int, *command: str, stand_in: str) -> Step:
        return Step(name, CHECKS, says, seconds, (sys.executable, *command), stand_in)

    def engines(name: str, says: str, *cases: str) -> Step:
        command = (str(HERE / "engines.py"), RESULTS, f"random:{s.small}", s.device, *cases)
        return check(name, says, 120, *command, stand_in="on the CPU, which captures nothing")

    def sanitizer(tool: str, says: str, stand_in: str) -> Step:
        command = (str(HERE / "sanitizer.py"), tool, RESULTS, *dry)
        limit = 900 if s.dry else 240  # the simulator is built on first use
        return check(tool, says, limit, *command, stand_in=stand_in)

    sass: tuple[str, ...] = ("-m", "pytest", "-q", "-n", "0", "-m", "", str(ROOT / "tests/bench/test_sass.py"))
    if not s.dry:
        sass = (str(ROOT / ".ci/sass"), str(CORE))
    simulator = "the same tests on the execution simulator, which finds races too"
    return [
        check(
            "build",
            "versions and tools; builds the core with nvcc",
            300,
            str(HERE / "core_build.py"),
            RESULTS,
            *dry,
            stand_in="configures the build, compiles nothing",
        ),
        check("sass", "the machine code of every kernel", 60, *sass, stand_in="the reader's tests"),
        engines("one-key", "an engine with one captured cycle", "none@1"),
        engines("two-keys", "an engine with two captured cycles", "none@2"),
        engines(
            "more-keys",
            "more batch sizes and widths, and the fast kernels, whose text may be another one",
            "none@4",
            "prompt_lookup,nodes=8@1",
            "prompt_lookup@4",
            "not-strict:prompt_lookup@2",
        ),
        engines("networks", "drafting networks", *networks),
        engines("two-engines", "an engine built while another one generates", "beside"),
        sanitizer("memcheck", "memory accesses, by one small test per kernel", simulator),
        sanitizer("racecheck", "races in shared memory, by the same tests", "skipped: memcheck's finds races too"),
        check(
            "ncu",
            "hardware counters of linear layers and attention",
            120,
            str(HERE / "ncu.py"),
            RESULTS,
            s.device,
            stand_in="the calls alone",
        ),
    ]


def _tests(s: Sizes) -> Step:
    options = ["-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    program = [str(HERE / "run_tests.py"), RESULTS]
    chosen = ["-n", str(PROCESSES), "-m", "gpu and not full and not slow"]
    if s.dry:
        program = ["-m", "pytest"]
        chosen = ["-m", "sim and not full and not slow", "--collect-only"]
    command = (sys.executable, *program, "-q", *options, *chosen, *device_tests())
    return Step("tests", TESTS, "tests of kernels and cycles", 300, command, "collected for the simulator, not run")


def _benches(s: Sizes) -> list[Step]:
    common = ("--model", f"random:{s.model}", "--device", s.device, "--repetitions", str(s.repetitions))
    sizes = ("--questions", QUESTIONS, "--prompt-tokens", str(s.tokens), "--max-new-tokens", str(s.new), "--ignore-eos")
    bench = (sys.executable, "-m", "specengine.bench", "--json", RESULTS)

    def cycles(name: str, says: str, reading: Reading, drafters: str, *options: str) -> Step:
        command = (*bench, *common, *sizes, "--drafters", drafters, *options)
        return Step(name, BENCHES, says, 120, command, "a tiny model on the CPU", reading)

    def without(what: str, step: Step) -> Step:
        """The step with a switch of the environment off."""
        command = ("env", f"{SWITCHES[what]}=0", *step.command)
        reading = without_goals(step.reading, f"no {what}")
        return replace(
            step, name=f"{step.name}-no-{what}", says=f"{step.says}, no {what}", command=command, reading=reading
        )

    eagle = f"eagle3:random:{s.model},nodes=8,levels=7,top_k=1,adaptive=false"
    fasteagle = f"fasteagle:random:{s.model},top_k=10,adaptive=false"
    dflash = f"dflash:random:{s.model},nodes=128,adaptive=false"
    trees = both(
        cycle_of("FastEagle, tree of 71", fasteagle, None), cycle_of("FastEagle's cost, tree of 61", TREE, None)
    )
    kernels: tuple[str, ...] = (*bench, "--kernels", "--device", s.device)
    if s.dry:
        kernels = (sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", str(ROOT / "tests/bench/test_kernels.py"))
    plain = cycles("plain", "plain decoding", targets.plain, "none")
    wide = cycles(
        "wide",
        "127 nodes by a drafter of one pass, of 1.6 B parameters where the goal has 1 B",
        cycle_of("127 nodes, one-pass drafter", WIDE, 5.0),
        WIDE,
    )
    return [
        plain,
        Step(
            "cycle-kernels",
            BENCHES,
            "the kernels of captured cycles and their times",
            120,
            (
                *(sys.executable, str(HERE / "cycle_kernels.py"), RESULTS, f"random:{s.model}", s.device),
                *(str(s.tokens), "24", "none@1", f"{eagle}@1", f"{WIDE}@1", "none@64"),
            ),
            "generates and profiles nothing",
        ),
        Step(
            "prefill",
            BENCHES,
            "passes over prompts: the host, and attention by the kernel beside PyTorch's",
            120,
            (
                *(sys.executable, str(HERE / "prompt_attention.py"), RESULTS, f"random:{s.model}", s.device),
                *(str(s.repetitions), *s.prompts),
            ),
            "a tiny model on the CPU",
            targets.prompts,
        ),
        cycles("pass", "a pass by its rows", targets.passes, "none", "--rows", s.rows, "--prefix", str(s.tokens)),
        cycles("eagle3", "a chain of 7 by an EAGLE-3 network", cycle_of("EAGLE-3, chain of 7", eagle, 5.2), eagle),
        cycles(
            "eagle3-cost",
            "a chain of 7 at EAGLE-3's cost, accepted as published",
            cycle_of("EAGLE-3's cost, chain of 7", CHAIN, 5.2),
            CHAIN,
        ),
        wide,
        cycles("dflash", "128 nodes by a DFlash network", cycle_of("DFlash, 128 nodes", dflash, 5.0), dflash),
        cycles("fallback", "an EAGLE-3 network whose drafts fail", targets.fallback, f"eagle3:random:{s.model}"),
        cycles("batch", "plain decoding in a batch", targets.batch, "none", "--batch", "64"),
        Step("kernels", BENCHES, "every kernel beside PyTorch", 120, kernels, "the bench's tests", targets.kernels),
        cycles("fasteagle", "trees by a FastEagle network, and at its cost", trees, f"{fasteagle},{TREE}"),
        cycles(
            "sampled",
            "the same at temperature 0.8",
            cycle_of("sampled, FastEagle's cost, tree of 61", TREE, None),
            TREE,
            "--temperature",
            "0.8",
        ),
        cycles("peers", "transformers, compiled", targets.peers, "none", "--peers", "transformers:compiled"),
        without("prefetch", plain),
        without("fusion", plain),
        without("prefetch", wide),
    ]
