"""The kernels in plain torch: the executable specification, the test oracle, and the fallback.

Its only virtue is being obvious. Everything is computed in float32 (float64 when given float64) from the
inputs as they are, one sequence at a time. Arguments come checked and are not checked again.
"""
