"""Builds engines on a GPU and compares their texts: python bench/gpu/engines.py JSON MODEL DEVICE CASE...

A case is DRAFTER@SIZE, an engine for batches of up to SIZE, or `beside`, an engine that is built while another one
generates. An engine captures a cycle per batch size and tree width. Every text must equal plain decoding without
graphs, as strict mode promises; that of not-strict:DRAFTER@SIZE only has to end. A case that fails does not stop the
next one.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from specengine import Engine, SamplingParams
from specengine.tensor_parallel.loading import LoadedModel, load_model

BESIDE = "beside"
NOT_STRICT = "not-strict:"
PROMPTS = [list(range(5, 45)), [7, 8, 9] * 12, [3] * 70, list(range(100, 20, -1))]
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
Texts = list[list[int]]


def texts(engine: Engine, size: int) -> Texts:
    """Returns the token ids of greedy answers to the first prompts."""
    return [output.token_ids for output in engine.generate(PROMPTS[:size], PARAMS)]


def build(model: LoadedModel, drafter: str, size: int, expected: Texts | None) -> dict[str, Any]:
    """Builds an engine and asks it; returns seconds and captured cycles. Raises RuntimeError for another text.

    expected: texts; None takes any of full length.
    """
    begin = time.perf_counter()
    engine = Engine(model, drafter=drafter, max_batch_size=size)
    seconds = time.perf_counter() - begin
    found = texts(engine, size)
    if [len(text) for text in found] != [PARAMS.max_new_tokens] * size:
        raise RuntimeError(f"{drafter}, batch {size}: not every text has {PARAMS.max_new_tokens} tokens")
    if expected is not None and found != expected[:size]:
        raise RuntimeError(f"{drafter}, batch {size}: the text is not that of plain decoding without graphs")
    cycles = len(engine.core.runner.graphs.batches) if engine.core.runner else 0  # 0: they run on the host
    return {"seconds": seconds, "cycles": cycles}


def build_beside(model: LoadedModel, expected: Texts) -> dict[str, Any]:
    """Builds an engine while another one generates. Raises what either raises."""
    first = Engine(model, drafter="none", max_batch_size=2)
    stop = threading.Event()
    wrong: list[Exception] = []

    def generate() -> None:
        try:
            while not stop.is_set():
                if texts(first, 2) != expected[:2]:
                    raise RuntimeError("the text of the first engine changed while the second was built")
        except Exception as error:  # of any kind: the main thread raises it
            wrong.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        return build(model, "prompt_lookup", 2, expected)
    finally:
        stop.set()
        thread.join()
        if wrong:
            raise wrong[0]


def build_not_strict(name: str, device: str, drafter: str, size: int) -> dict[str, Any]:
    """Builds an engine on the fast kernels, whose text may be another one. Raises RuntimeError for a short one."""
    return build(load_model(name, device=device, strict=False), drafter, size, None)


def main(path: Path, name: str, device: str, cases: list[str]) -> int:
    model = load_model(name, device=device, strict=device == "cuda")
    plain = Engine(model, drafter="none", max_batch_size=len(PROMPTS), graphs=False)
    expected = texts(plain, len(PROMPTS))
    del plain
    results: dict[str, dict[str, Any]] = {}
    measured: list[list[Any]] = []
    for case in cases:
        drafter, _, size = case.partition("@")
        try:
            if case == BESIDE:
                results[case] = build_beside(model, expected)
            elif case.startswith(NOT_STRICT):
                results[case] = build_not_strict(name, device, drafter.removeprefix(NOT_STRICT), int(size))
            else:
                results[case] = build(model, drafter, int(size), expected)
            measured.append([f"{case}: {results[case]['cycles']} captured cycles", results[case]["seconds"], "s"])
        except Exception:  # of any kind: the next case may be well
            traceback.print_exc()
            results[case] = {"failed": traceback.format_exc(limit=0).strip()}
        print(case, results[case], flush=True)
        path.write_text(json.dumps({"engines": results, "measured": measured}), encoding="utf-8")
        gc.collect()  # an engine that failed may live in its exception's frames
    return 1 if len(measured) < len(cases) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
