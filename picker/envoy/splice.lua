-- Changes the body of a request as the picker's answer tells, and takes out of the response what
-- came of it. It runs on the route of such requests only.
--   x-warmpath-splice   OFFSET DROP TEXT: after OFFSET bytes, DROP bytes go and TEXT comes
-- The text asks the server for the usage of a stream. The server sends that in an event of its own,
-- without choices. Held back is an event whose end has not come, up to MAX_EVENT bytes.
local MAX_EVENT = 65536

function envoy_on_request(handle)
  local told = handle:headers():get("x-warmpath-splice")
  local offset, drop, text = string.match(told, "^(%d+) (%d+) (.+)$")
  local body = offset and handle:body()
  if not body then
    return
  end
  local rest = offset + drop
  body:setBytes(
    body:getBytes(0, tonumber(offset)) .. text .. body:getBytes(rest, body:length() - rest)
  )
end

local function is_extra(event)
  return #event <= MAX_EVENT
    and string.find(event, "}%s*$") ~= nil
    and string.find(event, '"usage"%s*:%s*{') ~= nil
    and string.find(event, '"choices"%s*:%s*%[%s*%]') ~= nil
end

-- Where the first event of a text ends; nil: its end has not come.
local function end_of_event(text, from)
  local _, lf = string.find(text, "\n\n", from, true)
  local _, crlf = string.find(text, "\n\r\n", from, true)
  return lf and crlf and math.min(lf, crlf) or lf or crlf
end

-- The complete events of a text but for extra ones, and what comes after them.
local function split(text)
  if string.sub(text, -2) == "\n\n" and not string.find(text, '"usage"', 1, true) then
    return text, ""
  end
  local kept, from = {}, 1
  local to = end_of_event(text, from)
  while to do
    local event = string.sub(text, from, to)
    if is_extra(event) then
      event = string.match(event, "^[\r\n]*") -- empty lines before it
    end
    kept[#kept + 1], from = event, to + 1
    to = end_of_event(text, from)
  end
  return table.concat(kept), string.sub(text, from)
end

-- Two functions for a stream: `feed` takes its next bytes and returns those to pass on, `finish`
-- returns what is left of them at the end.
local function stripper()
  local begun = "" -- an event whose end has not come
  local before = nil -- of an event that is too long, the last bytes passed

  local function feed(bytes)
    local passed, whole = "", nil
    if before then
      local seen = before .. bytes
      local to = end_of_event(seen, 1)
      if not to then
        before = string.sub(seen, -2)
        return bytes
      end
      to = to - #before
      passed, bytes, before = string.sub(bytes, 1, to), string.sub(bytes, to + 1), nil
    end
    whole, begun = split(begun .. bytes)
    if #begun > MAX_EVENT then
      whole, before, begun = whole .. begun, string.sub(begun, -2), ""
    end
    return passed .. whole
  end

  local function finish()
    return is_extra(begun) and "" or begun
  end

  return feed, finish
end

local function is_plain_stream(headers)
  local kind = headers:get("content-type")
  return string.sub(headers:get(":status"), 1, 1) == "2"
    and kind ~= nil
    and string.find(kind, "text/event-stream", 1, true) == 1
    and headers:get("content-encoding") == nil
    and headers:get("content-length") == nil
end

function envoy_on_response(handle)
  if not is_plain_stream(handle:headers()) then
    return
  end
  local feed, finish = stripper()
  local last, passed
  for piece in handle:bodyChunks() do
    local bytes = piece:getBytes(0, piece:length())
    last, passed = piece, feed(bytes)
    if passed ~= bytes then
      piece:setBytes(passed)
    end
  end
  -- The last piece has not left yet, but where trailers come after it.
  local left = finish()
  if left ~= "" and last and handle:trailers() == nil then
    last:setBytes(passed .. left)
  end
end
