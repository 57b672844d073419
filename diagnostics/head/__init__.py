"""One head against float64. Where to begin:

- opened in ``open`` and ``read``, measured in ``measure``: one pass of truth (``truth``, ``streaming``)
- an output beside a well-rounded kernel's: ``judging``, ``counterfactual``, ``quality``, ``outlying``; of inputs
  without a published recipe: ``no_recipe``
- how errors reach the gradients: ``propagation``, ``effects``; dW_Q: ``projection`` and the package ``pullback``
- whose roundings it has: ``baseline``, ``identification``, ``by_kernels``, ``recipe_*``; where the kernel is not fused
  or rounds in its own way: ``unfused*``, ``tiled_loops``, ``block_sums``, ``from_lse``, ``cut_off``, ``fp32_in_bf16``
- declared to work below 16 bits: ``declared*``
- another call than its capture states: ``assumptions``, ``output_fit``, ``scale_fit``, ``other_*``, ``mistakes``
- repeated row maxima: ``row_maxima``; rows checked against the oracle: ``certification``; linear attention: ``linear``
"""
