-- What all scripts share. It stands before each of them, and is as short as it can be: it is run
-- for every request.
--
-- All keys of a store have one hash tag, so that a cluster keeps them together: a script may reach
-- those of reservations that expire, which nobody could name beforehand. Every key has a time to
-- live. The arithmetic is ledger.py's. Values are MessagePack:
--   a counter: [value, settled, rate, level, at, seq, until, lasts, seq of a low, low, ...]
--   a reservation: [subject, model, ttl, expires, expired, lines, [amount, ...], [seq, ...]],
--   whose lines, which only pass through here, are JSON: [key, what, draws, rate, until, ...]

local P = string.sub(KEYS[1], 1, -9) -- without ":version"
local LATE = 604800 -- seconds that an expired reservation is remembered
local SPARE = 3600 -- seconds that a counter lives on, so that its time to live is seldom set
local DAY = 86400
local KEPT_DAYS = 400
local MAX_LOWS = 16

-- of a counter
local VALUE, SETTLED, RATE, LEVEL, AT, SEQ, UNTIL, LASTS = 1, 2, 3, 4, 5, 6, 7, 8

local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6

local function decoded(raw)
  return raw and cmsgpack.unpack(raw) or {0, 0, -1, 0, 0, 0, 0, 0}
end

-- Write a counter. To set its time to live is dear, so that it is set for longer than needed. One
-- that was never written lasts until 0.
local function write(key, found)
  local needed = math.max(found[UNTIL], now) + 60
  if needed <= found[LASTS] then
    redis.call('SET', key, cmsgpack.pack(found), 'KEEPTTL')
  else
    found[LASTS] = needed + SPARE
    local lives = math.ceil((found[LASTS] - now) * 1000)
    redis.call('SET', key, cmsgpack.pack(found), 'PX', lives)
  end
end

local function leak(found)
  local elapsed = now - found[AT]
  if elapsed > 0 then
    found[AT] = now
    local level = found[LEVEL] - elapsed * found[RATE]
    found[LEVEL] = level > 0 and level or 0
  end
end

local function charge(found, amount)
  local level, last = found[LEVEL], #found
  while last > LASTS and found[last] >= level do
    found[last], found[last - 1] = nil, nil
    last = last - 2
  end
  found[SEQ] = found[SEQ] + 1
  found[last + 1], found[last + 2] = found[SEQ], level
  if last + 2 > LASTS + 2 * MAX_LOWS then
    found[LASTS + 4] = found[LASTS + 2]
    table.remove(found, LASTS + 1)
    table.remove(found, LASTS + 1)
  end
  found[LEVEL] = level + amount
  return found[SEQ]
end

-- Write a reservation, the fourth of whose parts is when it expires.
local function keep(id, held)
  local lives = math.ceil((held[4] - now + LATE) * 1000)
  redis.call('SET', P .. ':r:' .. id, cmsgpack.pack(held), 'PX', lives)
  redis.call('ZADD', P .. ':due', string.format('%.6f', held[4]), id)
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
