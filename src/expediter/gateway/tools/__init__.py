"""Functions that a model may call: how they are told to it, how its calls are read, and how a call is forced."""
