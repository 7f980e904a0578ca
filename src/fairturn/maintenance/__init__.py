"""Operations on a whole queue: backup, restore, and a copy into PostgreSQL."""
