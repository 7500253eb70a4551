-- Changes the body of a request as the picker's answer tells, and undoes in the response what comes
-- of it. It runs on the route of such requests only.
--   x-warmpath-splice   USAGE LENGTH NAME, then for each splice OFFSET DROP LENGTH TEXT: after
--                       OFFSET bytes of the body as it came, DROP bytes go and TEXT comes. Lengths
--                       are in bytes; nothing stands between a text and what follows it.
-- USAGE is 1 where a splice asks the server for the usage of a stream. The server sends that in an
-- event of its own, without choices, which is taken out. Held back is an event whose end has not
-- come, up to MAX_EVENT bytes.
-- NAME, in JSON, is the model that the client asked for, where a splice names another; 0 is its
-- length elsewhere. It takes the place of the model's name in the answer: of the string at `model`,
-- `response.model` or `message.model`.
local MAX_EVENT = 65536
local MAX_STEPS = 262144 -- through one document, to where it names its model
local NAMESPACE = "warmpath.splice" -- dynamic metadata, from the request to its response

-- A number, a space, and what stands after them.
local function number_at(text, from)
  local _, to, digits = string.find(text, "^(%d+) ", from)
  return tonumber(digits), to and to + 1
end

-- A length, a space, so many bytes, and what stands after them.
local function text_at(text, from)
  local length, start = number_at(text, from)
  return string.sub(text, start, start + length - 1), start + length
end

function envoy_on_request(handle)
  local told = handle:headers():get("x-warmpath-splice")
  local usage, name, offset, drop, text
  local from, place, pieces = 1, 0, {}
  usage, from = number_at(told, from)
  name, from = text_at(told, from)
  local body = handle:body()
  if not body then
    return
  end
  while from <= #told do
    offset, from = number_at(told, from)
    drop, from = number_at(told, from)
    text, from = text_at(told, from)
    pieces[#pieces + 1] = body:getBytes(place, offset - place)
    pieces[#pieces + 1] = text
    place = offset + drop
  end
  pieces[#pieces + 1] = body:getBytes(place, body:length() - place)
  body:setBytes(table.concat(pieces))
  local metadata = handle:streamInfo():dynamicMetadata()
  metadata:set(NAMESPACE, "usage", usage == 1)
  metadata:set(NAMESPACE, "name", name)
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

-- One JSON document, read as far as it takes to know where its model is named. Of the functions for
-- it, `begin` is called before each, and `scan` takes its next bytes: text, from where to where, and
-- a table for what is to be passed on. It returns where the bytes begin that must come again with
-- the next ones, which may be the beginning of a key.
local LONGEST_KEY = #'"response"'

local function document(name)
  local done -- its model was named, or cannot be any more
  local depth -- of objects and lists
  local level -- the depth of the object whose keys are read
  local wants_key -- there, rather than a value
  local key -- of the value that comes
  local quoted, escaped -- in a string, a byte of it
  local replaces -- that string
  local steps

  local function begin()
    done, depth, level, wants_key, key = false, 0, 0, false, ""
    quoted, escaped, replaces, steps = false, false, false, 0
  end

  -- After the end of a string, and whether its end has come.
  local function rest_of_string(text, from, to)
    if escaped then
      from, escaped = from + 1, false
    end
    while from <= to do
      local at = string.find(text, '["\\]', from)
      if at == nil or at > to then
        return to + 1, false
      elseif string.byte(text, at) == 34 then
        return at + 1, true
      end
      from = at + 2
    end
    escaped = from > to + 1
    return to + 1, false
  end

  local function punctuation(byte)
    if byte == "," then
      wants_key = true
    elseif byte == "{" or byte == "[" then
      if byte == "{" and level == 1 and (key == "response" or key == "message") then
        level, wants_key = 2, true
      end
      depth = depth + 1
    else
      depth = depth - 1
      level, done = depth, depth == 0
    end
  end

  local function scan(text, from, to, out)
    local start = from -- of what has not been passed on
    while from <= to and not done do
      steps = steps + 1
      if quoted then
        local closed
        from, closed = rest_of_string(text, from, to)
        quoted = not closed
        if replaces then
          start, done = from, closed
        end
      elseif steps > MAX_STEPS then
        done = true
      else
        local at
        if depth > level then
          at = string.find(text, '["{}%[%]]', from)
        elseif depth == 0 then
          at = string.find(text, "[^ \t\r\n]", from)
        else
          at = string.find(text, '["{}%[%],]', from)
        end
        if at == nil or at > to then
          from = to + 1
          break
        end
        local byte = string.sub(text, at, at)
        from = at + 1
        if depth == 0 then
          done = byte ~= "{"
          depth, level, wants_key = 1, 1, true
        elseif byte == '"' then
          quoted = true
          if depth == level then
            if wants_key then
              local after, closed = rest_of_string(text, from, to)
              if not closed and to - at + 1 < LONGEST_KEY then
                quoted, escaped, from = false, false, at
                break
              end
              quoted, wants_key = not closed, false
              key = closed and string.sub(text, from, after - 2) or ""
              from = after
            elseif key == "model" then
              replaces = true
              out[#out + 1] = string.sub(text, start, at - 1)
              out[#out + 1] = name
              start = from
            end
          end
        elseif depth > level then
          depth = depth + ((byte == "{" or byte == "[") and 1 or -1)
        else
          punctuation(byte)
        end
      end
    end
    if done then
      from = to + 1
    end
    out[#out + 1] = string.sub(text, start, from - 1)
    return from
  end

  begin()
  return begin, scan
end

-- Two functions for a body, as of `stripper`, that put the model's name in; see picker/restore.py.
local function restorer(name, is_stream)
  local begin, scan = document(name)
  local begun = "" -- what comes again with the next bytes
  local line_began, in_data = true, false

  -- An event's data may have several lines, and a string is in one of them.
  local function lines(text, out)
    local from = 1
    while from <= #text do
      if line_began then
        local five = string.sub(text, from, from + 4)
        if #five < 5 and five == string.sub("data:", 1, #five) then
          return from
        end
        line_began, in_data = false, five == "data:"
        if in_data then
          out[#out + 1] = five
          from = from + 5
        elseif string.find(five, "^[\r\n]") then
          begin()
        end
      end
      local ended = string.find(text, "\n", from, true)
      local to = ended or #text
      if in_data then
        from = scan(text, from, to, out)
        if not ended then
          return from
        end
      end
      out[#out + 1] = string.sub(text, from, to)
      line_began = ended ~= nil
      from = to + 1
    end
    return from
  end

  local function feed(bytes)
    local text, out = begun .. bytes, {}
    local stop = is_stream and lines(text, out) or not is_stream and scan(text, 1, #text, out)
    begun = string.sub(text, stop)
    return table.concat(out)
  end

  local function finish()
    return begun
  end

  return feed, finish
end

-- Two functions for a body from those of `first`, then those of `second`.
local function chained(first, first_finish, second, second_finish)
  local function feed(bytes)
    return second(first(bytes))
  end

  local function finish()
    return second(first_finish()) .. second_finish()
  end

  return feed, finish
end

function envoy_on_response(handle)
  local headers = handle:headers()
  local kind = headers:get("content-type")
  local told = handle:streamInfo():dynamicMetadata():get(NAMESPACE)
  if kind == nil or told == nil or headers:get("content-encoding") ~= nil then
    return
  end
  local is_stream = string.find(kind, "text/event-stream", 1, true) == 1
  local is_success = string.sub(headers:get(":status"), 1, 1) == "2"
  local feed, finish
  if told.name ~= "" and (is_stream or string.find(kind, "json", 1, true)) then
    feed, finish = restorer(told.name, is_stream)
  end
  if told.usage and is_stream and is_success and headers:get("content-length") == nil then
    local strip, strip_finish = stripper()
    if feed then
      feed, finish = chained(feed, finish, strip, strip_finish)
    else
      feed, finish = strip, strip_finish
    end
  end
  if feed == nil then
    return
  end
  headers:remove("content-length")
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
