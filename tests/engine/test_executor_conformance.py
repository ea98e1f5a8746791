"""The contract of executors, held by the fake and by torch."""

import copy
from typing import ClassVar

import pytest
import torch
from engine_models import VOCAB_SIZE, tiny_llama

from expediter.core.ports import Executor, ExecutorLimits
from expediter.engine.executor import TorchExecutor
from expediter.testing.executor_conformance import ExecutorConformance
from expediter.testing.fake_executor import FakeExecutor


class TestFakeExecutor(ExecutorConformance):
    repeats: ClassVar[bool] = True

    def make_executor(self, limits: ExecutorLimits) -> Executor:
        return FakeExecutor(limits)


class _TorchConformance(ExecutorConformance):
    dtype: ClassVar[torch.dtype] = torch.float32
    device: ClassVar[str] = "cpu"
    _model: ClassVar = None

    def make_executor(self, limits: ExecutorLimits) -> Executor:
        if type(self)._model is None:
            type(self)._model = tiny_llama(self.dtype, self.device)
        return TorchExecutor(
            copy.copy(type(self)._model),
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            num_host_blocks=limits.num_host_blocks,
        )

    def test_vocabulary_is_the_models(self, executor: Executor) -> None:
        assert executor.limits.vocab_size == VOCAB_SIZE


class TestTorchFloat32(_TorchConformance):
    pass


class TestTorchBfloat16(_TorchConformance):
    """Tokens are not compared: bfloat16 rounds differently in other batches, and near-ties then fall either way."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16
    reads_kv: ClassVar[bool] = False


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@needs_cuda
class TestTorchCudaFloat32(_TorchConformance):
    device: ClassVar[str] = "cuda"


@needs_cuda
class TestTorchCudaBfloat16(_TorchConformance):
    device: ClassVar[str] = "cuda"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    reads_kv: ClassVar[bool] = False
