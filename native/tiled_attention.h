/* Attention by tiles of AMX, or by dot products of pairs in their layout, q and K/V in bfloat16: included by kernels.c.

   Blocks of KEYS positions, at multiples of KEYS, are weighed by an online softmax in base 2; weights are rounded to
   bfloat16 before values are multiplied by them. Each row of a tile is computed alone, and a block that a query does
   not see adds exact zeros: so a query has the same bits whatever is attended with it, a prompt as a single token. */

#define TILED_ROWS 128 /* of a task */

INLINE int is_tiled(const struct attention *a) {
    return a->q_bf16 && a->kv_bf16 && a->dim % 32 == 0 && a->value_dim % 16 == 0;
}

/* 2 to the power x, to 3 units in the last place. */
INLINE vf power_of_two(vf x) {
    __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf r = x - (vf)whole;
    r = (vf)_mm512_mask_blend_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-150.0f), _CMP_GE_OQ),
                                 _mm512_setzero_ps(), (__m512)r); /* -inf - -inf */
    vf p = all(1.33336e-3f);
    p = fused(p, r, all(9.6184373e-3f));
    p = fused(p, r, all(5.5503324e-2f));
    p = fused(p, r, all(2.4022648e-1f));
    p = fused(p, r, all(6.9314718e-1f));
    p = fused(p, r, all(1.0f));
    return (vf)_mm512_scalef_ps((__m512)p, whole);
}

/* What a task works with. */
struct tiled {
    uint16_t *q, *keys, *values, *weights;
    float *scores, *total, *top, *weight;
};

static struct tiled tiled_room(const struct attention *a, int64_t rows) {
    size_t sizes[8] = {2 * rows * a->dim, 2 * KEYS * a->dim, 2 * KEYS * a->value_dim, 2 * LANES * KEYS,
                       4 * LANES * KEYS, 4 * rows * a->value_dim, 4 * rows, 4 * rows};
    size_t at[8], whole = 0;
    for (int i = 0; i < 8; i++) {
        at[i] = whole;
        whole += (sizes[i] + 63) / 64 * 64;
    }
    char *held = room(0, whole);
    return (struct tiled){(uint16_t *)held, (uint16_t *)(held + at[1]), (uint16_t *)(held + at[2]), (uint16_t *)(held + at[3]),
                          (float *)(held + at[4]), (float *)(held + at[5]), (float *)(held + at[6]), (float *)(held + at[7])};
}

/* Rows of the pools, of positions `from` to `to` of the block at `at`; -1 of others. */
INLINE void pool_rows(const struct attention *a, int64_t span, int64_t group, int64_t at, int64_t from, int64_t to,
                      int64_t *row) {
    const int32_t *table = a->page_table + span * a->table_stride;
    int64_t page = at / a->page_size, offset = at % a->page_size;
    for (int64_t j = 0; j < KEYS; j++) {
        int inside = at + j >= from && at + j < to;
        row[j] = inside ? (table[page] * a->groups + group) * a->page_size + offset : -1;
        if (++offset == a->page_size) {
            offset = 0;
            page++;
        }
    }
}

#ifdef __AMX_BF16__
#define FETCH(PLACE) __builtin_prefetch(PLACE)
#else
#define FETCH(PLACE) __builtin_prefetch(PLACE, 0, 2) /* into the second cache: more of these are under way at once */
#endif

/* Fetch the next block's keys and values, of which the processor cannot know where they lie. */
INLINE void fetch_rows(const struct attention *a, const int64_t *row) {
    for (int64_t j = 0; j < KEYS && row[j] >= 0; j++) {
        for (int64_t i = 0; i < a->dim; i += 32)
            FETCH((const uint16_t *)a->k + row[j] * a->dim + i);
        for (int64_t i = 0; i < a->value_dim; i += 32)
            FETCH((const uint16_t *)a->v + row[j] * a->value_dim + i);
    }
}

/* Positions `from` to `to` of the block at `at`, others being zeros: keys as tiles [KEYS / 16][dim / 32][16][16][2],
   values as tiles [KEYS / 32][value_dim / 16][16][16][2], pairs of numbers and of positions being neighbours. */
static void read_block(const struct attention *a, int64_t span, int64_t group, int64_t at, int64_t from, int64_t to,
                       const struct tiled *t) {
    const uint16_t *key[KEYS], *value[KEYS];
    int64_t row[KEYS];
    pool_rows(a, span, group, at + KEYS, from, to, row);
    fetch_rows(a, row);
    pool_rows(a, span, group, at, from, to, row);
    for (int64_t j = 0; j < KEYS; j++) {
        key[j] = row[j] >= 0 ? (const uint16_t *)a->k + row[j] * a->dim : NULL;
        value[j] = row[j] >= 0 ? (const uint16_t *)a->v + row[j] * a->value_dim : NULL;
    }
    vu *keys = (vu *)t->keys;
    for (int64_t j = 0; j < KEYS; j += LANES)
        for (int64_t i = 0; i < a->dim / 32; i++, keys += LANES) {
            vu x[LANES];
            for (int l = 0; l < LANES; l++)
                x[l] = key[j + l] ? *(const vuu *)(key[j + l] + 32 * i) : (vu){0};
            swap(x, 8);
            swap(x, 4);
            swap(x, 2);
            swap(x, 1);
            for (int l = 0; l < LANES; l++)
                keys[l] = x[l];
        }
    int64_t tiles = a->value_dim / LANES;
    const __m512i order = interleave();
    for (int64_t j = 0; j < KEYS; j += 2)
        for (int64_t i = 0; i < tiles; i++) {
            __m256i first = value[j] ? _mm256_loadu_si256((const __m256i *)(value[j] + 16 * i)) : _mm256_setzero_si256();
            __m256i second =
                value[j + 1] ? _mm256_loadu_si256((const __m256i *)(value[j + 1] + 16 * i)) : _mm256_setzero_si256();
            __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
            _mm512_store_si512((vu *)t->values + (j / 32 * tiles + i) * LANES + j / 2 % LANES,
                               _mm512_permutexvar_epi16(order, both));
        }
}

#ifdef __AMX_BF16__
/* Scores of 16 rows of q with a block -> scores [16][KEYS]. */
static void tiled_scores(const struct attention *a, const uint16_t *q, int rows, const struct tiled *t) {
    (void)rows;
    int64_t steps = a->dim / 32;
    const char *keys = (const char *)t->keys;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t i = 0; i < steps; i++) {
        _tile_loadd(4, q + 32 * i, 2 * a->dim);
        _tile_loadd(6, keys + 1024 * i, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, keys + 1024 * (steps + i), 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, keys + 1024 * (2 * steps + i), 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, keys + 1024 * (3 * steps + i), 64);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, t->scores, 4 * KEYS);
    _tile_stored(1, t->scores + LANES, 4 * KEYS);
    _tile_stored(2, t->scores + 2 * LANES, 4 * KEYS);
    _tile_stored(3, t->scores + 3 * LANES, 4 * KEYS);
}

#else
INLINE __m512bh pair_at(const uint16_t *x) {
    int32_t both;
    memcpy(&both, x, 4);
    return (__m512bh)_mm512_set1_epi32(both);
}

/* Scores of some rows of q with a block -> scores [rows][KEYS]. */
INLINE void scores_of(const struct attention *a, const uint16_t *q, int rows, const vu *keys, float *scores) {
    __m512 sum[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++)
            sum[r][g] = _mm512_setzero_ps();
    int64_t pairs = a->dim / 2;
    for (int64_t i = 0; i < pairs; i++)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m512bh x = pair_at(q + r * a->dim + 2 * i);
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++)
                sum[r][g] = _mm512_dpbf16_ps(sum[r][g], (__m512bh)keys[g * pairs + i], x);
        }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++)
            storef(scores + r * KEYS + g * LANES, (vf)sum[r][g]);
}

/* Of up to 16 rows; those up to the next multiple of 4 are read, too. */
static void tiled_scores(const struct attention *a, const uint16_t *q, int rows, const struct tiled *t) {
    const vu *keys = (const vu *)t->keys;
    int r = 0;
    for (; rows - r > 1; r += 4)
        scores_of(a, q + r * a->dim, 4, keys, t->scores + r * KEYS);
    if (r < rows)
        scores_of(a, q + r * a->dim, 1, keys, t->scores + r * KEYS);
}
#endif

/* Weights of one row, which sees positions `low` to `high` of the block -> weights [KEYS]; returns what the sums of
   the blocks before are multiplied by. */
INLINE float tiled_softmax(const struct attention *a, const float *s, int64_t low, int64_t high, float *top,
                           float *weight, uint16_t *weights) {
    const vf lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const float log2e = 1.44269504088896341f;
    vf x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        x[i] = a->soft_cap > 0 ? capped(a, loadf(s + i * LANES) * a->scale) * log2e : loadf(s + i * LANES) * (a->scale * log2e);
    if (low > 0 || high < KEYS - 1) {
        vf least = all(low), most = all(high);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            vf at = lane + (float)(i * LANES);
            vi seen = (at >= least) & (at <= most);
            x[i] = (vf)(((vi)x[i] & seen) | ((vi)all(-INFINITY) & ~seen));
        }
    }
    float best = _mm512_reduce_max_ps((__m512)maximum(maximum(x[0], x[1]), maximum(x[2], x[3])));
    best = *top > best ? *top : best;
    float base = best == -INFINITY ? 0.0f : best;
    float shrink = power_of_two(all(*top - base))[0];
    vf added = zero();
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vf w = power_of_two(x[i] - base);
        added += w;
        *(vh *)(weights + i * LANES) = narrow(w);
    }
    *weight = *weight * shrink + sum(added);
    *top = best;
    return shrink;
}

#ifdef __AMX_BF16__
/* total [16][value_dim] times shrink [16], plus weights [16][KEYS] times the block's values. */
static void tiled_values(const struct attention *a, const struct tiled *t, const float *shrink, int rows, float *total) {
    int64_t tiles = a->value_dim / LANES;
    float made[2 * 256] __attribute__((aligned(64)));
    for (int64_t i = 0; i < tiles; i += 2) {
        const char *values = (const char *)t->values + 1024 * i, *next = values + 1024 * (i + 1 < tiles);
        _tile_zero(0); _tile_zero(1);
        _tile_loadd(4, t->weights, 2 * KEYS);
        _tile_loadd(6, values, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, next, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, t->weights + 32, 2 * KEYS);
        _tile_loadd(6, values + 1024 * tiles, 64);
        _tile_dpbf16ps(0, 5, 6);
        _tile_loadd(7, next + 1024 * tiles, 64);
        _tile_dpbf16ps(1, 5, 7);
        _tile_stored(0, made, 64);
        _tile_stored(1, made + 256, 64);
        for (int r = 0; r < rows; r++) {
            float *to = total + r * a->value_dim + i * LANES;
            storef(to, fused(loadf(to), all(shrink[r]), loadf(made + r * LANES)));
            if (i + 1 < tiles)
                storef(to + LANES, fused(loadf(to + LANES), all(shrink[r]), loadf(made + 256 + r * LANES)));
        }
    }
}

static void configure_attention(int rows) {
    struct tile_config c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        c.bytes[i] = 64;
        c.rows[i] = i < 6 ? rows : 16;
    }
    _tile_loadconfig(&c);
}

static void release_attention(void) { _tile_release(); }

#else
/* `size` vectors of total [rows][value_dim] times shrink, plus weights times the block's values from vector i on. */
INLINE void values_of(const struct attention *a, const struct tiled *t, int row, int rows, int64_t i, int size,
                      const float *shrink, float *total) {
    int64_t tiles = a->value_dim / LANES;
    const uint16_t *weights = t->weights + row * KEYS;
    const vu *values = (const vu *)t->values;
    __m512 sum[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < size; c++)
            sum[r][c] = (__m512)(loadf(total + (row + r) * a->value_dim + (i + c) * LANES) * shrink[row + r]);
    for (int half = 0; half < KEYS / 32; half++)
        for (int j = 0; j < LANES; j++) {
            const vu *at = values + (half * tiles + i) * LANES + j;
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                __m512bh w = pair_at(weights + r * KEYS + 32 * half + 2 * j);
#pragma GCC unroll 4
                for (int c = 0; c < size; c++)
                    sum[r][c] = _mm512_dpbf16_ps(sum[r][c], (__m512bh)at[c * LANES], w);
            }
        }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < size; c++)
            storef(total + (row + r) * a->value_dim + (i + c) * LANES, (vf)sum[r][c]);
}

/* As with tiles; rows up to the next multiple of 4 are read and written, too. */
static void tiled_values(const struct attention *a, const struct tiled *t, const float *shrink, int rows, float *total) {
    int64_t tiles = a->value_dim / LANES;
    for (int64_t i = 0; i < tiles; i += tiles - i >= 4 ? 4 : 1)
        for (int r = 0; r < rows; r += 4) {
            int one = rows - r == 1, wide = tiles - i >= 4;
            if (one && wide)
                values_of(a, t, r, 1, i, 4, shrink, total);
            else if (one)
                values_of(a, t, r, 1, i, 1, shrink, total);
            else if (wide)
                values_of(a, t, r, 4, i, 4, shrink, total);
            else
                values_of(a, t, r, 4, i, 1, shrink, total);
        }
}

static void configure_attention(int rows) { (void)rows; }
static void release_attention(void) {}
#endif

#ifndef __AMX_BF16__
#define FEW_ROWS 4 /* of a task, whose keys and values are read where they lie */
#define MOST_FEW 512 /* numbers of a key or value */

/* Where the keys and values of a block's first `count` positions lie. Others have zeros. */
struct places { const uint16_t *key[KEYS], *value[KEYS]; int64_t count; };

static const uint16_t zeros[MOST_FEW];

static void find_places(const struct attention *a, int64_t span, int64_t group, int64_t at, int64_t from, int64_t to,
                        struct places *p) {
    int64_t row[KEYS];
    pool_rows(a, span, group, at, from, to, row);
    p->count = to - at < 0 ? 0 : to - at < KEYS ? to - at : KEYS;
    for (int64_t j = 0; j < KEYS; j++) {
        p->key[j] = row[j] >= 0 ? (const uint16_t *)a->k + row[j] * a->dim : zeros;
        p->value[j] = row[j] >= 0 ? (const uint16_t *)a->v + row[j] * a->value_dim : zeros;
    }
}

/* As `scores_of`, to the bit, of keys where they lie. Values are fetched meanwhile: a processor cannot know where they lie,
   and what it fetches at once is limited. */
INLINE void few_scores(const struct attention *a, const uint16_t *q, int rows, const struct places *p, float *scores) {
    for (int64_t j = 0; j < KEYS; j += LANES) {
        __m512 sum[FEW_ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
            sum[r] = _mm512_setzero_ps();
        for (int64_t i = 0; i < a->dim && j < p->count; i += 32) {
            vu x[LANES];
#pragma GCC unroll 16
            for (int l = 0; l < LANES; l++)
                x[l] = *(const vuu *)(p->key[j + l] + i);
#pragma GCC unroll 16
            for (int l = 0; l < LANES; l++)
                if (i < a->value_dim)
                    FETCH(p->value[j + l] + i);
            swap(x, 8);
            swap(x, 4);
            swap(x, 2);
            swap(x, 1);
#pragma GCC unroll 16
            for (int l = 0; l < LANES; l++)
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++)
                    sum[r] = _mm512_dpbf16_ps(sum[r], (__m512bh)x[l], pair_at(q + r * a->dim + i + 2 * l));
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
            storef(scores + r * KEYS + j, (vf)sum[r]);
    }
}

/* 32 numbers of two rows as pairs: of columns 0 to 3, 8 to 11 and so on, or of the others. */
INLINE __m512bh pairs_of(const uint16_t *first, const uint16_t *second, int others) {
    __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
    return (__m512bh)(others ? _mm512_unpackhi_epi16(a, b) : _mm512_unpacklo_epi16(a, b));
}

/* As `values_of`, to the bit, of values where they lie, `size` times 32 numbers from number i on; total has them in the order
   of `pairs_of`. Keys of the next block are fetched meanwhile. Positions beyond the block's last add one zero, as all would. */
INLINE void few_values(const struct attention *a, const uint16_t *weights, int rows, const struct places *p,
                       const struct places *next, int64_t i, int size, const float *shrink, float *total) {
    __m512 sum[FEW_ROWS][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 2 * size; c++)
            sum[r][c] = (__m512)(loadf(total + r * a->value_dim + i + c * LANES) * shrink[r]);
    int64_t last = p->count + 2 < KEYS ? p->count + 2 : KEYS;
    for (int64_t j = 0; j < last; j += 2) {
#pragma GCC unroll 2
        for (int h = 0; h < size; h++) {
            if (i + 32 * h < a->dim) {
                FETCH(next->key[j] + i + 32 * h);
                FETCH(next->key[j + 1] + i + 32 * h);
            }
        }
        __m512bh x[4];
#pragma GCC unroll 4
        for (int c = 0; c < 2 * size; c++)
            x[c] = pairs_of(p->value[j] + i + 32 * (c / 2), p->value[j + 1] + i + 32 * (c / 2), c % 2);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m512bh w = pair_at(weights + r * KEYS + j);
#pragma GCC unroll 4
            for (int c = 0; c < 2 * size; c++)
                sum[r][c] = _mm512_dpbf16_ps(sum[r][c], x[c], w);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 2 * size; c++)
            storef(total + r * a->value_dim + i + c * LANES, (vf)sum[r][c]);
}
#endif

/* What a task begins with: its rows of q, and no sums yet. `room`: rows that there is room for. */
static struct tiled begin_rows(const struct attention *a, int64_t group, int64_t first, int64_t rows, int64_t room) {
    int64_t share = a->heads / a->groups;
    struct tiled t = tiled_room(a, room);
    for (int64_t r = 0; r < rows; r++) {
        int64_t head = group * share + r % share;
        memcpy(t.q + r * a->dim, (const uint16_t *)a->q + (first + r / share) * a->q_stride + head * a->dim, 2 * a->dim);
        t.top[r] = a->sinks ? a->sinks[head] * 1.44269504088896341f : -INFINITY;
        t.weight[r] = a->sinks ? 1.0f : 0.0f;
    }
    memset(t.q + rows * a->dim, 0, 2 * a->dim * (room - rows));
    memset(t.total, 0, 4 * a->value_dim * room);
    return t;
}

/* Weights of rows `r` on, `now` of them, of the block at `at` -> shrink, see `tiled_softmax`. */
INLINE void weigh_rows(const struct attention *a, const struct tiled *t, int64_t past, int64_t at, int64_t r, int now,
                       float *shrink) {
    int64_t share = a->heads / a->groups;
    for (int i = 0; i < now; i++) {
        int64_t query = past + (r + i) / share, low = query - a->window + 1, chunk = chunk_of(a, query);
        low = (low > chunk ? low : chunk) - at;
        int64_t high = query - at;
        shrink[i] = tiled_softmax(a, t->scores + i * KEYS, low < 0 ? 0 : low > KEYS ? KEYS : low,
                                  high > KEYS - 1 ? KEYS - 1 : high < -1 ? -1 : high, t->top + r + i, t->weight + r + i,
                                  t->weights + i * KEYS);
    }
}

/* The first position that queries from `past` on see. */
INLINE int64_t first_seen(const struct attention *a, int64_t past) {
    int64_t lowest = past + 1 - a->window, begin = chunk_of(a, past), start = lowest > begin ? lowest : begin;
    return start < 0 ? 0 : start;
}

#ifndef __AMX_BF16__
/* As `attend_tiled`, to the bit, of few rows: what is read is used once, so it is not brought to tiles. */
INLINE void attend_few(const struct attention *a, int64_t span, int64_t group, int64_t first, int64_t past, int64_t length,
                       int rows) {
    const vi order = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    int64_t share = a->heads / a->groups, start = first_seen(a, past);
    struct tiled t = begin_rows(a, group, first, rows, rows);
    struct places places[2], *now = places, *next = places + 1;
    find_places(a, span, group, start / KEYS * KEYS, start, length, now);
    for (int64_t at = start / KEYS * KEYS; at < length; at += KEYS) {
        float shrink[FEW_ROWS];
        find_places(a, span, group, at + KEYS, start, length, next);
        few_scores(a, t.q, rows, now, t.scores);
        weigh_rows(a, &t, past, at, 0, rows, shrink);
        int64_t i = 0;
        for (; i + 64 <= a->value_dim; i += 64)
            few_values(a, t.weights, rows, now, next, i, 2, shrink, t.total);
        if (i < a->value_dim)
            few_values(a, t.weights, rows, now, next, i, 1, shrink, t.total);
        struct places *done = now;
        now = next;
        next = done;
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t head = group * share + r % share, out = ((first + r / share) * a->heads + head) * a->value_dim;
        for (int64_t i = 0; i < a->value_dim; i += 32) {
            const float *total = t.total + r * a->value_dim + i;
            vf even = loadf(total), odd = loadf(total + LANES);
            put16(a->out, out + i, 1, __builtin_shuffle(even, odd, order) / t.weight[r]);
            put16(a->out, out + i + LANES, 1, __builtin_shuffle(even, odd, order + 8) / t.weight[r]);
        }
    }
}

static int attends_few(const struct attention *a, int64_t span, int64_t group, int64_t first, int64_t past, int64_t length,
                       int64_t rows) {
    if (rows > FEW_ROWS || a->value_dim % 32 || a->dim > MOST_FEW || a->value_dim > MOST_FEW)
        return 0;
    switch (rows) {
    case 1: attend_few(a, span, group, first, past, length, 1); break;
    case 2: attend_few(a, span, group, first, past, length, 2); break;
    case 3: attend_few(a, span, group, first, past, length, 3); break;
    default: attend_few(a, span, group, first, past, length, 4);
    }
    return 1;
}
#endif

/* As `attend`. */
static void attend_tiled(const struct attention *a, int64_t span, int64_t group, int64_t from, int64_t to) {
    int64_t share = a->heads / a->groups, first = a->query_start[span] + from, n = to - from;
    int64_t whole = a->query_start[span + 1] - a->query_start[span], past = a->kv_len[span] - whole + from;
    int64_t rows = n * share, length = past + n;
#ifndef __AMX_BF16__
    if (attends_few(a, span, group, first, past, length, rows))
        return;
#endif
    int height = rows < LANES ? rows : LANES;
    struct tiled t = begin_rows(a, group, first, rows, (rows + LANES - 1) / LANES * LANES);
    configure_attention(height);
    int64_t start = first_seen(a, past);
    for (int64_t at = start / KEYS * KEYS; at < length; at += KEYS) {
        read_block(a, span, group, at, start, length, &t);
        for (int64_t r = 0; r < rows; r += LANES) {
            int now = rows - r < height ? rows - r : height;
            if (past + (r + now - 1) / share < at)
                continue; /* none of them sees it */
            float shrink[LANES] = {0};
            tiled_scores(a, t.q + r * a->dim, now, &t);
            weigh_rows(a, &t, past, at, r, now, shrink);
            tiled_values(a, &t, shrink, now, t.total + r * a->value_dim);
        }
    }
    release_attention();
    for (int64_t r = 0; r < rows; r++) {
        int64_t head = group * share + r % share, out = ((first + r / share) * a->heads + head) * a->value_dim;
        for (int64_t i = 0; i < a->value_dim; i += LANES)
            put16(a->out, out + i, 1, loadf(t.total + r * a->value_dim + i) / t.weight[r]);
    }
}
