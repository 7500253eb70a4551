-- What the scripts share that write records. It stands between common.lua and them.

local MAX_AUDIT = 100000

-- Records outlive all that is in use: who comes back within a year finds them.
local function keep_policy()
  for _, name in ipairs({'version', 'versions', 'subjects', 'changes', 'audit', 'due'}) do
    redis.call('EXPIRE', P .. ':' .. name, KEPT_DAYS * DAY)
  end
end

-- Write audit entries, which are JSON, with the revision that they belong to.
local function enter(entries, revision)
  for _, entry in ipairs(entries) do
    redis.call('LPUSH', P .. ':audit', revision .. ':' .. entry)
  end
  redis.call('LTRIM', P .. ':audit', 0, MAX_AUDIT - 1)
end
