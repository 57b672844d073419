"""What the quantisers of libraries are called here: the table of docs/quantisation.md, measured on their own code.

Each row is a library's option on a weight of 64 x 512 in fp32 and in BF16 (rows of other sizes), and the declaration
that ``quant`` is given; of options that compute in BF16 where the weight has it, with ``scale=bf16``. Told are the
part of the values that ``quant`` finds to be the declaration's in some order of computing them (``as declared``: two
roundings of fp32 may part them), the part with the very bits of its exact arithmetic (``bit-equal``), and the outcome.
Libraries that are not installed are said to be so. Those that are no package are formulas after their repositories, as
in tests/test_quant_libraries.py; microxcaling is none either, but a clone of it on PYTHONPATH is run.

    pip install bitsandbytes==0.50.2 hqq==0.2.8.post1 optimum-quanto==0.2.7 compressed-tensors==0.20.1
    pip install nvidia-modelopt==0.47.0 brevitas==0.13.4
    git clone https://github.com/microsoft/microxcaling
    export PYTHONPATH=microxcaling
    python benchmarks/study_quant_libraries.py --json benchmarks/results/quant_libraries_cpu.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from measuring import made_by, options_of, save
from torch import Tensor

import attn_diag
from attn_diag.kernels.quantizers import parse_quantizer

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from test_quant_libraries import awq, bitnet, bitnet_activations, gptq, groups

FLOATS = (torch.float32, torch.bfloat16)
IN_BF16 = "scale=bf16"


@dataclass(frozen=True)
class Option:
    """A library's option, and what it is called here."""

    name: str
    declared: str
    values: Callable[[Tensor], Tensor]
    starred: bool = False
    """Whether it computes in BF16 where the weight is in BF16."""
    of: torch.dtype | None = None
    """The format to which it takes every weight first."""


def weight(seed: int) -> Tensor:
    """[64, 512] fp32, each row of its own size, as output channels are."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(64, 512, generator=g) * 0.02 * torch.exp(0.3 * torch.randn(64, 1, generator=g))


def bitsandbytes() -> Iterator[Option]:
    functional = import_module("bitsandbytes.functional")

    def four_bit(kind: str, block: int) -> Callable[[Tensor], Tensor]:
        return lambda w: functional.dequantize_4bit(
            *functional.quantize_4bit(w, blocksize=block, quant_type=kind, compress_statistics=False)
        )

    for kind, declared in (("nf4", "nf4"), ("fp4", "bnb-fp4")):
        yield Option(f"quantize_4bit {kind}", declared, four_bit(kind, 64))
        yield Option(f"quantize_4bit {kind}, blocks of 128", f"{declared} block=128", four_bit(kind, 128))
    yield Option(
        "int8_vectorwise_quant",
        "int8",
        lambda w: functional.int8_vectorwise_dequant(*functional.int8_vectorwise_quant(w)[:2]),
        of=torch.float16,
    )


def hqq() -> Iterator[Option]:
    quantizer = import_module("hqq.core.quantize").Quantizer

    def values(w: Tensor) -> Tensor:
        codes, meta = quantizer.quantize(
            w, nbits=4, group_size=64, axis=1, optimize=False, round_zero=False, device="cpu", compute_dtype=w.dtype
        )
        made: Tensor = quantizer.dequantize(*quantizer.cpu(codes, meta | {"compute_dtype": w.dtype}))
        return made

    yield Option("axis=1, optimize=False, group 64", "int4-asymmetric block=64 zero_point=float", values, starred=True)


def quanto() -> Iterator[Option]:
    library = import_module("optimum.quanto")

    def whole(kind: Any) -> Callable[[Tensor], Tensor]:
        scaled = library.AbsmaxOptimizer()
        return lambda w: library.quantize_weight(w, kind, 0, scaled(w, kind, 0)).dequantize()

    def in_groups(w: Tensor) -> Tensor:
        scale, shift = library.MaxOptimizer()(w, library.qint4, 0, 128)
        made: Tensor = library.quantize_weight(w, library.qint4, 0, scale, shift, 128).dequantize()
        return made

    yield Option("qint8", "int8 narrow=false", whole(library.qint8), starred=True)
    yield Option("qfloat8_e4m3fn", "fp8-row", whole(library.qfloat8_e4m3fn), starred=True)
    yield Option("qint4, group 128", "int4-asymmetric block=128 zero_point=float", in_groups, starred=True)


def compressed_tensors() -> Iterator[Option]:
    schemes = import_module("compressed_tensors.quantization.quant_scheme").PRESET_SCHEMES
    helpers = import_module("compressed_tensors.quantization.utils.helpers")
    forward = import_module("compressed_tensors.quantization.lifecycle.forward")

    def as_scheme(name: str) -> Callable[[Tensor], Tensor]:
        arguments = schemes[name]["weights"]

        def values(w: Tensor) -> Tensor:
            size, whole = arguments.group_size, None
            if arguments.strategy == "tensor":
                ends = w.amin(), w.amax()
            elif arguments.strategy == "block":
                rows, columns = arguments.block_structure
                rows = min(rows, len(w))  # the weight has half a block of rows
                parts = w.reshape(len(w) // rows, rows, -1, columns)
                ends = parts.amin((1, 3)), parts.amax((1, 3))
            elif size:
                parts = w.reshape(len(w), -1, size)
                ends = parts.amin(-1), parts.amax(-1)
            else:
                ends = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
            if arguments.strategy == "tensor_group":
                whole = helpers.generate_gparam(w.amin(), w.amax())
            scale, zero = helpers.calculate_qparams(*ends, arguments, global_scale=whole)
            made: Tensor = forward.fake_quantize(w, scale, zero, arguments, global_scale=whole)
            return made

        return values

    for name, declared in (
        ("W8A8", "int8-half-range"),
        ("W4A16", "int4-half-range block=128"),
        ("W4A16_ASYM", "int4-asymmetric block=128"),
        ("FP8", "fp8"),
        ("FP8_DYNAMIC", "fp8-row"),
        ("FP8_BLOCK", "fp8-blocks"),
        ("NVFP4A16", "nvfp4"),
        ("MXFP4A16", "mxfp4 target=3.5"),
        ("MXFP6A16", "mxfp6 target=3.875"),
    ):
        yield Option(name, declared, as_scheme(name), starred=True)


def modelopt() -> Iterator[Option]:
    quantizers = import_module("modelopt.torch.quantization.nn")
    configuration = import_module("modelopt.torch.quantization.config").QuantizerAttributeConfig
    nvfp4 = import_module("modelopt.torch.quantization.qtensor").NVFP4QTensor

    def of(**fields: Any) -> Callable[[Tensor], Tensor]:
        return lambda w: quantizers.TensorQuantizer(configuration(**fields)).eval()(w)

    def packed(w: Tensor) -> Tensor:
        codes, scale, whole = nvfp4.quantize(w, 16)
        made: Tensor = codes.dequantize(scale=scale, double_scale=whole, block_sizes={-1: 16}, dtype=w.dtype)
        return made

    yield Option("INT8 by channel", "int8", of(num_bits=8, axis=0))
    yield Option("INT4 in blocks of 128", "int4 block=128", of(num_bits=4, block_sizes={-1: 128}))
    yield Option("FP8 by tensor", "fp8", of(num_bits=(4, 3), axis=None))
    yield Option("FP8 in 128 x 128", "fp8-blocks", of(num_bits=(4, 3), block_sizes={-1: 128, -2: 128}))
    yield Option("NVFP4QTensor", "nvfp4", packed)


def brevitas() -> Iterator[Option]:
    layers, quantizers = import_module("brevitas.nn"), import_module("brevitas.quant")

    def of(name: str) -> Callable[[Tensor], Tensor]:
        def values(w: Tensor) -> Tensor:
            layer = layers.QuantLinear(w.shape[1], w.shape[0], bias=False, weight_quant=getattr(quantizers, name))
            layer.to(w.dtype).weight.data = w.clone()
            with torch.no_grad():
                made: Tensor = layer.eval().quant_weight().value
            return made

        return values

    yield Option("Int8WeightPerChannelFloat", "int8", of("Int8WeightPerChannelFloat"), starred=True)
    yield Option(
        "ShiftedUint8WeightPerChannelFloat", "int8-asymmetric", of("ShiftedUint8WeightPerChannelFloat"), starred=True
    )


def microxcaling() -> Iterator[Option]:
    operations, specifications = import_module("mx.mx_ops"), import_module("mx.specs")

    def of(elements: str) -> Callable[[Tensor], Tensor]:
        specs = specifications.finalize_mx_specs(
            {"w_elem_format": elements, "scale_bits": 8, "block_size": 32, "custom_cuda": False, "round": "nearest"}
        )
        return lambda w: operations.quantize_mx_op(w, specs, elem_format=elements, axes=[-1], round="nearest")

    for elements, declared in (
        ("fp8_e4m3", "mxfp8"),
        ("fp8_e5m2", "mxfp8-e5m2"),
        ("fp6_e2m3", "mxfp6"),
        ("fp6_e3m2", "mxfp6-e3m2"),
        ("fp4_e2m1", "mxfp4"),
        ("int8", "mxint8"),
    ):
        yield Option(elements, declared, of(elements))


def of_range(w: Tensor, size: int, bits: int = 4) -> Tensor:
    """GPTQ's Quantizer and SpinQuant's ActQuantizer (of a row), both with sym=False, which have their scales in fp32.

    github.com/IST-DASLab/gptq, quant.py; github.com/facebookresearch/SpinQuant, utils/quant_utils.py.
    """
    x, most = groups(w, size).float(), 2**bits - 1
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / most
    zero = torch.round(-low / scale)
    made: Tensor = (scale * (torch.clamp(torch.round(x / scale) + zero, 0, most) - zero)).reshape(w.shape).to(w.dtype)
    return made


def spinquant_symmetric(x: Tensor, bits: int = 4) -> Tensor:
    """SpinQuant's ActQuantizer with sym=True (github.com/facebookresearch/SpinQuant, utils/quant_utils.py)."""
    most = 2 ** (bits - 1) - 1
    scale = x.abs().amax(-1, keepdim=True).float() / most
    made: Tensor = (scale * torch.clamp(torch.round(x / scale), -(most + 1), most)).to(x.dtype)
    return made


def efficientqat(w: Tensor, size: int = 128, bits: int = 4) -> Tensor:
    """EfficientQAT's UniformAffineQuantizer before it learns.

    github.com/OpenGVLab/EfficientQAT, quantize/quantizer.py. Its straight-through sums are written out: in BF16 they
    round once more.
    """
    x, most = groups(w, size), 2**bits - 1
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / most).clamp(1e-4, 1e4)
    zero = (-(low / scale).clamp(-1e4, 1e4)).round().clamp(0, most)
    steps = x / scale
    codes = ((steps.round() - steps) + steps + zero).clamp(0, most)
    made: Tensor = ((codes - zero) * scale).reshape(w.shape)
    return made


def smoothquant(w: Tensor, *, by_tensor: bool = False) -> Tensor:
    """SmoothQuant's quantize_…_absmax (github.com/mit-han-lab/smoothquant, smoothquant/fake_quant.py)."""
    scale = (w.abs().amax() if by_tensor else w.abs().amax(-1, keepdim=True)).clamp(min=1e-5) / 127
    return (w / scale).round() * scale


def formulas() -> Iterator[Option]:
    yield Option("GPTQ sym=True, group 128", "int4-half-range block=128", gptq)
    yield Option("GPTQ sym=False, group 128", "int4-asymmetric block=128", lambda w: of_range(w, 128))
    yield Option("AWQ, group 128", "int4-asymmetric block=128", lambda w: awq(w, size=128), starred=True)
    yield Option("EfficientQAT, group 128", "int4-asymmetric block=128", efficientqat, starred=True)
    yield Option("SmoothQuant by channel", "int8 narrow=false", smoothquant, starred=True)
    yield Option(
        "SmoothQuant by tensor",
        "int8 block=tensor narrow=false",
        lambda w: smoothquant(w, by_tensor=True),
        starred=True,
    )
    yield Option("SpinQuant by token, symmetric", "int8 elements=int4", spinquant_symmetric)
    yield Option(
        "SpinQuant by token, not symmetric",
        "int8-asymmetric elements=int4",
        lambda x: of_range(x, x.shape[1]),
    )
    yield Option("BitNet b1.58 weights", "ternary", bitnet, starred=True)
    yield Option("BitNet b1.58 activations", "int8 narrow=false", bitnet_activations, starred=True)


LIBRARIES: dict[str, tuple[str, Callable[[], Iterator[Option]]]] = {
    "bitsandbytes": ("bitsandbytes", bitsandbytes),
    "HQQ": ("hqq", hqq),
    "quanto": ("optimum-quanto", quanto),
    "compressed-tensors": ("compressed-tensors", compressed_tensors),
    "ModelOpt": ("nvidia-modelopt", modelopt),
    "brevitas": ("brevitas", brevitas),
    "microxcaling": ("", microxcaling),
    "formulas": ("", formulas),
}


def of_option(library: str, option: Option, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """A row: the option on a weight of this dtype."""
    w = weight(seed).to(dtype).to(option.of or dtype)
    values, declared = option.values(w.clone()), option.declared
    by = parse_quantizer(declared)
    assert by is not None
    # Scales of a format of their own are in that whatever the weight is in.
    if option.starred and dtype == torch.bfloat16 and by.scale == "fp32":
        declared = f"{declared} {IN_BF16}"
        by = attn_diag.quantizer(by, scale="bf16")
    found = attn_diag.quant(w, by, observed=values)
    exact = attn_diag.quantize(w, by).values.to(values.dtype)
    told = max(match.equal for match in found.matches if match.words.startswith("as declared"))
    return {"library": library, "option": option.name, "weight": str(dtype).removeprefix("torch."), "seed": seed,
            "declared": declared, "as declared": told, "bit-equal": float((values == exact).double().mean()),
            "outcome": found.outcome, "headline": found.headline}  # fmt: skip


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="weights of each row")
    parser.add_argument("--only", nargs="*", default=LIBRARIES, choices=LIBRARIES, help="of these libraries")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    for library in arguments.only:
        package, options = LIBRARIES[library]
        try:
            versions[library] = version(package) if package else "a clone" if library == "microxcaling" else ""
            given = list(options())
        except (ImportError, PackageNotFoundError) as error:
            versions[library] = f"not installed: {error}"
            print(f"{library}: {versions[library]}", flush=True)
            continue
        for option in given:
            for dtype in FLOATS:
                for seed in range(arguments.seeds):
                    rows.append(of_option(library, option, seed, dtype))
                    print(rows[-1], flush=True)
                save(made_by() | {"versions": versions, "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
