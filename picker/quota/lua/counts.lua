-- Counters as they are now.
-- KEYS: version, then the key of each counter

expire()
save()
return {string.format('%.6f', now), redis.call('MGET', unpack(KEYS, 2))}
