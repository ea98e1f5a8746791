"""Runs a real model: torch executor, paged attention, sampler, tokenizer, the default model."""

import os

# Models come from local folders only. The hub's client reads this once, when it is first imported, which no module of
# this package does before this line.
os.environ["HF_HUB_OFFLINE"] = "1"
