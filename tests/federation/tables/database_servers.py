"""Private servers of databases that are installed, for as long as tests need them."""

import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

SECRET = "pass-Wort7"


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


@contextmanager
def folder_of(account, name):
    """A folder for a server that does not run as root, and how to run programs as its account."""
    other = os.geteuid() == 0
    if other and shutil.which("runuser") is None:
        pytest.skip(f"{name} does not run as root, and there is no runuser to run it as {account}")
    folder = Path(
        subprocess.check_output(["mktemp", "-d", f"/tmp/fedstat-{account}.XXXXXX"], text=True).strip()
    )
    if other:
        shutil.chown(folder, account)
    try:
        yield folder, ["runuser", "-u", account, "--"] if other else []
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def postgresql_server():
    """Connection string of the superuser of a PostgreSQL server."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("no PostgreSQL server is installed (no /usr/lib/postgresql/*/bin/initdb)")
    programs, port = found[-1].parent, free_port()
    with folder_of("postgres", "PostgreSQL") as (folder, prefix):
        (folder / "password").write_text(SECRET)
        (folder / "password").chmod(0o644)

        def run(*command):
            subprocess.run([*prefix, *map(str, command)], check=True, capture_output=True, cwd=folder)

        options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        try:
            run(programs / "initdb", "-D", folder / "db", "-U", "owner", f"--pwfile={folder}/password",
                "--auth=scram-sha-256", "-E", "UTF8", "--no-sync")  # fmt: skip
            run(programs / "pg_ctl", "-D", folder / "db", "-w", "-o", options, "-l", folder / "log", "start")
            yield f"postgresql://owner:{SECRET}@127.0.0.1:{port}/postgres"
        finally:
            if (folder / "db" / "postmaster.pid").exists():
                run(programs / "pg_ctl", "-D", folder / "db", "-m", "immediate", "stop")


@contextmanager
def mariadb_server():
    """Connection string of an account of a MariaDB server that may do anything."""
    pymysql = pytest.importorskip("pymysql")
    install, program = shutil.which("mariadb-install-db"), shutil.which("mariadbd")
    program = program or next((path for path in ("/usr/sbin/mariadbd",) if Path(path).exists()), None)
    if not (install and program):
        pytest.skip("no MariaDB server is installed (no mariadb-install-db, no mariadbd)")
    port = free_port()
    with folder_of("mysql", "MariaDB") as (folder, prefix):
        data, socket_file = folder / "db", folder / "socket"
        common = ["--no-defaults", f"--datadir={data}"]
        subprocess.run(
            [*prefix, install, *common, "--auth-root-authentication-method=normal", "--skip-test-db"],
            check=True, capture_output=True, cwd=folder,
        )  # fmt: skip
        options = [f"--port={port}", f"--socket={socket_file}", "--bind-address=127.0.0.1",
                   "--innodb-flush-log-at-trx-commit=0", f"--pid-file={folder}/pid"]  # fmt: skip
        server = subprocess.Popen(
            [*prefix, program, *common, *options],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            until = time.monotonic() + 120
            while True:
                try:
                    connection = pymysql.connect(unix_socket=str(socket_file), user="root")
                    break
                except pymysql.Error:
                    if time.monotonic() > until or server.poll() is not None:
                        raise
                    time.sleep(0.1)
            with connection, connection.cursor() as cursor:
                cursor.execute("CREATE DATABASE wards")
                cursor.execute(f"CREATE USER owner@'127.0.0.1' IDENTIFIED BY '{SECRET}'")
                cursor.execute("GRANT ALL ON *.* TO owner@'127.0.0.1'")
            yield f"mysql://owner:{SECRET}@127.0.0.1:{port}/wards"
        finally:
            server.terminate()
            server.wait()
