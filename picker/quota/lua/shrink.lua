-- Let a reservation hold no more than some amounts, for a new time to live.
-- KEYS: version
-- ARGV: [id, amounts, ttl]

local id, amounts, ttl = unpack(cmsgpack.unpack(ARGV[1]))
expire()
local raw = redis.call('GET', P .. ':r:' .. id)
local held = raw and raw ~= '' and cmsgpack.unpack(raw)
if not held or held[EXPIRED] then
  save()
  return 'gone'
end
resize(held[LINES], amounts, false)
held[TTL], held[EXPIRES] = ttl, now + ttl
keep(id, held)
save()
return 'shrunk'
