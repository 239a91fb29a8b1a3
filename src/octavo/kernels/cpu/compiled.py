"""From a Python function to an address: Numba's `cfunc`, cached on disk.

A kernel is written as a factory that closes over plain integers and strings (vector shape, dtypes) and over
`source_digest()`. Numba keys its cache by the closure's values, so another shape, another dtype, or a changed
line anywhere in this folder is another entry; without the digest a change in an intrinsic would not be
noticed, because Numba looks only at the file that holds the kernel.

Every kernel has the same type, ``void kernel(intptr_t *block)``: see `threads.py`.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


@functools.cache
def source_digest() -> str:
    """A hash of this folder's sources: the part of the cache key that Numba does not see by itself."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compile_kernel(function: Callable[[int], None]) -> int:
    """Compile `function(block_address)` or load it from Numba's disk cache; returns its address.

    The cache lies beside this package, else in the user's cache folder, or in NUMBA_CACHE_DIR when that is
    set. Where none is writable, or its disk is full, the kernel is compiled for this process only; what
    cannot be read in it is written anew.
    """
    import numba
    from numba import types
    from numba.core.registry import cpu_target

    # Numba keeps all variants of one name in one index, which two processes may write at once, and then a
    # variant finds another's code. A name of its own for each variant and CPU leaves nothing to mix up.
    closure = [cell.cell_contents for cell in function.__closure__ or ()]
    variant = repr((cpu_target.target_context.codegen().magic_tuple(), closure))
    function.__qualname__ += f"_{hashlib.sha256(variant.encode()).hexdigest()[:16]}"
    # `_nrt` off: no array is ever made here, so Numba's reference counting need not be linked.
    options: dict[str, Any] = {"error_model": "numpy", "_nrt": False}
    compiler = functools.partial(numba.cfunc, types.void(types.intp), **options)
    kernel: Any
    try:
        kernel = _kept_on_disk(functools.partial(compiler, cache=True), function)
    except (OSError, RuntimeError) as error:
        if not _is_about_the_folder(error):
            raise
        if not _alive or cache_folder() is not None:  # said once
            logger.warning("compiled kernels are not kept on disk (%s); set NUMBA_CACHE_DIR", error)
        kernel = compiler()(function)
    _alive.append(kernel)
    assert kernel.address is not None
    return int(kernel.address)


def _kept_on_disk(compiler: Callable[..., Any], function: Callable[[int], None]) -> Any:
    try:
        return compiler()(function)
    except Exception as error:
        if _is_about_the_folder(error):
            raise
        # The file was cut short, say: what reading it raises then can be anything.
        from numba.core import caching

        cache: Any = caching.FunctionCache
        cache(function).flush()
        return compiler()(function)


def _is_about_the_folder(error: Exception) -> bool:
    """And not about the kernel, or about what lies in the folder: "cannot cache function: no locator"."""
    return isinstance(error, OSError) or (isinstance(error, RuntimeError) and "cache" in str(error))


def cache_folder() -> Path | None:
    """Where Numba keeps the kernels that this process has compiled; None when it keeps not all of them."""
    folders = {kernel._cache.cache_path for kernel in _alive}
    return None if None in folders or not folders else Path(min(folders))


_alive: list[Any] = []  # the machine code lives as long as its cfunc object
