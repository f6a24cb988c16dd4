from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HealthCheckRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthCheckResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: str
    def __init__(self, status: _Optional[str] = ...) -> None: ...

class ViewModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ViewModelsResponse(_message.Message):
    __slots__ = ("model_names",)
    MODEL_NAMES_FIELD_NUMBER: _ClassVar[int]
    model_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model_names: _Optional[_Iterable[str]] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("meta", "chunk")
    META_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    meta: CheckpointMeta
    chunk: TensorChunk
    def __init__(self, meta: _Optional[_Union[CheckpointMeta, _Mapping]] = ..., chunk: _Optional[_Union[TensorChunk, _Mapping]] = ...) -> None: ...

class CheckpointMeta(_message.Message):
    __slots__ = ("model_name", "output_file")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FILE_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    output_file: str
    def __init__(self, model_name: _Optional[str] = ..., output_file: _Optional[str] = ...) -> None: ...

class TensorChunk(_message.Message):
    __slots__ = ("tensor_name", "shape", "data", "chunk_index", "end_of_tensor")
    TENSOR_NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    END_OF_TENSOR_FIELD_NUMBER: _ClassVar[int]
    tensor_name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    chunk_index: int
    end_of_tensor: bool
    def __init__(self, tensor_name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., chunk_index: _Optional[int] = ..., end_of_tensor: bool = ...) -> None: ...

class CheckpointResponse(_message.Message):
    __slots__ = ("chunk", "done", "exit_code", "output_chunk")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: str
    done: bool
    exit_code: int
    output_chunk: TensorChunk
    def __init__(self, chunk: _Optional[str] = ..., done: bool = ..., exit_code: _Optional[int] = ..., output_chunk: _Optional[_Union[TensorChunk, _Mapping]] = ...) -> None: ...

class ModelInferenceConfig(_message.Message):
    __slots__ = ("input_shape", "max_batch_size")
    INPUT_SHAPE_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    input_shape: _containers.RepeatedScalarFieldContainer[int]
    max_batch_size: int
    def __init__(self, input_shape: _Optional[_Iterable[int]] = ..., max_batch_size: _Optional[int] = ...) -> None: ...
