"""Numbers: eight-bit formats, quantised tensors, fake quantisation, and the policy of what is stored how."""

from mtpjax.quant.fake_quant import fake_quant, fake_quant_params
from mtpjax.quant.formats import FORMATS, cast
from mtpjax.quant.policy import PRECISIONS, Precision, apply_precision, convert_leaf, precision_report
from mtpjax.quant.qtensor import BLOCK, QTensor, dequantize, frozen, quantize, take

__all__ = [
    "BLOCK",
    "FORMATS",
    "PRECISIONS",
    "Precision",
    "QTensor",
    "apply_precision",
    "cast",
    "convert_leaf",
    "dequantize",
    "fake_quant",
    "fake_quant_params",
    "frozen",
    "precision_report",
    "quantize",
    "take",
]
