-- One check of the priority rule, a copy of Rule.check in priority.py: Redis cannot call Python, and
-- a script is atomic. tests/test_counts.py compares both.
--
-- KEYS[1]  the customer's key; its value is "COUNT UPDATED_AT IDS": UPDATED_AT in microseconds since
--          1970, IDS of the last checks since the last reset, newest first
-- ARGV[1]  the reset interval in microseconds
-- ARGV[2]  "idle" or "periodic": the start of the interval
-- ARGV[3]  the id of this check, 8 characters; a retry has the same id
-- ARGV[4]  the time, if the client has a clock; otherwise the server's
--
-- Lua numbers are exact up to 2^53: in microseconds, until the year 2255.
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
    -- A retry after a lost reply. Each check since then has lowered the count by one.
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
-- The key expires one second after the count would be reset. SET with PX is one command, so that no
-- key is ever without an expiry.
local rest_ms = math.ceil((updated_at + interval - now) / 1000) + 1000
redis.call('SET', KEYS[1], string.format('%.0f %.0f %s', count, updated_at, ids),
  'PX', string.format('%.0f', rest_ms))
return count
