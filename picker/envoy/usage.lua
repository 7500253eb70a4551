-- Finds the token usage that a model server tells at the end of a response, and hands it to the
-- access log as dynamic metadata of "warmpath":
--   first   Unix milliseconds when the first event of a stream came; 0: it has not come yet
--   usage   {"usage": {...}}; Anthropic's streams tell the prompt's at their beginning, which is
--           added as {"message": {"usage": {...}}, "usage": {...}}
-- Only the first and last few KiB of a response are looked at, and nothing is held back.
local HEAD = 2048
local TAIL = 4096

local function find_usage(text, from)
  local _, after = string.find(text, '"usage"', from, true)
  if after == nil then
    return nil, nil
  end
  return string.match(text, "^%s*:%s*(%b{})", after + 1), after + 1
end

local function last_usage(text)
  local last, from = nil, 1
  while from ~= nil do
    local usage
    usage, from = find_usage(text, from)
    last = usage or last
  end
  return last
end

function envoy_on_response(handle)
  local kind = handle:headers():get("content-type")
  if kind == nil then
    return
  end
  local is_stream = string.find(kind, "text/event-stream", 1, true) ~= nil
  if not is_stream and string.find(kind, "json", 1, true) == nil then
    return
  end

  local plain = handle:headers():get("content-encoding") == nil
  local waiting = is_stream -- for the first event; servers may send comments before it
  local head = ""
  local pieces, oldest, newest, held = {}, 1, 0, 0
  for piece in handle:bodyChunks() do
    local length = piece:length()
    if length > 0 then
      local kept = math.min(length, TAIL)
      local bytes = piece:getBytes(length - kept, kept)
      if is_stream and #head < HEAD then
        head = head .. piece:getBytes(0, math.min(length, HEAD - #head))
      end
      if waiting then
        waiting = plain and #head < HEAD and string.find(head, "data:", 1, true) == nil
        local first = waiting and 0 or handle:timestamp()
        if newest == 0 or not waiting then
          handle:streamInfo():dynamicMetadata():set("warmpath", "first", first)
        end
      end
      newest = newest + 1
      pieces[newest], held = bytes, held + kept
      while held - #pieces[oldest] >= TAIL do
        held = held - #pieces[oldest]
        pieces[oldest], oldest = nil, oldest + 1
      end
    end
  end

  local begun = find_usage(head, 1)
  local usage = newest > 0 and last_usage(table.concat(pieces, "", oldest, newest)) or begun
  if usage then
    local document = '"usage":' .. usage .. "}"
    if begun and begun ~= usage then
      document = '"message":{"usage":' .. begun .. "}," .. document
    end
    handle:streamInfo():dynamicMetadata():set("warmpath", "usage", "{" .. document)
  end
end
