"""Attention calls of a running model, as their kernels saw them. Where to begin:

- ``capturing`` is ``attn_diag.capture``, ``observed`` is ``attn_diag.observe``; ``recorder`` and ``writer`` make files
- ``watch`` follows one model for one listener, ``intercept`` meets the calls, ``call`` is one of them
- functions and operators that are met: ``functions``, ``operators``, ``kernels``, ``methods``; how each is read:
  ``sites`` and ``*_calls``
- gradients: ``pending``; x, w_q and dq_pre: ``query_projections``, ``linear_layers``
- compiled models: ``graph_projections``, ``flex_graphs``, ``inductor_pass``; CUDA graphs: ``cuda_graphs``
- linear attention: ``linear_calls`` meets it, ``linear_records`` are its calls, ``rwkv_operators`` RWKV-LM's
- several ranks: ``rings``, ``hops``, ``sums``, ``spread_heads``, ``pipeline``
- attention that is not met, and what is lost: ``unseen``, ``losses``
"""
