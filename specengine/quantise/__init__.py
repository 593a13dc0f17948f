"""Writers of quantised checkpoints: `specengine quantize`."""
