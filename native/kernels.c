/* See kernels.h. Compiled for one instruction set, with KERNELS the name of its table. */

#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#define LANES 16
#define PANELS 8       /* of a task */
#define MOST_PANELS 32 /* of a task of one row with a gate */
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef float vfu __attribute__((vector_size(64), aligned(4)));
typedef uint32_t vuu __attribute__((vector_size(64), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(32), aligned(2)));
typedef int8_t vsb __attribute__((vector_size(16), aligned(1)));
typedef uint8_t vb __attribute__((vector_size(16), aligned(1)));
/* A register: half a panel where there are none of 64 bytes, since the compiler keeps longer vectors in memory. */
#ifdef __AVX512F__
#define WIDTH 16
#else
#define WIDTH 8
#endif
typedef float rf __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ri __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t ru __attribute__((vector_size(4 * WIDTH)));
typedef float rfu __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef uint32_t ruu __attribute__((vector_size(4 * WIDTH), aligned(4)));
#define INLINE static inline __attribute__((always_inline))

INLINE vf zero(void) { return (vf){0}; }
INLINE vf all(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vf loadf(const void *p) { return *(const vfu *)p; }
INLINE void storef(float *p, vf x) { *(vfu *)p = x; }
INLINE vf wide(vh x) {
#ifdef __AVX512F__
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16); /* the compiler's way takes five steps */
#else
    return (vf)(__builtin_convertvector(x, vu) << 16);
#endif
}
INLINE vf loadb(const void *p) { return wide(*(const vh *)p); }

/* To bfloat16, halves to even; NaN stays NaN. */
INLINE vh narrow(vf x) {
#ifdef __AVX512BF16__
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    vu bits = (vu)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vi nan = x != x;
    return __builtin_convertvector((rounded & ~(vu)nan) | (0x7fc0 & (vu)nan), vh);
#endif
}

INLINE float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float get(const void *p, int64_t i, int bf16) {
    return bf16 ? from_bf16(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}

INLINE vf get16(const void *p, int64_t i, int bf16) {
    return bf16 ? loadb((const uint16_t *)p + i) : loadf((const float *)p + i);
}

INLINE void put16(void *p, int64_t i, int bf16, vf x) {
    if (bf16)
        *(vh *)((uint16_t *)p + i) = narrow(x);
    else
        storef((float *)p + i, x);
}

INLINE void put(void *p, int64_t i, int bf16, float x) {
    if (bf16)
        ((uint16_t *)p)[i] = to_bf16(x);
    else
        ((float *)p)[i] = x;
}

INLINE vf half_to_float(vh x) {
#ifdef __AVX512F__
    return (vf)_mm512_cvtph_ps((__m256i)x);
#else
    union { vh h; __m128i half[2]; } from = {x};
    union { __m256 half[2]; vf f; } to;
    to.half[0] = _mm256_cvtph_ps(from.half[0]);
    to.half[1] = _mm256_cvtph_ps(from.half[1]);
    return to.f;
#endif
}

INLINE float sum(vf x) {
    float s = 0;
    vf y = x + __builtin_shuffle(x, (vi){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    y = y + __builtin_shuffle(y, (vi){4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3});
    s = (y[0] + y[2]) + (y[1] + y[3]);
    return s;
}

INLINE vf maximum(vf a, vf b) {
    vi more = a > b;
    return (vf)(((vi)a & more) | ((vi)b & ~more));
}

/* exp, to 2 units in the last place; 0 below -87. */
INLINE vf exponential(vf x) {
    vi low = x < -87.0f;
    vf at = maximum(x, all(-87.0f));
    at = -maximum(-at, all(-88.0f));
    vf turns = at * 1.44269504088896341f;
    vf rounded = (turns + 12582912.0f) - 12582912.0f;
    vf r = at - rounded * 0.693359375f;
    r = r + rounded * 2.12194440e-4f;
    vf p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi power = (__builtin_convertvector(rounded, vi) + 127) << 23;
    return (vf)((vi)(p * (vf)power) & ~low);
}

INLINE vf apply_gate(vf gate, vf up, int kind) {
    if (kind == SILU)
        return gate / (1.0f + exponential(-gate)) * up;
    vf bent = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    /* tanh(z) = 1 - 2 / (exp(2 z) + 1) */
    return 0.5f * gate * (2.0f - 2.0f / (exponential(2.0f * bent) + 1.0f)) * up;
}

/* Memory of a thread, grown as needed and kept. */
static __thread struct { void *at; size_t size; } scratch[3];

static void *room(int which, size_t size) {
    if (scratch[which].size < size) {
        free(scratch[which].at);
        scratch[which].at = aligned_alloc(64, (size + 4095) / 4096 * 4096);
        scratch[which].size = scratch[which].at ? size : 0;
    }
    return scratch[which].at;
}

/* x [rows, k] in float, padded with zeros. */
static const float *floats(const struct linear *a) {
    int64_t k = a->matrix->k;
    float *out = room(0, sizeof(float) * a->rows * k);
    for (int64_t r = 0; r < a->rows; r++) {
        int64_t i = 0;
        for (; i + LANES <= a->inputs; i += LANES)
            storef(out + r * k + i, get16(a->x, r * a->x_stride + i, a->x_bf16));
        for (; i < a->inputs; i++)
            out[r * k + i] = get(a->x, r * a->x_stride + i, a->x_bf16);
        for (; i < k; i++)
            out[r * k + i] = 0;
    }
    return out;
}

/* x [rows, k] in bfloat16, padded with zeros: itself where it is that already. */
static const uint16_t *halves(const struct linear *a, int64_t *stride) {
    int64_t k = a->matrix->k;
    if (a->inputs == k) {
        *stride = a->x_stride;
        return a->x;
    }
    uint16_t *out = room(0, sizeof(uint16_t) * a->rows * k);
    for (int64_t r = 0; r < a->rows; r++) {
        memcpy(out + r * k, (const uint16_t *)a->x + r * a->x_stride, 2 * a->inputs);
        memset(out + r * k + a->inputs, 0, 2 * (k - a->inputs));
    }
    *stride = k;
    return out;
}

INLINE vf number(const struct matrix *m, vf values, vi word, int i, int kind) {
    if (kind == INT4) {
#ifdef __AVX512F__
        return (vf)_mm512_permutexvar_ps((__m512i)((vu)word >> (4 * i)), (__m512)values);
#else
        return __builtin_shuffle(values, (vi)(((vu)word >> (4 * i)) & 15));
#endif
    }
    return __builtin_convertvector((word << (24 - 8 * i)) >> 24, vf);
}

INLINE vf bytes(const void *p, int is_signed) {
#ifdef __AVX512F__
    __m128i few = _mm_loadu_si128(p);
    return (vf)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(few) : _mm512_cvtepu8_epi32(few));
#else
    return is_signed ? __builtin_convertvector(*(const vsb *)p, vf) : __builtin_convertvector(*(const vb *)p, vf);
#endif
}

/* Where the 256 columns begin that column `at` is one of, with their scales: in a matrix of superblocks. */
INLINE const char *superblock(const struct matrix *m, int64_t panel, int64_t at) {
    return (const char *)m->weight + panel * m->panel + at / 256 * (m->panel / (m->k / 256));
}

/* The scale of a group of a panel, and what is subtracted of each of its columns. */
INLINE vf scale_of(const struct matrix *m, int64_t panel, int64_t g, vf *less) {
    int64_t groups = m->k / m->group, at = (panel * groups + g) * LANES;
    vf scale = zero();
    *less = zero();
    switch (m->scale_kind) {
    case SCALE_F16:
        scale = half_to_float(*(const vh *)((const uint16_t *)m->scale + at));
        break;
    case SCALE_BF16:
        scale = loadb((const uint16_t *)m->scale + at);
        break;
    case SCALE_F32:
        scale = loadf((const float *)m->scale + at);
        break;
    default: {
        const char *by = superblock(m, panel, g * m->group), *of = by + 4 * LANES;
        of += g % (256 / m->group) * (m->scale_kind == SCALE_U8 ? 2 * LANES : LANES);
        scale = bytes(of, m->scale_kind == SCALE_I8) * half_to_float(*(const vh *)by);
        if (m->scale_kind == SCALE_U8)
            *less = bytes(of + LANES, 0) * half_to_float(*(const vh *)(by + 2 * LANES));
        return scale;
    }
    }
    if (m->has_zeros)
        *less = loadb((const uint16_t *)m->zero + at) * scale;
    return scale;
}

INLINE int has_less(const struct matrix *m) { return m->has_zeros || m->scale_kind == SCALE_U8; }

/* Sums of groups of x [rows, k] -> [rows, k / group]. */
static const float *group_sums(const struct matrix *m, const float *x, int64_t rows) {
    int64_t groups = m->k / m->group;
    if (!has_less(m))
        return x;
    float *out = room(1, sizeof(float) * rows * groups);
    for (int64_t i = 0; i < rows * groups; i++) {
        vf total = zero();
        for (int64_t j = 0; j < m->group; j += LANES)
            total += loadf(x + i * m->group + j);
        out[i] = sum(total);
    }
    return out;
}

/* Bytes of scales within a panel up to column `at`, where there are `head` of them before each 256 columns. */
INLINE int64_t heads(int64_t head, int64_t at) { return head * (at / 256 + 1); }

/* Products of `rows` rows of x (float, k apart) with `count` panels, whose scales are before each 256 columns of them or,
   where `head` is 0, elsewhere -> out [count][rows]. */
INLINE void quantized(const struct matrix *m, const void *const *weight, int64_t head, const int64_t *panel, int count,
                      const float *x, const float *sums, int rows, vf (*out)[8], int kind) {
    int each = kind == INT4 ? 8 : 4;
    int64_t k = m->k, groups = k / m->group;
    vf values = kind == INT4 ? loadf(m->values) : zero();
    vf total[PANELS][8];
#pragma GCC unroll 8
    for (int p = 0; p < count; p++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            total[p][r] = zero();
    for (int64_t g = 0; g < groups; g++) {
        vf even[PANELS][8], odd[PANELS][8];
#pragma GCC unroll 8
        for (int p = 0; p < count; p++)
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                even[p][r] = odd[p][r] = zero();
        int64_t before = heads(head, g * m->group);
        for (int64_t w = g * m->group / each; w < (g + 1) * m->group / each; w++)
#pragma GCC unroll 8
            for (int p = 0; p < count; p++) {
                vi word = (vi) * (const vuu *)((const char *)weight[p] + before + 4 * LANES * w);
#pragma GCC unroll 8
                for (int i = 0; i < each; i += 2) {
                    vf a = number(m, values, word, i, kind), b = number(m, values, word, i + 1, kind);
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) {
                        even[p][r] += a * x[r * k + w * each + i];
                        odd[p][r] += b * x[r * k + w * each + i + 1];
                    }
                }
            }
#pragma GCC unroll 8
        for (int p = 0; p < count; p++) {
            vf less, scale = scale_of(m, panel[p], g, &less);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                total[p][r] += (even[p][r] + odd[p][r]) * scale;
                if (has_less(m))
                    total[p][r] -= less * sums[r * groups + g];
            }
        }
    }
#pragma GCC unroll 8
    for (int p = 0; p < count; p++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            out[p][r] = total[p][r];
}

/* The same with unquantized panels; `weight` and `next` are floats or pairs of bfloat16 from one panel to the next. */
INLINE void dense(const void *const *weight, int count, const float *x, int64_t k, int rows, vf (*out)[8], int kind) {
    vf even[PANELS][8], odd[PANELS][8];
#pragma GCC unroll 8
    for (int p = 0; p < count; p++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            even[p][r] = odd[p][r] = zero();
    for (int64_t i = 0; i < k; i += 2)
#pragma GCC unroll 8
        for (int p = 0; p < count; p++) {
            vf a, b;
            if (kind == BF16) {
                vu pair = *(const vuu *)((const uint32_t *)weight[p] + i / 2 * LANES);
                a = (vf)(pair << 16);
                b = (vf)(pair & 0xffff0000);
            } else {
                a = loadf((const float *)weight[p] + i * LANES);
                b = loadf((const float *)weight[p] + (i + 1) * LANES);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                even[p][r] += a * x[r * k + i];
                odd[p][r] += b * x[r * k + i + 1];
            }
        }
#pragma GCC unroll 8
    for (int p = 0; p < count; p++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            out[p][r] = even[p][r] + odd[p][r];
}

#ifndef __AVX512F__
/* The same with a panel of bfloat16: the compiler keeps vectors of 64 bytes in memory where there are none. */
INLINE void dense_halves(const void *weight, const float *x, int64_t k, int rows, vf (*out)[8]) {
    const __m256i upper = _mm256_set1_epi32(0xffff0000);
    __m256 even[2][2], odd[2][2];
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < 2; h++)
            even[r][h] = odd[r][h] = _mm256_setzero_ps();
    for (int64_t i = 0; i < k; i += 2)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            __m256i pair = _mm256_loadu_si256((const __m256i *)weight + i + h);
            __m256 a = (__m256)_mm256_slli_epi32(pair, 16), b = (__m256)_mm256_and_si256(pair, upper);
#pragma GCC unroll 2
            for (int r = 0; r < rows; r++) {
                even[r][h] = _mm256_fmadd_ps(a, _mm256_broadcast_ss(x + r * k + i), even[r][h]);
                odd[r][h] = _mm256_fmadd_ps(b, _mm256_broadcast_ss(x + r * k + i + 1), odd[r][h]);
            }
        }
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < 2; h++)
            _mm256_storeu_ps((float *)&out[0][r] + 8 * h, _mm256_add_ps(even[r][h], odd[r][h]));
}
#endif

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
/* The same with pairs of bfloat16 numbers, x too, `stride` apart. */
INLINE void dense_bf16(const void *const *weight, int count, const uint16_t *x, int64_t stride, int64_t k, int rows,
                       vf (*out)[8]) {
    __m512 total[PANELS][8];
#pragma GCC unroll 8
    for (int p = 0; p < count; p++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            total[p][r] = _mm512_setzero_ps();
    for (int64_t i = 0; i < k / 2; i++)
#pragma GCC unroll 8
        for (int p = 0; p < count; p++) {
            __m512i w = _mm512_loadu_si512((const uint32_t *)weight[p] + i * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                int32_t pair;
                memcpy(&pair, x + r * stride + 2 * i, 4);
                total[p][r] = _mm512_dpbf16_ps(total[p][r], (__m512bh)w, (__m512bh)_mm512_set1_epi32(pair));
            }
        }
#pragma GCC unroll 8
    for (int p = 0; p < count; p++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            out[p][r] = (vf)total[p][r];
}
#endif

#ifdef __AVX512BF16__
/* Numbers 0 to 15 and 16 to 31 in turn. */
INLINE __m512i interleave(void) {
    const __m512i low = (__m512i)(vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return _mm512_or_si512(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(16)), 16));
}
#endif

/* 16 columns of INT6 as bytes: of columns 0 to 7 the even and the odd ones, then of columns 8 to 15. */
INLINE void sixes(const uint32_t *words, ri *codes) {
    const ri low = (ri){0} + 0x0f0f0f0f, high = (ri){0} + 0x30303030;
    ru first = *(const ruu *)words, second = *(const ruu *)(words + LANES), upper = *(const ruu *)(words + 2 * LANES);
    codes[0] = ((ri)first & low) | ((ri)(upper << 4) & high);
    codes[1] = ((ri)(first >> 4) & low) | ((ri)(upper << 2) & high);
    codes[2] = ((ri)second & low) | ((ri)upper & high);
    codes[3] = ((ri)(second >> 4) & low) | ((ri)(upper >> 2) & high);
}

/* A panel of INT6 as one of INT8, without scales. */
static const void *widen(const struct matrix *m, const void *panel, uint32_t *out) {
    int64_t k = m->k;
    for (int64_t i = 0; i < k / 16 * LANES / WIDTH; i++) {
        int64_t run = i * WIDTH / LANES, lane = i * WIDTH % LANES;
        ri codes[4];
        sixes((const uint32_t *)((const char *)panel + heads(m->head, 16 * run)) + 3 * LANES * run + lane, codes);
        for (int h = 0; h < 2; h++) {
            ru even = (ru)codes[2 * h], odd = (ru)codes[2 * h + 1];
            for (int w = 0; w < 2; w++, even >>= 16, odd >>= 16) {
                ru four = (even & 0xff) | (odd & 0xff) << 8 | (even & 0xff00) << 8 | (odd & 0xff00) << 16;
                *(ruu *)(out + (4 * run + 2 * h + w) * LANES + lane) = ((four | 0x80808080) - 0x20202020) ^ 0x80808080;
            }
        }
    }
    return out;
}

/* Decode a panel of a quantized matrix to bfloat16 pairs or floats. head: see `quantized`. */
static void decode(const struct matrix *m, const void *weight, int64_t head, int64_t panel, void *out, int bf16) {
    int each = m->kind == INT4 ? 8 : 4;
    vf values = m->kind == INT4 ? loadf(m->values) : zero();
    for (int64_t g = 0; g < m->k / m->group; g++) {
        vf less, scale = scale_of(m, panel, g, &less);
        const char *words = (const char *)weight + heads(head, g * m->group);
        for (int64_t w = g * m->group / each; w < (g + 1) * m->group / each; w++) {
            vi word = (vi) * (const vuu *)(words + 4 * LANES * w);
            for (int i = 0; i < each; i += 2) {
                vf a, b;
                if (m->kind == INT4) {
                    a = number(m, values, word, i, INT4) * scale - less;
                    b = number(m, values, word, i + 1, INT4) * scale - less;
                } else {
                    a = number(m, values, word, i, INT8) * scale - less;
                    b = number(m, values, word, i + 1, INT8) * scale - less;
                }
                int64_t at = w * each + i;
                if (bf16) {
#ifdef __AVX512BF16__
                    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
                    vu pair = (vu)_mm512_permutexvar_epi16(interleave(), both);
#else
                    vu pair = __builtin_convertvector(narrow(a), vu) | (__builtin_convertvector(narrow(b), vu) << 16);
#endif
                    *(vuu *)((uint32_t *)out + at / 2 * LANES) = pair;
                } else {
                    storef((float *)out + at * LANES, a);
                    storef((float *)out + (at + 1) * LANES, b);
                }
            }
        }
    }
}

/* Bias, gate and rounding of one row of one panel, or of two where there is a gate. */
INLINE void finish(const struct linear *a, int64_t row, int64_t panel, vf value, vf up) {
    int64_t width = a->gate ? a->matrix->n / 2 : a->matrix->n, at = panel * LANES, left = width - at;
    float held[LANES];
    if (a->bias && left >= LANES) {
        value += get16(a->bias, at, a->bias_bf16);
        if (a->gate)
            up += get16(a->bias, width + at, a->bias_bf16);
    } else if (a->bias) {
        for (int64_t i = 0; i < left; i++)
            value[i] += get(a->bias, at + i, a->bias_bf16);
    }
    if (a->gate) {
        if (a->y_bf16) { /* as two operations round */
            value = wide(narrow(value));
            up = wide(narrow(up));
        }
        value = apply_gate(value, up, a->gate);
    }
    if (left >= LANES) {
        put16(a->y, row * a->y_stride + at, a->y_bf16, value);
        return;
    }
    storef(held, value);
    for (int64_t i = 0; i < left; i++)
        put(a->y, row * a->y_stride + at + i, a->y_bf16, held[i]);
}

/* A task: some panels; with a gate, those of the gate and those of what it multiplies in turn. */
INLINE int list_panels(const struct linear *a, int64_t first, int count, int64_t *panel) {
    int64_t width = a->gate ? a->matrix->n / 2 : a->matrix->n, last = (width + LANES - 1) / LANES;
    int found = 0;
    for (int i = 0; i < count && first + i < last; i++) {
        panel[found++] = first + i;
        if (a->gate)
            panel[found++] = first + i + width / LANES;
    }
    return found;
}

/* Outputs of a task, in panels. With a gate, a row is multiplied by two parts of a matrix in turn; what is read in one
   piece should be long, since a processor reads ahead only after a while. */
INLINE int task_of(const struct linear *a, int64_t last) {
#ifndef __AMX_BF16__
    if (a->gate && a->rows == 1)
        return last < 4 * 16 ? 4 : last < MOST_PANELS / 2 * 16 ? last / 16 : MOST_PANELS / 2;
#endif
    return a->gate ? PANELS / 2 : PANELS;
}

/* Which of a task's panels is number `i` in memory: a processor reads ahead of what it reads in order. */
INLINE int in_memory(const struct linear *a, int i, int count) {
    return !a->gate ? i : i < count / 2 ? 2 * i : 2 * i - count + 1;
}

INLINE void finish_all(const struct linear *a, const int64_t *panel, int count, int64_t row, int rows, vf (*out)[8]) {
    int step = a->gate ? 2 : 1;
    for (int p = 0; p < count; p += step)
        for (int r = 0; r < rows; r++)
            finish(a, row + r, panel[p], out[p][r], step == 2 ? out[p + 1][r] : zero());
}

/* `count` panels times `rows` rows, with both known to the compiler. */
#define CALL(COUNT, ROWS) \
    switch (way) { \
    case F32: dense(weight, COUNT, x, k, ROWS, out, F32); break; \
    case BF16: dense(weight, COUNT, x, k, ROWS, out, BF16); break; \
    case INT8: quantized(m, weight, head, panel, COUNT, x, sums, ROWS, out, INT8); break; \
    default: quantized(m, weight, head, panel, COUNT, x, sums, ROWS, out, INT4); \
    }

#ifdef __AVX512F__
#define AT_ONCE 8 /* rows */
#else
#define AT_ONCE 2
#endif

static __attribute__((noinline)) void some(const struct matrix *m, int way, const void *const *weight,
                                           int64_t head, const int64_t *panel, int count, const float *x, const float *sums,
                                           int64_t k, int rows, vf (*out)[8]) {
#ifdef __AVX512F__
    if (rows == 1 && count == 4) { CALL(4, 1) return; }
    if (rows == 2 && count == 2) { CALL(2, 2) return; }
    if (rows == 8 && count == 1) { CALL(1, 8) return; }
    if (rows == 4 && count == 2) { CALL(2, 4) return; }
    if (rows == 4 && count == 1) { CALL(1, 4) return; }
#else
    for (int p = 0; way == BF16 && p < count; p++) {
        if (rows == 2)
            dense_halves(weight[p], x, k, 2, out + p);
        else
            dense_halves(weight[p], x, k, 1, out + p);
    }
    if (way == BF16)
        return;
    if (rows == 1 && count == 2) { CALL(2, 1) return; }
#endif
    if (rows == 2 && count == 1) { CALL(1, 2) return; }
    CALL(1, 1)
}

/* Rows `row` on, `rows` of them, of any number of panels, in the pieces that `some` has. */
static void pieces(const struct linear *a, int way, const void *const *weight, int64_t head, const int64_t *panel, int count,
                   const float *x, const float *sums, int64_t rows) {
    const struct matrix *m = a->matrix;
    int64_t k = m->k, groups = has_less(m) ? k / m->group : 0;
    for (int64_t r = 0; r < rows;) {
        int64_t left = rows - r;
        int now = left >= AT_ONCE ? AT_ONCE : left >= 4 && AT_ONCE >= 4 ? 4 : left >= 2 ? 2 : 1;
        int most = AT_ONCE == 8 ? (now == 1 ? 4 : now == 8 ? 1 : 2) : now == 1 ? 2 : 1;
        vf out[MOST_PANELS][8];
        for (int p = 0; p < count;) {
            int here = count - p >= most ? most : 1;
            some(m, way, weight + p, head, panel + p, here, x + r * k, sums + r * groups, k, now, out + p);
            p += here;
        }
        finish_all(a, panel, count, r, now, out);
        r += now;
    }
}

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define CALL_BF16(COUNT, ROWS) dense_bf16(weight, COUNT, x, stride, k, ROWS, out)

static __attribute__((noinline)) void some_bf16(const void *const *weight, int count, const uint16_t *x,
                                                int64_t stride, int64_t k, int rows, vf (*out)[8]) {
    if (rows == 2 && count == 4) { CALL_BF16(4, 2); return; }
    if (rows == 4 && count == 4) { CALL_BF16(4, 4); return; }
    if (rows == 8 && count == 2) { CALL_BF16(2, 8); return; }
    for (int p = 0; p < count; p++) {
        for (int r = 0; r < rows; r++) {
            vf one[1][8];
            dense_bf16(weight + p, 1, x + r * stride, stride, k, 1, one);
            out[p][r] = one[0][0];
        }
    }
}

static void pieces_bf16(const struct linear *a, const void *const *weight, const int64_t *panel, int count,
                        const uint16_t *x, int64_t stride, int64_t rows) {
    for (int64_t r = 0; r < rows;) {
        int64_t left = rows - r;
        int now = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1, most = now == 1 ? 1 : now == 8 ? 2 : 4;
        vf out[MOST_PANELS][8];
        for (int i = 0; i < count; i += most) {
            int p = most == 1 ? in_memory(a, i, count) : i;
            some_bf16(weight + p, count - p < most ? count - p : most, x + r * stride, stride, a->matrix->k, now,
                      out + p);
        }
        finish_all(a, panel, count, r, now, out);
        r += now;
    }
}
#endif

#ifdef __AMX_BF16__
struct tile_config { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; };

static void configure(int rows, int more) {
    struct tile_config c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        c.bytes[i] = 64;
        c.rows[i] = 16;
    }
    c.rows[0] = c.rows[1] = c.rows[4] = rows;
    c.rows[2] = c.rows[3] = c.rows[5] = more ? more : 1;
    _tile_loadconfig(&c);
}

#define TILES_PRODUCT(SUM, X, WEIGHT) \
    if (int8) \
        _tile_dpbssd(SUM, X, WEIGHT); \
    else \
        _tile_dpbf16ps(SUM, X, WEIGHT);

/* Two panels, of bfloat16 or int8, by up to 32 rows of as many bytes, `count` times 64, `stride` bytes apart: sums in tiles
   0 to 3, x in 4 and 5, the matrix in 6 and 7 -> out [panels][32][16], of float or int32. */
INLINE void tiles(const void *const *weight, const void *x, int64_t stride, int64_t count, int more, int int8, void *out) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t i = 0; i < count; i++) {
        _tile_loadd(4, (const char *)x + 64 * i, stride);
        _tile_loadd(6, (const uint32_t *)weight[0] + i * 256, 64);
        _tile_loadd(7, (const uint32_t *)weight[1] + i * 256, 64);
        TILES_PRODUCT(0, 4, 6)
        TILES_PRODUCT(1, 4, 7)
        if (more) {
            _tile_loadd(5, (const char *)x + 16 * stride + 64 * i, stride);
            TILES_PRODUCT(2, 5, 6)
            TILES_PRODUCT(3, 5, 7)
        }
    }
    _tile_stored(0, (float *)out, 64);
    _tile_stored(1, (float *)out + 512, 64);
    if (more) {
        _tile_stored(2, (float *)out + 256, 64);
        _tile_stored(3, (float *)out + 768, 64);
    }
}

static void pieces_amx(const struct linear *a, const void *const *weight, const int64_t *panel, int count,
                       const uint16_t *x, int64_t stride, int64_t rows) {
    float made[1024] __attribute__((aligned(64)));
    int set = -1;
    for (int64_t r = 0; r < rows; r += 32) {
        int now = rows - r < 32 ? rows - r : 32, more = now > 16 ? now - 16 : 0;
        if (set != now) {
            configure(now > 16 ? 16 : now, more);
            set = now;
        }
        for (int p = 0; p < count; p += 2) {
            const void *both[2] = {weight[p], weight[p + 1 < count ? p + 1 : p]};
            tiles(both, x + r * stride, 2 * stride, a->matrix->k / 32, more, 0, made);
            for (int i = 0; i < now; i++) {
                vf first = loadf(made + 16 * i), second = loadf(made + 512 + 16 * i);
                if (a->gate) {
                    finish(a, r + i, panel[p], first, second);
                } else {
                    finish(a, r + i, panel[p], first, zero());
                    if (p + 1 < count)
                        finish(a, r + i, panel[p + 1], second, zero());
                }
            }
        }
    }
    _tile_release();
}
#endif

/* a * b + c, rounded once. By name: whether the compiler fuses them by itself differs from one loop to the next. */
INLINE rf fused_register(rf a, rf b, rf c) {
#ifdef __AVX512F__
    return (rf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return (rf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

INLINE vf fused(vf a, vf b, vf c) {
#ifdef __AVX512F__
    return fused_register(a, b, c);
#else
    union { vf whole; rf half[2]; } x = {a}, y = {b}, z = {c};
    z.half[0] = fused_register(x.half[0], y.half[0], z.half[0]);
    z.half[1] = fused_register(x.half[1], y.half[1], z.half[1]);
    return z.whole;
#endif
}

#include "integers.h"
#include "rounded.h"
#include "float8.h"

#define FEW 8 /* rows up to which numbers are multiplied as they are read */

#ifdef __AMX_BF16__
#define MANY 64 /* rows above which tiles of bfloat16 pay for decoding a matrix: twice as many products a second */
#else
#define MANY INT64_MAX
#endif

static void linear(const struct linear *a, int64_t *next) {
    if (a->rounded) {
        rounded_linear(a, next);
        return;
    }
    if (a->matrix->kind == FLOAT8) {
        float8_linear(a, next);
        return;
    }
    if (a->x_bf16 && a->matrix->kind >= INT8 && (a->rows <= MANY || a->invariant)) {
        integer_linear(a, next);
        return;
    }
    const struct matrix *stored = a->matrix;
    struct matrix held = *stored, *m = &held;
    held.kind = stored->kind == INT6 ? INT8 : stored->kind;
    int64_t width = a->gate ? m->n / 2 : m->n, last = (width + LANES - 1) / LANES;
    int quantised = m->kind >= INT8, decoded = quantised && a->rows > FEW;
    int task = task_of(a, last);
    int bf16 = 0;
#ifdef __AVX512BF16__
    bf16 = a->x_bf16 && (m->kind == BF16 || decoded);
#endif
    int64_t stride = 0;
    const uint16_t *xb = bf16 ? halves(a, &stride) : NULL;
    (void)xb;
    const float *x = bf16 ? NULL : floats(a);
    const float *sums = bf16 || decoded || !quantised ? x : group_sums(m, x, a->rows);
    int64_t head = stored->kind == INT6 ? 0 : m->head;
    size_t wider = stored->kind == INT6 ? 16 * m->k : 0, kept = wider + (decoded ? (bf16 ? 32 : 64) : 0) * m->k;
    char *buffer = kept ? room(2, kept * (a->gate ? 2 * task : task)) : NULL;
    for (;;) {
        int64_t first = __atomic_fetch_add(next, task, __ATOMIC_RELAXED), panel[MOST_PANELS];
        if (first >= last)
            return;
        const void *weight[MOST_PANELS];
        int count = list_panels(a, first, task, panel);
        for (int p = 0; p < count; p++) {
            char *own = buffer + kept * p;
            weight[p] = (const char *)m->weight + panel[p] * m->panel;
            if (wider)
                weight[p] = widen(m, weight[p], (uint32_t *)own);
            if (decoded) {
                decode(m, weight[p], head, panel[p], own + wider, bf16);
                weight[p] = own + wider;
            }
        }
#ifdef __AMX_BF16__
        if (bf16) {
            pieces_amx(a, weight, panel, count, xb, stride, a->rows);
            continue;
        }
#elif defined(__AVX512BF16__)
        if (bf16) {
            pieces_bf16(a, weight, panel, count, xb, stride, a->rows);
            continue;
        }
#endif
        pieces(a, decoded ? F32 : m->kind, weight, head, panel, count, x, sums, a->rows);
    }
}

#define KEYS 64 /* attended at a time */

/* Sums of neighbours of a, then of b. */
INLINE vf pairs(vf a, vf b) {
    const vi even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
}

/* The sums of 16 vectors. */
INLINE vf sums_of(vf *x) {
    for (int left = 8; left; left /= 2)
        for (int i = 0; i < left; i++)
            x[i] = pairs(x[2 * i], x[2 * i + 1]);
    return x[0];
}

/* Where the numbers of a position of a K/V head begin, `dim` each. */
INLINE int64_t place(const struct attention *a, int64_t span, int64_t group, int64_t position, int64_t dim) {
    int64_t page = a->page_table[span * a->table_stride + position / a->page_size];
    return ((page * a->groups + group) * a->page_size + position % a->page_size) * dim;
}

INLINE vf capped(const struct attention *a, vf s) {
    return a->soft_cap > 0 ? (1.0f - 2.0f / (exponential(2.0f * s / a->soft_cap) + 1.0f)) * a->soft_cap : s;
}

#ifdef __AVX512BF16__
/* Swap the pieces of `d` of a square of 16 by 16 that lie off the diagonal. */
INLINE void swap(vu *x, int d) {
    const vu lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vu odd = (vu)((lane & d) != 0);
    const vu upper = lane + (odd & (vu)((vu){0} + 16 - d)), lower = lane + d + (odd & (vu)((vu){0} + 16 - d));
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & d)) {
            vu first = __builtin_shuffle(x[i], x[i + d], upper);
            x[i + d] = __builtin_shuffle(x[i], x[i + d], lower);
            x[i] = first;
        }
}
#endif

/* Products of q [rows, dim] with up to 16 keys -> score [rows, KEYS]. */
static void scores(const struct attention *a, int64_t span, int64_t group, int64_t at, int64_t count, const float *q,
                   int64_t rows, float *score) {
    int64_t dim = a->dim;
    float held[LANES * 512] __attribute__((aligned(64)));
    for (int64_t j = 0; j < count; j++) {
        int64_t from = place(a, span, group, at + j, dim);
        for (int64_t i = 0; i < dim; i += LANES)
            storef(held + j * dim + i, get16(a->k, from + i, a->kv_bf16));
    }
    for (int64_t r = 0; r < rows; r++) {
        vf part[LANES];
        for (int64_t j = 0; j < LANES; j++)
            part[j] = zero();
        for (int64_t j = 0; j < count; j++) {
            vf dot = zero();
            for (int64_t i = 0; i < dim; i += LANES)
                dot = fused(loadf(held + j * dim + i), loadf(q + r * dim + i), dot);
            part[j] = dot;
        }
        storef(score + r * KEYS, capped(a, sums_of(part)));
    }
}

/* Add `count` values, weighed by score [rows, KEYS], to `size` vectors of total [rows, wide_dim]. */
INLINE void weigh(const struct attention *a, const int64_t *from, int64_t count, const float *score, int64_t wide_dim,
                  int rows, int size, float *total) {
    vf sum[4][4];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < size; i++)
            sum[r][i] = loadf(total + r * wide_dim + i * LANES);
    for (int64_t j = 0; j < count; j++)
        for (int i = 0; i < size; i++) {
            vf v = get16(a->v, from[j] + i * LANES, a->kv_bf16);
            for (int r = 0; r < rows; r++)
                sum[r][i] = fused(v, all(score[r * KEYS + j]), sum[r][i]);
        }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < size; i++)
            storef(total + r * wide_dim + i * LANES, sum[r][i]);
}

static void values(const struct attention *a, int64_t span, int64_t group, int64_t at, int64_t count,
                   const float *score, int64_t rows, float *total) {
    int64_t wide_dim = a->value_dim, from[KEYS];
    for (int64_t i = 0; i < wide_dim;) {
        int size = wide_dim - i >= 4 * LANES ? 4 : 1;
        for (int64_t j = 0; j < count; j++)
            from[j] = place(a, span, group, at + j, wide_dim) + i;
        for (int64_t r = 0; r < rows;) {
            int now = rows - r >= 4 ? 4 : rows - r >= 3 ? 3 : rows - r;
            const float *s = score + r * KEYS;
            float *to = total + r * wide_dim + i;
            switch (now * 8 + size) {
            case 36: weigh(a, from, count, s, wide_dim, 4, 4, to); break;
            case 33: weigh(a, from, count, s, wide_dim, 4, 1, to); break;
            case 28: weigh(a, from, count, s, wide_dim, 3, 4, to); break;
            case 25: weigh(a, from, count, s, wide_dim, 3, 1, to); break;
            case 20: weigh(a, from, count, s, wide_dim, 2, 4, to); break;
            case 17: weigh(a, from, count, s, wide_dim, 2, 1, to); break;
            case 12: weigh(a, from, count, s, wide_dim, 1, 4, to); break;
            default: weigh(a, from, count, s, wide_dim, 1, 1, to);
            }
            r += now;
        }
        i += size * LANES;
    }
}

/* The first position of the chunk that a query is in. */
INLINE int64_t chunk_of(const struct attention *a, int64_t query) {
    return query < a->chunk ? 0 : query / a->chunk * a->chunk;
}

/* Scores of positions that a query does not see become -inf. */
static void hide(const struct attention *a, int64_t past, int64_t at, int64_t count, int64_t rows, float *score) {
    int64_t share = a->heads / a->groups, last = past + (rows - 1) / share;
    if (at + count - 1 <= past && at > last - a->window && at >= chunk_of(a, last))
        return;
    for (int64_t r = 0; r < rows; r++) {
        int64_t query = past + r / share, chunk = chunk_of(a, query);
        for (int64_t j = 0; j < count; j++) {
            int64_t position = at + j;
            if (position > query || position <= query - a->window || position < chunk)
                score[r * KEYS + j] = -INFINITY;
        }
    }
}

#define QUERIES 32 /* of a task: what none of them sees of a prompt is not read */

/* Queries `from` to `to` of one span and one K/V head: online softmax over its blocks, at positions that are multiples of
   KEYS, so that a query has the same bits whatever is attended with it. */
static void attend(const struct attention *a, int64_t span, int64_t group, int64_t from, int64_t to) {
    int64_t share = a->heads / a->groups, first = a->query_start[span] + from, n = to - from;
    int64_t whole = a->query_start[span + 1] - a->query_start[span], past = a->kv_len[span] - whole + from;
    int64_t rows = n * share, dim = a->dim, wide_dim = a->value_dim, length = past + n;
    float *q = room(0, sizeof(float) * (rows * (dim + wide_dim + KEYS + 2) + LANES));
    float *total = q + rows * dim, *score = total + rows * wide_dim, *top = score + rows * KEYS + LANES, *weight = top + rows;
    /* Scores from `lead` on may end in the next row, before its own, and after the last. */
    for (int64_t r = 0; r < rows; r++) {
        int64_t head = group * share + r % share, at = (first + r / share) * a->q_stride + head * dim;
        for (int64_t i = 0; i < dim; i += LANES)
            storef(q + r * dim + i, get16(a->q, at + i, a->q_bf16) * a->scale);
        for (int64_t i = 0; i < wide_dim; i += LANES)
            storef(total + r * wide_dim + i, zero());
        top[r] = a->sinks ? a->sinks[head] : -INFINITY;
        weight[r] = a->sinks ? 1.0f : 0.0f;
    }
    int64_t lowest = past + 1 - a->window, begin = chunk_of(a, past);
    int64_t start = lowest > begin ? lowest : begin;
    for (int64_t at = start < 0 ? 0 : start; at < length;) {
        int64_t lead = at % KEYS, stop = at - lead + KEYS, count = (stop < length ? stop : length) - at;
        for (int64_t j = 0; j < count; j += LANES)
            scores(a, span, group, at + j, count - j < LANES ? count - j : LANES, q, rows, score + lead + j);
        hide(a, past, at, count, rows, score + lead);
        for (int64_t r = 0; r < rows; r++) {
            float *s = score + r * KEYS, best = top[r];
            for (int64_t j = 0; j < lead; j++)
                s[j] = -INFINITY;
            for (int64_t j = lead + count; j < KEYS; j++)
                s[j] = -INFINITY;
            vf most = maximum(maximum(loadf(s), loadf(s + 16)), maximum(loadf(s + 32), loadf(s + 48)));
            for (int i = 0; i < LANES; i++)
                best = most[i] > best ? most[i] : best;
            if (best == -INFINITY) {
                memset(s, 0, sizeof(float) * KEYS);
                continue;
            }
            float shrink = expf(top[r] - best);
            vf added = zero();
            for (int64_t j = 0; j < KEYS; j += LANES) {
                vf w = exponential(loadf(s + j) - best);
                added += w;
                storef(s + j, w);
            }
            weight[r] = weight[r] * shrink + sum(added);
            top[r] = best;
            for (int64_t i = 0; i < wide_dim; i += LANES)
                storef(total + r * wide_dim + i, loadf(total + r * wide_dim + i) * shrink);
        }
        values(a, span, group, at, count, score + lead, rows, total);
        at += count;
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t head = group * share + r % share, at = ((first + r / share) * a->heads + head) * wide_dim;
        for (int64_t i = 0; i < wide_dim; i += LANES)
            put16(a->out, at + i, a->q_bf16, loadf(total + r * wide_dim + i) / weight[r]);
    }
}

#ifdef __AVX512BF16__
#include "tiled_attention.h"
#endif

/* Tasks are a span's groups times its pieces of queries, in the order of spans. */
static void attention(const struct attention *a, int64_t *next) {
    int64_t span = 0, before = 0, queries = QUERIES;
    void (*attends)(const struct attention *, int64_t, int64_t, int64_t, int64_t) = attend;
#ifdef __AVX512BF16__
    if (is_tiled(a)) {
        int64_t many = TILED_ROWS * a->groups / a->heads;
        queries = many > LANES ? many : LANES;
        attends = attend_tiled;
    }
#endif
    for (;;) {
        int64_t task = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED), n = 0, pieces = 0;
        for (; span < a->spans; span++) {
            n = a->query_start[span + 1] - a->query_start[span];
            pieces = n > a->most ? 0 : (n + queries - 1) / queries;
            if (task < before + pieces * a->groups)
                break;
            before += pieces * a->groups;
        }
        if (span >= a->spans)
            return;
        /* The last pieces first: they take longest. */
        int64_t piece = pieces - 1 - (task - before) / a->groups, from = piece * queries;
        attends(a, span, (task - before) % a->groups, from, from + queries < n ? from + queries : n);
    }
}

/* One row: residual + x scaled, rounded as it is stored, and its norm. */
INLINE void norm_row(const struct norm *from_arguments, int64_t row, int bf16, int weight_bf16) {
    struct norm held = *from_arguments;
    held.bf16 = bf16;
    held.weight_bf16 = weight_bf16;
    const struct norm *a = &held;
    int64_t size = a->size, at = row * size, even = size / LANES * LANES;
    vf squares = zero(), totals = zero();
    float square = 0, total = 0;
    for (int64_t i = 0; i < even; i += LANES) {
        vf x = get16(a->x, at + i, a->bf16);
        if (a->residual) {
            x = get16(a->residual, at + i, a->bf16) + x * a->scale;
            put16(a->residual, at + i, a->bf16, x);
            x = a->bf16 ? wide(narrow(x)) : x;
        }
        squares += x * x;
        totals += x;
    }
    for (int64_t i = even; i < size; i++) {
        float x = get(a->x, at + i, a->bf16);
        if (a->residual) {
            x = get(a->residual, at + i, a->bf16) + x * a->scale;
            put(a->residual, at + i, a->bf16, x);
            x = a->bf16 ? from_bf16(to_bf16(x)) : x;
        }
        square += x * x;
        total += x;
    }
    if (!a->weight)
        return;
    const void *from = a->residual ? a->residual : a->x;
    float mean = a->centred ? (sum(totals) + total) / size : 0;
    if (a->centred) { /* again, since squares lose what the mean has */
        squares = zero();
        square = 0;
        for (int64_t i = 0; i < even; i += LANES) {
            vf x = get16(from, at + i, a->bf16) - mean;
            squares += x * x;
        }
        for (int64_t i = even; i < size; i++) {
            float x = get(from, at + i, a->bf16) - mean;
            square += x * x;
        }
    }
    float by = 1.0f / sqrtf((sum(squares) + square) / size + a->eps);
    for (int64_t i = 0; i < even; i += LANES) {
        vf x = (get16(from, at + i, a->bf16) - mean) * by * get16(a->weight, i, a->weight_bf16);
        if (a->bias)
            x += get16(a->bias, i, a->weight_bf16);
        put16(a->out, at + i, a->bf16, x);
    }
    for (int64_t i = even; i < size; i++) {
        float x = (get(from, at + i, a->bf16) - mean) * by * get(a->weight, i, a->weight_bf16);
        if (a->bias)
            x += get(a->bias, i, a->weight_bf16);
        put(a->out, at + i, a->bf16, x);
    }
}

static void norm(const struct norm *a, int64_t *next) {
    for (;;) {
        int64_t row = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        if (row >= a->rows)
            return;
        if (a->bf16 && a->weight_bf16)
            norm_row(a, row, 1, 1);
        else if (!a->bf16 && !a->weight_bf16)
            norm_row(a, row, 0, 0);
        else
            norm_row(a, row, a->bf16, a->weight_bf16);
    }
}

/* One head: normed where there is a weight, rotated, in floats. */
static void turn(const struct rope *a, const void *x, int64_t at, const void *weight, float eps, int64_t token,
                 float *out) {
    int64_t dim = a->dim, half = a->half, even = dim / LANES * LANES, i = 0;
    vf squares = zero();
    float square = 0;
    for (; i < even; i += LANES) {
        vf part = get16(x, at + i, a->bf16);
        storef(out + i, part);
        squares += part * part;
    }
    for (; i < dim; i++) {
        out[i] = get(x, at + i, a->bf16);
        square += out[i] * out[i];
    }
    if (weight) {
        float by = 1.0f / sqrtf((sum(squares) + square) / dim + eps);
        for (i = 0; i < even; i += LANES) {
            vf part = loadf(out + i) * by * get16(weight, i, a->weight_bf16);
            storef(out + i, a->bf16 ? wide(narrow(part)) : part);
        }
        for (; i < dim; i++) {
            out[i] = out[i] * by * get(weight, i, a->weight_bf16);
            out[i] = a->bf16 ? from_bf16(to_bf16(out[i])) : out[i];
        }
    }
    const float *cos = a->cos + token * half, *sin = a->sin + token * half;
    if (a->interleaved)
        for (i = 0; i < half; i++) {
            float first = out[2 * i], second = out[2 * i + 1];
            out[2 * i] = first * cos[i] - second * sin[i];
            out[2 * i + 1] = first * sin[i] + second * cos[i];
        }
    else {
        for (i = 0; i + LANES <= half; i += LANES) {
            vf first = loadf(out + i), second = loadf(out + i + half), c = loadf(cos + i), s = loadf(sin + i);
            storef(out + i, first * c - second * s);
            storef(out + i + half, first * s + second * c);
        }
        for (; i < half; i++) {
            float first = out[i], second = out[i + half];
            out[i] = first * cos[i] - second * sin[i];
            out[i + half] = first * sin[i] + second * cos[i];
        }
    }
}

static void store(void *to, int64_t at, int bf16, const float *x, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        put16(to, at + i, bf16, loadf(x + i));
    for (; i < size; i++)
        put(to, at + i, bf16, x[i]);
}

static void rope_token(const struct rope *a, int64_t token) {
    int64_t dim = a->dim, slot = a->groups ? a->slots[token] : 0;
    int64_t page = slot / a->page_size, offset = slot % a->page_size;
    float held[1024];
    for (int64_t h = 0; h < a->heads; h++) {
        turn(a, a->qkv, token * a->stride + h * dim, a->q_norm, a->q_eps, token, held);
        store(a->q, (token * a->heads + h) * dim, a->bf16, held, dim);
    }
    for (int64_t g = 0; g < a->groups; g++) {
        int64_t to = ((page * a->groups + g) * a->page_size + offset) * dim;
        turn(a, a->qkv, token * a->stride + (a->heads + g) * dim, a->k_norm, a->k_eps, token, held);
        store(a->k_pool, to, a->bf16, held, dim);
        size_t each = a->bf16 ? 2 : 4;
        memcpy((char *)a->v_pool + to * each,
               (const char *)a->qkv + (token * a->stride + (a->heads + a->groups + g) * dim) * each, dim * each);
    }
}

static void rope(const struct rope *a, int64_t *next) {
    for (;;) {
        int64_t token = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        if (token >= a->rows)
            return;
        rope_token(a, token);
    }
}

/* Column `c` of output `lane` of a panel, before its scale. */
INLINE float number_at(const struct matrix *m, const char *panel, int lane, int64_t c) {
    const uint32_t *words = (const uint32_t *)(panel + heads(m->head, c)) + lane;
    if (m->kind == INT8)
        return (float)((const int8_t *)(words + c / 4 * LANES))[c % 4];
    if (m->kind == INT4)
        return m->values[words[c / 8 * LANES] >> 4 * (c % 8) & 15];
    int i = (int)(c % 16), upper = i < 8 ? i / 2 * 8 + i % 2 * 2 : (i - 8) / 2 * 8 + i % 2 * 2 + 4;
    const uint32_t *run = words + c / 16 * 3 * LANES;
    return (float)((run[i / 8 * LANES] >> 4 * (i % 8) & 15) | (run[2 * LANES] >> upper & 3) << 4) - 32.0f;
}

static void lookup(const struct lookup *a, int64_t *next) {
    const struct matrix *m = a->matrix;
    for (;;) {
        int64_t row = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        if (row >= a->count)
            return;
        int64_t panel = a->which[row] / LANES, lane = a->which[row] % LANES;
        for (int64_t c = 0; c < a->inputs;) {
            vf less, scale = scale_of(m, panel, c / m->group, &less);
            int64_t end = (c / m->group + 1) * m->group;
            for (; c < end && c < a->inputs; c++) {
                float scaled = number_at(m, (const char *)m->weight + panel * m->panel, (int)lane, c) * scale[lane];
                __asm__("" : "+x"(scaled)); /* rounded, then subtracted from: as torch does */
                put(a->out, row * a->inputs + c, a->bf16, scaled - less[lane]);
            }
        }
    }
}

const struct kernels KERNELS = {linear, attention, norm, rope, lookup};
