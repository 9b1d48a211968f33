/* Kernels of one instruction set: included by kernels.c, which is compiled once for each (see build.sh).

   Vectors are GCC's, of 16 lanes, so that one source serves every instruction set; lanes are 16 neighbouring outputs of
   a matrix. A matrix [n, k] is stored in panels of 16 outputs, k padded to a multiple of 32:

     F32   [n / 16][k][16] float
     BF16  [n / 16][k / 2][16][2] bfloat16, which is a tile of AMX as it is
     INT8  [n / 16][k / 4][16][4] signed bytes
     INT4  [n / 16][k / 8][16] words of 32 bits, number i of 8 in bits 4 i to 4 i + 3
     INT6  [n / 16][k / 16][3][16] words, of numbers + 32: their lower 4 bits as two words of INT4, and in byte i of the
           third the upper 2 bits of numbers 2 i, 2 i + 1, 2 i + 8 and 2 i + 9; no tiles of AMX multiply them
     FLOAT8 [n / 16][k / 4][16][4] e4m3 numbers, without NaN, whose scales are of float32, of all columns or of groups of
           a multiple of 128

   Scales and zero points of groups of columns are [n / 16][k / group][16], apart from the panels. Those of superblocks
   lie within: before the numbers of each 256 columns are two float16 numbers [2][16], what scales and what minima are
   multiplied by, and for each group [16] scales as bytes, followed by [16] minima where there are some. One stream
   is read faster from memory than two.

   Each output is summed along k in an order that depends on nothing but the matrix's kind and the way: so a row has the
   same bits in any batch that takes the same way. Rows in bfloat16 have one way by matrices of bfloat16, and one by
   those of integers but for many rows on a processor with AMX, see `invariant`.
*/

#ifndef QUIRE_KERNELS_H
#define QUIRE_KERNELS_H

#include <stdint.h>

enum { F32, BF16, INT8, INT4, INT6, FLOAT8 };

/* How scales are stored: float16, bfloat16, float32; or as superblocks have them, unsigned with minima or signed. */
enum { SCALE_F16, SCALE_BF16, SCALE_F32, SCALE_U8, SCALE_I8 };

enum { NO_GATE, SILU, GELU };

/* panel: bytes of one. head: bytes of scales before the numbers of each 256 columns, 0 where they lie apart. */
struct matrix {
    int64_t n, k, panel, head;
    int32_t kind, group, scale_kind, has_zeros;
    const void *weight, *scale, *zero;
    const float *values; /* what the 16 numbers of INT4 stand for */
};

struct linear {
    const struct matrix *matrix;
    const void *x;
    void *y;
    const void *bias;
    int64_t rows, x_stride, y_stride;
    int32_t x_bf16, y_bf16, bias_bf16, gate;
    int32_t inputs, invariant; /* invariant: a row's bits must not depend on how many rows there are */
    int32_t rounded; /* rows become int8 by their own largest number, see rounded.h: of a matrix of INT8 with a float32
                        scale a row */
};

struct attention {
    const void *q;
    void *out;
    const void *k, *v;
    const int32_t *query_start, *kv_len, *page_table;
    const float *sinks;
    int64_t spans, heads, groups, dim, value_dim, page_size, table_stride, q_stride;
    int64_t window, chunk, most;
    float scale, soft_cap;
    int32_t q_bf16, kv_bf16;
};

struct norm {
    const void *x;
    void *residual, *out;
    const void *weight, *bias;
    int64_t rows, size;
    float eps, scale;
    int32_t bf16, weight_bf16, centred;
};

struct rope {
    const void *qkv;
    void *q, *k_pool, *v_pool;
    const int64_t *slots;
    const float *cos, *sin;
    const void *q_norm, *k_norm;
    int64_t rows, heads, groups, dim, half, page_size, stride;
    float q_eps, k_eps;
    int32_t bf16, weight_bf16, interleaved;
};

/* Rows number `which` of a matrix of INT8, INT4 or INT6, as numbers. */
struct lookup {
    const struct matrix *matrix;
    const int64_t *which;
    void *out;
    int64_t count;
    int32_t inputs, bf16;
};

/* One of several kernels that `quire_run` runs one after the other. arguments: a `struct linear` and so on. apart: it
   reads nothing that the call before it writes. next: the next task, set by `quire_run`. */
enum { LINEAR, ATTENTION, NORM, ROPE };

struct call {
    const void *arguments;
    int32_t kernel, apart;
    int64_t next;
};

/* Where `quire_pack_blocks` puts rows of GGUF's blocks: a matrix in panels of k columns, of which the file has `inputs`. */
struct blocks {
    int64_t inputs, k;
    int32_t type;
    void *weight, *scale;
};

struct kernels {
    void (*linear)(const struct linear *, int64_t *next);
    void (*attention)(const struct attention *, int64_t *next);
    void (*norm)(const struct norm *, int64_t *next);
    void (*rope)(const struct rope *, int64_t *next);
    void (*lookup)(const struct lookup *, int64_t *next);
};

#endif
