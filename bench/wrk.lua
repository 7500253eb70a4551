-- Posts the chat bodies of the files named after the run's number, in turn, each with a nonce of its
-- own in the place of the bodies' marker; reports one line of JSON.
--   wrk -s wrk.lua URL -- RUN FILE...
local MARKER = "@nonce------"

local heads, tails, run, count = {}, {}, 0, 0

function init(args)
  run = tonumber(args[1])
  local headers = { ["Content-Type"] = "application/json", ["Authorization"] = "Bearer sk-bench" }
  for i = 2, #args do
    local file = assert(io.open(args[i], "rb"))
    local whole = wrk.format("POST", wrk.path, headers, file:read("*a"))
    file:close()
    local first, last = string.find(whole, MARKER, 1, true)
    heads[#heads + 1], tails[#tails + 1] = string.sub(whole, 1, first - 1), string.sub(whole, last + 1)
  end
end

function request()
  count = count + 1
  local i = count % #heads + 1
  return heads[i] .. string.format("%04d%08d", run % 10000, count) .. tails[i]
end

function done(summary)
  local errors = summary.errors
  io.write(string.format(
    '{"requests": %d, "seconds": %.6f, "failed": %d, "refused": %d}\n',
    summary.requests, summary.duration / 1e6,
    errors.connect + errors.read + errors.write + errors.timeout, errors.status))
end
