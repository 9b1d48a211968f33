/* AMX's tiles in plain C, included before kernels.c, for processors without them: see test_emulated_tiles.py. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) memcpy(&tile_sizes, from, sizeof tile_sizes)
#define _tile_release() ((void)0)
#define _tile_zero(tile) memset(tile_bytes[tile], 0, sizeof tile_bytes[tile])
#define _tile_loadd load_tile
#define _tile_stored store_tile
#define _tile_dpbssd multiply_bytes
#define _tile_dpbf16ps multiply_halves

static __thread struct { uint8_t palette, start, reserved[14]; uint16_t columns[16]; uint8_t rows[16]; } tile_sizes;
static __thread uint8_t tile_bytes[8][16][64];

static void load_tile(int tile, const void *from, int64_t stride) {
    memset(tile_bytes[tile], 0, sizeof tile_bytes[tile]);
    for (int r = 0; r < tile_sizes.rows[tile]; r++)
        memcpy(tile_bytes[tile][r], (const char *)from + r * stride, tile_sizes.columns[tile]);
}

static void store_tile(int tile, void *to, int64_t stride) {
    for (int r = 0; r < tile_sizes.rows[tile]; r++)
        memcpy((char *)to + r * stride, tile_bytes[tile][r], tile_sizes.columns[tile]);
}

/* A row of a sum has 16 columns of 4 bytes. Column c of b's row i has what four bytes, or two halves, of a are multiplied with. */

static void multiply_bytes(int sum, int a, int b) {
    __mmask16 columns = (__mmask16)((1u << tile_sizes.columns[sum] / 4) - 1);
    for (int r = 0; r < tile_sizes.rows[sum]; r++) {
        __m512i total = _mm512_loadu_si512(tile_bytes[sum][r]);
        for (int i = 0; i < tile_sizes.columns[a]; i++) {
            __m512i row = _mm512_loadu_si512(tile_bytes[b][i / 4]);
            row = _mm512_srai_epi32(_mm512_sll_epi32(row, _mm_cvtsi32_si128(24 - i % 4 * 8)), 24);
            total = _mm512_add_epi32(total, _mm512_mullo_epi32(_mm512_set1_epi32((int8_t)tile_bytes[a][r][i]), row));
        }
        _mm512_mask_storeu_epi32(tile_bytes[sum][r], columns, total);
    }
}

static float half_in(const uint8_t *at) {
    uint32_t bits = (uint32_t)(at[0] | at[1] << 8) << 16;
    float made;
    memcpy(&made, &bits, 4);
    return made;
}

static void multiply_halves(int sum, int a, int b) {
    __mmask16 columns = (__mmask16)((1u << tile_sizes.columns[sum] / 4) - 1);
    for (int r = 0; r < tile_sizes.rows[sum]; r++) {
        __m512 total = _mm512_loadu_ps(tile_bytes[sum][r]);
        for (int i = 0; i < tile_sizes.columns[a] / 2; i++) {
            __m512i row = _mm512_loadu_si512(tile_bytes[b][i / 2]);
            row = i % 2 ? _mm512_and_si512(row, _mm512_set1_epi32((int)0xffff0000u)) : _mm512_slli_epi32(row, 16);
            total = _mm512_fmadd_ps(_mm512_set1_ps(half_in(&tile_bytes[a][r][2 * i])), _mm512_castsi512_ps(row), total);
        }
        _mm512_mask_storeu_ps(tile_bytes[sum][r], columns, total);
    }
}
