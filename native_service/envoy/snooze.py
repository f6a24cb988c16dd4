"""SnoozeML's Infer turned into ModelInfer inside Envoy, and back, where little has to be done for that.

The hop through our service costs a small call as much again. What it is not needed for: small messages with nothing but
FP32 tensors of exactly the shapes that the model has. Every other call, also every wrong one, goes to our service.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from native_service.envoy.scripts import KSERVE, METADATA, RESOURCE_EXHAUSTED, SNOOZE
from nereid_backend.spec import VARIABLE, ModelSpec, TensorSpec

RETRY_AFTER_S = 5
"""When a full server asks SnoozeML's clients to come back."""
INFER = f"/{SNOOZE}/Infer"
MODEL_INFER = f"/{KSERVE}/ModelInfer"
BEGUN = "snooze"
"""In the metadata: the microsecond when a call came that is turned here."""

_LONGEST_REQUEST, _LONGEST_ANSWER = 64 * 1024, 256 * 1024


def on_infer(specs: Iterable[ModelSpec]) -> str:
    """The function ``turned(request, buffer, length)``: the model's name when the call in ``buffer`` has become one of
    ModelInfer for one of ``specs``."""
    models = ", ".join(f"[{_quoted(spec.name)}] = {_model(spec)}" for spec in specs if can_turn(spec))
    return (
        f'local snooze, infer_path, longest = {{{models}}}, "{INFER}", {_LONGEST_REQUEST}\n'
        f'local begun, nereid = "{BEGUN}", "{METADATA}"\n' + _WIRE + _REQUEST
    )


def on_answer() -> str:
    """The whole of ``envoy_on_response`` for calls that ``on_infer`` has turned."""
    return (
        f'local begun, nereid, exhausted, hint = "{BEGUN}", "{METADATA}", "{RESOURCE_EXHAUSTED}", "{RETRY_AFTER_S}"\n'
        + _WIRE
        + _ANSWER
    )


def can_turn(spec: ModelSpec) -> bool:
    """Whether calls of ``spec`` may be turned: FP32 of fixed shapes in, one small tensor of that kind out."""
    tensors = (*spec.client_inputs, *spec.client_outputs)
    if len(spec.client_outputs) != 1 or not spec.client_inputs or any(t.dtype != "f32" for t in tensors):
        return False
    if any(VARIABLE in spec.dims(tensor) for tensor in tensors):
        return False
    return 4 * max(spec.max_batch_size, 1) * math.prod(spec.dims(spec.client_outputs[0])) <= _LONGEST_ANSWER


def _model(spec: ModelSpec) -> str:
    inputs = ", ".join(f"[{_quoted(tensor.name)}] = {_dims(spec, tensor)}" for tensor in spec.client_inputs)
    return f"{{rows = {spec.max_batch_size}, count = {len(spec.client_inputs)}, inputs = {{{inputs}}}}}"


def _dims(spec: ModelSpec, tensor: TensorSpec) -> str:
    return "{" + ", ".join(map(str, spec.dims(tensor))) + "}"


def _quoted(text: str) -> str:
    """For Lua; a model's file may give its tensors any names."""
    return '"' + "".join(f"\\{byte:03d}" for byte in text.encode()) + '"'


_WIRE = """
-- A varint in a text, and the place behind it.
local function varint_at(text, at)
  local value, scale = 0, 1
  for _ = 1, 5 do
    local part = text:byte(at)
    if part == nil then return nil end
    at = at + 1
    if part < 128 then return value + part * scale, at end
    value, scale = value + (part - 128) * scale, scale * 128
  end
  return nil
end

local function varint(value)
  if value < 128 then return string.char(value) end
  local parts = {}
  while value > 127 do
    table.insert(parts, string.char(value % 128 + 128))
    value = math.floor(value / 128)
  end
  table.insert(parts, string.char(value))
  return table.concat(parts)
end

-- A field whose key is one byte.
local function field(key, text)
  return string.char(key) .. varint(#text) .. text
end

-- gRPC's frame around a message.
local function framed(message)
  local size = #message
  return string.char(0, math.floor(size / 16777216) % 256, math.floor(size / 65536) % 256,
    math.floor(size / 256) % 256, size % 256) .. message
end

-- Calls on_field with the key and the content of every field, a text or for a varint its number; whether all were read.
local function each_field(text, at, stop, on_field)
  while at <= stop do
    local key, size = text:byte(at), nil
    size, at = varint_at(text, at + 1)
    if size == nil or at > stop + 1 then return false end
    if key % 8 == 0 then
      if not on_field(key, size) then return false end
    elseif key % 8 == 2 and key < 128 then
      if at + size - 1 > stop or not on_field(key, text:sub(at, at + size - 1)) then return false end
      at = at + size
    else
      return false
    end
  end
  return true
end
"""

_REQUEST = """
local function sizes_of(shape)
  local sizes, at = {}, 1
  while at <= #shape do
    local size
    size, at = varint_at(shape, at)
    if size == nil then return nil end
    table.insert(sizes, size)
  end
  return sizes
end

local function input_of(text)
  local input = {}
  local whole = each_field(text, 1, #text, function(key, content)
    if key == 10 and input.name == nil then input.name = content return true end
    if key == 18 and input.shape == nil then input.shape = content return true end
    if key == 34 and input.data == nil then input.data = content return true end
    return key == 24 and content <= 1
  end)
  return whole and input.name and input.shape and input.data and input or nil
end

-- The number of rows of an input that has the shape its model takes, 1 where that has no rows.
local function rows_of(input, model)
  local dims, sizes = model.inputs[input.name], sizes_of(input.shape)
  if dims == nil or sizes == nil then return nil end
  local rows, shift = 1, 0
  if model.rows > 0 then
    rows, shift = sizes[1], 1
    if rows == nil or rows < 1 or rows > model.rows then return nil end
  end
  if #sizes ~= #dims + shift then return nil end
  local count = rows
  for place, size in ipairs(dims) do
    if sizes[place + shift] ~= size then return nil end
    count = count * size
  end
  return #input.data == 4 * count and rows or nil
end

local function turned(request, buffer, length)
  if length > longest then return nil end
  local text = buffer:getBytes(0, length)
  local name, inputs = nil, {}
  local whole = each_field(text, 6, length, function(key, content)
    if key == 10 and name == nil then name = content return true end
    if key ~= 18 then return false end
    local input = input_of(content)
    table.insert(inputs, input)
    return input ~= nil
  end)
  local model = whole and name and snooze[name]
  if not model or #inputs ~= model.count then return nil end
  local parts, rows, seen = {field(10, name)}, nil, {}
  for _, input in ipairs(inputs) do
    local found = rows_of(input, model)
    if found == nil or seen[input.name] or (rows and rows ~= found) then return nil end
    rows, seen[input.name] = found, true
    table.insert(parts, field(42, field(10, input.name) .. field(18, "FP32") .. field(26, input.shape)))
  end
  for _, input in ipairs(inputs) do table.insert(parts, field(58, input.data)) end
  local message = framed(table.concat(parts))
  buffer:setBytes(message)
  local headers = request:headers()
  if headers:get("content-length") then headers:replace("content-length", tostring(#message)) end
  -- The answer is to be read here.
  headers:remove("grpc-accept-encoding")
  local now_us = request:timestampString(EnvoyTimestampResolution.MICROSECOND)
  request:streamInfo():dynamicMetadata():set(nereid, begun, now_us)
  return name
end
"""

_ANSWER = """
-- Little-endian, of a number above zero.
local function double(value)
  local fraction, exponent = math.frexp(value)
  local mantissa = (fraction * 2 - 1) * 2 ^ 52
  local low, high = mantissa % 2 ^ 32, math.floor(mantissa / 2 ^ 32) + (exponent + 1022) * 2 ^ 20
  local parts = {}
  for _, half in ipairs({low, high}) do
    for _ = 1, 4 do
      table.insert(parts, string.char(half % 256))
      half = math.floor(half / 256)
    end
  end
  return table.concat(parts)
end

local function answer_of(text, duration_ms)
  local name, output, data = nil, {}, nil
  local whole = text:byte(1) == 0 and each_field(text, 6, #text, function(key, content)
    if key == 10 then
      name = content
    elseif key == 42 then
      return each_field(content, 1, #content, function(inner, value) output[inner] = value return true end)
    elseif key == 50 then
      data = content
    end
    return true
  end)
  if not (whole and name and data and output[10] and output[26]) then return nil end
  local tensor = field(10, output[10]) .. field(18, output[26]) .. string.char(24, 1) .. field(34, data)
  return framed(field(10, name) .. field(18, tensor) .. string.char(25) .. double(duration_ms))
end

local words_for_memory = {"out of memory", "bad_alloc", "cuda failure 2", "memory allocation failed"}

local function end_with(headers, status, text)
  headers:replace("grpc-status", status)
  headers:replace("grpc-message", text)
end

-- The codes and words that SnoozeML's clients tell apart; as native_service/snooze/errors.py has them.
local function put_into_words(headers)
  local status, text = headers:get("grpc-status"), headers:get("grpc-message") or ""
  if status == nil or status == "0" then return end
  if text:find("Request for unknown model", 1, true) then
    return end_with(headers, "14", "the model is currently loading, retry later")
  elseif text:find("Exceeds maximum queue size", 1, true) then
    headers:replace("retry-after", hint)
    return end_with(headers, exhausted, "the queue of the model is full, retry later")
  elseif text:find("Request timeout expired", 1, true) then
    return end_with(headers, "4", "the model did not come to this call in time")
  elseif status == exhausted then
    if headers:get("retry-after") then headers:replace("retry-after", hint) end
    return
  elseif status == "2" or status == "13" or status == "14" then
    local lower = text:lower()
    for place, words in ipairs(words_for_memory) do
      if lower:find(words, 1, true) then
        headers:replace("retry-after", hint)
        return end_with(headers, exhausted, (place > 1 and "out of memory: " or "") .. text)
      end
    end
  end
  if status == "2" or status == "6" or status == "9" then headers:replace("grpc-status", "13") end
end

function envoy_on_response(response)
  local headers = response:headers()
  if headers:get("grpc-status") ~= nil then return put_into_words(headers) end
  local buffer = response:body()
  if buffer == nil or buffer:length() == 0 then
    local trailers = response:trailers()
    if trailers ~= nil then put_into_words(trailers) end
    return
  end
  local known = response:streamInfo():dynamicMetadata():get(nereid)
  local now_us, since_us = response:timestampString(EnvoyTimestampResolution.MICROSECOND), known and known[begun]
  local duration_ms = since_us and math.max(tonumber(now_us) - tonumber(since_us), 1) / 1000 or 0.001
  local answer = answer_of(buffer:getBytes(0, buffer:length()), duration_ms)
  buffer:setBytes(answer or "")
  if answer == nil then
    local trailers = response:trailers()
    if trailers ~= nil then end_with(trailers, "13", "the answer of the model could not be read") end
  end
end
"""
