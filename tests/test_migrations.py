"""A file of an older version is brought to this one, with everything in it."""

from pathlib import Path

import apsw

from fairturn.keys import Keys
from fairturn.model import NewDocument
from fairturn.stores.sqlite import SqliteStore
from fairturn.stores.sqlite.database import APPLICATION_ID, migrations


def test_a_file_without_access_keys_gets_them_and_keeps_its_documents(tmp_path: Path) -> None:
    path = tmp_path / "documents.db"
    (number, first), *_ = migrations()
    connection = apsw.Connection(str(path))
    connection.execute(first)
    connection.execute(f"PRAGMA user_version = {number}")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute("INSERT INTO queue (one, settings, id_key) VALUES (1, '{}', 7)")
    connection.execute("INSERT INTO customers (number, name) VALUES (1, 'acme')")
    connection.close()

    store = SqliteStore(path)
    made = Keys(store).make("customer", customer="acme")
    store.submit([NewDocument("acme", "1")])

    assert Keys(store).check(made.shown) == made.key
    assert [customer.name for customer in store.customers().customers] == ["acme"]
    assert store.oldest_waiting().keys() == {1}
    store.close()
