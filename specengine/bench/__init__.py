"""The benchmark: `python -m specengine.bench` measures drafters against plain decoding on the same questions."""
