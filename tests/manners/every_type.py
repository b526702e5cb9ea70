"""psycopg 3: values of every type as parameters and results, in text and in binary, NULLs and lists too."""

import datetime as dt
import decimal
import sys
import uuid

import psycopg
from psycopg.types.json import Jsonb

port = sys.argv[1]
conn = psycopg.connect(f"host=127.0.0.1 port={port} user=root dbname=dev", autocommit=True)

utc = dt.timezone.utc
D = decimal.Decimal
VALUES = {
    "boolean": [True, False],
    "smallint": [-32768, 7],
    "integer": [-(2**31), 7],
    "bigint": [-(2**63), 7],
    "real": [1.5, -2.25],
    "double precision": [0.1, -1e300],
    "numeric(12,4)": [D("0.0000"), D("-1.5000"), D("12345678.9012")],
    "text": ["", "é 'quoted' {x}", "NULL"],
    "varchar(10)": ["ten"],
    "bytea": [b"", b"\x00\xff\\"],
    "date": [dt.date(2000, 1, 1), dt.date(1, 1, 1), dt.date(9999, 12, 31)],
    "time": [dt.time(0, 0), dt.time(23, 59, 59, 999999)],
    "timestamp": [dt.datetime(1969, 12, 31, 23, 59, 59, 999999)],
    "timestamptz": [dt.datetime(2026, 3, 1, 8, 0, tzinfo=utc)],
    "interval": [dt.timedelta(days=3, seconds=5, microseconds=7), dt.timedelta(days=-1)],
    "uuid": [uuid.UUID("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11")],
    "jsonb": [{"a": [1, None, "x"]}, [], "text", 1.5],
}

checks = 0
for number, (name, values) in enumerate(VALUES.items()):
    every = f"every{number}"
    wrap = Jsonb if name == "jsonb" else lambda v: v
    conn.execute(f"CREATE TABLE {every} (id int PRIMARY KEY, v {name})")
    # A parameter's format: psycopg's choice, text, binary.
    for place in ("%s", "%t", "%b"):
        for binary in (False, True):
            cur = conn.cursor(binary=binary)
            conn.execute(f"DELETE FROM {every}")
            for i, value in enumerate(values + [None]):
                given = wrap(value) if value is not None else None
                cur.execute(f"INSERT INTO {every} VALUES (%s, {place})", (i, given))
                got = cur.execute(f"SELECT v FROM {every} WHERE id = %s", (i,)).fetchone()[0]
                assert got == value and type(got) is type(value), (name, place, binary, value, got)
                got = cur.execute(f"SELECT {place}::{name}", (given,)).fetchone()[0]
                assert got == value, (name, place, binary, value, got)
                checks += 1
            if name in ("jsonb", "varchar(10)"):
                continue
            array = name.split("(")[0] + "[]"
            items = values + [None]
            got = cur.execute(f"SELECT {place}::{array}", (items,)).fetchone()[0]
            assert got == items, (array, place, binary, got)
            if name != "boolean":
                found = cur.execute(
                    f"SELECT count(*) FROM {every} WHERE v = ANY({place}::{array})", (values,)
                ).fetchone()[0]
                assert found == len(values), (array, place, binary, found)
            checks += 1
print(checks, "values came back")
