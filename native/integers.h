/* A quantized matrix times rows in bfloat16: included by kernels.c.

   Each row is brought to int8 in blocks of 32 columns (scale: the largest number / 127, as llama.cpp's Q8_0), blocks are
   summed in int32, which is exact, and scaled sums are added up in float in the order of columns. No step depends on how
   many rows or threads there are, so a row has the same bits in any batch. */

#define BLOCK 32

#define AHEAD 2048 /* bytes that are fetched ahead: the processor's own prefetcher stops at each page */
#ifdef __AMX_INT8__
#define FETCHES_ROWS 1
#define FETCHES_SUPERBLOCKS 1
#define COPIES 0
#else
#define FETCHES_ROWS 2 /* rows from which that helps: one is read a fifth slower so */
#define FETCHES_SUPERBLOCKS (WIDTH == LANES ? 4 : 2) /* the same, of superblocks */
#define COPIES (WIDTH == LANES)
#endif
/* Bytes of scales before 256 columns, at most. They are copied, or fetched, when the numbers before them have been read:
   used one by one after numbers that follow them, they make a row from memory reach 0.8 to 0.9 of the speed. */
#define MOST_HEAD 320

/* Rows as int8, `height` of them side by side: their numbers [rows / height][blocks][height][32] in the order in which
   the kind's words have columns; the scale of each block; what sums of its codes begin with, two for a block of groups
   of 16 columns; and for matrices with zero points or minima the sums of the matrix's groups in float,
   [rows / height][groups][height]. */
struct bytes_of_rows {
    int64_t height, blocks, groups;
    int8_t *q;
    float *scale;
    int32_t *sum;
    float *group_sum;
};

INLINE int64_t place_of(const struct bytes_of_rows *x, int64_t row, int64_t count, int64_t i) {
    return (row / x->height * count + i) * x->height + row % x->height;
}

/* Column c of 8 of a word of INT4, and so of INT6, is the low or the high half of byte c / 2: even ones are multiplied first. */
#define EVEN_ODD 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15

/* One block of a row to int8; returns its scale. NaN and infinity stay seen. */
INLINE float to_bytes(const void *x, int bf16, int four_bits, int8_t *q, int32_t *sums) {
    vf part[2] = {get16(x, 0, bf16), get16(x, LANES, bf16)};
    const vi magnitude = (vi){0} + 0x7fffffff;
    vf most = maximum((vf)((vi)part[0] & magnitude), (vf)((vi)part[1] & magnitude)), seen = (part[0] + part[1]) * 0.0f;
    vi wrong = seen != seen;
#ifdef __AVX512F__
    float top = _mm512_reduce_max_ps((__m512)most);
    int bad = _mm512_test_epi32_mask((__m512i)wrong, (__m512i)wrong) != 0;
    float by = top > 0 ? 127.0f / top : 0.0f;
    for (int h = 0; h < 2; h++) {
        __m512i whole = _mm512_cvtps_epi32((__m512)(part[h] * by));
        __m128i made = _mm512_cvtepi32_epi8(whole);
        sums[h] = _mm512_reduce_add_epi32(whole);
        _mm_storeu_si128((__m128i *)q + h, four_bits ? _mm_shuffle_epi8(made, _mm_setr_epi8(EVEN_ODD)) : made);
    }
#else
    const int8_t order[16] = {EVEN_ODD};
    float top = 0;
    int bad = 0;
    for (int i = 0; i < LANES; i++) {
        top = most[i] > top ? most[i] : top;
        bad |= wrong[i];
    }
    float by = top > 0 ? 127.0f / top : 0.0f;
    for (int h = 0; h < 2; h++) {
        vi rounded = (vi)(part[h] * by + 12582912.0f) - 0x4b400000;
        sums[h] = 0;
        for (int i = 0; i < LANES; i++) {
            sums[h] += rounded[i];
            q[LANES * h + i] = (int8_t)rounded[four_bits ? order[i] : i];
        }
    }
#endif
    return bad ? NAN : top / 127.0f;
}

static void row_to_bytes(const struct linear *a, int64_t row, const struct bytes_of_rows *x) {
    size_t each = a->x_bf16 ? 2 : 4;
    const char *from = (const char *)a->x + row * a->x_stride * each;
    for (int64_t b = 0; b < x->blocks; b++) {
        int64_t at = place_of(x, row, x->blocks, b), left = a->inputs - b * BLOCK;
        float held[BLOCK];
        const void *block = from + b * BLOCK * each;
        if (left < BLOCK) {
            memset(held, 0, sizeof(held));
            memcpy(held, block, left > 0 ? left * each : 0);
            block = held;
        }
        x->scale[at] = to_bytes(block, a->x_bf16, a->matrix->kind != INT8, x->q + at * BLOCK, x->sum + 2 * at);
    }
}

#ifdef __AVX512VNNI__
#define SHIFT 128 /* the instruction multiplies unsigned bytes by signed ones: signed codes are shifted */
#else
#define SHIFT 0
#endif

/* A number is (code - offset) * part; of 4 bits the code is the number itself or what `table` has for it. */
struct codes { int32_t offset; float part; int use_table; vb table; };

static struct codes codes_of(const struct matrix *m) {
    struct codes c = {SHIFT, 1.0f, 0, {0}};
    if (m->kind == INT6)
        c.offset = 32;
    if (m->kind != INT4)
        return c;
    int linear = 1, whole = 1;
    for (int i = 0; i < 16; i++) {
        linear &= m->values[i] == m->values[0] + i;
        whole &= m->values[i] == (float)(int)m->values[i];
    }
    if (linear) {
        c.offset = (int32_t)-m->values[0];
        return c;
    }
    c.use_table = 1;
    c.part = whole ? 1.0f : 0.5f;
    for (int i = 0; i < 16; i++)
        c.table[i] = (uint8_t)(SHIFT + (int)(m->values[i] / c.part));
    return c;
}

static struct bytes_of_rows bytes_of(const struct linear *a, const struct codes *codes) {
    const struct matrix *m = a->matrix;
    int64_t height = a->rows < LANES ? a->rows : LANES, rows = (a->rows + height - 1) / height * height;
    struct bytes_of_rows x = {height, m->k / BLOCK, m->k / m->group};
    /* A vector of scales may be read from any row. */
    size_t sizes[4] = {rows * m->k, 4 * (rows * x.blocks + LANES), 8 * rows * x.blocks, 4 * (rows * x.groups + LANES)};
    size_t at[4], whole = 0;
    for (int i = 0; i < 4; i++) {
        at[i] = whole;
        whole += (sizes[i] + 63) / 64 * 64;
    }
    char *held = room(1, whole);
    x.q = (int8_t *)held;
    x.scale = (float *)(held + at[1]);
    x.sum = (int32_t *)(held + at[2]);
    x.group_sum = (float *)(held + at[3]);
    for (int64_t r = 0; r < a->rows; r++) {
        row_to_bytes(a, r, &x);
        for (int64_t g = 0; has_less(m) && g < x.groups; g++) {
            float total = 0;
            for (int64_t c = g * m->group; c < (g + 1) * m->group; c += 16) {
                int64_t block = place_of(&x, r, x.blocks, c / BLOCK);
                total = fmaf((float)x.sum[2 * block + c / 16 % 2], x.scale[block], total);
            }
            x.group_sum[place_of(&x, r, x.groups, g)] = total;
        }
    }
    /* The codes' offset, taken off. */
    for (int64_t i = 0; i < 2 * rows * x.blocks; i += 2) {
        int32_t second = x.sum[i + 1];
        x.sum[i] = -codes->offset * (m->group < BLOCK ? x.sum[i] : x.sum[i] + second);
        x.sum[i + 1] = -codes->offset * second;
    }
    return x;
}

/* positive: no code has a sign. */
#ifdef __AVX512VNNI__
INLINE ri dot(ri sum, ri codes, ri x, int positive) {
    (void)positive; /* they are shifted */
    return (ri)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
}
INLINE ri look_up(vb table, ri codes) {
    return (ri)_mm512_shuffle_epi8(_mm512_broadcast_i32x4((__m128i)table), (__m512i)codes);
}
#else
/* Magnitudes by numbers with the codes' signs: sums of two products fit 16 bits. */
INLINE ri dot(ri sum, ri codes, ri x, int positive) {
    __m256i size = positive ? (__m256i)codes : _mm256_abs_epi8((__m256i)codes);
    __m256i by = positive ? (__m256i)x : _mm256_sign_epi8((__m256i)x, (__m256i)codes);
    __m256i pairs = _mm256_maddubs_epi16(size, by);
    return (ri)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE ri look_up(vb table, ri codes) {
    return (ri)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256((__m128i)table), (__m256i)codes);
}
#endif

INLINE ri word_at(const int8_t *q) {
    int32_t found;
    memcpy(&found, q, 4);
    return (ri){0} + found;
}

INLINE rf all_of(float x) {
#ifdef __AVX512F__
    return (rf)_mm512_set1_ps(x);
#else
    return (rf)_mm256_set1_ps(x);
#endif
}

/* A register of scales from memory: float16, bfloat16 and bytes. */
#ifdef __AVX512F__
INLINE rf halves_at(const char *p) { return half_to_float(*(const vh *)p); }
INLINE rf bf16_at(const char *p) { return loadb(p); }
INLINE rf bytes_at(const char *p, int is_signed) { return bytes(p, is_signed); }
#else
INLINE rf halves_at(const char *p) { return (rf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE rf bf16_at(const char *p) {
    return (rf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
}
INLINE rf bytes_at(const char *p, int is_signed) {
    __m128i few = _mm_loadl_epi64((const __m128i *)p);
    return (rf)_mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(few) : _mm256_cvtepu8_epi32(few));
}
#endif

/* out + a sum of a group, scaled: the one way, to the bit, in which all kernels add up. */
INLINE rf add_group(rf out, rf part, rf scale, rf minimum, float group_sum, int less) {
    out = fused_register(part, scale, out);
    return less ? fused_register(-minimum, all_of(group_sum), out) : out;
}

/* Where the scales of the groups of a panel lie, and what is subtracted of each column of a group, from the next group
   on. whole, whole_less: what bytes are multiplied by until the next 256 columns. */
struct scales {
    const char *scale, *zero;
    rf whole, whole_less;
};

INLINE int in_superblocks(int kind) { return kind == SCALE_U8 || kind == SCALE_I8; }

INLINE struct scales scales_of(const struct matrix *m, int64_t panel, int lane, int kind) {
    int64_t at = panel * (m->k / m->group) * LANES + lane;
    return (struct scales){(const char *)m->scale + at * (kind == SCALE_F32 ? 4 : 2), (const char *)m->zero + at * 2};
}

/* The next 256 columns begin at `head` with their scales, which are multiplied by `part`. */
INLINE void next_superblock(struct scales *s, const char *head, int lane, int kind, float part) {
    s->whole = halves_at(head + 2 * lane) * part;
    if (kind == SCALE_U8)
        s->whole_less = halves_at(head + 2 * LANES + 2 * lane);
    s->scale = head + 4 * LANES + lane;
}

/* The scale of the next group times `part`. */
INLINE rf next_scale(struct scales *s, int kind, float part, int less, rf *minimum) {
    rf scale;
    if (in_superblocks(kind)) {
        scale = bytes_at(s->scale, kind == SCALE_I8) * s->whole;
        if (kind == SCALE_U8)
            *minimum = bytes_at(s->scale + LANES, 0) * s->whole_less;
        s->scale += kind == SCALE_U8 ? 2 * LANES : LANES;
        return scale;
    }
    scale = kind == SCALE_F32 ? *(const rfu *)s->scale : kind == SCALE_F16 ? halves_at(s->scale) : bf16_at(s->scale);
    s->scale += (kind == SCALE_F32 ? 4 : 2) * LANES;
    if (less) {
        *minimum = bf16_at(s->zero) * scale;
        s->zero += 2 * LANES;
    }
    return scale * part;
}

/* Words of `columns` columns of a matrix that are read together, as bytes that are multiplied: four columns each, of 4 and
   6 bits the even and the odd ones of eight in turn. shifted: the odd ones of 4 bits are 16 times as large. Returns how
   many. */
INLINE int bytes_of_words(const uint32_t *words, const struct codes *codes, int kind, int table, int shifted, ri *out) {
    ri word = (ri)*(const ruu *)words;
    if (kind == INT6) {
        sixes(words, out);
        return 4;
    }
    if (kind == INT8) {
        out[0] = word ^ (ri)((ru){0} + SHIFT * 0x01010101u);
        return 1;
    }
    out[0] = word & 0x0f0f0f0f;
    out[1] = shifted ? word & (ri)((ru){0} + 0xf0f0f0f0u) : (ri)((ru)word >> 4) & 0x0f0f0f0f;
    if (table) {
        out[0] = look_up(codes->table, out[0]);
        out[1] = look_up(codes->table, out[1]);
    }
    return 2;
}

/* Products of `rows` rows, of one height, with a register's outputs of a panel, from `lane` on -> out [rows]. columns: summed as integers, 16 or 32. single: a
   group is no longer than those. */
INLINE void integers(const struct matrix *m, const struct codes *codes, int64_t panel, int lane,
                     const struct bytes_of_rows *x, int64_t row, int rows, int kind, int columns, int single, int less, int table, int scale_kind,
                     vf *to) {
    int64_t at = place_of(x, row, x->blocks, 0), height = x->height, each = single ? 1 : m->group / columns;
    const uint32_t *words = (const uint32_t *)((const char *)m->weight + panel * m->panel) + lane;
    const int8_t *q = x->q + at * BLOCK;
    const float *by = x->scale + at, *group_sum = x->group_sum + place_of(x, row, x->groups, 0);
    const int32_t *start = x->sum + 2 * at;
    struct scales s = scales_of(m, panel, lane, scale_kind);
    int fetches = rows >= (in_superblocks(scale_kind) ? FETCHES_SUPERBLOCKS : FETCHES_ROWS);
    /* Of few rows, odd columns of 4 bits are summed apart, 16 times as large: one shift for all, and neither sum waits for
       the other. Without VNNI such products do not fit in 16 bits. */
    int shifted = SHIFT && kind == INT4 && !table && rows <= 2;
    rf part[8], out[8];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        out[r] = part[r] = (rf){0};
    for (int64_t block = 0, left = each; block < x->blocks; block++) {
        if (in_superblocks(scale_kind) && block % (256 / BLOCK) == 0) {
            const char *head = (const char *)(words - lane);
#pragma GCC unroll 5
            for (int i = 0; i < MOST_HEAD / 64 && (fetches || !COPIES); i++)
                __builtin_prefetch(head + (fetches ? AHEAD : 0) + 64 * i);
            char copy[MOST_HEAD];
            if (COPIES)
                head = memcpy(copy, head, MOST_HEAD);
            next_superblock(&s, head, lane, scale_kind, codes->part);
            words += m->head / 4;
        }
#pragma GCC unroll 2
        for (int h = 0; h < BLOCK / columns; h++) {
            ri sum[8], high[8];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                sum[r] = (ri){0} + start[2 * r + h];
                high[r] = (ri){0};
            }
#pragma GCC unroll 8
            for (int w = 0; w < columns; w += kind == INT6 ? 16 : kind == INT4 ? 8 : 4) {
                ri bytes[4];
                int found = bytes_of_words(words, codes, kind, table, shifted, bytes);
                if (fetches) {
                    __builtin_prefetch((const char *)words + AHEAD);
                    if (kind == INT6) {
                        __builtin_prefetch((const char *)(words + LANES) + AHEAD);
                        __builtin_prefetch((const char *)(words + 2 * LANES) + AHEAD);
                    }
                }
                words += (kind == INT6 ? 3 : 1) * LANES;
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                    for (int i = 0; i < found; i++) {
                        ri *to = shifted && i ? high : sum;
                        to[r] = dot(to[r], bytes[i], word_at(q + r * BLOCK + h * columns + w + 4 * i),
                                    kind != INT8 && !table);
                    }
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                ri whole = shifted ? sum[r] + (high[r] >> 4) : sum[r];
                rf made = __builtin_convertvector(whole, rf), scaled = all_of(by[r]);
                part[r] = single ? made * scaled : fused_register(made, scaled, part[r]);
            }
            if (!single && --left)
                continue;
            rf minimum = {0}, scale = next_scale(&s, scale_kind, codes->part, less, &minimum);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                out[r] = add_group(out[r], part[r], scale, minimum, less ? group_sum[r] : 0, less);
                part[r] = (rf){0};
            }
            left = each;
            group_sum += height;
        }
        q += height * BLOCK;
        by += height;
        start += 2 * height;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        *(rfu *)((float *)(to + r) + lane) = out[r];
}

#define INTEGERS(ROWS, KIND, COLUMNS, SINGLE, LESS, TABLE, SCALE) \
    do { \
        for (int lane = 0; lane < LANES; lane += WIDTH) \
            integers(m, codes, panel, lane, x, row, ROWS, KIND, COLUMNS, SINGLE, LESS, TABLE, SCALE, out); \
        return; \
    } while (0)

/* Those of GGUF's types have their kind of scale known to the compiler. */
#define INTEGERS_OF(ROWS) \
    do { \
        int less = has_less(m), any = m->scale_kind; \
        if (m->kind == INT6) INTEGERS(ROWS, INT6, 16, 1, 0, 0, SCALE_I8); \
        if (m->group < BLOCK && m->kind == INT8 && any == SCALE_I8) INTEGERS(ROWS, INT8, 16, 1, 0, 0, SCALE_I8); \
        if (m->group < BLOCK && m->kind == INT8) INTEGERS(ROWS, INT8, 16, 1, 0, 0, any); \
        if (m->group < BLOCK) INTEGERS(ROWS, INT4, 16, 1, 0, codes->use_table, any); \
        if (m->group > BLOCK && m->kind == INT8) INTEGERS(ROWS, INT8, BLOCK, 0, less, 0, any); \
        if (m->group > BLOCK) INTEGERS(ROWS, INT4, BLOCK, 0, less, codes->use_table, any); \
        if (m->kind == INT8 && any == SCALE_F16 && !less) INTEGERS(ROWS, INT8, BLOCK, 1, 0, 0, SCALE_F16); \
        if (m->kind == INT8) INTEGERS(ROWS, INT8, BLOCK, 1, less, 0, any); \
        if (any == SCALE_U8 && !codes->use_table) INTEGERS(ROWS, INT4, BLOCK, 1, 1, 0, SCALE_U8); \
        if (any == SCALE_F16 && !less && !codes->use_table) INTEGERS(ROWS, INT4, BLOCK, 1, 0, 0, SCALE_F16); \
        INTEGERS(ROWS, INT4, BLOCK, 1, less, codes->use_table, any); \
    } while (0)

static __attribute__((noinline)) void some_integers(const struct matrix *m, const struct codes *codes, int64_t panel,
                                                    const struct bytes_of_rows *x, int64_t row, int rows, vf *out) {
#ifdef __AVX512F__
    if (rows == 8) INTEGERS_OF(8);
    if (rows == 4) INTEGERS_OF(4);
#endif
    if (rows == 2) INTEGERS_OF(2);
    INTEGERS_OF(1);
}

static void pieces_integers(const struct linear *a, const struct codes *codes, const int64_t *panel, int count,
                            const struct bytes_of_rows *x) {
    for (int64_t r = 0; r < a->rows;) {
        int64_t left = a->rows - r;
        int now = left >= AT_ONCE ? AT_ONCE : left >= 4 && AT_ONCE >= 4 ? 4 : left >= 2 ? 2 : 1;
        vf out[MOST_PANELS][8];
        for (int i = 0; i < count; i++) {
            int p = in_memory(a, i, count);
            some_integers(a->matrix, codes, panel[p], x, r, now, out[p]);
        }
        finish_all(a, panel, count, r, now, out);
        r += now;
    }
}

#ifdef __AMX_INT8__
/* The scales of a panel, and what is subtracted of each column of a group, in float [groups][16]. */
struct held_scales { float *scale, *less; };

static struct held_scales hold_scales(const struct matrix *m, int64_t panel, float part, float *held) {
    int64_t groups = m->k / m->group;
    struct held_scales made = {held, held + groups * LANES};
    struct scales s = scales_of(m, panel, 0, m->scale_kind);
    for (int64_t g = 0; g < groups; g++) {
        if (in_superblocks(m->scale_kind) && g * m->group % 256 == 0) {
            next_superblock(&s, superblock(m, panel, g * m->group), 0, m->scale_kind, part);
            for (int i = 0; i < MOST_HEAD; i += 64) /* none lies beside another */
                __builtin_prefetch(superblock(m, panel, g * m->group + 4 * 256) + i);
        }
        vf minimum = zero(), scale = next_scale(&s, m->scale_kind, part, m->has_zeros, &minimum);
        storef(made.scale + g * LANES, scale);
        if (has_less(m))
            storef(made.less + g * LANES, minimum);
    }
    return made;
}

/* Room for the scales of one panel. */
INLINE int64_t scales_size(const struct matrix *m) { return 2 * LANES * (m->k / m->group); }

INLINE vf add_held(vf out, vf part, const struct held_scales *s, int64_t g, float group_sum, int less) {
    return add_group(out, part, loadf(s->scale + g * LANES), less ? loadf(s->less + g * LANES) : zero(), group_sum, less);
}

#define TILES 4 /* blocks of columns multiplied one after the other, each in a tile of its own */

static void configure_bytes(int rows, int columns) {
    struct tile_config c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        c.rows[i] = i < 6 ? rows : columns / 4;
        c.bytes[i] = i < 4 || i > 5 ? 64 : columns;
    }
    _tile_loadconfig(&c);
}

/* One panel's numbers as signed bytes [k / 4][16][4]; of 8 bits they are that already, with scales between them. */
static const int8_t *signed_codes(const struct matrix *m, const struct codes *codes, int64_t panel, int8_t *out) {
    const char *from = (const char *)m->weight + panel * m->panel;
    if (m->kind == INT8)
        return (const int8_t *)from;
    const __m512i low = _mm512_set1_epi8(15), offset = _mm512_set1_epi8((char)codes->offset);
    for (int64_t w = 0; w < m->k / 8; w++) {
        const char *at = from + heads(m->head, 8 * w) + 4 * LANES * w;
        __m512i word = _mm512_loadu_si512(at);
        __builtin_prefetch(at + AHEAD);
        vi even = (vi)_mm512_and_si512(word, low), odd = (vi)_mm512_and_si512(_mm512_srli_epi32(word, 4), low);
        if (codes->use_table) {
            even = look_up(codes->table, even);
            odd = look_up(codes->table, odd);
        }
        _mm512_storeu_si512(out + w * 128, _mm512_sub_epi8((__m512i)even, offset));
        _mm512_storeu_si512(out + w * 128 + 64, _mm512_sub_epi8((__m512i)odd, offset));
    }
    return out;
}

#define ONE_TILE(I, A, B, X) \
    if ((I) < count) { \
        _tile_zero(I); \
        _tile_loadd(A, X, BLOCK); \
        _tile_loadd(B, weight + (I) * columns * LANES, 64); \
        _tile_dpbssd(I, A, B); \
        _tile_stored(I, sums + 256 * (I), 64); \
    }

/* Sums of a height of rows and `count` runs of columns, TILES at most -> sums [TILES][16][16]. Two runs of 16 columns
   lie in one block. */
INLINE void some_runs(const int8_t *weight, const int8_t *x, int64_t height, int columns, int64_t count, int32_t *sums) {
    int64_t one = columns == BLOCK ? height * BLOCK : 16, two = columns == BLOCK ? 2 * one : height * BLOCK;
    for (int i = 0; i < TILES * columns / 4; i++)
        __builtin_prefetch(weight + 64 * i + AHEAD);
    ONE_TILE(0, 4, 6, x)
    ONE_TILE(1, 5, 7, x + one)
    ONE_TILE(2, 4, 6, x + two)
    ONE_TILE(3, 5, 7, x + two + one)
}

/* One panel by `rows` rows of the height that begins at `row` -> out, scaled as by `integers`, to the bit. single: a
   group is no longer than a run of columns. Tiles are multiplied while the sums of those before are scaled, all of which
   are of the same 256 columns. */
INLINE void panel_tile(const struct matrix *m, const int8_t *weight, const struct held_scales *scales,
                       const struct bytes_of_rows *x, int64_t row, int rows, int columns, int single, int less, vf *to) {
    int64_t height = x->height, runs = m->k / columns, each = m->group / columns;
    int64_t first = row / height;
    int64_t head = m->kind == INT8 ? m->head : 0;
    const int8_t *q = x->q + first * x->blocks * height * BLOCK;
    const float *scale = x->scale + first * x->blocks * height, *group_sum = x->group_sum + first * x->groups * height;
    int32_t sums[2][TILES * 256] __attribute__((aligned(64)));
    vf part[LANES], out[LANES];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        out[r] = part[r] = zero();
    some_runs(weight + head, q, height, columns, runs, sums[0]);
    for (int64_t run = 0; run < runs; run++) {
        int64_t ahead = run + TILES;
        if (run % TILES == 0 && ahead < runs)
            some_runs(weight + heads(head, ahead * columns) + ahead * columns * LANES, q + ahead * columns / BLOCK * height * BLOCK, height, columns,
                      runs - ahead, sums[run / TILES % 2 ^ 1]);
        const int32_t *sum = sums[run / TILES % 2] + run % TILES * 256;
        const float *by = scale + run * columns / BLOCK * height;
        int64_t g = single ? run : run / each;
        int ends = single || (run + 1) % each == 0;
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vf made = __builtin_convertvector(*(const vi *)(sum + r * LANES), vf);
            if (single)
                out[r] = add_held(out[r], made * all(by[r]), scales, g, less ? group_sum[g * height + r] : 0, less);
            else
                part[r] = fused(made, all(by[r]), part[r]);
        }
        if (single || !ends)
            continue;
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            out[r] = add_held(out[r], part[r], scales, g, less ? group_sum[g * height + r] : 0, less);
            part[r] = zero();
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        to[r] = out[r];
}

#define PANEL_TILE(ROWS) \
    do { \
        int less = has_less(m); \
        if (m->group < BLOCK) \
            panel_tile(m, weight, scales, x, row, ROWS, 16, 1, 0, out); \
        else if (m->group == BLOCK && less) \
            panel_tile(m, weight, scales, x, row, ROWS, BLOCK, 1, 1, out); \
        else if (m->group == BLOCK) \
            panel_tile(m, weight, scales, x, row, ROWS, BLOCK, 1, 0, out); \
        else \
            panel_tile(m, weight, scales, x, row, ROWS, BLOCK, 0, less, out); \
    } while (0)

static __attribute__((noinline)) void panel_rows(const struct matrix *m, const int8_t *weight, const struct held_scales *scales,
                                                 const struct bytes_of_rows *x, int64_t row, int rows, vf *out) {
    if (rows > 8)
        PANEL_TILE(16);
    else if (rows > 4)
        PANEL_TILE(8);
    else
        PANEL_TILE(4);
}

static void pieces_bytes(const struct linear *a, const int64_t *panel, const int8_t *const *weight,
                         const struct held_scales *scales, int count, const struct bytes_of_rows *x) {
    int step = a->gate ? 2 : 1, set = -1;
    for (int64_t r = 0; r < a->rows; r += LANES) {
        int now = a->rows - r < LANES ? a->rows - r : LANES;
        if (set != now)
            configure_bytes(set = now, a->matrix->group < BLOCK ? 16 : BLOCK);
        for (int p = 0; p < count; p += step) {
            vf out[2][LANES];
            for (int i = 0; i < step; i++)
                panel_rows(a->matrix, weight[p + i], scales + p + i, x, r, now, out[i]);
            for (int i = 0; i < now; i++)
                finish(a, r + i, panel[p], out[0][i], a->gate ? out[1][i] : zero());
        }
    }
    _tile_release();
}
#endif

#define BY_TILES 9 /* rows from which tiles are faster */

/* A quantized matrix by rows in bfloat16, which become int8. */
static void integer_linear(const struct linear *a, int64_t *next) {
    const struct matrix *m = a->matrix;
    int64_t width = a->gate ? m->n / 2 : m->n, last = (width + LANES - 1) / LANES;
    int task = task_of(a, last);
    struct codes codes = codes_of(m);
    struct bytes_of_rows x = bytes_of(a, &codes);
#ifdef __AMX_INT8__
    int64_t size = scales_size(m);
    float *held = a->rows < BY_TILES ? NULL : room(2, PANELS * (sizeof(float) * size + m->k * LANES));
#endif
    for (;;) {
        int64_t first = __atomic_fetch_add(next, task, __ATOMIC_RELAXED), panel[MOST_PANELS];
        if (first >= last)
            return;
        int count = list_panels(a, first, task, panel);
#ifdef __AMX_INT8__
        if (held) {
            struct held_scales scales[PANELS];
            const int8_t *weight[PANELS];
            int8_t *buffer = (int8_t *)(held + PANELS * size);
            for (int p = 0; p < count; p++) {
                scales[p] = hold_scales(m, panel[p], codes.part, held + p * size);
                weight[p] = signed_codes(m, &codes, panel[p], buffer + p * m->k * LANES);
            }
            pieces_bytes(a, panel, weight, scales, count, &x);
            continue;
        }
#endif
        pieces_integers(a, &codes, panel, count, &x);
    }
}
