"""The lossy rules, one of each kind."""

from specengine.rules.cascade import Bild, Cascade, Lossy
from specengine.rules.margin import Margin
from specengine.rules.typical import Typical

LOSSY = (
    *(Margin(0.8, mode) for mode in ("strict", "lossless-base")),
    Typical(),
    Cascade("chow", 0.99),
    *(Cascade(deferral, 0.3) for deferral in ("diff", "opt", "token-v1", "token-v2", "token-v3")),
    Bild(4.0),
    Lossy(0.5),
)
IDS = [f"{rule.name}-{getattr(rule, 'mode', getattr(rule, 'deferral', ''))}" for rule in LOSSY]
