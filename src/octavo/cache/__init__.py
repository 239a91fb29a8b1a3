"""Who owns which block of the KV cache, how large a cache is, and the tensors it lives in.

The manager decides, `storage` holds the numbers; only `octavo.cache.storage` loads torch, so nothing is
imported here.
"""
