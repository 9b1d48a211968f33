/* A matrix of FLOAT8 times rows: included by kernels.c. RUN columns of a panel are decoded, which is exact, multiplied by
   all rows, and their sums scaled and added in the order of columns: so a row has the same bits in any batch. Rows in
   bfloat16 are multiplied by tiles where there are any, whatever their number is. */

#define RUN 128

/* Rows as they are multiplied: bfloat16 pairs of columns 0 and 2, and 1 and 3, of each four; or floats. `stride` apart.
   count: by tiles in whole heights, of which the last may have rows that nothing reads. */
struct rows { const void *x; int64_t stride, count; int halves; };

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
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
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

#ifdef __AMX_BF16__
#define ONE_RUN_TILE(I, A, B) \
    _tile_zero(I); \
    _tile_loadd(A, x + 32 * (I), stride); \
    _tile_loadd(B, run + 256 * (I), 64); \
    _tile_dpbf16ps(I, A, B); \
    _tile_stored(I, sums + 256 * (I), 64);

/* A decoded run, which is RUN columns where there are tiles, by a height of rows, `stride` bytes apart: each quarter of its
   columns in a tile of its own -> sums [4][height][16], each quarter 256 numbers after the one before. */
INLINE void run_tiles(const uint32_t *run, const uint16_t *x, int64_t stride, float *sums) {
    ONE_RUN_TILE(0, 4, 6)
    ONE_RUN_TILE(1, 5, 7)
    ONE_RUN_TILE(2, 4, 6)
    ONE_RUN_TILE(3, 5, 7)
}

INLINE void add_run_tiles(const float *sums, int64_t height, const float *scale, float *total) {
    for (int64_t r = 0; r < height; r++) {
        const float *sum = sums + r * LANES;
        vf made = (loadf(sum) + loadf(sum + 256)) + (loadf(sum + 512) + loadf(sum + 768));
        storef(total + r * LANES, fused(made, loadf(scale), loadf(total + r * LANES)));
    }
}

/* A panel by all rows, in whole heights -> total [rows][16]. The next run is decoded before one is multiplied, and tiles are
   multiplied before the sums of those before are added: what was just written cannot be read at once. */
static void float8_panel_tiles(const struct matrix *m, const uint32_t *words, const float *scale, const struct rows *x,
                               uint32_t *runs, float *total) {
    int64_t rows = x->count, height = rows < LANES ? rows : LANES, turn = 0;
    float sums[2][1024] __attribute__((aligned(64))), *to = NULL;
    const float *by = NULL;
    decode_halves(words, RUN / 4, 1, runs);
    for (int64_t at = 0; at < m->k; at += RUN) {
        int64_t half = at / RUN % 2 * (RUN / 2 * LANES), other = RUN / 2 * LANES - half;
        if (at + RUN < m->k)
            decode_halves(words + (at + RUN) / 4 * LANES, RUN / 4, 1, runs + other);
        for (int64_t r = 0; r < rows; r += height, turn++) {
            run_tiles(runs + half, (const uint16_t *)x->x + r * x->stride + at, 2 * x->stride, sums[turn % 2]);
            if (to)
                add_run_tiles(sums[(turn + 1) % 2], height, by, to);
            by = scale + at / m->group * LANES;
            to = total + r * LANES;
        }
    }
    add_run_tiles(sums[(turn + 1) % 2], height, by, to);
}
#endif

/* A panel by all rows -> total [rows][16]. run: room for RUN columns of floats. */
static void float8_panel(const struct linear *a, int64_t panel, const struct rows *x, void *run, float *total) {
    const struct matrix *m = a->matrix;
    const uint32_t *words = (const uint32_t *)((const char *)m->weight + panel * m->panel);
    const float *scale = (const float *)m->scale + panel * (m->k / m->group) * LANES;
    memset(total, 0, sizeof(float) * x->count * LANES);
#ifdef __AMX_BF16__
    if (x->halves) {
        float8_panel_tiles(m, words, scale, x, run, total);
        return;
    }
#endif
    for (int64_t at = 0; at < m->k; at += RUN) {
        int64_t columns = m->k - at < RUN ? m->k - at : RUN;
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
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
        int64_t stride = k + 32, count = a->rows; /* so that neighbours do not lie in the same place of the first cache */
#ifdef __AMX_BF16__
        count = count < LANES ? count : (count + LANES - 1) / LANES * LANES;
        configure(count < LANES ? count : LANES, count < LANES ? count : LANES);
#endif
        uint16_t *out = room(1, sizeof(uint16_t) * count * stride);
        for (int64_t r = 0; r < a->rows; r++) {
            const uint16_t *from = (const uint16_t *)a->x + r * a->x_stride;
            uint16_t *to = out + r * stride;
            int64_t i = 0;
            for (; i + 32 <= a->inputs; i += 32) {
                __m512i four = _mm512_shufflelo_epi16(_mm512_loadu_si512(from + i), _MM_SHUFFLE(3, 1, 2, 0));
                _mm512_storeu_si512(to + i, _mm512_shufflehi_epi16(four, _MM_SHUFFLE(3, 1, 2, 0)));
            }
            for (; i < k; i++) {
                int64_t column = i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i;
                to[i] = column < a->inputs ? from[column] : 0;
            }
        }
        return (struct rows){out, stride, count, 1};
    }
#endif
    return (struct rows){floats(a), k, a->rows, 0};
}

static void float8_linear(const struct linear *a, int64_t *next) {
    int64_t width = a->gate ? a->matrix->n / 2 : a->matrix->n, last = (width + LANES - 1) / LANES;
    int task = task_of(a, last), step = a->gate ? 2 : 1;
    struct rows x = rows_of(a);
    int64_t each = x.count * LANES;
    char *run = room(2, sizeof(float) * (RUN * LANES + 2 * each));
    float *total = (float *)run + RUN * LANES;
    for (;;) {
        int64_t first = __atomic_fetch_add(next, task, __ATOMIC_RELAXED), panel[MOST_PANELS];
        if (first >= last)
            break;
        int count = list_panels(a, first, task, panel);
        for (int p = 0; p < count; p += step) {
            for (int h = 0; h < step; h++)
                float8_panel(a, panel[p + h], &x, run, total + h * each);
            for (int64_t r = 0; r < a->rows; r++)
                finish(a, r, panel[p], loadf(total + r * LANES), a->gate ? loadf(total + each + r * LANES) : zero());
        }
    }
#ifdef __AMX_BF16__
    if (x.halves)
        _tile_release();
#endif
}
