"""Which rows each optimiser step takes: a pure function of lengths, seed and step.

A micro-batch never holds padding: its rows lie one after another and do not see one another (`nn.Batch`). Without
packing it holds a fixed number of rows, so its tokens vary with their lengths. With packing, rows are first put
together into packs of at most `capacity` tokens, and a micro-batch holds a fixed number of packs, so its tokens are
nearly constant and small rows do not waste a whole pass over the weights.

Packs are made by best fit decreasing over the whole set: rows from the longest to the shortest, each into the fullest
pack that has room. It needs at most 11/9 of the packs of the best packing, plus one (Johnson 1973), and far fewer with
real lengths. How many packs come out depends on the lengths alone, so all epochs have equally many steps; which of
several equally long rows goes where is drawn anew in each epoch.
"""

import heapq
import math
from collections.abc import Sequence

from pyggtrain.data.order import epoch_order


class MicroBatches:
    """The micro-batches of a run, as indices of rows.

    Args:
        lengths: tokens of each row.
        seed: of the order.
        micro_batch_size: units (rows, or packs) in one micro-batch.
        accumulation_steps: micro-batches in one optimiser step.
        capacity: most tokens of a pack; None does not pack, and a unit is a row.

    Attributes:
        num_units: units in one epoch.
        steps_per_epoch: optimiser steps of one epoch; the last takes what is left.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        seed: int,
        micro_batch_size: int,
        accumulation_steps: int,
        capacity: int | None = None,
    ) -> None:
        self._lengths, self._seed, self._capacity = lengths, seed, capacity
        self._size, self._accumulation_steps = micro_batch_size, accumulation_steps
        self._epoch = -1
        self._packs: list[list[int]] = []
        self.num_units = len(lengths) if capacity is None else len(self._packs_of(0))
        self.steps_per_epoch = math.ceil(self.num_units / (micro_batch_size * accumulation_steps))

    def of_step(self, step: int) -> list[list[int]]:
        """Row indices of each micro-batch of optimiser step `step`, counted from 0 over all epochs."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        per_step = self._size * self._accumulation_steps
        places = range(self.num_units)[step_in_epoch * per_step : (step_in_epoch + 1) * per_step]
        micro_batches = [places[start : start + self._size] for start in range(0, len(places), self._size)]
        if self._capacity is None:
            order = epoch_order(self.num_units, self._seed, epoch)
            return [[order[place] for place in part] for part in micro_batches]
        packs = self._packs_of(epoch)
        return [[row for place in part for row in packs[place]] for part in micro_batches]

    def largest(self, num_units: int) -> list[int]:
        """Row indices of the largest micro-batch that so many units can make."""
        lengths = self._lengths
        if self._capacity is None:
            return heapq.nlargest(num_units, range(len(lengths)), key=lengths.__getitem__)
        fullest = heapq.nlargest(num_units, self._packs_of(0), key=lambda pack: sum(lengths[row] for row in pack))
        return [row for pack in fullest for row in pack]

    @property
    def fill(self) -> float:
        """Share of the packs' room that holds tokens; 1 without packing."""
        if self._capacity is None:
            return 1.0
        return sum(self._lengths) / (self.num_units * self._capacity)

    def _packs_of(self, epoch: int) -> list[list[int]]:
        """The rows of each pack, in the order of one epoch."""
        assert self._capacity is not None, "rows are not packed"
        if epoch != self._epoch:
            packs = best_fit(self._lengths, epoch_order(len(self._lengths), self._seed, epoch), self._capacity)
            # Best fit makes the packs of long rows first.
            self._packs = [packs[index] for index in epoch_order(len(packs), self._seed, epoch)]
            self._epoch = epoch
        return self._packs


def best_fit(lengths: Sequence[int], order: Sequence[int], capacity: int) -> list[list[int]]:
    """Put rows into packs by best fit decreasing.

    Args:
        lengths: tokens of each row, at most `capacity`.
        order: the rows to pack, by index; decides between rows of one length.
        capacity: most tokens of a pack.

    Returns:
        the rows of each pack.
    """
    packs: list[list[int]] = []
    # Packs by the room that is left in them, and the rooms that there are as bits of one number: the smallest room
    # that is large enough is then the lowest bit of a shifted number.
    by_room: dict[int, list[int]] = {}
    rooms = 0
    # Python's sort keeps the given order among equals.
    for row in sorted(order, key=lambda row: lengths[row], reverse=True):
        length = lengths[row]
        assert length <= capacity, f"row {row} has {length} tokens, more than a pack's {capacity}"
        if larger := rooms >> length:
            room = length + (larger & -larger).bit_length() - 1
            pack = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
            packs[pack].append(row)
        else:
            room, pack = capacity, len(packs)
            packs.append([row])
        by_room.setdefault(room - length, []).append(pack)
        rooms |= 1 << (room - length)
    return packs
