"""Models in: ``capture`` and ``last`` (live), ``Monitor`` and ``read_log`` (monitoring; the alarm's thresholds: alarm),
``break_if`` (debugging), ``trace_dtypes`` and ``check_qkv`` (drift).
"""
