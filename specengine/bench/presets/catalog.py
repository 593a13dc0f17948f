"""All presets, by name.

A preset has two lists of contenders. The first has drafters that come with the package. The second has synthetic
drafters for a target of random weights.
"""

from __future__ import annotations

from specengine.bench.presets.preset import Entry, Preset

_RATES = "0.81,0.80,0.79,0.78,0.77,0.76"  # FastEagle's paper: from 0.81 at depth 1 to 0.74
_EAGLE3_TREE = f"synthetic:{_RATES},k=10,cost=eagle3"
_FASTEAGLE_TREE = f"synthetic:{_RATES},k=10,cost=fasteagle"
_EAGLE3_TWO = "synthetic:0.81,0.80,k=1,cost=eagle3"
_FASTEAGLE_TWO = "synthetic:0.81,0.80,k=1,cost=fasteagle"
_SMALL = "draft-model:self,layers=1,length=4,adaptive=false"
_MARS_TREE = "eagle3,nodes=50,levels=7,adaptive=false"
_THETAS = ("0.84", "0.86", "0.88", "0.9", "0.92", "0.94", "0.96", "0.98")
_THETA_METHODS = {  # the one published theta
    ("strict", "0.84"): "theta 0.84"
}
_CASCADES = (
    *(("Lossy", f"lossy:alpha={alpha}") for alpha in ("0.1", "0.3", "0.5")),
    *(("BiLD", f"bild:alpha={alpha}") for alpha in ("0.5", "1", "2")),
    *(("Chow", f"cascade:chow,alpha={alpha}") for alpha in ("0.1", "0.2", "0.4")),
    *(("Diff", f"cascade:diff,alpha={alpha}") for alpha in ("-0.25", "0", "0.25")),
    *(("OPT", f"cascade:opt,alpha={alpha}") for alpha in ("-0.25", "0", "0.25")),
    *(("Token", f"cascade:token-v3,alpha={alpha}") for alpha in ("0.25", "0.5", "0.75")),
)

PRESETS = {
    "fasteagle-table1": Preset(
        "drafters at batch 1, greedy and sampled",
        (
            Entry("prompt_lookup"),
            Entry("draft-model,adaptive=false"),
            Entry("medusa,adaptive=false"),
            Entry("eagle3,adaptive=false", "EAGLE-3"),
            Entry("eagle3", never_slower=True),
            Entry("fasteagle,top_k=10,adaptive=false", "FastEagle"),
            Entry("fasteagle", never_slower=True),
            Entry("auto", never_slower=True),
        ),
        (Entry(_EAGLE3_TREE, "EAGLE-3"), Entry(_FASTEAGLE_TREE, "FastEagle")),
        temperatures=(0.0, 1.0),
    ),
    "fasteagle-table2": Preset(
        "the parts of FastEagle",
        (
            Entry("fasteagle,top_k=10,adaptive=false", "FastEagle"),
            Entry("fasteagle,top_k=1,adaptive=false", "chain"),
            Entry("medusa,adaptive=false"),
        ),
        (Entry(_FASTEAGLE_TREE, "FastEagle"), Entry(_FASTEAGLE_TREE.replace("k=10", "k=1"), "chain")),
    ),
    "fasteagle-table3": Preset(
        "batches: the published chain of two, and adaptive trees",
        (
            Entry("fasteagle,top_k=1,levels=2,adaptive=false", "FastEagle"),
            Entry("eagle3,nodes=3,levels=2,top_k=1,adaptive=false"),
            Entry("fasteagle", never_slower=True),
            Entry("eagle3", never_slower=True),
            Entry("auto", never_slower=True),
        ),
        (Entry(_FASTEAGLE_TWO, "FastEagle"), Entry(_EAGLE3_TWO), Entry("prompt_lookup", never_slower=True)),
        batches=(1, 2, 4, 8, 16, 24, 32, 40, 48, 56),
    ),
    "ouroboros-table2": Preset(
        "phrases and sentences of a smaller model, greedy",
        (
            Entry("draft-model,adaptive=false", "speculative decoding"),
            Entry("lookahead,adaptive=false", "lookahead decoding"),
            Entry("ouroboros,adaptive=false", "Ouroboros"),
            Entry("ouroboros", never_slower=True),
        ),
        (
            Entry(_SMALL, "speculative decoding"),
            Entry("lookahead,adaptive=false", "lookahead decoding"),
            Entry("ouroboros:self,layers=1,adaptive=false", "Ouroboros"),
        ),
    ),
    "mars-table1": Preset(
        "EAGLE-3 with and without MARS's margin, sampled",
        (
            Entry(_MARS_TREE, "EAGLE-3"),
            Entry(_MARS_TREE, "MARS", "margin:strict,theta=0.9"),
            # Outside its margin this rule is lossless, as plain EAGLE-3.
            Entry(_MARS_TREE, rule="margin:lossless-base,theta=0.9"),
        ),
        (Entry(_EAGLE3_TREE, "EAGLE-3"), Entry(_EAGLE3_TREE, "MARS", "margin:strict,theta=0.9")),
        temperatures=(1.0,),
        quality=True,
    ),
    "mars-theta": Preset(
        "MARS's margin from lenient to strict",
        tuple(
            Entry(_MARS_TREE, _THETA_METHODS.get((mode, theta), ""), f"margin:{mode},theta={theta}")
            for mode in ("strict", "lossless-base")
            for theta in _THETAS
        ),
        tuple(
            Entry(_EAGLE3_TREE, _THETA_METHODS.get(("strict", theta), ""), f"margin:strict,theta={theta}")
            for theta in _THETAS
        ),
        quality=True,
    ),
    "cascades-slides": Preset(
        "speculative cascades, by the share of tokens from the small model",
        tuple(Entry("draft-model,adaptive=false", method, rule) for method, rule in _CASCADES),
        tuple(Entry(_SMALL, method, rule) for method, rule in _CASCADES),
        temperatures=(0.0, 1.0),
        quality=True,
    ),
    "glide-cost": Preset(
        "GLIDE, a drafter that reads the target's cache, with and without siblings (CAPE)",
        (
            Entry("glide,cape=false,adaptive=false", "GLIDE"),
            Entry("glide,adaptive=false", "GLIDE and CAPE"),
            Entry("glide,cross=false,cape=false,adaptive=false"),
            Entry("glide", never_slower=True),
        ),
        (Entry("synthetic:0.6,0.6,0.6,0.6", "GLIDE"), Entry("synthetic:0.7,0.7,0.7,0.7,k=7", "GLIDE and CAPE")),
    ),
}


def named(preset: str) -> Preset:
    """Returns a preset by its name. Raises ValueError for an unknown name."""
    if preset not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {preset!r}")
    return PRESETS[preset]
