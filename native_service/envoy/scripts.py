"""The Lua scripts that Envoy runs on the calls that pass it.

The first one names the cluster of a request in the header ``nereid-cluster``; the others put answers into the words and
codes that our service uses. What a script costs is in the decisions of this folder's README.
"""

from __future__ import annotations

from collections.abc import Sequence

from nereid_backend.spec import ModelSpec

REGION = "shared_memory_region"
"""The parameter of a tensor that lies in shared memory."""
CODING_HEADER = "nereid-coding"
CLUSTER_HEADER = "nereid-cluster"
KSERVE = "inference.GRPCInferenceService"
SNOOZE = "snoozeml.v1.InferenceService"
TRITON, MODEL_PREFIX = "triton", "model_"
"""Names of clusters: Triton without permits, and what stands before a model's name for Triton with them."""
RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE = 8, 13, 14

# Of one dimension, and of all inputs of a request together (our service allows each as many). Both are far beyond what
# a request can carry; a Lua number counts no further.
MOST_SIZE, MOST_ELEMENTS = 2**31 - 1, 2**53
# Of all names, shapes, ids and parameters of a request together: what fits into an error that repeats them.
MOST_TEXT_BYTES = 16 * 1024
_MOST_PARTS = 10_000
METADATA = "nereid"
"""Where a request's own id is kept for the log, when it has one."""
# Triton 2.51 answers INTERNAL with these words for ever once a model's process is gone.
STUB_IS_DEAD = "is not healthy"
PROCESS_DIED = "the model's process has died, retry later"
GONE = "the server behind this address does not answer, retry later"


def on_request(native: Sequence[tuple[ModelSpec, float | None]], on_infer: str) -> str:
    """Names the cluster of a call that Triton can answer as it is, for ``native`` models and their time limits in s.

    ``on_infer`` is what turns SnoozeML's calls into ModelInfer (:mod:`native_service.envoy.snooze`).
    ``ranks`` is the number of dimensions of all inputs together when none is left out; -1 for models that do not
    batch, whose requests need no help. Names hold letters, digits, '_', '.' and '-' only (settings).
    """
    ranks = ", ".join(f'["{spec.name}"] = {_total_rank(spec)}' for spec, _ in native)
    limits = ", ".join(f'["{spec.name}"] = {limit_s}' for spec, limit_s in native if limit_s is not None)
    asking = ", ".join(f'["/{KSERVE}/{method}"] = true' for method in ("ModelMetadata", "ModelConfig", "ModelReady"))
    streams = ", ".join(
        f'["{path}"] = true'
        for path in (f"/{KSERVE}/ModelStreamInfer", "/inference.Nereid/Checkpoint", f"/{SNOOZE}/StreamInfer")
    )
    return (
        f"local ranks = {{{ranks}}}\n"
        f"local limits = {{{limits}}}\n"
        f'local infer, asking = "/{KSERVE}/ModelInfer", {{{asking}}}\n'
        f"local streams = {{{streams}}}\n"
        f'local header, prefix, triton = "{CLUSTER_HEADER}", "{MODEL_PREFIX}", "{TRITON}"\n'
        f"local most_size, most_elements = {MOST_SIZE}, {MOST_ELEMENTS}\n"
        f'local most_text, most_parts, metadata = {MOST_TEXT_BYTES}, {_MOST_PARTS}, "{METADATA}"\n'
        f'local region = "{REGION}"\n' + on_infer + _ON_REQUEST
    )


def on_answer_of_service(over_limit: str) -> str:
    """gRPC refuses what is too large for our service before the service sees it, in words of its own.

    Only answers of our service pass here: a script costs a small call to Triton 5 to 8 % of Envoy's time.
    """
    return f"""
function envoy_on_response(response)
  local headers = response:headers()
  if headers:get("grpc-status") == nil then headers = response:trailers() end
  if headers == nil or headers:get("grpc-status") ~= "{RESOURCE_EXHAUSTED}" then return end
  local text = headers:get("grpc-message")
  if text ~= nil and text:find("larger than max", 1, true) then
    headers:replace("grpc-message", "{over_limit}")
  end
end
"""


# Reads KServe's messages by their keys (field number * 8 + kind). Only what every reader takes the same way is read: a
# field that is not KServe's, of another kind or twice where once is meant, or a malformed one, ends the reading.
_ON_REQUEST = """
local window_bytes, longest_name, longest_id = 4096, 1024, 100
local buffer, window, first, parts, texts, id

-- Places are asked for in ascending order.
local function byte(at)
  local value = window:byte(at - first + 1)
  if value == nil and at < buffer:length() then
    first, window = at, buffer:getBytes(at, math.min(window_bytes, buffer:length() - at))
    value = window:byte(1)
  end
  return value
end

local function number(at)
  local value, scale = 0, 1
  for _ = 1, 10 do
    local part = byte(at)
    if part == nil then return nil end
    at = at + 1
    if part < 128 then return value + part * scale, at end
    value, scale = value + (part - 128) * scale, scale * 128
  end
  return nil
end

-- The key at a place, and from where to where its bytes are.
local function field(at, stop)
  local key, size = byte(at), nil
  size, at = number(at + 1)
  if size == nil or at + size > stop then return nil end
  return key, at, at + size
end

-- Whether that many more bytes beside the tensors, in one more part, are too many.
local function is_too_much(bytes)
  parts, texts = parts + 1, texts + bytes
  return parts > most_parts or texts > most_text
end

local function text(from, to)
  if to - from > longest_name then return nil end
  return to > from and buffer:getBytes(from, to - from) or ""
end

-- Whether a tensor lies in shared memory: our service checks where.
local function is_in_region(from, to)
  return to > from and buffer:getBytes(from, to - from):find(region, 1, true) ~= nil
end

-- Of the shape of an input so far: the number of dimensions, the product of the sizes but those of 0, whether one is 0.
local dimensions, elements, is_empty

local function add_size(at)
  local size
  size, at = number(at)
  if size == nil or size > most_size then return nil end
  if size > 0 then elements = elements * size else is_empty = true end
  dimensions = dimensions + 1
  return at
end

-- Whether an input can be read.
local function read_input(at, stop)
  local key, from
  while at < stop do
    if byte(at) == 24 then -- shape, one size
      at = add_size(at + 1)
      if at == nil or at > stop or is_too_much(10) then return false end
    else
      key, from, at = field(at, stop)
      if key == 42 then -- contents
        if is_too_much(0) then return false end
      elseif key == 10 or key == 18 or key == 26 or key == 34 then -- name, datatype, shape, parameters
        if is_too_much(at - from) or (key == 34 and is_in_region(from, at)) then return false end
        while key == 26 and from < at do
          from = add_size(from)
          if from == nil or from > at then return false end
        end
      else
        return false
      end
    end
  end
  return true
end

-- The model that a message of that many bytes asks for, when Triton can answer it.
local function read_request(length, is_infer)
  local name, version, at, key, from = nil, nil, 5, nil, nil
  dimensions, elements, is_empty = 0, 1, false
  while at < length do
    key, from, at = field(at, length)
    if key == 10 and name == nil then
      name = text(from, at)
      if name == nil then return nil end
    elseif key == 18 and version == nil then
      version = text(from, at)
      if version ~= "" and version ~= "1" then return nil end
    elseif not is_infer then
      return nil
    elseif key == 42 then -- an input
      if is_too_much(0) or not read_input(from, at) then return nil end
    elseif key == 26 or key == 34 or key == 50 then -- id, parameters, outputs
      -- Triton repeats them in its errors. An error of more than 64 KiB breaks the connection with all calls on it, and
      -- calls that are cut off at once can crash Triton 2.51.
      if is_too_much(at - from) or (key == 50 and is_in_region(from, at)) then return nil end
      if key == 26 and at - from <= longest_id then id = text(from, at) end
    elseif key ~= 58 or is_too_much(0) then -- raw contents
      return nil
    end
  end
  local rank = name and ranks[name]
  -- Triton 2.51 multiplies sizes without looking: past 32 bits of rows or 64 of bytes, or with no rows, they break the
  -- model's process or the requests that share its batch.
  if rank == nil or elements > most_elements then return nil end
  if is_infer and rank >= 0 and (is_empty or dimensions ~= rank) then return nil end
  return name
end

local unit_s = {H = 3600, M = 60, S = 1, m = 1e-3, u = 1e-6, n = 1e-9}

-- No call of the model waits longer than its limit: Triton ends it then, and drops it when it has not begun.
local function shorten(headers, limit_s)
  local amount, unit = (headers:get("grpc-timeout") or ""):match("^(%d+)([HMSmun])$")
  if amount and tonumber(amount) * unit_s[unit] <= limit_s then return end
  -- Eight digits at most.
  local text = limit_s < 99999 and math.ceil(limit_s * 1000) .. "m" or math.ceil(limit_s) .. "S"
  headers:replace("grpc-timeout", text)
end

function envoy_on_request(request)
  local headers = request:headers()
  if headers:get(header) then
    -- Not the caller's to choose: it would get around the permits, or to calls that are switched off.
    headers:remove(header)
    request:clearRouteCache()
  end
  local timeout = headers:get("grpc-timeout")
  if timeout and (timeout:match("^%d+[nu]$") or timeout:match("^%dm$")) then
    -- Triton 2.51 can crash on a deadline that passes while it sets the request up; the client ends the call itself.
    headers:remove("grpc-timeout")
  end
  local path = headers:get(":path")
  local is_infer, is_snooze = path == infer, path == infer_path
  if not is_infer and not is_snooze and not asking[path] then
    -- Envoy bounds what it holds of messages that are half sent, our service cannot.
    if not streams[path] then request:body() end
    return
  end
  buffer = request:body()
  local length = buffer and buffer:length() or 0
  if length < 5 then return end
  window, first, parts, texts = buffer:getBytes(0, math.min(window_bytes, length)), 0, 0, 0
  -- One message, not compressed: nothing else is for Triton.
  local flag, a, b, c, d = window:byte(1, 5)
  local name = nil
  id = nil
  if flag == 0 and ((a * 256 + b) * 256 + c) * 256 + d == length - 5 then
    if is_snooze then name = turned(request, buffer, length) else name = read_request(length, is_infer) end
  end
  buffer, window = nil, nil
  if name == nil then return end
  -- Waiting for the body has ended the life of the objects from before it.
  headers = request:headers()
  if id and id:match("^[%w%p ]+$") then request:streamInfo():dynamicMetadata():set(metadata, "id", id) end
  is_infer = is_infer or is_snooze
  if is_infer and limits[name] then shorten(headers, limits[name]) end
  headers:add(header, is_infer and prefix .. name or triton)
  request:clearRouteCache()
end
"""

ON_INTERNAL_ANSWER = f"""
function envoy_on_response(response)
  local headers = response:headers()
  local text = headers:get("grpc-message")
  if text ~= nil and text:find("{STUB_IS_DEAD}", 1, true) then
    headers:replace("grpc-status", "{UNAVAILABLE}")
    headers:replace("grpc-message", "{PROCESS_DIED}")
  end
end
"""


def _total_rank(spec: ModelSpec) -> int:
    return sum(len(spec.dims(tensor)) + 1 for tensor in spec.client_inputs) if spec.max_batch_size else -1
