"""Functions of linear attention in, result out: ``check_linear``, ``invariance_linear``, ``replay_linear``."""
