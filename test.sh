#!/usr/bin/env bash
# Installs what the tests need and runs all of them. The one command of the README.
#
# With root (or passwordless sudo) it installs from Debian's packages and PyPI what is missing: a
# C compiler, PostgreSQL 15 (judges SQL answers), psql, Chromium (the web console), Python with psycopg
# (driver manners) and moto (an S3-compatible server). Elsewhere it names what it skips. With CI=true nothing is skipped
# but the cluster in containers where no engine for them answers, which is said and counted at the end;
# MILLRACE_REQUIRE_CONTAINERS=1 makes that an error, too.
#
#   ./test.sh              everything, two test binaries at a time (tests/run.py)
#   ./test.sh FILTER…      passes the words on to `cargo test`
set -euo pipefail
cd "$(dirname "$0")"

export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/millrace/target}"
export CARGO_TERM_COLOR="${CARGO_TERM_COLOR:-never}"
tools="$CARGO_TARGET_DIR/../test-tools"
mkdir -p "$CARGO_TARGET_DIR" "$tools"
tools="$(cd "$tools" && pwd)"
scratch="$(mktemp -d)"
skipped=()

skip() {
  if [ "${CI:-}" = true ]; then
    echo "error: $1 is missing and could not be installed; CI skips nothing" >&2
    exit 1
  fi
  skipped+=("$1")
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; elif sudo -n true 2>/dev/null; then sudo "$@"; else return 1; fi
}

apt_updated=
apt_install() {
  command -v apt-get >/dev/null || return 1
  if [ -z "$apt_updated" ]; then as_root apt-get update -qq >/dev/null || return 1; apt_updated=1; fi
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

cleanup() {
  [ -z "${compiling:-}" ] || kill "$compiling" 2>/dev/null || true
  [ -z "${moto_pid:-}" ] || kill "$moto_pid" 2>/dev/null || true
  if [ -d "$scratch/pg" ]; then pg_ctl_stop || true; fi
  rm -rf "$scratch"
}
trap cleanup EXIT

command -v cc >/dev/null || apt_install gcc libc6-dev || skip "a C compiler"
command -v make >/dev/null || apt_install make || skip "make"
command -v openssl >/dev/null || apt_install openssl || skip "openssl"
# Compiles while what follows waits for the network. What is below finds everything compiled.
cargo test --workspace --locked --no-run --message-format=json-render-diagnostics "$@" >"$scratch/built" &
compiling=$!
command -v chromium >/dev/null || apt_install chromium || skip "Chromium"
command -v psql >/dev/null || apt_install postgresql-client || skip "psql"
[ -x /usr/lib/postgresql/15/bin/initdb ] || apt_install postgresql-15 || skip "PostgreSQL 15"
if [ ! -x "$tools/venv/bin/python" ]; then
  python3 -m venv "$tools/venv" 2>/dev/null ||
    { apt_install python3 python3-venv && python3 -m venv "$tools/venv"; } || skip "Python"
fi
if [ -x "$tools/venv/bin/python" ]; then
  "$tools/venv/bin/python" -c 'import psycopg, moto.server' 2>/dev/null ||
    "$tools/venv/bin/pip" install -q --disable-pip-version-check 'psycopg[binary]>=3.1,<4' 'moto[server,s3]>=5,<6' ||
    skip "psycopg and moto"
fi
wait "$compiling"
compiling=

free_port() { python3 -c 'import socket; s=socket.socket(); s.bind(("127.0.0.1",0)); print(s.getsockname()[1])'; }

# A scratch PostgreSQL; it refuses to run as root, so then it runs as the user `postgres`.
pg_bin=/usr/lib/postgresql/15/bin
as_pg() { if [ "$(id -u)" = 0 ]; then (cd / && runuser -u postgres -- "$@"); else "$@"; fi; }
pg_ctl_stop() { as_pg "$pg_bin/pg_ctl" -D "$scratch/pg" -m immediate stop >/dev/null 2>&1; }
if [ -x "$pg_bin/initdb" ]; then
  chmod 755 "$scratch"
  mkdir "$scratch/pg"
  [ "$(id -u)" != 0 ] || chown postgres "$scratch/pg"
  pg_port="$(free_port)"
  as_pg "$pg_bin/initdb" -D "$scratch/pg" -A trust -U postgres --locale=C -E UTF8 >/dev/null
  as_pg "$pg_bin/pg_ctl" -D "$scratch/pg" -w -l "$scratch/pg/log" \
    -o "-p $pg_port -c listen_addresses=127.0.0.1 -c unix_socket_directories=$scratch/pg -c fsync=off" start >/dev/null
  export MILLRACE_TEST_POSTGRES="host=127.0.0.1 port=$pg_port user=postgres dbname=postgres"
fi

if "$tools/venv/bin/python" -c 'import moto.server' 2>/dev/null; then
  moto_port="$(free_port)"
  # Of creators that come at the same time moto lets several win now and then, since each has a thread of its own. A bucket
  # does not, so requests are answered one after another.
  cat >"$scratch/bucket_in_turn.py" <<'EOF'
import io
import threading

from moto import server

run, turn = server.run_simple, threading.Lock()


def one_at_a_time(app):
    def answer(environ, start):
        whole = environ.get("wsgi.input_terminated")
        length = -1 if whole else int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length)
        environ.update({"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))})
        with turn:
            return list(app(environ, start))

    return answer


server.run_simple = lambda host, port, app, **options: run(host, port, one_at_a_time(app), **options)
server.main()
EOF
  "$tools/venv/bin/python" "$scratch/bucket_in_turn.py" -H 127.0.0.1 -p "$moto_port" >"$scratch/moto.log" 2>&1 &
  moto_pid=$!
  export MILLRACE_TEST_S3="http://127.0.0.1:$moto_port"
  export MILLRACE_TEST_PYTHON="$tools/venv/bin/python"
fi

for what in "${skipped[@]:-}"; do
  [ -z "$what" ] || echo "note: $what is not here; the tests that need it are skipped"
done

# Runs a test binary so that each test reports how long it took; rustc's test harness has no stable flag for it. A
# binary that takes several times as long as the slowest does is stopped: a test that hangs is a failure, and its name is
# the last one that was started.
cat >"$scratch/timed" <<'EOF'
#!/usr/bin/env bash
case "$1" in */deps/*) grep -q -e --report-time <("$1" --help 2>/dev/null) || exec "$@" ;; *) exec "$@" ;; esac
RUSTC_BOOTSTRAP=1 exec timeout --kill-after=10 "${TEST_BINARY_LIMIT:-1500}" "$@" -Z unstable-options --report-time
EOF
chmod +x "$scratch/timed"
host="$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')"
export "CARGO_TARGET_${host}_RUNNER=$scratch/timed"

# What tests have left out although they passed, a line each.
export MILLRACE_SKIPPED_TESTS="$scratch/skipped"
: >"$MILLRACE_SKIPPED_TESTS"

run_tests() {
  if [ $# = 0 ] && command -v python3 >/dev/null; then
    python3 tests/run.py "$scratch/built" "$scratch/timed"
  else
    cargo test --workspace --locked "$@"
  fi
}

# Of seconds.
time_of() { echo "$(($1 / 60)) min $(($1 % 60)) s"; }

status=0
# What a run that is ended still has to say is shown.
run_tests "$@" | (trap '' INT TERM && exec tee "$scratch/output") || status=$?
echo "The slowest tests (seconds):"
sed -nE 's/^test (.*) \.\.\. ok <([0-9.]+)s>$/\2 \1/p' "$scratch/output" | sort -rn | sed -n 1,10p
if [ -s "$MILLRACE_SKIPPED_TESTS" ]; then
  echo "SKIPPED: $(wc -l <"$MILLRACE_SKIPPED_TESTS")"
  sed 's/^/  /' "$MILLRACE_SKIPPED_TESTS"
fi
echo "test.sh took $(time_of "$SECONDS")"
[ -z "${CI_BEGAN:-}" ] || echo "All of .ci/run took $(time_of $(($(date +%s) - CI_BEGAN)))"
exit "$status"
