-- Give reservations a new time to live.
-- KEYS: version
-- ARGV: [ids, ttl]

local ALL = {math.huge, math.huge, math.huge, math.huge, math.huge}

local ids, ttl = unpack(cmsgpack.unpack(ARGV[1]))
expire()
for _, id in ipairs(ids) do
  local raw = redis.call('GET', P .. ':r:' .. id)
  local held = raw and raw ~= '' and cmsgpack.unpack(raw)
  if held and not held[5] then
    change(id, held, ALL, ttl, false)
  end
end
save()
return 'renewed'
