"""The recount that the fault tests rely on: it finds nothing in a sound queue, and finds damage."""

from pathlib import Path

import psycopg
import pytest

from tests import recount
from tests.faults import scene


def test_a_sound_queue_has_no_differences(tmp_path: Path) -> None:
    with scene(tmp_path) as (world, _, _):
        assert recount.differences(world.store, world.url) == []


@pytest.mark.parametrize("damage", recount.DAMAGES)
def test_damage_is_found(tmp_path: Path, damage: str) -> None:
    with scene(tmp_path) as (world, _, _):
        recount.fold(world.store)
        with psycopg.connect(world.url) as connection:
            connection.execute(recount.DAMAGES[damage].encode())

        assert recount.compared(world.store, world.url) != []
