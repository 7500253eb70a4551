-- What all scripts share. It stands before each of them.
--
-- All keys of a store have one hash tag, so that a cluster keeps them together: a script may reach
-- those of reservations that expire, which nobody could name beforehand. Every key has a time to
-- live. Counters and reservations are MessagePack arrays, in the order of bucket.Counter and
-- ledger.Reservation; the arithmetic is ledger.py's.

local P = string.sub(KEYS[1], 1, -9) -- without ":version"
local LATE = 3600 -- seconds that an expired reservation is remembered
local DONE = 600 -- seconds that a settled one is
local DAY = 86400
local KEPT_DAYS = 400
local NUM_DENIALS = 1000
local MAX_LOWS = 16
local EPSILON = 1e-6
local BUSY = 1

local VALUE, SETTLED, RATE, LEVEL, AT, SEQ, LOWS, UNTIL = 1, 2, 3, 4, 5, 6, 7, 8 -- of a counter
local KEY, AMOUNT, WHAT, NUMBER, DRAWS, LINE_RATE, LINE_UNTIL = 1, 2, 3, 4, 5, 6, 7 -- of a line
local LINES, TTL, EXPIRES, EXPIRED = 4, 5, 6, 7 -- of a reservation, after id, subject, model

local function clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
end

local now = clock()
local counters = {} -- by key, as far as they were looked at
local changed = {} -- keys of those that must be written

local function decoded(raw)
  if raw then
    return cmsgpack.unpack(raw)
  end
  return {0, 0, -1, 0, 0, 0, {}, 0}
end

local function counter(key)
  local found = counters[key]
  if not found then
    found = decoded(redis.call('GET', P .. ':c:' .. key))
    counters[key] = found
  end
  return found
end

-- Read counters that will be looked at, in one call.
local function read(lines)
  local keys = {}
  for index, line in ipairs(lines) do
    keys[index] = P .. ':c:' .. line[KEY]
  end
  if #keys > 0 then
    for index, raw in ipairs(redis.call('MGET', unpack(keys))) do
      local key = lines[index][KEY]
      counters[key] = counters[key] or decoded(raw)
    end
  end
end

local function save()
  for key in pairs(changed) do
    local found = counters[key]
    local keep = math.max(found[UNTIL] - now, 0) + 60
    redis.call('SET', P .. ':c:' .. key, cmsgpack.pack(found), 'PX', math.ceil(keep * 1000))
  end
end

local function leak(found)
  local elapsed = now - found[AT]
  if elapsed > 0 then
    found[AT] = now
    found[LEVEL] = math.max(0, found[LEVEL] - elapsed * found[RATE])
  end
end

local function charge(found, amount)
  local level, lows = found[LEVEL], found[LOWS]
  while #lows > 0 and lows[#lows][2] >= level do
    table.remove(lows)
  end
  found[SEQ] = found[SEQ] + 1
  lows[#lows + 1] = {found[SEQ], level}
  if #lows > MAX_LOWS then
    lows[2][2] = lows[1][2]
    table.remove(lows, 1)
  end
  found[LEVEL] = level + amount
  return found[SEQ]
end

local function give_back(found, surplus, seq)
  local least = found[LEVEL]
  for _, low in ipairs(found[LOWS]) do
    if low[1] > seq then
      least = low[2]
      break
    end
  end
  local given = math.min(surplus, least, found[LEVEL])
  if given <= 0 then
    return
  end
  found[LEVEL] = found[LEVEL] - given
  local kept = {}
  least = found[LEVEL]
  for index = #found[LOWS], 1, -1 do
    local low = found[LOWS][index]
    if low[1] > seq then
      low[2] = low[2] - given
    end
    if low[2] < least then
      least = low[2]
      table.insert(kept, 1, low)
    end
  end
  found[LOWS] = kept
end

local function recharge(line, amount, final)
  local difference = amount - line[AMOUNT]
  local found = counter(line[KEY])
  if found[RATE] < 0 and line[LINE_RATE] >= 0 then -- it was forgotten since
    found[RATE], found[AT] = line[LINE_RATE], now
  end
  found[UNTIL] = math.max(found[UNTIL], line[LINE_UNTIL])
  found[VALUE] = found[VALUE] + difference
  if final then
    found[SETTLED] = found[SETTLED] + amount
  end
  if found[RATE] >= 0 and difference ~= 0 and not line[DRAWS] then
    leak(found)
    if difference > 0 then
      charge(found, difference)
      if found[RATE] > 0 then
        found[UNTIL] = math.max(found[UNTIL], now + found[LEVEL] / found[RATE])
      end
    else
      give_back(found, -difference, line[NUMBER])
    end
  end
  changed[line[KEY]] = true
end

-- Make lines hold no more than `amounts`, or settle them when final.
local function resize(lines, amounts, final)
  local kept, start, left = {}, 0, 0
  for index, line in ipairs(lines) do
    if not line[DRAWS] then
      if left > 0 and final then
        kept[start] = kept[start] + left
      end
      start, left = index, amounts[line[WHAT] + 1]
    end
    kept[index] = math.min(left, line[AMOUNT])
    left = left - kept[index]
  end
  if left > 0 and final then
    kept[start] = kept[start] + left
  end
  for index, line in ipairs(lines) do
    if kept[index] ~= line[AMOUNT] or (final and kept[index] ~= 0) then
      recharge(line, kept[index], final)
    end
    line[AMOUNT] = kept[index]
  end
end

local function seconds(number)
  return string.format('%.6f', number)
end

local function keep(id, reservation)
  local lasts = reservation[EXPIRES] - now + LATE
  redis.call('SET', P .. ':r:' .. id, cmsgpack.pack(reservation), 'PX', math.ceil(lasts * 1000))
  redis.call('ZADD', P .. ':due', seconds(reservation[EXPIRES]), id)
  redis.call('EXPIRE', P .. ':due', KEPT_DAYS * DAY)
  for _, line in ipairs(reservation[LINES]) do
    local found = counter(line[KEY])
    found[UNTIL] = math.max(found[UNTIL], reservation[EXPIRES] + LATE)
    changed[line[KEY]] = true
  end
end

local function drop(id)
  redis.call('DEL', P .. ':r:' .. id)
  redis.call('ZREM', P .. ':due', id)
end

-- Give back what reservations hold that have outlived their time.
local function expire()
  for _ = 1, 50 do
    local ids = redis.call('ZRANGEBYSCORE', P .. ':due', '-inf', seconds(now), 'LIMIT', 0, 20)
    if #ids == 0 then
      return
    end
    for _, id in ipairs(ids) do
      local raw = redis.call('GET', P .. ':r:' .. id)
      local held = raw and raw ~= '' and cmsgpack.unpack(raw)
      if held and not held[EXPIRED] then
        resize(held[LINES], {0, 0, 0, 0, 0}, false)
        held[EXPIRED], held[TTL], held[EXPIRES] = true, LATE, now + LATE
        keep(id, held)
      else
        drop(id)
      end
    end
  end
end

-- Add to what a subject used today: requests, prompt, cached and completion tokens, denials.
local function book(subject, model, more)
  local day = math.floor(now / DAY)
  local page, field = P .. ':use:' .. day, subject .. '\t' .. model
  local raw = redis.call('HGET', page, field)
  local use = raw and cmsgpack.unpack(raw) or {0, 0, 0, 0, 0}
  for index, amount in ipairs(more) do
    use[index] = use[index] + amount
  end
  redis.call('HSET', page, field, cmsgpack.pack(use))
  if not raw then
    redis.call('EXPIREAT', page, (day + 1 + KEPT_DAYS) * DAY)
  end
end
