"""Questions that take many simulations: which policy, how many GPUs, does a published result come out."""
