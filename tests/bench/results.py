"""Results as the benchmark writes them."""

from specengine.types import PHASES


def result(**changes):
    """Returns results with data for every kind of picture, as the benchmark writes them."""
    run = {
        "peer": None,
        "drafter": "none",
        "rule": "match",
        "temperature": 0.0,
        "batch": 1,
        "identical": "3/3",
        "tokens_per_second": 100.0,
        "speedup": 1.0,
        "tau": 1.0,
        "level_acceptance": [],
        "level_cycles": [],
        "ms_per_cycle": dict.fromkeys(PHASES, 1.0),
        "by_class": {"code": {"speedup": 1.0}, "chat": {"speedup": 1.0}},
    }
    fast = {**run, "drafter": "eagle3:a", "label": "eagle3:a", "speedup": 2.0, "tokens_per_second": 200.0, "tau": 2.5}
    fast |= {
        "level_acceptance": [0.8, None],
        "level_cycles": [50, 30],
        "first_token_ms": 7.0,
        "peak_memory_bytes": 2**30,
    }
    data = {"model": "m", "questions": 3, "max_new_tokens": 9, "runs": [run, fast, {**fast, "batch": 2}]}
    data |= {"rows": [{"rows": 1, "ms": 1.0}, {"rows": 8, "ms": 1.5}], "machine": {"cpu": "x", "cores": 2}}
    data["example"] = {"question": "q", "tokens": {"eagle3:a": [["Hi", "target"], [" you\n", "eagle3"]]}}
    return {**data, **changes}
