"""Block drafters inside captured cycles: the CPU's trees and text."""

import dataclasses
from itertools import cycle

import pytest
import torch

from tests.drafters.block_files import DFLASH, JETSPEC, backbone_state, write
from tests.drafters.block_heads import DFLASH2, DOMINO, DSPARK, SIZES, dflash2_state, domino_state, dspark_state
from tests.engine.device.prompts import GREEDY, PROMPTS, SAMPLED, on_the_cpu
from tests.engines import ids

pytestmark = pytest.mark.filterwarnings("ignore:drafter")
SLIDING = JETSPEC | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
CHAIN, LEVELS, JETSPEC_TREE = "tree=chain", "nodes=12,top_k=3", "tree=jetspec,nodes=12,top_k=3"
KINDS = {
    "dflash": (DFLASH, lambda: backbone_state(SIZES), CHAIN),
    "jetspec": (SLIDING, lambda: backbone_state(SIZES), CHAIN),
    "dspark": (DSPARK, dspark_state, LEVELS),
    "threshold": (DSPARK, dspark_state, f"{CHAIN},threshold=0.5"),
    "rnn": (DSPARK | {"markov_head_type": "rnn"}, lambda: dspark_state(kind="rnn"), LEVELS),
    "domino": (DOMINO, domino_state, LEVELS),
    "dflash 2": (DFLASH2, dflash2_state, CHAIN),
    "dflash ddtree": (DFLASH, lambda: backbone_state(SIZES), "tree=ddtree,nodes=12"),
    "jetspec tree": (SLIDING, lambda: backbone_state(SIZES), JETSPEC_TREE),
    "dspark top2gap": (DSPARK, dspark_state, "tree=top2gap,nodes=12,top_k=3"),
    "domino jetspec": (DOMINO, domino_state, JETSPEC_TREE),
}
NAMES = {"rnn": "dspark", "threshold": "dspark"}


def spec_of(kind, folder):
    torch.manual_seed(7)
    config, make, options = KINDS[kind]
    return f"{NAMES.get(kind, kind.split()[0])}:{write(folder / 'drafter', config, make())},{options},adaptive=false"


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind, params", [*zip(KINDS, cycle([GREEDY, SAMPLED]))], ids=[*KINDS])
def test_a_block_drafter_drafts_on_the_device_what_it_drafts_on_the_host(device_engine, tmp_path, kind, params):
    spec = spec_of(kind, tmp_path)
    traced = dataclasses.replace(params, max_new_tokens=6, trace=True)
    expected = on_the_cpu(traced, drafter=spec)
    engine = device_engine(spec, max_batch_size=3)
    assert engine.drafter.drafts_in_cycle
    outputs = engine.generate(PROMPTS, traced)
    assert ids(outputs) == ids(expected)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert [sorted(step.tokens) for step in ours.trace] == [sorted(step.tokens) for step in theirs.trace]
    assert max(len(step.tokens) for output in outputs for step in output.trace) > 3
