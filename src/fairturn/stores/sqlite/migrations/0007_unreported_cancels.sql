-- Documents that were cancelled while they waited or were delayed, until a claim reports them to its worker. Rows of
-- documents that were deleted since are removed by a claim too.
CREATE TABLE unreported_cancels (
    number   INTEGER PRIMARY KEY,   -- in the order of the cancels
    document INTEGER NOT NULL
) STRICT;
