"""The layers of a pass op by op, as a CUDA graph captures them."""
