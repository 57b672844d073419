"""Which inputs break a kernel, and the smallest of them: ``attn_diag.hunt``.

A capture is changed along one axis at a time (head size, lengths, groups, mask, dtype, strides, values, batch), then
along several. Every case runs in a worker process and is judged as ``inspect`` judges a capture. What fails is reduced
to the changes that it takes, those are named with their levels, and the rest is shrunk to the smallest case.
"""
