"""psycopg 3 with its defaults against the server on the port given."""

import datetime
import decimal
import sys

import psycopg

port = sys.argv[1]
conn = psycopg.connect(f"host=127.0.0.1 port={port} user=root dbname=dev", autocommit=True)
cur = conn.cursor()

cur.execute(
    "CREATE TABLE p (id int PRIMARY KEY, v text, n numeric(10,2), d date, ts timestamptz, b bytea, f double precision)"
)
now = datetime.datetime(2024, 5, 6, 7, 8, 9, tzinfo=datetime.timezone.utc)
row = (1, "a'b", decimal.Decimal("1.50"), datetime.date(2024, 1, 2), now, b"\x00\xff", 2.5)
cur.execute("INSERT INTO p VALUES (%s, %s, %s, %s, %s, %s, %s)", row)
cur.execute("SELECT * FROM p WHERE id = %s", (1,))
assert cur.fetchone() == row

# The same statement again and again becomes a prepared one.
for i in range(2, 12):
    cur.execute("INSERT INTO p (id, v) VALUES (%s, %s)", (i, str(i)))
assert conn.execute("SELECT count(*) FROM p").fetchone() == (11,)

# Binary in and out.
binary = conn.cursor(binary=True)
assert binary.execute("SELECT * FROM p WHERE id = %b", (1,)).fetchone() == row

# Many in one pipeline.
cur.executemany("INSERT INTO p (id, v) VALUES (%s, %s)", [(i, None) for i in range(100, 150)])
assert conn.execute("SELECT count(*) FROM p WHERE v IS NULL").fetchone() == (50,)
with conn.pipeline():
    one = conn.execute("SELECT 1")
    two = conn.execute("SELECT %s::text", ("two",))
assert one.fetchone() == (1,) and two.fetchone() == ("two",)

# Of a batch all rows are there, or none.
try:
    cur.executemany("INSERT INTO p (id, v) VALUES (%s, 'batch')", [(i,) for i in (200, 201, 1, 202)])
    raise AssertionError("no error")
except psycopg.errors.UniqueViolation:
    pass
assert conn.execute("SELECT count(*) FROM p WHERE v = 'batch'").fetchone() == (0,)
cur.executemany("INSERT INTO p (id, v) VALUES (%s, 'batch') RETURNING id", [(200,), (201,)], returning=True)
assert cur.fetchall() == [(200,)] and cur.nextset() and cur.fetchall() == [(201,)]
looking = psycopg.connect(f"host=127.0.0.1 port={port} user=root dbname=dev", autocommit=True)
with conn.pipeline() as pipeline:
    conn.execute("DELETE FROM p WHERE v = 'batch'")
    seen = conn.execute("SELECT count(*) FROM p WHERE v = 'batch'")
    assert seen.fetchone() == (0,)
    assert looking.execute("SELECT count(*) FROM p WHERE v = 'batch'").fetchone() == (2,)
    pipeline.sync()
    assert looking.execute("SELECT count(*) FROM p WHERE v = 'batch'").fetchone() == (0,)
try:
    with conn.pipeline():
        conn.execute("INSERT INTO p (id, v) VALUES (210, 'batch')")
        conn.execute("SELECT 1 / 0")
        conn.execute("INSERT INTO p (id, v) VALUES (211, 'batch')")
except psycopg.errors.DivisionByZero:
    pass
assert looking.execute("SELECT count(*) FROM p WHERE v = 'batch'").fetchone() == (0,)
looking.close()

# A list as a parameter.
got = conn.execute("SELECT id FROM p WHERE id = ANY(%s) ORDER BY id", ([1, 3, 999],)).fetchall()
assert got == [(1,), (3,)], got

# Transactions and nested savepoints.
with conn.transaction():
    assert conn.execute("SELECT 1").fetchone() == (1,)
    try:
        with conn.transaction():
            conn.execute("SELECT 1 / (id - 1) FROM p")
        raise AssertionError("no error")
    except psycopg.errors.DivisionByZero:
        pass
    assert conn.execute("SELECT 2").fetchone() == (2,)

# COPY both ways.
with cur.copy("COPY p (id, v) FROM STDIN") as copy:
    for i in range(1000, 1100):
        copy.write_row((i, f"row\t{i}"))
with cur.copy("COPY (SELECT id, v FROM p WHERE id >= 1000 ORDER BY id) TO STDOUT") as copy:
    rows = list(copy.rows())
assert len(rows) == 100 and rows[0] == ("1000", "row\t1000"), rows[:2]

# Errors tell their state.
try:
    cur.execute("INSERT INTO p (id) VALUES (1)")
    raise AssertionError("no error")
except psycopg.errors.UniqueViolation:
    pass

# A server-side cursor.
with conn.transaction():
    with conn.cursor(name="c") as named:
        named.execute("SELECT id FROM p ORDER BY id")
        assert named.fetchmany(2) == [(1,), (2,)]

# What SQLAlchemy asks when it connects.
assert conn.execute("select pg_catalog.version()").fetchone()[0].startswith("PostgreSQL 15")
assert conn.execute("select current_schema()").fetchone() == ("public",)
assert conn.execute("show standard_conforming_strings").fetchone() == ("on",)
assert conn.execute(
    "SELECT t.oid, typarray FROM pg_type t JOIN pg_namespace ns ON typnamespace = ns.oid WHERE typname = 'hstore'"
).fetchone() is None

# Types by name.
info = psycopg.types.TypeInfo.fetch(conn, "text")
assert info.oid == 25 and info.array_oid == 1009, info
print("ok")

# Its default: every statement opens a transaction, which commit() ends.
plain = psycopg.connect(f"host=127.0.0.1 port={port} user=root dbname=dev")
other = psycopg.connect(f"host=127.0.0.1 port={port} user=root dbname=dev")
conn.execute("CREATE TABLE acct (id int PRIMARY KEY, n bigint NOT NULL)")
conn.execute("CREATE TABLE moves (src int, dst int, n bigint)")
conn.execute("CREATE MATERIALIZED VIEW total AS SELECT sum(n) AS n FROM acct")
plain.execute("INSERT INTO acct SELECT g, 100 FROM generate_series(1, 10) AS t(g)")
assert plain.execute("SELECT sum(n) FROM acct").fetchone() == (1000,)
assert conn.execute("SELECT count(*) FROM acct").fetchone() == (0,)
plain.commit()
assert conn.execute("SELECT n FROM total").fetchone() == (1000,)
plain.execute("DELETE FROM acct")
plain.rollback()
assert plain.execute("SELECT count(*) FROM acct").fetchone() == (10,)
plain.commit()
with plain.cursor() as c:
    c.executemany("INSERT INTO moves VALUES (%s, %s, %s)", [(i, i, 0) for i in range(500)])
    c.execute("UPDATE acct SET n = n - 5 WHERE id = %s RETURNING n", (1,))
    assert c.fetchone() == (95,)
    with c.copy("COPY moves FROM STDIN") as copy:
        copy.write_row((1, 2, 5))
    assert c.execute("SELECT count(*) FROM moves").fetchone() == (501,)
plain.rollback()
assert plain.execute("SELECT count(*) FROM moves").fetchone() == (0,)
plain.rollback()

# Two transactions change the same row: the second to commit is told to try again.
plain.execute("UPDATE acct SET n = n - 1 WHERE id = 1")
other.execute("UPDATE acct SET n = n + 1 WHERE id = 1")
plain.execute("INSERT INTO moves VALUES (1, 1, 1)")
other.execute("INSERT INTO moves VALUES (2, 2, 2)")
plain.commit()
try:
    other.commit()
    raise AssertionError("no conflict")
except psycopg.errors.SerializationFailure:
    pass
assert conn.execute("SELECT src FROM moves").fetchall() == [(1,)]
assert conn.execute("SELECT n FROM acct WHERE id = 1").fetchone() == (99,)

# Both insert one key: the second is a duplicate, and nothing of its transaction stays.
plain.execute("INSERT INTO acct VALUES (50, 0)")
other.execute("INSERT INTO moves VALUES (3, 3, 3)")
other.execute("INSERT INTO acct VALUES (50, 1)")
plain.commit()
try:
    other.commit()
    raise AssertionError("no duplicate")
except psycopg.errors.UniqueViolation:
    pass
assert conn.execute("SELECT count(*) FROM moves").fetchone() == (1,)

# One snapshot for a whole block.
plain.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
before = plain.execute("SELECT n FROM acct WHERE id = 2").fetchone()
conn.execute("UPDATE acct SET n = n + 1 WHERE id = 2")
assert plain.execute("SELECT n FROM acct WHERE id = 2").fetchone() == before
plain.execute("UPDATE acct SET n = 0 WHERE id = 2")
try:
    plain.commit()
    raise AssertionError("no conflict")
except psycopg.errors.SerializationFailure:
    pass
assert plain.execute("SELECT n FROM acct WHERE id = 2").fetchone() == (before[0] + 1,)
plain.rollback()

# The statement without a name is gone when another was to take its place, or after a query string.
pg = conn.pgconn
for last in (lambda: pg.prepare(b"", b"SELEC 1"), lambda: pg.exec_(b"SELECT 2")):
    assert pg.prepare(b"", b"SELECT 1").status == psycopg.pq.ExecStatus.COMMAND_OK
    last()
    gone = pg.exec_prepared(b"", [])
    assert gone.error_field(psycopg.pq.DiagnosticField.SQLSTATE) == b"26000", gone.error_message
    assert b"unnamed prepared statement does not exist" in gone.error_message, gone.error_message

# Days and times without end are refused, however they come.
for column, binary_infinity in (("d", b"\x7f\xff\xff\xff"), ("ts", b"\x7f" + b"\xff" * 7)):
    for copied, value in (("text", "infinity"), ("csv", "-infinity"), ("binary", binary_infinity)):
        try:
            with cur.copy(f"COPY p (id, {column}) FROM STDIN (FORMAT {copied})") as copy:
                if copied == "binary":
                    size = len(value).to_bytes(4, "big")
                    row = b"\0\2\0\0\0\4" + (5000).to_bytes(4, "big") + size + value
                    copy.write(b"PGCOPY\n\xff\r\n\0" + bytes(8) + row + b"\xff\xff")
                else:
                    copy.write(f"5000{',' if copied == 'csv' else chr(9)}{value}\n")
            raise AssertionError(f"{copied} of {column}")
        except psycopg.errors.FeatureNotSupported as e:
            assert "infinity of dates and times" in str(e), e
    for format, value in ((0, b"-infinity"), (1, binary_infinity)):
        statement = f"INSERT INTO p (id, {column}) VALUES (5000, $1)".encode()
        refused = pg.exec_params(statement, [value], param_formats=[format])
        assert refused.error_field(psycopg.pq.DiagnosticField.SQLSTATE) == b"0A000", (column, format)
assert conn.execute("SELECT count(*) FROM p WHERE id = 5000").fetchone() == (0,)
