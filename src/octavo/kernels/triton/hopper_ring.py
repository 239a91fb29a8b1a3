"""How the roles of the Hopper pipeline hand each other slots of shared memory, and notes."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
# ruff: noqa: RUF005  (Gluon has no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate


@aggregate
class Ring:
    """Slots of shared memory that are filled and emptied in turn; `count` numbers their uses from 0."""

    slots: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, slots, full, empty):
        self.slots = slots
        self.full = full
        self.empty = empty

    @gluon.jit
    def wait_empty(self, count):
        """A slot to fill, and the barrier to tell."""
        size: gl.constexpr = self.full.shape[0]
        mbarrier.wait(self.empty.index(count % size), ((count // size) & 1) ^ 1)
        return self.slots.index(count % size), self.full.index(count % size)

    @gluon.jit
    def wait_full(self, count):
        size: gl.constexpr = self.full.shape[0]
        mbarrier.wait(self.full.index(count % size), (count // size) & 1)
        return self.slots.index(count % size)

    @gluon.jit
    def release(self, count):
        size: gl.constexpr = self.full.shape[0]
        mbarrier.arrive(self.empty.index(count % size), count=1)


@gluon.jit
def new_ring(dtype, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, READERS: gl.constexpr):
    slots = gl.allocate_shared_memory(dtype, SHAPE, LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [SHAPE[0], 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SHAPE[0], 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SHAPE[0]):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Ring(slots, full, empty)


@gluon.jit
def send(notes, sent, part, row, q_start, q_len, k_len, low, first, end):
    """Eight numbers for the warpgroups: what to do next. A part of -1 ends the work.

    `part`: of the keys and the head, split * heads + head.
    """
    note, full = notes.wait_empty(sent)
    i = gl.arange(0, 8, layout=gl.BlockedLayout([8], [32], [1], [0]))
    value = gl.where(i == 0, part, gl.where(i == 1, row, gl.where(i == 2, q_start, q_len)))
    value = gl.where(
        i == 4, k_len, gl.where(i == 5, low, gl.where(i == 6, first, gl.where(i == 7, end, value)))
    )
    note.store(value.to(gl.int32))
    mbarrier.arrive(full, count=1)


@gluon.jit
def receive(notes, received):
    note = notes.wait_full(received).load(gl.BlockedLayout([8], [32], [4], [0]))
    notes.release(received)
    i = gl.arange(0, 8, layout=gl.BlockedLayout([8], [32], [4], [0]))
    values = ()
    for n in gl.static_range(8):
        values = values + (gl.sum(gl.where(i == n, note, 0), 0),)
    return values
