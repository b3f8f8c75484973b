"""Named operations on raw arrays: one operation a file, one pure-JAX reference, fast paths per platform behind it.

`quant/ops.py` wraps these for quantised weights; model code calls only those wrappers.
"""
