-- Change counters by hand, with their audit entries.
-- KEYS: version
-- ARGV: [[key, amount or false, rate, until], ...], [entry, ...]; false: reset

expire()
for _, correction in ipairs(cmsgpack.unpack(ARGV[1])) do
  local key, amount, rate, lasts = unpack(correction)
  local found = counter(key)
  if amount then
    recharge({key, 0, 0, found[SEQ], false, rate, lasts}, amount, true)
  else
    found[VALUE] = found[VALUE] - found[SETTLED]
    found[SETTLED] = 0
    if found[RATE] >= 0 then
      leak(found)
      found[LEVEL], found[SEQ] = 0, found[SEQ] + 1
      for index = #found, LASTS + 1, -1 do
        found[index] = nil
      end
      found[LASTS + 1], found[LASTS + 2] = found[SEQ], 0
    end
    changed[key] = true
  end
end
save()
local revision = string.match(redis.call('GET', KEYS[1]) or '0', '^%d+')
enter(cmsgpack.unpack(ARGV[2]), revision)
keep_policy()
return 'corrected'
