-- Replace what a request reserved by what it used, once.
-- KEYS: version
-- ARGV: [id, amounts, prompt, cached, completion], and for what was reserved elsewhere
--       [subject, model, lines]

local DONE = 600 -- seconds that a settled reservation is remembered: SETTLED_SECONDS of store.py

local id, amounts, prompt, cached, completion = unpack(cmsgpack.unpack(ARGV[1]))
local key = P .. ':r:' .. id
local raw = redis.call('GET', key)
local subject, model, lines
if raw == '' then
  return 'again'
elseif raw then
  local held = cmsgpack.unpack(raw)
  subject, model, lines = held[1], held[2], read(held[6], held[7], held[8])
  redis.call('ZREM', P .. ':due', id)
elseif ARGV[2] then
  local text
  subject, model, text = unpack(cmsgpack.unpack(ARGV[2]))
  lines = read(text)
elseif amounts[1] + amounts[4] == 0 then
  subject, model, lines = '', '', {} -- given back: should the reservation still come, it is void
else
  return 'unknown'
end
redis.call('SET', key, '', 'PX', DONE * 1000)
resize(lines, amounts, true)
save()
if amounts[1] + prompt + completion > 0 then
  book(subject, model, {amounts[1], prompt, cached, completion, 0})
end
return 'settled'
