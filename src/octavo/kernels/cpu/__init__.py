"""What makes the CPU fast: kernels that Numba and LLVM compile on first use and keep on disk.

No C compiler is needed, only wheels.

How the pieces fit, bottom up::

    host.py        may this machine run them, and how wide are its vectors         (VectorShape)
    ir.py          LLVM vector instructions as Numba intrinsics: loads, stores, loops
    math.py        exp and tanh as vector polynomials
    tile.py        the one micro-kernel: a register tile of  out += x @ w
    compiled.py    Numba `cfunc` + disk cache -> an address that plain ctypes can call
    threads.py     runs that address on this thread and a team of workers
    team.py        how leader and workers meet, compiled
    linear_kernel.py, attention_kernel.py, small_kernels.py        the loops around tiles and rows
    attention.py, kv_write.py, norm.py, rotary.py, activation.py   tensors in, addresses down
    attention_parameters.py   names for what attention.py hands to its kernel

Three rules hold everywhere in this room:

* **One order of additions per output element.** It depends on the element's own operands and on
  absolute positions (K index, key position), never on the number of rows in the call, on the tile a row lands
  in, or on the number of threads. A row therefore gets the same bits alone, in a batch, in a chunk, or after
  a prefix hit.
* **Workers take tasks from an atomic counter**, so the faster thread does more; which thread computes a
  task changes nothing in its result.
* **Compiled code receives addresses and integers only.** All checks happen before, in Python.
"""
