"""Frozen answers: what the commands return, as plain dataclasses with their JSON. No torch, no reports, no files.

``base`` has the class that all derive from. Each command's answer is a module of that command's name; a
``Diagnosis`` is made of ``diagnosis``, ``estimates`` and ``figures``.
"""
