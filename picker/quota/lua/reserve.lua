-- Charge all limits of a request, or none.
-- KEYS: version, reservation, then each counter and grant that the checks name by number
-- ARGV: version of the policy, [id, subject, model, ttl, amounts], checks, lines
-- checks: of each [number, what, capacity, rate, start, end, shadow, grants]
--         and then for each of its grants [number, amount, expires]
-- lines: of each check and then of its grants, kept as they are

local EPSILON = 1e-6 -- of a token: what rounding of levels may add up to
local BUSY = 1 -- seconds until to ask again for a place among the concurrent
local NUM_DENIALS = 1000

local first_due = redis.call('ZRANGE', P .. ':due', 0, 0, 'WITHSCORES')[2]
if first_due and tonumber(first_due) <= now then
  return cmsgpack.pack({'due'}) -- some have expired: give back what they hold, and ask again
end
local raw = redis.call('MGET', unpack(KEYS))
-- The reservation is there only if it was given back before it came: nobody waits for the answer.
if (raw[1] or '') ~= ARGV[1] or raw[2] then
  return cmsgpack.pack({'stale'})
end
local id, subject, model, ttl, amounts = unpack(cmsgpack.unpack(ARGV[2]))
local checks = cmsgpack.unpack(ARGV[3])
local counters = {} -- by number
local held, seqs = {}, {} -- by line: what it is to hold
local firsts, lines = {}, {} -- by check: where it begins, its line
local shadowed, refusing, wait = {}, nil, -1
local tuned = false

local at, line = 1, 1
while at <= #checks do
  local number, what, capacity, rate = checks[at], checks[at + 1], checks[at + 2], checks[at + 3]
  local start, finish, num_grants = checks[at + 4], checks[at + 5], checks[at + 7]
  if finish > 0 and (now < start or now >= finish) then
    return cmsgpack.pack({'clock', now})
  end
  local check = #firsts + 1
  firsts[check], lines[check] = at, line
  local found = decoded(raw[number])
  counters[number] = found
  if found[RATE] ~= rate then
    if found[RATE] >= 0 then
      leak(found)
    end
    found[RATE], found[AT] = rate, now
    tuned = true
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
  held[line], seqs[line] = need, 0
  for index = 1, num_grants do
    held[line + index], seqs[line + index] = 0, 0
  end
  local over = used + need - capacity
  if over > EPSILON and need > 0 then
    local missing = math.min(need, math.ceil(over - EPSILON))
    for index = 1, num_grants do
      local grant = at + 5 + 3 * index
      local pool = decoded(raw[checks[grant]])
      counters[checks[grant]] = pool
      local left = checks[grant + 1] - pool[VALUE]
      if checks[grant + 2] > now and left > 0 and missing > 0 then
        local taken = math.min(left, missing)
        held[line], held[line + index] = held[line] - taken, taken
        missing = missing - taken
      end
    end
    if missing > 0 then
      held[line] = need
      for index = 1, num_grants do
        held[line + index] = 0
      end
      if checks[at + 6] then
        shadowed[#shadowed + 1] = check - 1
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
          refusing, wait = check, takes
        end
      end
    end
  end
  at, line = at + 8 + 3 * num_grants, line + 1 + num_grants
end

local function standings()
  local told = {}
  for check, first in ipairs(firsts) do
    local rate, finish, found = checks[first + 3], checks[first + 5], counters[checks[first]]
    if rate >= 0 then
      told[check] = {found[LEVEL], rate > 0 and found[LEVEL] / rate or 0}
    elseif finish > 0 then
      told[check] = {found[VALUE], finish - now}
    else
      told[check] = {found[VALUE], found[VALUE] ~= 0 and BUSY or 0}
    end
  end
  return told
end

local function note(check, takes, shadow)
  local key = string.sub(KEYS[checks[firsts[check]]], #P + 4)
  local whose, of, name = string.match(key, '^(.-)\t(.-)\t([^\t]*)')
  local limit = whose .. ' ' .. name .. (of ~= '' and ' for ' .. of or '')
  local denial = {now, subject, model, limit, held[lines[check]], takes, shadow}
  redis.call('LPUSH', P .. ':denials', cmsgpack.pack(denial))
  redis.call('LTRIM', P .. ':denials', 0, NUM_DENIALS - 1)
  redis.call('EXPIRE', P .. ':denials', KEPT_DAYS * DAY)
end

if refusing then
  local told = wait < math.huge and wait or -1
  note(refusing, told, false)
  book(subject, '', {0, 0, 0, 0, 1})
  if tuned then
    for _, first in ipairs(firsts) do
      write(KEYS[checks[first]], counters[checks[first]])
    end
  end
  return cmsgpack.pack({'denied', now, refusing - 1, told, held[lines[refusing]], standings()})
end

local expires = now + ttl
for check, first in ipairs(firsts) do
  local number, rate, finish = checks[first], checks[first + 3], checks[first + 5]
  local found, of = counters[number], lines[check]
  local need, lasts = held[of], expires + SPARE
  found[VALUE] = found[VALUE] + need
  if rate >= 0 then
    seqs[of] = need > 0 and charge(found, need) or found[SEQ]
    if rate > 0 then
      lasts = math.max(lasts, now + found[LEVEL] / rate)
    end
  elseif finish > 0 then
    lasts = math.max(lasts, finish + DAY)
  end
  found[UNTIL] = math.max(found[UNTIL], lasts)
  write(KEYS[number], found)
  for index = 1, checks[first + 7] do
    local taken, grant = held[of + index], first + 5 + 3 * index
    if taken > 0 then
      local pool = counters[checks[grant]]
      pool[VALUE] = pool[VALUE] + taken
      pool[UNTIL] = math.max(pool[UNTIL], expires + SPARE, checks[grant + 2] + DAY)
      write(KEYS[checks[grant]], pool)
    end
  end
end
keep(id, {subject, model, ttl, expires, false, ARGV[4], held, seqs})
if not first_due then
  redis.call('EXPIRE', P .. ':due', KEPT_DAYS * DAY)
end
for _, index in ipairs(shadowed) do
  note(index + 1, -1, true)
end
return cmsgpack.pack({'granted', now, standings(), shadowed})
