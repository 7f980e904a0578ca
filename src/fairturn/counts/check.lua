-- One check of the priority rule, as Rule.check in priority.py: the same in one atomic step, because
-- Redis cannot call Python. tests/test_counts.py proves that both give the same counts.
--
-- KEYS[1]  the customer's key, which holds "COUNT UPDATED_AT", in microseconds since 1970
-- ARGV[1]  the reset interval in microseconds
-- ARGV[2]  "idle" or "periodic": what the interval runs from
-- ARGV[3]  the moment, where a clock was handed in; otherwise it is the server's
--
-- Numbers of Lua are exact up to 2^53, which as microseconds is the year 2255.
local now
if ARGV[3] then
  now = tonumber(ARGV[3])
else
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local interval = tonumber(ARGV[1])
local count, updated_at = 0, now
local last = redis.call('GET', KEYS[1])
if last then
  local value, at = string.match(last, '^(%-?%d+) (%-?%d+)$')
  at = tonumber(at)
  if at and now - at <= interval then
    count = value - 1
    if ARGV[2] == 'periodic' or now < at then
      updated_at = at
    end
  end
end
-- The key lives as long as its count can matter, and a second longer. SET with PX is one command, so
-- there is never a key without an end.
local rest_ms = math.ceil((updated_at + interval - now) / 1000) + 1000
redis.call('SET', KEYS[1], string.format('%.0f %.0f', count, updated_at),
  'PX', string.format('%.0f', rest_ms))
return count
