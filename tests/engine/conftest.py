"""Settings and models that the engine's tests share."""

import torch

torch.set_num_threads(2)
