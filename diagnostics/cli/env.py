"""``attn-diag env``: versions and devices, for bug reports."""

from __future__ import annotations


def env() -> None:
    """Print versions and devices, for bug reports."""
    import platform
    import sys
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from attn_diag.head.machine import describe_tool, pick_device
    from attn_diag.printing import say

    tool = describe_tool(pick_device("auto"))
    say(f"OK attn-diag {tool.version} on {tool.device}, torch {tool.torch}", sys.stdout)
    say(f"attn-diag {tool.version}", sys.stdout)
    say(f"python {tool.python} on {platform.platform()}", sys.stdout)
    for package in ("torch", "triton", "numpy", "scipy", "safetensors", "pydantic", "typer", "rich", "jinja2"):
        try:
            say(f"{package} {version(package)}", sys.stdout)
        except PackageNotFoundError:
            say(f"{package} not installed", sys.stdout)
    cuda = torch.version.cuda or "not built in"
    say(f"device {tool.device} ({tool.backend}), CUDA {cuda}, {torch.get_num_threads()} threads", sys.stdout)
