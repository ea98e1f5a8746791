"""What goes into a step together: the published ways to build a batch, over the same few moves."""

from __future__ import annotations

from typing import Protocol

from expediter.scheduling.draft import Draft


class Batching(Protocol):
    """Fills a step.

    Attributes:
        whole_prompts: a prompt is computed in one step, so the budget must hold the longest one.
    """

    whole_prompts: bool

    def fill(self, draft: Draft) -> None:
        """Put work into the draft."""
        ...


class StallFree:
    """Every decode, then chunks of prompts. Source: Sarathi-Serve (2403.02310)."""

    whole_prompts = False

    def fill(self, draft: Draft) -> None:
        draft.add_decodes()
        draft.add_prompts()


class IterationLevel:
    """Every decode, then whole prompts. Source: Orca (OSDI 2022), selective batching."""

    whole_prompts = True

    def fill(self, draft: Draft) -> None:
        draft.add_decodes()
        draft.add_prompts(whole=True)


class PromptsFirst:
    """Whole prompts alone while there are any that fit, else every decode. Source: vLLM before chunked prefill."""

    whole_prompts = True

    def fill(self, draft: Draft) -> None:
        draft.add_prompts(whole=True)
        if not draft.chunks:
            draft.add_decodes()


class StaticBatches:
    """A batch starts when the one before has ended altogether; everybody is padded to the longest.

    The executors here need no padding; the plan's features count it, so that modelled time does. Source: what
    FasterTransformer and plain `generate` do.
    """

    whole_prompts = True

    def __init__(self) -> None:
        self._num_seqs = 0

    def fill(self, draft: Draft) -> None:
        if len(draft.running):
            draft.add_decodes()
        else:
            draft.add_prompts(whole=True)
            if not draft.chunks:  # all of them came with their KV
                draft.add_decodes()
            self._num_seqs = len(draft.running)
        draft.pad_to = self._num_seqs
