#!/bin/sh
# Build the CPU kernels: native/build.sh OUTPUT. Needs gcc 12 or later on x86-64.
set -eu
out=$(realpath -m "$1")
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="-O3 -std=c11 -fPIC -fvisibility=hidden -ffp-contract=fast -fno-math-errno -fno-trapping-math -Wall -Wno-psabi"
avx512="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mprefer-vector-width=512"
compile() {
    name=$1
    shift
    gcc $flags -mavx2 -mfma -mf16c "$@" -DKERNELS="kernels_$name" -c kernels.c -o "$work/$name.o"
}
compile avx2
compile avx512 $avx512
compile avx512_bf16 $avx512 -mavx512bf16
compile amx $avx512 -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8
source=$(cat kernels.h kernels.c integers.h rounded.h float8.h tiled_attention.h blocks.c library.c build.sh | sha256sum | cut -c1-64)
gcc -O2 -std=c11 -D_GNU_SOURCE "-DSOURCE=\"$source\"" -fPIC -fvisibility=default -Wall -c library.c -o "$work/library.o"
gcc -O3 -std=c11 -mavx2 -fPIC -fvisibility=default -Wall -c blocks.c -o "$work/blocks.o"
gcc -shared -Wl,-s -o "$out" "$work"/*.o -lm
