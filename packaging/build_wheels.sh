#!/usr/bin/env bash
# Build what is published: the source distribution, and of it a wheel for x86-64 and one for 64-bit ARM.
#
#   packaging/build_wheels.sh [DIRECTORY]    where they go; dist by default
#
# In the environment: PYTHON, an interpreter that has build and setuptools; python3 by default. Compilers are Debian's,
# for this machine and the other one: apt-get install gcc libc6-dev gcc-aarch64-linux-gnu (gcc-x86-64-linux-gnu on ARM).
#
# The tag is manylinux_2_17, which is that of manylinux2014. kernels.so takes malloc, free, memcpy and memset of glibc, the
# newest of them of 2.14 on x86-64 and of 2.17, the first there was, on ARM; whether that is still so is looked up below.
# No processor is assumed: the library itself finds out what there is.
#
# libgomp.so.1 is not among what manylinux promises, and is not put into the wheel: torch for x86-64 brings one of that name,
# whose threads the kernels share, and a second one would have threads of its own. Where there is none, or one of before
# gcc 6, the library cannot be opened, and torch's own products serve; the wheel works.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-dist}
python=${PYTHON:-python3}
glibc=2.17
library=neurogrid/model/kernels/kernels.so

say() { echo "build_wheels: $*" >&2; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for machine in x86_64 aarch64; do
    if ! command -v "$machine-linux-gnu-gcc" >/dev/null; then
        say "$machine-linux-gnu-gcc is missing; on Debian, as root: apt-get install" \
            "$([ "$machine" = "$(uname -m)" ] && echo gcc libc6-dev || echo "gcc-${machine/_/-}-linux-gnu")"
        exit 1
    fi
done

# Usage: check_needs LIBRARY. What it links to, and the newest glibc that it asks for.
check_needs() {
    local needed newest
    needed=$(readelf -d "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort | xargs)
    newest=$(readelf --version-info "$1" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1)
    if readelf -d "$1" | grep -E '\((RPATH|RUNPATH)\)' >&2; then
        say "$1 looks for libraries in a directory of this machine"
        exit 1
    fi
    if [ "$needed" != "libc.so.6 libgomp.so.1" ]; then
        say "$1 needs $needed, and is to need libc.so.6 and libgomp.so.1"
        exit 1
    fi
    if [ "$(printf '%s\n' "GLIBC_$glibc" "$newest" | sort -V | tail -n 1)" != "GLIBC_$glibc" ]; then
        say "$1 needs $newest, and the tag of the wheel says $glibc"
        exit 1
    fi
}

"$python" -m build --no-isolation --sdist --outdir "$work/sdist" .
for machine in x86_64 aarch64; do
    # A tree of its own for each: what was compiled for one is not to be found by the other.
    mkdir "$work/$machine"
    tar -xzf "$work"/sdist/*.tar.gz -C "$work/$machine" --strip-components=1
    CC=$machine-linux-gnu-gcc NEUROGRID_BUILD_KERNELS=required "$python" -m build --no-isolation --wheel \
        --config-setting="--build-option=--plat-name=manylinux_${glibc/./_}_$machine" \
        --outdir "$work/wheels" "$work/$machine"
    "$python" -m zipfile -e "$work/wheels"/*"_$machine.whl" "$work/$machine/unpacked"
    check_needs "$work/$machine/unpacked/$library"
done
mkdir -p "$out"
cp "$work"/sdist/* "$work"/wheels/* "$out"
say "in $out: $(basename -a "$work"/sdist/* "$work"/wheels/* | xargs)"
