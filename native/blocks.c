/* Blocks of GGUF's quantized types to panels, in one pass over the file's bytes. Layouts of blocks are ggml-common.h's,
   of panels those of kernels.h. */

#include <string.h>

#include "kernels.h"

#define LANES 16
#define WIDE 256 /* numbers of the largest block */

/* One block of a row: its numbers as bytes (of 4 bits two in one, the lower half first), its scales and minima, as many
   bytes each as there are groups, and its factors: float16, or bfloat16 where an exponent is stored. */
struct block {
    uint8_t codes[WIDE];
    uint8_t scale[16], zero[16];
    uint16_t factor[2];
};

static uint16_t half_at(const uint8_t *raw) { return (uint16_t)(raw[0] | raw[1] << 8); }

/* `n` bytes, whose lower halves are numbers 0 to n - 1 and whose upper ones are as many others -> n / 2 bytes each. */
static inline void split(const uint8_t *raw, int n, uint8_t *low, uint8_t *high) {
    for (int i = 0; i < n / 2; i++) {
        uint16_t both = half_at(raw + 2 * i);
        low[i] = (uint8_t)((both & 15) | (both >> 4 & 0xf0));
        high[i] = (uint8_t)((both >> 4 & 15) | (both >> 8 & 0xf0));
    }
}

/* `count` numbers 0 to 15 -> half as many bytes. */
static inline void join(const uint8_t *numbers, int count, uint8_t *out) {
    for (int i = 0; i < count / 2; i++)
        out[i] = (uint8_t)(numbers[2 * i] | numbers[2 * i + 1] << 4);
}

static void q8_0(const uint8_t *raw, struct block *to) {
    to->factor[0] = half_at(raw);
    memcpy(to->codes, raw + 2, 32);
}

static void q4_0(const uint8_t *raw, struct block *to) {
    to->factor[0] = half_at(raw);
    split(raw + 2, 16, to->codes, to->codes + 8);
}

static void q5_0(const uint8_t *raw, struct block *to) {
    to->factor[0] = half_at(raw);
    uint32_t fifth;
    memcpy(&fifth, raw + 2, 4);
    for (int i = 0; i < 16; i++) {
        to->codes[i] = (uint8_t)(((raw[6 + i] & 15) | (fifth >> i & 1) << 4) - 16);
        to->codes[16 + i] = (uint8_t)((raw[6 + i] >> 4 | (fifth >> (16 + i) & 1) << 4) - 16);
    }
}

static void mxfp4(const uint8_t *raw, struct block *to) {
    to->factor[0] = raw[0] ? (uint16_t)(raw[0] << 7) : 0x40; /* 2^(raw[0] - 127) in bfloat16 */
    split(raw + 1, 16, to->codes, to->codes + 8);
}

static void iq4_xs(const uint8_t *raw, struct block *to) {
    to->factor[0] = half_at(raw);
    uint16_t upper = half_at(raw + 2);
    for (int g = 0; g < 8; g++) {
        int lower = raw[4 + g / 2] >> (g % 2 * 4) & 15;
        to->scale[g] = (uint8_t)((lower | (upper >> (2 * g) & 3) << 4) - 32);
        split(raw + 8 + 16 * g, 16, to->codes + 16 * g, to->codes + 16 * g + 8);
    }
}

static void q3_k(const uint8_t *raw, struct block *to) {
    const uint8_t *third = raw, *two = raw + 32, *scales = raw + 96;
    uint8_t numbers[WIDE];
    for (int g = 0; g < 8; g++)
        for (int i = 0; i < 32; i++)
            numbers[32 * g + i] = (uint8_t)((two[g / 4 * 32 + i] >> (g % 4 * 2) & 3) | (third[i] >> g & 1) << 2);
    join(numbers, WIDE, to->codes);
    for (int g = 0; g < 16; g++) {
        int low = scales[g % 8] >> (g / 8 * 4) & 15, high = scales[8 + g % 4] >> (g / 4 * 2) & 3;
        to->scale[g] = (uint8_t)((low | high << 4) - 32);
    }
    to->factor[0] = half_at(raw + 108);
}

/* What Q4_K and Q5_K begin with: factors of scales and of minima, and eight of either in 6 bits. */
static void six_bits(const uint8_t *raw, struct block *to) {
    const uint8_t *at = raw + 4;
    to->factor[0] = half_at(raw);
    to->factor[1] = half_at(raw + 2);
    for (int g = 0; g < 4; g++) {
        to->scale[g] = at[g] & 63;
        to->zero[g] = at[4 + g] & 63;
        to->scale[4 + g] = (uint8_t)((at[8 + g] & 15) | at[g] >> 6 << 4);
        to->zero[4 + g] = (uint8_t)(at[8 + g] >> 4 | at[4 + g] >> 6 << 4);
    }
}

static void q4_k(const uint8_t *raw, struct block *to) {
    six_bits(raw, to);
    for (int g = 0; g < 4; g++)
        split(raw + 16 + 32 * g, 32, to->codes + 32 * g, to->codes + 32 * g + 16);
}

static void q5_k(const uint8_t *raw, struct block *to) {
    six_bits(raw, to);
    const uint8_t *fifth = raw + 16, *low = raw + 48;
    for (int g = 0; g < 8; g++)
        for (int i = 0; i < 32; i++)
            to->codes[32 * g + i] =
                (uint8_t)((low[g / 2 * 32 + i] >> (g % 2 * 4) & 15) | (fifth[i] >> g & 1) << 4);
}

/* Numbers + 32, and what both layouts of them share. */
static inline void q6_k_numbers(const uint8_t *raw, struct block *to, uint8_t *numbers) {
    for (int h = 0; h < 2; h++)
        for (int g = 0; g < 4; g++)
            for (int i = 0; i < 32; i++) {
                int low = raw[64 * h + g % 2 * 32 + i] >> (g / 2 * 4) & 15;
                int upper = raw[128 + 32 * h + i] >> (2 * g) & 3;
                numbers[128 * h + 32 * g + i] = (uint8_t)(low | upper << 4);
            }
    memcpy(to->scale, raw + 192, 16);
    to->factor[0] = half_at(raw + 208);
}

static void q6_k(const uint8_t *raw, struct block *to) {
    uint8_t numbers[WIDE];
    q6_k_numbers(raw, to, numbers);
    for (int i = 0; i < WIDE; i++)
        to->codes[i] = (uint8_t)(numbers[i] - 32);
}

/* As INT6 has them. */
static void q6_k_packed(const uint8_t *raw, struct block *to) {
    uint8_t numbers[WIDE];
    q6_k_numbers(raw, to, numbers);
    for (int run = 0; run < WIDE / 16; run++) {
        const uint8_t *of = numbers + 16 * run;
        uint8_t *out = to->codes + 12 * run;
        for (int i = 0; i < 8; i++)
            out[i] = (uint8_t)((of[2 * i] & 15) | of[2 * i + 1] << 4);
        for (int i = 0; i < 4; i++)
            out[8 + i] = (uint8_t)(of[2 * i] >> 4 | of[2 * i + 1] >> 4 << 2 | of[2 * i + 8] >> 4 << 4 |
                                   of[2 * i + 9] >> 4 << 6);
    }
}

/* In the order of `BLOCK_TYPES` of quire.ops.native.pack. bits: of a number in panels. */
static const struct type {
    void (*read)(const uint8_t *, struct block *);
    int numbers, size, bits, groups, minima;
} TYPES[] = {
    {q8_0, 32, 34, 8},  {q4_0, 32, 18, 4},   {q5_0, 32, 22, 8},   {q4_0, 32, 18, 4},
    {mxfp4, 32, 17, 4}, {q3_k, 256, 110, 4, 16}, {q4_k, 256, 144, 4, 8, 1}, {q5_k, 256, 176, 8, 8, 1},
    {q6_k, 256, 210, 8, 16}, {iq4_xs, 256, 136, 4, 8}, {q6_k_packed, 256, 210, 6, 16},
};

/* Column `b` of blocks of a panel: `held` has it of its 16 rows. */
static void put_blocks(const struct blocks *a, const struct type *type, int64_t panel, int64_t b,
                       const struct block *held) {
    int words = type->numbers * type->bits / 32, each = type->minima ? 2 * LANES : LANES;
    int head = type->groups ? 4 * LANES + type->groups * each : 0;
    int64_t at = panel * (a->k / type->numbers) + b;
    uint8_t *to = (uint8_t *)a->weight + at * (head + 4 * words * LANES);
    for (int w = 0; w < words; w++)
        for (int r = 0; r < LANES; r++)
            memcpy(to + head + 4 * (w * LANES + r), held[r].codes + 4 * w, 4);
    uint16_t *factor = type->groups ? (uint16_t *)to : (uint16_t *)a->scale + at * LANES;
    for (int r = 0; r < LANES; r++)
        factor[r] = held[r].factor[0];
    for (int r = 0; r < LANES && type->groups; r++) {
        factor[LANES + r] = held[r].factor[1];
        for (int g = 0; g < type->groups; g++) {
            uint8_t *scale = to + 4 * LANES + g * each + r;
            scale[0] = held[r].scale[g];
            if (type->minima)
                scale[LANES] = held[r].zero[g];
        }
    }
}

void quire_pack_blocks(const struct blocks *a, const uint8_t *raw, int64_t first, int64_t count) {
    const struct type *type = TYPES + a->type;
    int64_t across = a->inputs / type->numbers, row = across * type->size;
    for (int64_t done = 0; done < count; done += LANES) {
        int here = count - done < LANES ? (int)(count - done) : LANES;
        struct block held[LANES];
        memset(held, 0, sizeof held);
        for (int64_t b = 0; b < across; b++) {
            for (int r = 0; r < here; r++)
                type->read(raw + (done + r) * row + b * type->size, held + r);
            put_blocks(a, type, (first + done) / LANES, b, held);
        }
    }
}
