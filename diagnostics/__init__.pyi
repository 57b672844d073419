"""The public names and where they are defined: what type checkers read, and what is imported on first use."""

from .analysis import inspect as inspect
from .analysis import inspect_captures as inspect_captures
from .analysis import repeated_maxima as repeated_maxima
from .attribution.attribute import attribute as attribute
from .capture_job import Selection as Selection
from .captures import Capture as Capture
from .certification import Certify as Certify
from .comparison.diff import diff as diff
from .comparison.read import read_diagnosis as read_diagnosis
from .conversion.convert import convert as convert
from .debugging.breaking import break_if as break_if
from .debugging.breaking import last_finding as last_finding
from .debugging.explain import explain as explain
from .debugging.finding import Finding as Finding
from .drift.check import check_qkv as check_qkv
from .drift.trace import trace_dtypes as trace_dtypes
from .errors import AttnDiagError as AttnDiagError
from .errors import InputError as InputError
from .hardware.selftest import selftest as selftest
from .identification.identify import identify as identify
from .identification.many import identify_captures as identify_captures
from .kernels import Recipe as Recipe
from .kernels import preset as preset
from .kernels.attention import attention as attention
from .kernels.dump import Dump as Dump
from .live.recorder import capture as capture
from .live.recorder import last as last
from .loading import load as load
from .loading import load_example as load_example
from .microscopy.addition import examine_addition as examine_addition
from .microscopy.closed_form import closed_form as closed_form
from .microscopy.microscope import microscope as microscope
from .mitigation.what_if import what_if as what_if
from .monitoring.monitor import Monitor as Monitor
from .monitoring.record import read_log as read_log
from .paper.figures import paper_figures as paper_figures
from .probing.probe import probe as probe
from .regression.check import check as check
from .regression.unbiased import assert_unbiased as assert_unbiased
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
from .rounding import round_to as round_to

__version__: str
__all__: list[str]
