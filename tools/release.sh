#!/usr/bin/env bash
# release.sh: dist/ with what a release has: the wheels (tools/wheel.sh), tandem-VERSION-linux-ARCH.tar.gz, which has the
# installed program, library, headers and man pages for processors from LEVEL on (x86-64-v3), and SHA256SUMS of all. The
# program needs the packages of tools/setup.sh. WHEELS=0: without wheels. Refuses a tree with changes, whose commit would be
# another's. Needs network for pip.
set -eu
cd "$(dirname "$0")/.."
fail() { echo "release: $1" >&2; exit 1; }
[ -z "$(git status --porcelain)" ] || fail "the working tree has changes: commit them, for the release names the commit"
version=$(sed -n 's/^#define TANDEM_VERSION "\(.*\)"/\1/p' include/tandem/version.h)
[ -n "$version" ] || fail "include/tandem/version.h: no TANDEM_VERSION"
level=${LEVEL:-x86-64-v3}
name=tandem-$version-linux-$(uname -m)
work=build-release
mkdir -p dist "$work"
rm -rf dist/*.whl dist/tandem-*-linux-*.tar.gz dist/SHA256SUMS "$work/install"
quietly() { "$@" >"$work/log" 2>&1 || { tail -n 30 "$work/log" >&2; fail "$1 failed"; }; }
quietly cmake -G Ninja -S . -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DTANDEM_UNITY=ON -DTANDEM_MARCH="$level" -DTANDEM_CUDA=OFF \
  -DTANDEM_TESTS=OFF -DTANDEM_PYTHON=OFF -DCMAKE_INSTALL_PREFIX=/usr/local --log-level=WARNING
quietly cmake --build "$work/build" -j "$(nproc)"
DESTDIR=$PWD/$work/install/$name quietly cmake --install "$work/build" --strip
mv "$work/install/$name/usr/local"/* "$work/install/$name/"
rm -r "$work/install/$name/usr"
"$work/install/$name/bin/tandem" --version
tar -C "$work/install" --owner=0 --group=0 --sort=name --mtime="@$(git log -1 --format=%ct)" -czf "dist/$name.tar.gz" "$name"
[ "${WHEELS:-1}" = 0 ] || tools/wheel.sh
(cd dist && shopt -s nullglob && sha256sum -- *.whl *.tar.gz >SHA256SUMS && cat SHA256SUMS)
