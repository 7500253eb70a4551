-- What the scripts share that change reservations. It stands between common.lua and them.

local KEY, AMOUNT, WHAT, NUMBER, DRAWS, LINE_RATE, LINE_UNTIL = 1, 2, 3, 4, 5, 6, 7 -- of a line

local counters = {} -- by key, as far as they were looked at
local changed = {} -- keys of those that must be written

local function counter(key)
  local found = counters[key]
  if not found then
    found = decoded(redis.call('GET', P .. ':c:' .. key))
    counters[key] = found
  end
  return found
end

local function save()
  for key in pairs(changed) do
    write(P .. ':c:' .. key, counters[key])
  end
end

-- Lines with what they hold, from their text; their counters are read in one call.
local function read(text, amounts, seqs)
  local flat, lines, keys = cjson.decode(text), {}, {}
  for first = 1, #flat, 5 do
    local index = #lines + 1
    lines[index] = {
      flat[first],
      amounts and amounts[index] or 0,
      flat[first + 1],
      seqs and seqs[index] or 0,
      flat[first + 2],
      flat[first + 3],
      flat[first + 4],
    }
    keys[index] = P .. ':c:' .. flat[first]
  end
  if #keys > 0 then
    for index, raw in ipairs(redis.call('MGET', unpack(keys))) do
      local key = lines[index][KEY]
      counters[key] = counters[key] or decoded(raw)
    end
  end
  return lines
end

local function give_back(found, surplus, seq)
  local least = found[LEVEL]
  for index = LASTS + 1, #found, 2 do
    if found[index] > seq then
      least = found[index + 1]
      break
    end
  end
  local given = math.min(surplus, least, found[LEVEL])
  if given <= 0 then
    return
  end
  found[LEVEL] = found[LEVEL] - given
  least = found[LEVEL]
  local kept = {}
  for index = #found - 1, LASTS + 1, -2 do
    local number, low = found[index], found[index + 1]
    if number > seq then
      low = low - given
    end
    if low < least then
      least = low
      kept[#kept + 1] = low
      kept[#kept + 1] = number
    end
    found[index], found[index + 1] = nil, nil
  end
  for index = #kept, 1, -1 do
    found[#found + 1] = kept[index]
  end
end

local function recharge(line, amount, final)
  local found = counter(line[KEY])
  -- Of a counter that is gone, nothing is held any more.
  local difference = found[LASTS] > 0 and amount - line[AMOUNT] or (final and amount or 0)
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
  end
  return kept
end

-- Let a reservation hold no more than `amounts`, until another time.
local function change(id, held, amounts, ttl, expired)
  local lines = read(held[6], held[7], held[8])
  held[7] = resize(lines, amounts, false)
  held[3], held[4], held[5] = ttl, now + ttl, expired
  keep(id, held)
  for index, line in ipairs(lines) do
    if held[7][index] > 0 then
      local found = counters[line[KEY]]
      found[UNTIL] = math.max(found[UNTIL], held[4] + SPARE)
      changed[line[KEY]] = true
    end
  end
end

-- Give back what reservations hold that have outlived their time.
local function expire()
  for _ = 1, 50 do
    local until_now = string.format('%.6f', now)
    local ids = redis.call('ZRANGEBYSCORE', P .. ':due', '-inf', until_now, 'LIMIT', 0, 20)
    if #ids == 0 then
      return
    end
    for _, id in ipairs(ids) do
      local raw = redis.call('GET', P .. ':r:' .. id)
      local held = raw and raw ~= '' and cmsgpack.unpack(raw)
      if held and not held[5] then
        change(id, held, {0, 0, 0, 0, 0}, LATE, true)
      else
        redis.call('DEL', P .. ':r:' .. id)
        redis.call('ZREM', P .. ':due', id)
      end
    end
  end
end
