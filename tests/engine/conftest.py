"""Settings and models that the engine's tests share."""

from pathlib import Path

import pytest
import torch

from expediter.engine.default_model import resolve_model
from expediter.engine.tokenizer import Tokenizer

# More threads than free cores wait for each other in every small operation, and tests run beside other tests.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The default model, fetched and converted into the user's cache at first use."""
    return resolve_model()


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2_folder)
