-- One check of the priority rule, as Rule.check in priority.py: the same in one atomic step, because
-- Redis cannot call Python. tests/test_counts.py proves that both give the same counts.
--
-- KEYS[1]  the customer's key, which holds "COUNT UPDATED_AT IDS": UPDATED_AT in microseconds since
--          1970, IDS those of the last checks since the last reset, the newest first
-- ARGV[1]  the reset interval in microseconds
-- ARGV[2]  "idle" or "periodic": what the interval runs from
-- ARGV[3]  the id of this check, 8 characters; a check that is sent again has the same id
-- ARGV[4]  the moment, where a clock was handed in; otherwise it is the server's
--
-- Numbers of Lua are exact up to 2^53, which as microseconds is the year 2255.
local ID_BYTES, IDS_MAX = 8, 64
local id = ARGV[3]
local now
if ARGV[4] then
  now = tonumber(ARGV[4])
else
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local interval = tonumber(ARGV[1])
local count, updated_at, ids = 0, now, id
local last = redis.call('GET', KEYS[1])
if last then
  local value, at, earlier = string.match(last, '^(%-?%d+) (%-?%d+) ?(.*)$')
  at = tonumber(at)
  if at then
    -- The reply to this check was lost. Each check since then has lowered the count by one.
    local found = string.find(earlier, id, 1, true)
    if found and found % ID_BYTES == 1 then
      return value + (found - 1) / ID_BYTES
    end
    if now - at <= interval then
      count = value - 1
      ids = id .. string.sub(earlier, 1, (IDS_MAX - 1) * ID_BYTES)
      if ARGV[2] == 'periodic' or now < at then
        updated_at = at
      end
    end
  end
end
-- The key lives as long as its count can matter, and a second longer. SET with PX is one command, so
-- there is never a key without an end.
local rest_ms = math.ceil((updated_at + interval - now) / 1000) + 1000
redis.call('SET', KEYS[1], string.format('%.0f %.0f %s', count, updated_at, ids),
  'PX', string.format('%.0f', rest_ms))
return count
