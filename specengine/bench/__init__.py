"""`python -m specengine.bench`: drafters measured against plain decoding on the same questions."""
