/* A matrix of INT8 with one scale a row times rows that are rounded to int8, each by its own largest number: included by
   kernels.c. Sums are of int32 along all of k, which is exact, and what scales them has one order, so that every way
   has the bits of the reference (`int8_linear` of quire.ops.quantized). */

#include <float.h>

/* Rows as int8, `stride` bytes apart, the step of each, and what its sums begin with: the codes' shift, taken off. */
struct rounded_rows {
    int64_t stride;
    int8_t *q;
    float *step;
    int32_t *start;
};

typedef int8_t rb __attribute__((vector_size(WIDTH), aligned(1)));

INLINE ri to_whole(rf x) {
#ifdef __AVX512F__
    return (ri)_mm512_cvtps_epi32((__m512)x);
#else
    return (ri)_mm256_cvtps_epi32((__m256)x);
#endif
}

INLINE rf larger(rf a, rf b) {
#ifdef __AVX512F__
    return (rf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return (rf)_mm256_max_ps((__m256)a, (__m256)b);
#endif
}

/* x [inputs] to int8 [k], halves to even, 0 beyond inputs; NaN and infinity stay seen in the step. held: float [k]. */
static void round_row(const struct linear *a, int64_t row, float *held, const struct rounded_rows *to) {
    const char *from = (const char *)a->x + row * a->x_stride * (a->x_bf16 ? 2 : 4);
    int64_t k = a->matrix->k, whole = a->inputs / WIDTH * WIDTH;
    for (int64_t i = 0; i < whole; i += WIDTH)
        *(rfu *)(held + i) = a->x_bf16 ? bf16_at(from + 2 * i) : *(const rfu *)(from + 4 * i);
    for (int64_t i = whole; i < k; i++)
        held[i] = i < a->inputs ? get(from, i, a->x_bf16) : 0.0f;
    rf most = {0}, seen = {0};
    for (int64_t i = 0; i < k; i += WIDTH) {
        rf x = *(const rfu *)(held + i);
        most = larger(most, (rf)((ri)x & 0x7fffffff));
        seen += x * 0.0f;
    }
    float top = FLT_MIN, unseen = 0;
    for (int i = 0; i < WIDTH; i++) {
        top = most[i] > top ? most[i] : top;
        unseen += seen[i];
    }
    float step = top / 127.0f;
    int8_t *q = to->q + row * to->stride;
    ri total = {0};
    for (int64_t i = 0; i < k; i += WIDTH) {
        ri code = to_whole(*(const rfu *)(held + i) / step);
        total += code;
        *(rb *)(q + i) = __builtin_convertvector(code, rb);
    }
    int32_t codes = 0;
    for (int i = 0; i < WIDTH; i++)
        codes += total[i];
    to->step[row] = unseen == 0 ? step : NAN;
    to->start[row] = -SHIFT * codes;
}

static struct rounded_rows rounded_of(const struct linear *a) {
    /* 64 bytes more than k, so that neighbours do not lie in the same place of the first cache. */
    struct rounded_rows x = {a->matrix->k + 64};
    int64_t about = (a->rows + LANES) / LANES * LANES * sizeof(float);
    x.q = room(1, a->rows * x.stride + 2 * about);
    x.step = (float *)(x.q + a->rows * x.stride);
    x.start = (int32_t *)((char *)x.step + about);
    float *held = room(0, sizeof(float) * a->matrix->k);
    for (int64_t r = 0; r < a->rows; r++)
        round_row(a, r, held, &x);
    return x;
}

/* Sums of a row and a register's outputs of a panel, scaled and rounded as the reference does. */
INLINE void put_rounded(const struct linear *a, const struct rounded_rows *x, int64_t row, int64_t panel, int lane, ri sum,
                        vf *out) {
    const float *scale = (const float *)a->matrix->scale + panel * LANES + lane;
    rf made = __builtin_convertvector(sum, rf) * x->step[row] * *(const rfu *)scale;
#ifdef __AVX512F__
    __asm__("" : "+v"(made)); /* not to be fused with a bias, which is added to what was rounded */
    *out = a->y_bf16 ? wide(narrow(made)) : made;
#else
    *(rfu *)((float *)out + lane) = made;
    if (a->y_bf16 && lane + WIDTH == LANES)
        *out = wide(narrow(*out));
#endif
}

/* `count` panels by `rows` rows -> out [count][rows]. Of few of either, `chains` sums each, since one waits for itself. */
INLINE void rounded(const struct linear *a, const int64_t *panel, const struct rounded_rows *x, int64_t row, int rows,
                    int count, int chains, vf (*out)[8]) {
    const struct matrix *m = a->matrix;
    const int8_t *q = x->q + row * x->stride;
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        ri sum[2][8][4];
        const uint32_t *words[2];
#pragma GCC unroll 2
        for (int p = 0; p < count; p++) {
            words[p] = (const uint32_t *)((const char *)m->weight + panel[p] * m->panel) + lane;
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int c = 0; c < chains; c++)
                    sum[p][r][c] = (ri){0} + (c ? 0 : x->start[row + r]);
        }
        for (int64_t i = 0; i < m->k / 4; i += chains) {
#pragma GCC unroll 4
            for (int c = 0; c < chains; c++)
#pragma GCC unroll 2
                for (int p = 0; p < count; p++) {
                    const uint32_t *at = words[p] + (i + c) * LANES;
                    ri codes = (ri)*(const ruu *)at ^ (ri)((ru){0} + SHIFT * 0x01010101u);
                    if (rows >= FETCHES_ROWS)
                        __builtin_prefetch((const char *)at + AHEAD);
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++)
                        sum[p][r][c] = dot(sum[p][r][c], codes, word_at(q + r * x->stride + 4 * (i + c)), 0);
                }
        }
#pragma GCC unroll 2
        for (int p = 0; p < count; p++)
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
                for (int c = 1; c < chains; c++)
                    sum[p][r][0] += sum[p][r][c];
                put_rounded(a, x, row + r, panel[p], lane, sum[p][r][0], out[p] + r);
            }
    }
}

/* Rows that are multiplied at once: registers hold so many sums. */
#ifdef __AVX512F__
#define AT_MOST 8
#else
#define AT_MOST 4
#endif

static __attribute__((noinline)) void some_rounded(const struct linear *a, const int64_t *panel,
                                                   const struct rounded_rows *x, int64_t row, int rows, int count,
                                                   vf (*out)[8]) {
#ifdef __AVX512F__
    if (rows == 8 && count == 2) { rounded(a, panel, x, row, 8, 2, 1, out); return; }
    if (rows == 8) { rounded(a, panel, x, row, 8, 1, 1, out); return; }
#endif
    if (rows == 4) { rounded(a, panel, x, row, 4, 1, 1, out); return; }
    if (rows == 2) { rounded(a, panel, x, row, 2, 1, 2, out); return; }
    rounded(a, panel, x, row, 1, 1, 4, out);
}

static void pieces_rounded(const struct linear *a, const int64_t *panel, int count, const struct rounded_rows *x) {
    for (int64_t r = 0; r < a->rows;) {
        int64_t left = a->rows - r;
        int now = left >= AT_MOST ? AT_MOST : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        /* Of many rows a panel is in the second cache when it is read again, and rows are what is read most. */
        int most = now == 8 && a->rows > 8 ? 2 : 1;
        vf out[MOST_PANELS][8];
        for (int i = 0; i < count; i += most) {
            int p = most == 1 ? in_memory(a, i, count) : i;
            some_rounded(a, panel + p, x, r, now, count - i < most ? 1 : most, out + p);
        }
        finish_all(a, panel, count, r, now, out);
        r += now;
    }
}

#ifdef __AMX_INT8__
/* 32 rows and two panels at a time, 64 columns to a tile. */
static void tiles_rounded(const struct linear *a, const int64_t *panel, int count, const struct rounded_rows *x) {
    int32_t made[1024] __attribute__((aligned(64)));
    int step = a->gate ? 2 : 1, set = -1;
    for (int64_t r = 0; r < a->rows; r += 32) {
        int now = a->rows - r < 32 ? a->rows - r : 32, more = now > 16 ? now - 16 : 0;
        if (set != now)
            configure(now > 16 ? 16 : now, more);
        set = now;
        for (int p = 0; p < count; p += 2) {
            int64_t both[2] = {panel[p], panel[p + 1 < count ? p + 1 : p]};
            const void *weight[2];
            for (int i = 0; i < 2; i++)
                weight[i] = (const char *)a->matrix->weight + both[i] * a->matrix->panel;
            tiles(weight, x->q + r * x->stride, x->stride, a->matrix->k / 64, more, 1, made);
            for (int i = 0; i < now; i++) {
                vf out[2];
                for (int h = 0; h < 2; h++)
                    put_rounded(a, x, r + i, both[h], 0, *(const vi *)(made + 512 * h + 16 * i), out + h);
                for (int h = 0; h < 2 && p + h < count; h += step)
                    finish(a, r + i, panel[p + h], out[h], out[1]);
            }
        }
    }
    _tile_release();
}
#endif

static void rounded_linear(const struct linear *a, int64_t *next) {
    int64_t width = a->gate ? a->matrix->n / 2 : a->matrix->n, last = (width + LANES - 1) / LANES;
    int task = task_of(a, last);
    struct rounded_rows x = rounded_of(a);
    for (;;) {
        int64_t first = __atomic_fetch_add(next, task, __ATOMIC_RELAXED), panel[MOST_PANELS];
        if (first >= last)
            return;
        int count = list_panels(a, first, task, panel);
#ifdef __AMX_INT8__
        if (a->rows >= BY_TILES) {
            tiles_rounded(a, panel, count, &x);
            continue;
        }
#endif
        pieces_rounded(a, panel, count, &x);
    }
}
