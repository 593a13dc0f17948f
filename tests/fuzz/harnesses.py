"""All of them."""

from tests.fuzz import hybrids, mixtures, models, ops, quantised, texts

HARNESSES = (
    *models.HARNESSES,
    *quantised.HARNESSES,
    *mixtures.HARNESSES,
    *hybrids.HARNESSES,
    *ops.HARNESSES,
    *texts.HARNESSES,
)
