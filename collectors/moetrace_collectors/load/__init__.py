"""From counts to figures: how uneven experts and ranks are, for how long, and what their kernels see."""
