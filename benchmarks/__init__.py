"""Side by side with plain PyTorch and torch's own engine: ratios from one run. ``python -m benchmarks`` prints them."""
