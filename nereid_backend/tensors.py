"""Tensors between Triton's stub and numpy: what is exact where.

Measured against tritonserver 2.51 (see tests/nereid_backend/test_on_triton.py, which repeats it for every
dtype on both numpy generations):

===========  =========================================  ==========================================
numpy        into the model                             out of the model
===========  =========================================  ==========================================
1.26         ``as_numpy`` (writable view of the shared  ``Tensor(name, ndarray)``;
             memory)                                    ``Tensor.from_dlpack`` of an ndarray segfaults
2            DLPack; ``as_numpy`` is silently wrong     DLPack; ``Tensor(name, ndarray)`` is silently
                                                        empty
BF16, any    a DLPack capsule read by us: numpy has no  a DLPack capsule written by us
             BF16 and refuses one
===========  =========================================  ==========================================

BYTES are plain calls on both; under numpy 2 a server before 2.52 would end the process over them, so they are refused.

From 2.52 on the plain calls are exact under numpy 2 as well, and so is DLPack, so the numpy generation alone decides.

Capsules towards Triton are our own. numpy refuses to export a read-only array, which a view of a JAX result is; Triton
ignores strides; and its stub renames a consumed capsule in a way that makes numpy's destructor complain on stderr, once
per tensor.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from nereid_backend.dtypes import BYTES
from nereid_backend.errors import BundleError
from nereid_backend.spec import TensorSpec

Array = np.ndarray[Any, Any]

_KIND_INT, _KIND_UINT, _KIND_FLOAT, _KIND_BFLOAT, _KIND_BOOL = 0, 1, 2, 4, 6
# By numpy's kind; ml_dtypes declares bfloat16 as V, and nothing else of the kind gets here.
_KINDS = {"i": _KIND_INT, "u": _KIND_UINT, "f": _KIND_FLOAT, "b": _KIND_BOOL, "V": _KIND_BFLOAT}
_CPU = 1


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter)]

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_NAME = b"dltensor"

# A consumer owns an exported tensor until it calls the deleter, possibly without the GIL (numpy 1's own deleter
# crashes there; a ctypes callback takes the GIL first). What it points to is kept here until then.
_exported: dict[int, tuple[Any, ...]] = {}
_keys = itertools.count(1)


def _drop(managed: Any) -> None:
    _exported.pop(managed.contents.manager_ctx, None)


_release = _Deleter(_drop)


class Capsule:
    """An array as a C-contiguous DLPack producer on the CPU, whatever its dtype, strides and writability."""

    __slots__ = ("_array",)

    def __init__(self, array: Array) -> None:
        self._array = np.asarray(array, order="C")  # ascontiguousarray makes a scalar one-dimensional

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0

    def __dlpack__(self, **_: Any) -> Any:
        array = self._array
        kind = _KINDS[array.dtype.kind]
        shape = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
        managed = _DLManagedTensor()
        tensor = managed.dl_tensor
        tensor.data = array.ctypes.data
        tensor.device_type, tensor.device_id, tensor.ndim = _CPU, 0, array.ndim
        tensor.dtype = _DLDataType(kind, array.itemsize * 8, 1)
        tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
        key = next(_keys)
        managed.manager_ctx, managed.deleter = key, _release
        _exported[key] = (array, shape, managed)
        return _new_capsule(ctypes.addressof(managed), _NAME, None)


def _read_bf16(tensor: Any, dtype: np.dtype[Any]) -> Array:
    """The BF16 content of an object with ``__dlpack__``, copied (2 bytes an element)."""
    capsule = tensor.__dlpack__()
    dl = _DLManagedTensor.from_address(_get_pointer(capsule, _NAME)).dl_tensor
    shape = tuple(dl.shape[i] for i in range(dl.ndim))
    array = np.empty(shape, dtype)
    if array.nbytes:
        ctypes.memmove(array.ctypes.data, dl.data + dl.byte_offset, array.nbytes)
    return array  # the capsule still owns the tensor and frees it here


class TensorAccess:
    """Makes the functions that read and write one tensor each, chosen once for this interpreter's numpy.

    A ``scalar`` per request or per row travels with a last dimension of 1 of its own: Triton has no rank 0.
    """

    def __init__(
        self,
        pb_utils: Any,
        numpy_version: str = np.__version__,
        server_version: str = os.environ.get("TRITON_SERVER_VERSION", ""),
    ) -> None:
        """``server_version`` is what NVIDIA's containers say; the embedded server is 2.51 and says nothing."""
        self._server_version = server_version
        self._tensor = pb_utils.Tensor
        self._dlpack = int(numpy_version.partition(".")[0]) >= 2

    def request_reader(
        self, specs: Sequence[TensorSpec], is_scalar: Callable[[TensorSpec], bool] = lambda _: False
    ) -> Callable[[Iterable[Any]], list[list[Array]]]:
        """A function from requests to the arrays of each for the inputs ``specs``, in their order.

        The arrays are views of Triton's shared memory, valid until the response is sent; BF16 is a copy.
        """
        read = [(spec.name, self.reader(spec, scalar=is_scalar(spec))) for spec in specs]
        if len(read) == 1:  # Triton lets no request through that has another, or none
            ((_, only),) = read
            return lambda requests: [[only(request.inputs()[0])] for request in requests]

        def arrays(request: Any) -> list[Array]:
            tensors = {tensor.name(): tensor for tensor in request.inputs()}
            return [read_one(tensors[name]) for name, read_one in read]

        return lambda requests: list(map(arrays, requests))

    def reader(self, spec: TensorSpec, *, scalar: bool = False) -> Callable[[Any], Array]:
        """A function from a tensor of a request to the array of input ``spec``, see ``request_reader``."""
        if scalar:
            read = self.reader(spec)
            return lambda tensor: read(tensor)[..., 0]
        if spec.dtype == "bf16":
            bfloat16 = spec.element.numpy
            return lambda tensor: _read_bf16(tensor, bfloat16)
        if self._dlpack and not self._is_text(spec):
            return np.from_dlpack
        return operator.methodcaller("as_numpy")

    def view(self, spec: TensorSpec) -> Callable[[Any], Array]:
        """A function from any tensor of Triton's, laid out as ``spec``, to an array that the code of a bundle may keep.

        The array is read-only and holds Triton's memory for as long as it lives; BF16 is a copy.
        """
        if spec.dtype == "bf16":
            bfloat16 = spec.element.numpy
            return lambda tensor: _read_bf16(tensor, bfloat16)
        return np.from_dlpack

    def writer(self, spec: TensorSpec, *, scalar: bool = False) -> Callable[[Array], Any]:
        """A function from an array to the output tensor ``spec``; strided arrays arrive exact."""
        if scalar:
            write = self.writer(spec)
            return lambda array: write(array[..., np.newaxis])
        tensor, name = self._tensor, spec.name
        if spec.dtype == "bf16" or (self._dlpack and not self._is_text(spec)):
            return lambda array: tensor.from_dlpack(name, Capsule(array))
        return functools.partial(tensor, name)

    def _is_text(self, spec: TensorSpec) -> bool:
        """Raises BundleError for texts that this server would lose, or end the process over."""
        if spec.element is not BYTES:
            return False
        if self._dlpack and not _is_at_least_2_52(self._server_version):
            raise BundleError(
                f"tensor {spec.name!r} holds texts (BYTES), which Triton before 2.52 cannot hand over under numpy 2; "
                "use numpy 1.26 or a newer Triton"
            )
        return True


def _is_at_least_2_52(version: str) -> bool:
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    return len(numbers) == 2 and numbers >= [2, 52]
