-- Let a reservation hold no more than some amounts, for a new time to live.
-- KEYS: version
-- ARGV: [id, amounts, ttl]

local id, amounts, ttl = unpack(cmsgpack.unpack(ARGV[1]))
expire()
local raw = redis.call('GET', P .. ':r:' .. id)
local held = raw and raw ~= '' and cmsgpack.unpack(raw)
local open = held and not held[5]
if open then
  change(id, held, amounts, ttl, false)
end
save()
return open and 'shrunk' or 'gone'
