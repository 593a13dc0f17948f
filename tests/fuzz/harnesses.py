"""All of them."""

from tests.fuzz import hybrids, mixtures, models, one_pass, ops, quantised, texts, tokenizer_folders

HARNESSES = (
    *models.HARNESSES,
    *quantised.HARNESSES,
    *mixtures.HARNESSES,
    *hybrids.HARNESSES,
    *one_pass.HARNESSES,
    *ops.HARNESSES,
    *texts.HARNESSES,
    *tokenizer_folders.HARNESSES,
)
