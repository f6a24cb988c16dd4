"""The Lua scripts that Envoy runs on the calls that pass it.

The first one names the cluster of a request in the header ``nereid-cluster``; the others put answers into the words and
codes that our service uses. What a script costs is in the decisions of this folder's README.
"""

from __future__ import annotations

from collections.abc import Sequence

from nereid_backend.spec import ModelSpec

CLUSTER_HEADER, CODING_HEADER = "nereid-cluster", "nereid-coding"
EXTRACTION = "envoy.filters.http.grpc_field_extraction"
TRITON, MODEL_PREFIX = "triton", "model_"
"""Names of clusters: Triton without permits, and what stands before a model's name for Triton with them."""
RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE = 8, 13, 14

# Of one dimension, and of all inputs of a request together (our service allows each as many). Both are far beyond what
# a request can carry; a Lua number counts no further.
MOST_SIZE, MOST_ELEMENTS = 2**31 - 1, 2**53
# Of all names, shapes, ids and parameters of a request together: what fits into an error that repeats them.
MOST_TEXT_BYTES = 16 * 1024
_MOST_PARTS = 10_000
# Triton 2.51 answers INTERNAL with these words for ever once a model's process is gone.
STUB_IS_DEAD = "is not healthy"
PROCESS_DIED = "the model's process has died, retry later"


def on_request(native: Sequence[ModelSpec], *, checked: str = "") -> str:
    """Names the cluster of a call that Triton can answer as it is, for the ``native`` models.

    A request whose parameters have the word ``checked`` in them is left to our service.

    ``ranks`` is the number of dimensions of all inputs together when none is left out; -1 for models that do not
    batch, whose requests need no help. Names hold letters, digits, '_', '.' and '-' only (settings).
    """
    ranks = ", ".join(f'["{spec.name}"] = {_total_rank(spec)}' for spec in native)
    return (
        f"local ranks = {{{ranks}}}\n"
        f'local header, prefix, triton = "{CLUSTER_HEADER}", "{MODEL_PREFIX}", "{TRITON}"\n'
        f'local filter, most_size, most_elements = "{EXTRACTION}", {MOST_SIZE}, {MOST_ELEMENTS}\n'
        f"local most_text, most_parts = {MOST_TEXT_BYTES}, {_MOST_PARTS}\n"
        f'local checked = "{checked}"\n' + _ON_REQUEST
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


_ON_REQUEST = """
local window_bytes = 4096

local function is_checked(buffer, at, size)
  return checked ~= "" and size <= most_text and buffer:getBytes(at, size):find(checked, 1, true) ~= nil
end

-- What a ModelInferRequest of the buffer holds beside its tensors, in bytes; huge when it is malformed, made of very
-- many parts or to be checked. Field numbers as in KServe's messages: 5 inputs, of these 5 contents; 7
-- raw_input_contents.
local function text_bytes(buffer, length)
  local window, first, parts = "", 0, 0
  local function byte(at)
    if at < first or at >= first + #window then
      if at >= length then return nil end
      first, window = at, buffer:getBytes(at, math.min(window_bytes, length - at))
    end
    return window:byte(at - first + 1)
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
  local function scan(at, stop, inside)
    local bytes = 0
    while at < stop do
      parts = parts + 1
      local key, size
      key, at = number(at)
      if key == nil or parts > most_parts then return math.huge end
      local field, kind = math.floor(key / 8), key % 8
      if kind == 2 then
        size, at = number(at)
        if size == nil or at + size > stop then return math.huge end
        if field == 5 and not inside then
          bytes = bytes + scan(at, at + size, true)
        elseif field ~= (inside and 5 or 7) then
          bytes = is_checked(buffer, at, size) and math.huge or bytes + size
        end
        at = at + size
      elseif kind == 0 then
        size, at = number(at)
        if size == nil then return math.huge end
        bytes = bytes + 10
      else
        return math.huge
      end
    end
    return bytes
  end
  return scan(5, length, false)
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
  local fields = request:streamInfo():dynamicMetadata():get(filter)
  if fields == nil then return end
  local version = fields["model_version"] or fields["version"]
  if version ~= nil and version[1] ~= nil and version[1] ~= "" and version[1] ~= "1" then return end
  local names = fields["model_name"]
  if names == nil then
    names = fields["name"]
    if names ~= nil and names[1] ~= nil and ranks[names[1]] ~= nil then
      headers:add(header, triton)
      request:clearRouteCache()
    end
    return
  end
  local name = names[1]
  local rank = name ~= nil and ranks[name] or nil
  if rank == nil then return end
  -- Triton 2.51 multiplies sizes without looking: past 32 bits of rows or 64 of bytes, or with no rows, they break the
  -- model's process or the requests that share its batch. Our service refuses those.
  local total, elements = 0, 1
  for _, text in ipairs(fields["inputs.shape"] or {}) do
    local size = tonumber(text)
    if size < 0 or size > most_size or (size == 0 and rank >= 0) then return end
    if size > 0 then elements = elements * size end
    total = total + 1
  end
  if elements > most_elements or (rank >= 0 and total ~= rank) then return end
  -- Triton repeats names, ids and parameters in its errors. An error of more than 64 KiB breaks the connection with all
  -- calls on it, and calls that are cut off at once can crash Triton 2.51.
  local buffer = request:body()
  if buffer == nil then return end
  local length = buffer:length()
  if is_checked(buffer, 0, length) then return end
  if length > most_text and text_bytes(buffer, length) > most_text then return end
  -- Waiting for the body has ended the life of the objects from before it.
  request:headers():add(header, prefix .. name)
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
