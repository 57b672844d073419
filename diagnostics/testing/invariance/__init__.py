"""One call in every arrangement that should not matter: ``attn_diag.invariance`` and ``attn-diag invariance``.

What may differ and what may not:

- **bits** are promised where nothing that an output depends on has changed, and the work neither: the same call again,
  another batch size or order of batch items or heads, other contents of later tokens, of other batch items or heads.
- **rounding** is promised where a kernel may choose another order of adding: one row alone, a chunk of the rows, more
  keys that no row sees, GQA against repeated key heads, another layout, a compiled call, another number of splits.

Two calls are within the noise of each other where no element, no row and not the whole of a quantity differs by more
than two kernels may that round as this one does. The unit is the standard deviation of a well-rounded kernel's error,
element by element (``head.counterfactual``), times how much the kernel itself exceeds that over all elements of the
quantity, where it does. The limits are ``head.quality``'s: 8 standard deviations for an element or a row, 2.5 for all.
"""
