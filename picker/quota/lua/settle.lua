-- Replace what a request reserved by what it used, once.
-- KEYS: version
-- ARGV: [id, amounts, prompt, cached, completion], and for what was reserved elsewhere
--       [subject, model, lines]; its lines hold nothing here

local id, amounts, prompt, cached, completion = unpack(cmsgpack.unpack(ARGV[1]))
expire()
local key = P .. ':r:' .. id
local raw = redis.call('GET', key)
if raw == '' then
  save()
  return 'again'
end
local subject, model, lines
if raw then
  local held = cmsgpack.unpack(raw)
  subject, model, lines = held[2], held[3], held[LINES]
  redis.call('ZREM', P .. ':due', id)
elseif ARGV[2] then
  subject, model, lines = unpack(cmsgpack.unpack(ARGV[2]))
elseif amounts[1] + amounts[4] == 0 then
  subject, model, lines = '', '', {} -- given back: should the reservation still come, it is void
else
  save()
  return 'unknown'
end
redis.call('SET', key, '', 'PX', DONE * 1000)
read(lines)
resize(lines, amounts, true)
save()
if amounts[1] + prompt + completion > 0 then
  book(subject, model, {amounts[1], prompt, cached, completion, 0})
end
return 'settled'
