"""SGLang's prefix caches, the Python one and the Rust core; an argument says which. Runs in SGLang's environment.

The Rust core is called through its extension module alone, without the Python adapter around it. Its match, like the
Python one's, yields a length and a node; the slots of the matched tokens are a second call, which a scheduler must make
as well and which is measured as a case of its own. Keys are made before the clock starts.
"""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import random
import sys
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.peers.protocol import BLOCK_SIZE, CHAIN, LENGTHS, NUM_SEQUENCES, VOCAB_SIZE, Case, cpu_us, serve

_rng = random.Random(0)


def _tokens(count: int) -> array[int]:
    return array("q", _rng.choices(range(VOCAB_SIZE), k=count))


def _package() -> Path:
    """Return the folder of SGLang's package without importing it."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("sglang is not installed")
    return Path(found.submodule_search_locations[0])


class RustCore:
    """The tree of the extension module `mem_cache`."""

    def __init__(self) -> None:
        sys.path.insert(0, str(_package() / "srt" / "mem_cache" / "rust_tree_core"))
        self._module: Any = importlib.import_module("mem_cache")
        limits = self._module.TreeCoreInitParamsBinding(eviction_policy="lru", page_size=BLOCK_SIZE, device="cpu")
        self._tree = self._module.RustUnifiedTreeCoreBinding(limits, [0])
        self._root = self._tree.root_node_handle()

    def insert(self, key: array[int], slots: torch.Tensor) -> None:
        self._tree.insert(self._module.InsertParamsBinding(key=key, value=slots))

    def match(self, key: array[int]) -> int:
        return int(self._tree.match_prefix(self._module.MatchParamsBinding(key=key)).device_prefix_len)

    def match_slots(self, key: array[int]) -> torch.Tensor:
        found = self._tree.match_prefix(self._module.MatchParamsBinding(key=key))
        slots: torch.Tensor = self._tree.collect_full_device_indices(found.last_device_node_id, self._root)
        return slots

    def evict(self, num_tokens: int) -> int:
        """Evict leaves as the cache around the core does: ask for the next, then drop it."""
        evicted = 0
        self._tree.evict_device_start(0, num_tokens)
        while evicted < num_tokens:
            step = self._tree.evict_device_next_node(0, {0: evicted})
            evicted += int(self._tree.evict_device_leaf(step.node_id).tracker[0])
        self._tree.evict_device_end(0)
        return evicted


class PythonCache:
    """`RadixCache`. What it imports for a GPU and for a server is replaced by empty modules; it uses none of that."""

    def __init__(self) -> None:
        if "sglang" not in sys.modules:
            bare = ModuleType("sglang")
            bare.__path__ = [str(_package())]
            sys.modules["sglang"] = bare
            sys.meta_path.insert(0, _Replace())
        self._cache_module: Any = importlib.import_module("sglang.srt.mem_cache.radix_cache")
        self._params: Any = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        self._cache = self._cache_module.RadixCache.create_simulated(mock_allocator=_Allocator(), page_size=BLOCK_SIZE)

    def insert(self, key: array[int], slots: torch.Tensor) -> None:
        self._cache.insert(self._params.InsertParams(key=self._cache_module.RadixKey(key), value=slots))

    def match(self, key: array[int]) -> int:
        wanted = self._params.MatchPrefixParams(key=self._cache_module.RadixKey(key))
        return int(self._cache.match_prefix(wanted).device_prefix_len)

    def match_slots(self, key: array[int]) -> torch.Tensor:
        wanted = self._params.MatchPrefixParams(key=self._cache_module.RadixKey(key))
        slots: torch.Tensor = self._cache.path_device_indices(self._cache.match_prefix(wanted).last_device_node)
        return slots

    def evict(self, num_tokens: int) -> int:
        return int(self._cache.evict(self._params.EvictParams(num_tokens=num_tokens)).num_tokens_evicted)


class _Allocator:
    device = "cpu"

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        """The slots go nowhere: giving them back is no part of the tree."""


class _Empty(ModuleType):
    """A module that has every class one asks it for."""

    __path__: list[str] = []  # noqa: RUF012 - the import system reads it from modules

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {})
        setattr(self, name, found)
        return found


class _Replace(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    _names = (
        "sglang.kernels",
        "sglang.lang",
        "sglang.utils",
        "sglang.srt.utils",
        "sglang.srt.runtime_context",
        "sglang.srt.mem_cache.allocator",
        "sglang.srt.mem_cache.memory_pool",
        "sglang.srt.observability.metrics_collector",
    )

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self._names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


Cache = RustCore | PythonCache


class Filled:
    """A cache with `NUM_SEQUENCES` sequences of 768 tokens over 100 prefixes of 512."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._next_slot = 0
        prefixes = [_tokens(512) for _ in range(100)]
        for index in range(NUM_SEQUENCES):
            self.put(prefixes[index % 100] + _tokens(256))

    def slots(self, count: int) -> torch.Tensor:
        self._next_slot += count
        return torch.arange(self._next_slot - count, self._next_slot)

    def put(self, key: array[int]) -> None:
        self.cache.insert(key, self.slots(len(key)))


def match(filled: Filled, length: int, *, chain: bool, slots: bool) -> Case:
    key = _tokens(length)
    if chain:
        piece = length // CHAIN
        for end in range(piece, length, piece):
            filled.put(key[:end] + _tokens(BLOCK_SIZE))
    filled.put(key)
    if filled.cache.match(key) != length or len(filled.cache.match_slots(key)) != length:
        raise SystemExit("the prompt is not in the cache")
    function: Callable[[array[int]], object] = filled.cache.match_slots if slots else filled.cache.match
    return lambda num_samples: [cpu_us(lambda: function(key)) for _ in range(num_samples)]


def insert(filled: Filled, length: int) -> Case:
    def once() -> float:
        key, slots = _tokens(length), filled.slots(length)
        return cpu_us(lambda: filled.cache.insert(key, slots))

    return lambda num_samples: [once() for _ in range(num_samples)]


def evict(filled: Filled) -> Case:
    def once() -> float:
        evicted: list[int] = []
        taken = cpu_us(lambda: evicted.append(filled.cache.evict(256)))
        if evicted != [256]:
            raise SystemExit(f"{evicted[0]} tokens evicted instead of one leaf of 256")
        return taken

    return lambda num_samples: [once() for _ in range(num_samples)]


def _set_up(kind: type[Cache], make: Callable[[Filled], Case]) -> Case:
    case = make(Filled(kind()))
    gc.collect()
    gc.disable()
    return case


def all_cases(kind: type[Cache]) -> dict[str, Callable[[], Case]]:
    makers: dict[str, Callable[[Filled], Case]] = {"evict, 256-token leaf": evict}
    for length in LENGTHS:
        for chain, nodes in ((False, "1 node"), (True, f"{CHAIN} nodes")):
            for slots, what in ((False, "match"), (True, "match with ids")):
                name = f"{what}, {nodes}, {length} tokens"
                makers[name] = partial(match, length=length, chain=chain, slots=slots)
        makers[f"insert, {length} tokens"] = partial(insert, length=length)
    return {name: partial(_set_up, kind, make) for name, make in makers.items()}


if __name__ == "__main__":
    kinds: dict[str, type[Cache]] = {"rust": RustCore, "python": PythonCache}
    serve(all_cases(kinds[sys.argv[1]]))
