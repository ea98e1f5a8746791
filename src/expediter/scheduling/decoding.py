"""The sequences that decode one token per step, as arrays.

A step in which nothing changes touches them with a handful of array operations, whatever their number; Python looks at
a single sequence only when it joins, reaches a block edge, ends or is taken out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expediter.core.plan import IntArray
from expediter.core.request import RequestState

_NO_STOP = np.iinfo(np.int32).min  # no token id, not even a synthetic one of the simulator
_NO_ROWS = np.empty(0, np.intp)
_NEVER = 1 << 30
_FIRST_WIDTH = 64


class DecodingBatch:
    """Rows of decoding sequences, dense and in the order in which they joined.

    Row r < `size` is one sequence. `counters` holds per row, as int32, what changes by one each step:

    - `COMPUTED`: tokens whose KV exists; the position of the next input token.
    - `OUTPUT`: output tokens so far.
    - `ROOM`: negative number of free token positions in its blocks; 0 means that the next token needs a new block.
    - `LEFT`: negative number of output tokens until the longest allowed length; 0 means finished.

    All four rise by one per step, so that a step is a single addition. `rows` are the numbers of all rows there may be.
    """

    COMPUTED, OUTPUT, ROOM, LEFT = range(4)

    def __init__(self, max_num_seqs: int) -> None:
        self.size = 0
        self.num_stopping = 0
        self.counters: IntArray = np.zeros((4, max_num_seqs), np.int32)
        self.slots: IntArray = np.zeros(max_num_seqs, np.int32)
        self.last_tokens: IntArray = np.zeros(max_num_seqs, np.int32)
        self.states: npt.NDArray[np.object_] = np.empty(max_num_seqs, np.object_)
        # When token k after the first is due: first + k * pace; infinite pace for who has no target.
        self._due_s: npt.NDArray[np.float64] = np.zeros((2, max_num_seqs))
        self._min_output: IntArray = np.zeros(max_num_seqs, np.int32)
        self._stops: IntArray = np.full((max_num_seqs, 1), _NO_STOP, np.int32)
        # Output tokens by slot, not by row, so that rows can move without moving text.
        self._outputs: IntArray = np.zeros((max_num_seqs, _FIRST_WIDTH), np.int32)
        self.context_tokens = 0
        self.rows: npt.NDArray[np.intp] = np.arange(max_num_seqs)
        self.rows.flags.writeable = False
        # Bounds that spare most steps a look at every row: no output is longer, no row reaches its end before.
        self._longest_output = 0
        self._num_steps_left = _NEVER

    # -- membership ---------------------------------------------------------------------------------------------------

    def join(self, state: RequestState, num_blocks_tokens: int) -> None:
        """Add a sequence whose newest known token is its only uncomputed one.

        Args:
            num_blocks_tokens: token positions in the blocks that it owns.
        """
        row, request, num_output = self.size, state.request, len(state.output)
        self.size += 1
        computed = state.num_computed_tokens
        left = request.max_tokens - num_output
        self.counters[:, row] = (computed, num_output, computed - num_blocks_tokens, -left)
        self.slots[row] = state.slot
        self.last_tokens[row] = state.output[-1]
        self.states[row] = state
        self._due_s[:, row] = (state.first_token_s or 0.0, state.pace_s)
        self._min_output[row] = request.min_tokens
        self._reserve(num_output + 1)
        self._outputs[state.slot, :num_output] = state.output
        self._set_stops(row, request.stop_token_ids)
        self.context_tokens += computed + 1
        self._longest_output = max(self._longest_output, num_output)
        self._num_steps_left = min(self._num_steps_left, left)

    def leave(self, rows: npt.NDArray[np.intp]) -> list[RequestState]:
        """Remove rows; return their states, brought up to date, in row order."""
        left: list[RequestState] = []
        for row in rows.tolist():
            state: RequestState = self.states[row]
            computed, num_output, _, _ = self.counters[:, row].tolist()
            state.num_computed_tokens = computed
            new = self._outputs[state.slot, len(state.output) : num_output]
            state.output.extend(new.tolist())
            state.token_bytes += new.tobytes()
            self.context_tokens -= computed + 1
            left.append(state)
        self._close_up(rows)
        self.num_stopping -= sum(bool(state.request.stop_token_ids) for state in left)
        return left

    def _close_up(self, rows: npt.NDArray[np.intp]) -> None:
        """Move those who stay to where `rows` were, in order."""
        is_kept = np.ones(self.size, bool)
        is_kept[rows] = False
        (kept,) = is_kept.nonzero()
        size = len(kept)
        for column in (self.counters, self.slots, self.last_tokens, self.states, self._due_s, self._min_output):
            column[..., :size] = column.take(kept, axis=-1)
        if self.num_stopping:
            self._stops[:size] = self._stops.take(kept, axis=0)
        self.states[size : self.size] = None
        self.size = size
        self._num_steps_left = -int(self.counters[self.LEFT, :size].max(initial=-_NEVER))

    def row_of(self, state: RequestState) -> int:
        """Return the row of a sequence that is in the batch."""
        return int(np.flatnonzero(self.slots[: self.size] == state.slot)[0])

    def output_of(self, state: RequestState) -> list[int]:
        """Return the output of a sequence that is in the batch, up to date."""
        num_output = int(self.counters[self.OUTPUT, self.row_of(state)])
        output: list[int] = self._outputs[state.slot, :num_output].tolist()
        return output

    def slack_s(self, now_s: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return by how long each next token is early, and each row's pace, float64, shape [size]."""
        first, pace = self._due_s[:, : self.size]
        return first + self.counters[self.OUTPUT, : self.size] * pace - now_s, pace

    # -- a step -------------------------------------------------------------------------------------------------------

    def at_edge(self) -> npt.NDArray[np.intp]:
        """Return the rows whose next token needs a new block."""
        rows: npt.NDArray[np.intp] = (self.counters[self.ROOM, : self.size] == 0).nonzero()[0]
        return rows

    def add_room(self, rows: npt.NDArray[np.intp], num_tokens: int | npt.NDArray[np.intp]) -> None:
        """Record that `rows` got blocks for `num_tokens` more tokens; if a row comes again, its last number counts."""
        self.counters[self.ROOM, rows] -= num_tokens

    def advance(self, tokens: IntArray) -> npt.NDArray[np.intp]:
        """Append sampled tokens to all rows.

        Args:
            tokens: int32, shape [num_steps, size].
        Returns:
            Rows that are finished, ascending.
        """
        size, num_steps = self.size, len(tokens)
        counters = self.counters[:, :size]
        output = counters[self.OUTPUT]
        self._longest_output += num_steps
        if self._longest_output > self._outputs.shape[1]:  # the longest may have left since
            self._longest_output = int(output.max()) + num_steps
            self._reserve(self._longest_output)
        if num_steps == 1:
            self._outputs[self.slots[:size], output] = tokens[0]
        else:
            columns = output[:, None] + np.arange(num_steps, dtype=np.int32)
            self._outputs[self.slots[:size, None], columns] = tokens.T
        self.last_tokens[:size] = tokens[-1]
        counters += num_steps
        self.context_tokens += size * num_steps
        self._num_steps_left -= num_steps
        if self._num_steps_left and not self.num_stopping:
            return _NO_ROWS
        done = counters[self.LEFT] == 0
        if self.num_stopping:
            hit = (self._stops[:size] == tokens[-1][:, None]).any(axis=1)
            done |= hit & (output >= self._min_output[:size])
        rows: npt.NDArray[np.intp] = done.nonzero()[0]
        return rows

    # -- runs of steps (simulation) -----------------------------------------------------------------------------------

    def max_run(self, block_size: int, available_blocks: int) -> int:
        """Return in how many steps in a row nobody passes its longest length or lacks a block."""
        run = self._num_steps_left
        if self.size * (run // block_size + 1) <= available_blocks:  # nobody takes more than that
            return run
        room = -self.counters[self.ROOM, : self.size]

        def missing_blocks(num_steps: int) -> int:
            return int((-(-np.maximum(num_steps - room, 0) // block_size)).sum())

        if missing_blocks(run) <= available_blocks:
            return run
        enough, short = 1, run
        while short - enough > 1:
            middle = (enough + short) // 2
            if missing_blocks(middle) <= available_blocks:
                enough = middle
            else:
                short = middle
        return enough

    def edges_in_run(self, num_steps: int, block_size: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Return the block edges of a run in the order in which single steps would meet them: by step, then row.

        Returns:
            Row and ordinal (0 for a row's first new block in the run) of each edge.
        """
        room = -self.counters[self.ROOM, : self.size]
        (rows,) = (room < num_steps).nonzero()
        steps = room[rows, None] + np.arange(0, num_steps, block_size)
        order = steps.argsort(axis=None, kind="stable")[: np.count_nonzero(steps < num_steps)]
        places, ordinals = np.divmod(order, steps.shape[1])
        return rows[places], ordinals

    # -- storage ------------------------------------------------------------------------------------------------------

    def _reserve(self, width: int) -> None:
        have = self._outputs.shape[1]
        if width > have:
            wider = np.zeros((self._outputs.shape[0], max(width, 2 * have)), np.int32)
            wider[:, :have] = self._outputs
            self._outputs = wider

    def _set_stops(self, row: int, stop_token_ids: tuple[int, ...]) -> None:
        self.num_stopping += bool(stop_token_ids)
        have = self._stops.shape[1]
        if len(stop_token_ids) > have:
            wider = np.full((self._stops.shape[0], len(stop_token_ids)), _NO_STOP, np.int32)
            wider[:, :have] = self._stops
            self._stops = wider
        self._stops[row] = _NO_STOP
        self._stops[row, : len(stop_token_ids)] = stop_token_ids
