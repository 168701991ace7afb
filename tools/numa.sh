# Functions for the environment in $venv. The engine for CPUs is linked with libnuma. PyPI lacks it,
# and so does a small Debian.
has_numa() { "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; }
add_numa() {
    (cd "$venv" && apt-get download -qq libnuma1 && dpkg-deb -x libnuma1_*.deb numa) || return 0
    "$venv/bin/python" - "$venv"/numa/usr/lib/*/libnuma.so.1 <<'END'
import pathlib, sys, sysconfig
line = f"import ctypes; ctypes.CDLL({str(pathlib.Path(sys.argv[1]).absolute())!r})\n"
pathlib.Path(sysconfig.get_path("purelib"), "libnuma.pth").write_text(line)
END
}
