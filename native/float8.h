/* A matrix of FLOAT8 times rows: included by kernels.c. RUN columns of a panel are decoded, which is exact, multiplied by
   all rows, and their sums scaled and added in the order of columns: so a row has the same bits in any batch. */

#define RUN 128

/* Rows as they are multiplied: bfloat16 pairs of columns 0 and 2, and 1 and 3, of each four; or floats. `stride` apart. */
struct rows { const void *x; int64_t stride; int halves; };

#ifdef __AVX512BF16__
/* `count` words of four columns to two pairs of bfloat16 each. */
INLINE void decode_halves(const uint32_t *words, int64_t count, int fetches, uint32_t *out) {
    const __m512i sign = _mm512_set1_epi16((short)0x8000), size = _mm512_set1_epi16(0x7f00);
    const __m512i exponent = _mm512_set1_epi16(0x0780), bias = _mm512_set1_epi16(120 << 7);
    /* What numbers without an exponent stand for: 0 to 7 times 2^-9. */
    const __m512i small = _mm512_castsi128_si512(
        _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
#pragma GCC unroll 4
    for (int64_t i = 0; i < count; i++) {
        __m512i word = _mm512_loadu_si512(words + i * LANES);
        if (fetches)
            __builtin_prefetch((const char *)(words + i * LANES) + AHEAD);
        __m512i upper[2] = {_mm512_slli_epi16(word, 8), word}, lower[2] = {word, _mm512_srli_epi16(word, 8)};
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            __m512i made = _mm512_srli_epi16(_mm512_and_si512(upper[h], size), 4);
            __mmask32 is_small = _mm512_testn_epi16_mask(made, exponent);
            made = _mm512_mask_permutexvar_epi16(_mm512_add_epi16(made, bias), is_small, lower[h], small);
            made = _mm512_ternarylogic_epi32(made, upper[h], sign, 0xf8); /* the sign as it is */
            _mm512_store_si512(out + (2 * i + h) * LANES, made);
        }
    }
}
#endif

/* The same to floats. */
INLINE void decode_floats(const uint32_t *words, int64_t count, int fetches, float *out) {
    const ru sign = (ru){0} + 0x80000000u, size = (ru){0} + 0x7f000000u;
    for (int64_t i = 0; i < count; i++)
        for (int lane = 0; lane < LANES; lane += WIDTH) {
            const uint32_t *at = words + i * LANES + lane;
            ru word = *(const ruu *)at;
            if (fetches)
                __builtin_prefetch((const char *)at + AHEAD);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                ru top = word << (24 - 8 * c);
                *(rfu *)(out + (4 * i + c) * LANES + lane) = (rf)((top & sign) | ((top & size) >> 4)) * 0x1p120f;
            }
        }
}

/* Add a decoded run of columns by `rows` rows, scaled, to total [rows][16]. Of few rows, two sums each. */
INLINE void add_run(const void *run, int64_t columns, const struct rows *x, int64_t row, int64_t at, int rows,
                    const float *scale, float *total, int halves) {
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        rf sum[8][2];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            sum[r][0] = sum[r][1] = (rf){0};
        int64_t step = halves ? 2 : 1;
        for (int64_t i = 0; i < columns; i += 2 * step)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                const void *from = (const uint32_t *)run + (i / step + h) * LANES + lane;
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    int64_t place = (row + r) * x->stride + at + i + h * step;
#ifdef __AVX512BF16__
                    if (halves) {
                        ri pair = word_at((const int8_t *)x->x + 2 * place);
                        sum[r][h] = (rf)_mm512_dpbf16_ps((__m512)sum[r][h], *(const __m512bh *)from, (__m512bh)pair);
                        continue;
                    }
#endif
                    rf number = (rf){0} + ((const float *)x->x)[place];
                    sum[r][h] = fused_register(*(const rfu *)from, number, sum[r][h]);
                }
            }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            float *to = total + r * LANES + lane;
            *(rfu *)to = fused_register(sum[r][0] + sum[r][1], *(const rfu *)(scale + lane), *(const rfu *)to);
        }
    }
}

#define ADD_RUN(ROWS) \
    do { \
        if (x->halves) \
            add_run(run, columns, x, row, at, ROWS, scale, total, 1); \
        else \
            add_run(run, columns, x, row, at, ROWS, scale, total, 0); \
    } while (0)

static __attribute__((noinline)) void some_runs_by_rows(const void *run, int64_t columns, const struct rows *x, int64_t row,
                                                        int64_t at, int rows, const float *scale, float *total) {
    switch (rows) {
#ifdef __AVX512F__
    case 8: ADD_RUN(8); return;
#endif
    case 4: ADD_RUN(4); return;
    case 2: ADD_RUN(2); return;
    default: ADD_RUN(1);
    }
}

/* A panel by all rows -> total [rows][16]. run: room for RUN columns. */
static void float8_panel(const struct linear *a, int64_t panel, const struct rows *x, void *run, float *total) {
    const struct matrix *m = a->matrix;
    const uint32_t *words = (const uint32_t *)((const char *)m->weight + panel * panel_bytes(m));
    const float *scale = (const float *)m->scale + panel * (m->k / m->group) * LANES;
    memset(total, 0, sizeof(float) * a->rows * LANES);
    for (int64_t at = 0; at < m->k; at += RUN) {
        int64_t columns = m->k - at < RUN ? m->k - at : RUN;
#ifdef __AVX512BF16__
        if (x->halves)
            decode_halves(words + at / 4 * LANES, columns / 4, a->rows >= FETCHES_ROWS, run);
        else
#endif
            decode_floats(words + at / 4 * LANES, columns / 4, a->rows >= FETCHES_ROWS, run);
        for (int64_t r = 0; r < a->rows;) {
            int64_t left = a->rows - r;
            int now = left >= AT_MOST ? AT_MOST : left >= 4 ? 4 : left >= 2 ? 2 : 1;
            some_runs_by_rows(run, columns, x, r, at, now, scale + at / m->group * LANES, total + r * LANES);
            r += now;
        }
    }
}

static struct rows rows_of(const struct linear *a) {
    int64_t k = a->matrix->k;
#ifdef __AVX512BF16__
    if (a->x_bf16) {
        int64_t stride = k + 32; /* so that neighbours do not lie in the same place of the first cache */
        uint16_t *out = room(1, sizeof(uint16_t) * a->rows * stride);
        for (int64_t r = 0; r < a->rows; r++) {
            const uint16_t *from = (const uint16_t *)a->x + r * a->x_stride;
            uint16_t *to = out + r * stride;
            for (int64_t i = 0; i < k; i += 4)
                for (int c = 0; c < 4; c++) {
                    int64_t column = i + (c == 1 ? 2 : c == 2 ? 1 : c);
                    to[i + c] = column < a->inputs ? from[column] : 0;
                }
        }
        return (struct rows){out, stride, 1};
    }
#endif
    return (struct rows){floats(a), k, 0};
}

static void float8_linear(const struct linear *a, int64_t *next) {
    int64_t width = a->gate ? a->matrix->n / 2 : a->matrix->n, last = (width + LANES - 1) / LANES;
    int task = task_of(a, last), step = a->gate ? 2 : 1;
    struct rows x = rows_of(a);
    int64_t each = a->rows * LANES;
    char *run = room(2, sizeof(float) * (RUN * LANES + 2 * each));
    float *total = (float *)run + RUN * LANES;
    for (;;) {
        int64_t first = __atomic_fetch_add(next, task, __ATOMIC_RELAXED), panel[MOST_PANELS];
        if (first >= last)
            return;
        int count = list_panels(a, first, task, panel);
        for (int p = 0; p < count; p += step) {
            for (int h = 0; h < step; h++)
                float8_panel(a, panel[p + h], &x, run, total + h * each);
            for (int64_t r = 0; r < a->rows; r++)
                finish(a, r, panel[p], loadf(total + r * LANES), a->gate ? loadf(total + each + r * LANES) : zero());
        }
    }
}
