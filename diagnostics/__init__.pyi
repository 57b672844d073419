"""The public names and where they are defined: what type checkers read, and what is imported on first use."""

from .analyses.attribution.attribute import attribute as attribute
from .analyses.comparison.diff import diff as diff
from .analyses.comparison.read import read_diagnosis as read_diagnosis
from .analyses.conversion import convert as convert
from .analyses.explain import explain as explain
from .analyses.identify import identify as identify
from .analyses.identify import identify_captures as identify_captures
from .analyses.inspection.inspect import inspect as inspect
from .analyses.inspection.inspect import inspect_captures as inspect_captures
from .analyses.inspection.inspect import repeated_maxima as repeated_maxima
from .analyses.microscopy.addition import examine_addition as examine_addition
from .analyses.microscopy.closed_form import closed_form as closed_form
from .analyses.microscopy.microscope import microscope as microscope
from .analyses.mitigation.what_if import what_if as what_if
from .analyses.paper.figures import paper_figures as paper_figures
from .captures.capture import Capture as Capture
from .captures.loading import load as load
from .captures.loading import load_example as load_example
from .captures.selection import Selection as Selection
from .errors import AttnDiagError as AttnDiagError
from .errors import InputError as InputError
from .head.certification import Certify as Certify
from .kernels import Recipe as Recipe
from .kernels import preset as preset
from .kernels.attention import attention as attention
from .kernels.dump import Dump as Dump
from .results.attribution import Attribution as Attribution
from .results.check import CheckReport as CheckReport
from .results.comparison import Comparison as Comparison
from .results.diagnosis import Diagnosis as Diagnosis
from .results.diagnosis import json_schema as json_schema
from .results.dtypes import DtypeDrift as DtypeDrift
from .results.explanation import Explanation as Explanation
from .results.hardware import HardwareProfile as HardwareProfile
from .results.identification import Identification as Identification
from .results.microscope import Microscope as Microscope
from .results.paper import PaperFigures as PaperFigures
from .results.probe import ProbeReport as ProbeReport
from .results.what_if import WhatIf as WhatIf
from .testing.probing.probe import probe as probe
from .testing.regression.check import check as check
from .testing.round_to import round_to as round_to
from .testing.selftest import selftest as selftest
from .testing.unbiased import assert_unbiased as assert_unbiased
from .watching.debugging.breaking import break_if as break_if
from .watching.debugging.breaking import last_finding as last_finding
from .watching.debugging.finding import Finding as Finding
from .watching.drift.trace import check_qkv as check_qkv
from .watching.drift.trace import trace_dtypes as trace_dtypes
from .watching.live.recorder import capture as capture
from .watching.live.recorder import last as last
from .watching.monitoring.monitor import Monitor as Monitor
from .watching.monitoring.record import read_log as read_log

__version__: str
__all__: list[str]
