"""All of them."""

from tests.fuzz import hybrids, mixtures, models, one_pass, ops, quantised, texts

HARNESSES = (
    *models.HARNESSES,
    *quantised.HARNESSES,
    *mixtures.HARNESSES,
    *hybrids.HARNESSES,
    *one_pass.HARNESSES,
    *ops.HARNESSES,
    *texts.HARNESSES,
)
