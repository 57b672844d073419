"""``attn-diag env``: versions and devices, for bug reports."""

from __future__ import annotations


def env() -> None:
    """Print versions and devices, for bug reports."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from attn_diag.head.machine import describe_tool, pick_device

    tool = describe_tool(pick_device("auto"))
    print(f"attn-diag {tool.version}")
    print(f"python {tool.python} on {platform.platform()}")
    for package in ("torch", "triton", "numpy", "scipy", "safetensors", "pydantic", "typer", "rich", "jinja2"):
        try:
            print(f"{package} {version(package)}")
        except PackageNotFoundError:
            print(f"{package} not installed")
    cuda = torch.version.cuda or "not built in"
    print(f"device {tool.device} ({tool.backend}), CUDA {cuda}, {torch.get_num_threads()} threads")
