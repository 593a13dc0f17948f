"""Measures tokens per second of replicas on Ray Serve: python bench/replicas.py OUT.json

The same clients ask the same questions to one replica with one core, to two such replicas, and to one replica with both
cores, in several interleaved rounds. Ray's proxy and the clients run on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from pathlib import Path

import ray
from ray import serve
from serve_load import MODEL, free_port, throughput

from specengine.bench.machine import commit, machine, versions
from specengine.server.ray import app
from specengine.tensor_parallel.loading import load_model

CONTENDERS = ((1, 1), (2, 1), (1, 2))  # number of replicas, cores of each


def measure(address: str, drafter: str, concurrencies: list[int], tokens: int, contender: tuple[int, int]) -> dict:
    """Returns the throughput of replicas by concurrency."""
    replicas, cpus = contender
    scaling = {"min_replicas": replicas, "max_replicas": replicas, "cpus": cpus}
    serve.run(app({"model": MODEL, "drafter": drafter, "device": "cpu", "prefix_cache_mib": 0, **scaling}))
    # Every replica first measures the cost of its drafts.
    asyncio.run(throughput(address, {}, 2 * replicas, 4 * replicas, tokens))
    throughputs = {each: asyncio.run(throughput(address, {}, each, max(8, 2 * each), tokens)) for each in concurrencies}
    serve.delete("default")  # the next contender needs the cores
    return throughputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--concurrency", default="1,4,16", help="requests at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    given = parser.parse_args()
    load_model(MODEL)  # downloads it before anything is timed
    os.environ.pop("OMP_NUM_THREADS", None)  # it would override the cores of the replicas
    concurrencies = [int(each) for each in given.concurrency.split(",")]
    port = free_port()
    cpus = max(replicas * cores for replicas, cores in CONTENDERS)
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    runs: dict[tuple[int, int], list[dict]] = {contender: [] for contender in CONTENDERS}
    for number in range(given.rounds):
        for contender, rounds in runs.items():
            address = f"http://127.0.0.1:{port}"
            rounds.append(measure(address, given.drafter, concurrencies, given.tokens, contender))
            print(number, contender, rounds[-1], flush=True)
    serve.shutdown()
    ray.shutdown()
    result = {
        "command": " ".join(sys.argv),
        "model": MODEL,
        "drafter": given.drafter,
        "tokens": given.tokens,
        "rounds": given.rounds,
        "machine": machine(),
        "versions": versions() | {"ray": ray.__version__},
        "commit": commit(),
        "replicas": [
            {"replicas": contender[0], "cores_each": contender[1], "concurrency": concurrency}
            | {
                key: round(statistics.median(run[concurrency][key] for run in rounds), 2)
                for key in rounds[0][concurrency]
            }
            | {"rounds": [round(run[concurrency]["tokens_per_second"], 1) for run in rounds]}
            for contender, rounds in runs.items()
            for concurrency in concurrencies
        ],
    }
    text = json.dumps(result, indent=1)
    given.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
