-- Charge all limits of a request, or none.
-- KEYS: version, reservation, then each counter and grant that the checks name by number
-- ARGV: version of the policy, [id, subject, model, ttl, amounts], checks
-- a check: [key, its number, what, capacity, rate, start, end, grants, shadow]
-- a grant: [key, its number, amount, expires]

expire()
local raw = redis.call('MGET', unpack(KEYS))
-- The reservation is there only if it was given back before it came: nobody waits for the answer.
if (raw[1] or '') ~= ARGV[1] or raw[2] then
  save()
  return cmsgpack.pack({'stale'})
end
local id, subject, model, ttl, amounts = unpack(cmsgpack.unpack(ARGV[2]))
local checks = cmsgpack.unpack(ARGV[3])
for _, check in ipairs(checks) do
  if check[7] > 0 and (now < check[6] or now >= check[7]) then
    save()
    return cmsgpack.pack({'clock', now})
  end
  counters[check[1]] = counters[check[1]] or decoded(raw[check[2]])
  for _, grant in ipairs(check[8]) do
    counters[grant[1]] = counters[grant[1]] or decoded(raw[grant[2]])
  end
end

local asked, standings, shadowed, refusing, wait = {}, {}, {}, nil, -1
for index, check in ipairs(checks) do
  local key, _, what, capacity, rate, _, finish, grants, shadow = unpack(check)
  local found = counters[key]
  if found[RATE] ~= rate then
    if found[RATE] >= 0 then
      leak(found)
    end
    found[RATE], found[AT] = rate, now
    changed[key] = true
  end
  local used = found[VALUE]
  if rate >= 0 then
    leak(found)
    used = found[LEVEL]
  end
  local need = amounts[what + 1]
  if need > capacity then
    need = math.max(capacity, 1)
  end
  local over, draws = used + need - capacity, {}
  if over > EPSILON and need > 0 then
    local missing, drawn = math.min(need, math.ceil(over - EPSILON)), 0
    for _, grant in ipairs(grants) do
      local left = grant[3] - counters[grant[1]][VALUE]
      if grant[4] > now and left > 0 and missing > 0 then
        local taken = math.min(left, missing)
        draws[#draws + 1] = {grant, taken}
        missing, drawn = missing - taken, drawn + taken
      end
    end
    if missing == 0 then
      need = need - drawn
    elseif shadow then
      draws = {}
      shadowed[#shadowed + 1] = index - 1
    else
      local takes = BUSY
      if capacity == 0 then
        takes = math.huge
      elseif finish > 0 then
        takes = finish - now
      elseif rate > 0 then
        takes = over / rate
      end
      if takes > wait then
        refusing, wait = index, takes
      end
    end
  end
  asked[index] = {need, draws}
end

local function standing(check, found)
  if check[5] >= 0 then
    return {found[LEVEL], check[5] > 0 and found[LEVEL] / check[5] or 0}
  end
  if check[7] > 0 then
    return {found[VALUE], check[7] - now}
  end
  return {found[VALUE], found[VALUE] ~= 0 and BUSY or 0}
end

local function label(key)
  local whose, of, name = string.match(key, '^(.-)\t(.-)\t([^\t]*)')
  return whose .. ' ' .. name .. (of ~= '' and ' for ' .. of or '')
end

local function deny(index, seconds_, shadow)
  local entry = {now, subject, model, label(checks[index][1]), asked[index][1], seconds_, shadow}
  redis.call('LPUSH', P .. ':denials', cmsgpack.pack(entry))
  redis.call('LTRIM', P .. ':denials', 0, NUM_DENIALS - 1)
  redis.call('EXPIRE', P .. ':denials', KEPT_DAYS * DAY)
end

if refusing then
  local told = wait < math.huge and wait or -1
  for index, check in ipairs(checks) do
    standings[index] = standing(check, counters[check[1]])
  end
  deny(refusing, told, false)
  book(subject, '', {0, 0, 0, 0, 1})
  save()
  return cmsgpack.pack({'denied', now, refusing - 1, told, asked[refusing][1], standings})
end

local lines = {}
for index, check in ipairs(checks) do
  local key, found, need = check[1], counters[check[1]], asked[index][1]
  found[VALUE] = found[VALUE] + need
  local seq, lasts = 0, 0
  if check[5] >= 0 then
    seq = need > 0 and charge(found, need) or found[SEQ]
    if check[5] > 0 then
      found[UNTIL] = math.max(found[UNTIL], now + found[LEVEL] / check[5])
    end
  elseif check[7] > 0 then
    lasts = check[7] + DAY
    found[UNTIL] = math.max(found[UNTIL], lasts)
  end
  lines[#lines + 1] = {key, need, check[3], seq, false, check[5], lasts}
  standings[index] = standing(check, found)
  changed[key] = true
  for _, draw in ipairs(asked[index][2]) do
    local grant, amount = draw[1], draw[2]
    local pool = counters[grant[1]]
    pool[VALUE] = pool[VALUE] + amount
    pool[UNTIL] = math.max(pool[UNTIL], grant[4] + DAY)
    lines[#lines + 1] = {grant[1], amount, check[3], 0, true, -1, grant[4] + DAY}
    changed[grant[1]] = true
  end
end
keep(id, {id, subject, model, lines, ttl, now + ttl, false})
for _, index in ipairs(shadowed) do
  deny(index + 1, -1, true)
end
save()
return cmsgpack.pack({'granted', now, standings, shadowed})
