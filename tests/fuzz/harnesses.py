"""All of them."""

from tests.fuzz import mixtures, models, ops, quantised, texts

HARNESSES = (*models.HARNESSES, *quantised.HARNESSES, *mixtures.HARNESSES, *ops.HARNESSES, *texts.HARNESSES)
