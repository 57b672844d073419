"""attn-diag: signed rounding-error diagnostics for low-precision attention.

    import attn_diag
    diagnosis = attn_diag.inspect(q, k, v, o=o, do=do, causal="top-left")
    print(diagnosis.report())

Names are imported on first use, so that importing the package (and ``attn-diag --help``) needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from attn_diag.analysis import inspect, inspect_captures, repeated_maxima
    from attn_diag.attribution.attribute import attribute
    from attn_diag.attribution.result import Attribution
    from attn_diag.capture_job import Selection
    from attn_diag.captures import Capture
    from attn_diag.certification import Certify
    from attn_diag.comparison.diff import diff
    from attn_diag.comparison.read import read_diagnosis
    from attn_diag.comparison.result import Comparison
    from attn_diag.conversion.convert import convert
    from attn_diag.debugging.breaking import break_if, last_finding
    from attn_diag.debugging.explain import explain
    from attn_diag.debugging.finding import Finding
    from attn_diag.debugging.result import Explanation
    from attn_diag.diagnosis import Diagnosis, json_schema
    from attn_diag.drift.check import check_qkv
    from attn_diag.drift.result import DtypeDrift
    from attn_diag.drift.trace import trace_dtypes
    from attn_diag.errors import AttnDiagError, InputError
    from attn_diag.hardware.profile import HardwareProfile
    from attn_diag.hardware.selftest import selftest
    from attn_diag.identification.identify import identify
    from attn_diag.identification.many import identify_captures
    from attn_diag.identification.result import Identification
    from attn_diag.kernels import Recipe, preset
    from attn_diag.kernels.attention import attention
    from attn_diag.kernels.dump import Dump
    from attn_diag.live.recorder import capture, last
    from attn_diag.loading import load, load_example
    from attn_diag.microscopy.addition import examine_addition
    from attn_diag.microscopy.closed_form import closed_form
    from attn_diag.microscopy.microscope import microscope
    from attn_diag.microscopy.result import Microscope
    from attn_diag.mitigation.result import WhatIf
    from attn_diag.mitigation.what_if import what_if
    from attn_diag.monitoring.monitor import Monitor
    from attn_diag.monitoring.record import read_log
    from attn_diag.paper.figures import paper_figures
    from attn_diag.paper.result import PaperFigures
    from attn_diag.probing.probe import probe
    from attn_diag.probing.result import ProbeReport
    from attn_diag.regression.check import check
    from attn_diag.regression.result import CheckReport
    from attn_diag.regression.unbiased import assert_unbiased
    from attn_diag.rounding import round_to

_HOME = {
    "AttnDiagError": "errors",
    "Attribution": "attribution.result",
    "Certify": "certification",
    "Capture": "captures",
    "CheckReport": "regression.result",
    "Comparison": "comparison.result",
    "Diagnosis": "diagnosis",
    "DtypeDrift": "drift.result",
    "Dump": "kernels.dump",
    "Explanation": "debugging.result",
    "Finding": "debugging.finding",
    "HardwareProfile": "hardware.profile",
    "Identification": "identification.result",
    "InputError": "errors",
    "Microscope": "microscopy.result",
    "Monitor": "monitoring.monitor",
    "PaperFigures": "paper.result",
    "ProbeReport": "probing.result",
    "Recipe": "kernels",
    "Selection": "capture_job",
    "WhatIf": "mitigation.result",
    "assert_unbiased": "regression.unbiased",
    "attention": "kernels.attention",
    "attribute": "attribution.attribute",
    "break_if": "debugging.breaking",
    "capture": "live.recorder",
    "check": "regression.check",
    "check_qkv": "drift.check",
    "closed_form": "microscopy.closed_form",
    "convert": "conversion.convert",
    "diff": "comparison.diff",
    "examine_addition": "microscopy.addition",
    "explain": "debugging.explain",
    "identify": "identification.identify",
    "identify_captures": "identification.many",
    "inspect": "analysis",
    "inspect_captures": "analysis",
    "json_schema": "diagnosis",
    "last": "live.recorder",
    "last_finding": "debugging.breaking",
    "load": "loading",
    "load_example": "loading",
    "microscope": "microscopy.microscope",
    "paper_figures": "paper.figures",
    "preset": "kernels",
    "probe": "probing.probe",
    "read_diagnosis": "comparison.read",
    "read_log": "monitoring.record",
    "repeated_maxima": "analysis",
    "round_to": "rounding",
    "selftest": "hardware.selftest",
    "trace_dtypes": "drift.trace",
    "what_if": "mitigation.what_if",
}

__all__ = [
    "AttnDiagError",
    "Attribution",
    "Capture",
    "Certify",
    "CheckReport",
    "Comparison",
    "Diagnosis",
    "DtypeDrift",
    "Dump",
    "Explanation",
    "Finding",
    "HardwareProfile",
    "Identification",
    "InputError",
    "Microscope",
    "Monitor",
    "PaperFigures",
    "ProbeReport",
    "Recipe",
    "Selection",
    "WhatIf",
    "assert_unbiased",
    "attention",
    "attribute",
    "break_if",
    "capture",
    "check",
    "check_qkv",
    "closed_form",
    "convert",
    "diff",
    "examine_addition",
    "explain",
    "identify",
    "identify_captures",
    "inspect",
    "inspect_captures",
    "json_schema",
    "last",
    "last_finding",
    "load",
    "load_example",
    "microscope",
    "paper_figures",
    "preset",
    "probe",
    "read_diagnosis",
    "read_log",
    "repeated_maxima",
    "round_to",
    "selftest",
    "trace_dtypes",
    "what_if",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
